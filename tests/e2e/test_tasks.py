"""Check tasks other than language models: kills, numbers of ranks, metrics and recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from holding import HeldJob
from launching import WITH_DIGITS, WITH_TOY, Job, call, committed, python_main
from runs import fail, read_history, read_result, succeed, tensor_files
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytest.importorskip("sklearn")

STEPS = 60  # an epoch has 13 steps
CONVNET = [
    WITH_DIGITS,
    "experiment=digits_convnet",
    f"trainer.max_steps={STEPS}",
    "trainer.precision=fp32",
    "run.name=run",
    "trainer.eval_every=20",
    "snapshot.every_steps=4",
    "trainer.log_every=1",
]


def train(cwd: Path, *overrides: str, ranks: int = 1) -> dict:
    cwd.mkdir(parents=True, exist_ok=True)
    succeed([*python_main(), *CONVNET, f"ddp.nproc_per_node={ranks}", *overrides], cwd)
    return read_result(cwd / "outputs" / "run")


def test_killed_with_augmentation_and_loader_processes(tmp_path):
    """SIGKILL hits a rank and then all processes, in the middle of epochs.

    The run equals the uninterrupted run byte for byte.
    """
    train(tmp_path / "uninterrupted", "data.num_workers=2", ranks=2)
    command = [*python_main(), *CONVNET, "ddp.nproc_per_node=2", "data.num_workers=1"]
    run = tmp_path / "outputs" / "run"
    held = HeldJob(command, tmp_path, {19: 1, 37: 0})
    held.wait_for_step(19, lambda: committed(run))
    held.job.kill_worker(1)
    held.wait_for_step(37, lambda: committed(run))
    held.job.kill_tree()
    job = Job(command, tmp_path)
    assert job.wait() == 0, job.text()
    assert tensor_files(run, STEPS) == tensor_files(tmp_path / "uninterrupted/outputs/run", STEPS)
    history = read_history(run)
    assert (history.starts, [step for step, _ in history.series("train_loss")]) == (
        3,
        list(range(1, STEPS + 1)),
    )


def test_killed_between_the_last_snapshot_and_the_test_split(tmp_path):
    """A second start records the test metrics and the end of the run, each once."""
    settings = [WITH_TOY, "experiment=toy", "trainer.max_epochs=1", "run.name=run"]
    succeed([*python_main(), *settings], tmp_path)
    run = tmp_path / "outputs" / "run"
    lines, before = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True), read_result(run)
    assert b"test_loss" in lines[-2] and b"complete" in lines[-1]
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-2]))  # the state after a kill
    (run / "result.json").unlink()
    for _ in range(2):
        succeed([*python_main(), *settings], tmp_path)
        history = read_history(run)
        assert history.series("test_loss") == [(before["step"], pytest.approx(before["test_loss"]))]
        assert history.is_complete and (run / "metrics.jsonl").read_bytes().count(b"complete") == 1
        assert read_result(run)["test_loss"] == pytest.approx(before["test_loss"])


@pytest.mark.slow
def test_statistics_over_all_ranks(tmp_path):
    """1, 2 and 3 ranks train the same model, and evaluate each of 200 or 300 samples once."""
    one, two, three = (train(tmp_path / str(n), ranks=n) for n in (1, 2, 3))
    for name in ("val_loss", "val_accuracy", "test_loss", "test_accuracy"):
        assert one[name] == pytest.approx(two[name], abs=1e-5)
        assert one[name] == pytest.approx(three[name], abs=1e-5)
    assert one["samples"] == STEPS * 96 and "tokens" not in one


def test_unequal_micro_batches_are_refused(tmp_path):
    """Samples that do not fit the model are refused too."""
    batch = "ddp.sync_batchnorm=true needs one micro-batch per rank; make trainer.batch_size=96"
    blocks = "trainer.activation_checkpointing=true needs a model with an nn.ModuleList"
    for word, expected in (
        ("ddp.nproc_per_node=5", batch),
        ("trainer.activation_checkpointing=true", blocks),
    ):
        text = fail([*python_main(), *CONVNET, word], tmp_path)
        # On a slow machine, an earlier line says that the data is being loaded.
        (line,) = [line for line in text.splitlines() if "error" in line]
        assert line.startswith(f"config error: {expected}")
        assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_the_convnet_recipe(tmp_path):
    """The metrics are in the log, TensorBoard, metrics.jsonl and result.json."""
    recipe = [WITH_DIGITS, "experiment=digits_convnet", "ddp.nproc_per_node=2", "run.name=run"]
    text = succeed([*python_main(), *recipe], tmp_path)
    run = tmp_path / "outputs" / "run"
    result = read_result(run)
    assert result["test_accuracy"] >= 0.97
    assert (
        f"test loss {result['test_loss']:.4f}, accuracy {result['test_accuracy']:.4f}"
        in text.splitlines()[-1]
    )
    events = EventAccumulator(str(run / "tensorboard" / "rank0")).Reload()
    assert events.Scalars("test/accuracy")[-1].value == pytest.approx(result["test_accuracy"])
    assert len(events.Scalars("val/accuracy")) == len(read_history(run).series("val_accuracy")) == 4
    again = call([*python_main(), *recipe], tmp_path)
    assert (
        again.stdout.splitlines()[-1].split(" after ")[0]
        == text.splitlines()[-1].split(" after ")[0]
    )
    evaluate = [
        python_main()[0],
        "-m",
        "mingpt_ddp",
        "evaluate",
        str(run),
        "split=test",
        "precision=fp32",
        "code=examples/digits/digits.py",
    ]
    measured = json.loads(call(evaluate, Path(__file__).resolve().parents[2]).stdout)
    # The run was trained in another precision.
    assert measured["accuracy"] == pytest.approx(result["test_accuracy"], abs=0.02)
