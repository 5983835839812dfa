"""Check that the `again` command trains a recorded run again."""

from __future__ import annotations

from launching import TINY, python_main
from runs import read_result, recorded_config, succeed, tool


def test_again(tmp_path):
    succeed([*python_main(), *TINY, "run.name=first"], tmp_path)
    command = tool("again", "outputs/first")
    succeed([*command, "optimizer.lr=1e-2", "run.name=second"], tmp_path)
    first, second = (recorded_config(tmp_path / "outputs" / name) for name in ("first", "second"))
    first["optimizer"]["lr"] = 1e-2
    first["run"]["name"] = "second"
    assert second == first
    assert read_result(tmp_path / "outputs" / "second")["step"] == 12


def test_a_sweep_of_a_recorded_run(tmp_path):
    """Two jobs with two ranks each run concurrently. The recorded model has a non-default class."""
    model = ["model=modern_nano", "model.n_layer=1", "model.n_embd=24", "optimizer=muon"]
    succeed([*python_main(), *TINY, *model, "trainer.max_steps=6", "run.name=first"], tmp_path)
    words = ["-m", "optimizer.lr=0.01,0.02", "run.name=lr", "sweep.parallel=2"]
    succeed([*tool("again", "outputs/first"), *words, "ddp.nproc_per_node=2"], tmp_path)
    [*jobs] = sorted((tmp_path / "outputs" / "lr").glob("optimizer.lr=*"))
    expected = recorded_config(tmp_path / "outputs" / "first")
    for job, lr in zip(jobs, (0.01, 0.02), strict=True):
        assert read_result(job)["step"] == 6
        config = recorded_config(job)
        assert config["model"] == expected["model"]
        assert config["optimizer"] == {**expected["optimizer"], "lr": lr}
