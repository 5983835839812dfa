"""Other tasks than language models, as a user runs them: kills, world sizes, metrics, recipes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from launching import (
    WITH_DIGITS,
    WITH_TOY,
    Job,
    call,
    children,
    committed,
    python_main,
)
from pause_points import HeldJob
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mingpt_ddp.metrics.jsonl import METRICS, read_history
from mingpt_ddp.storage.run_directory import read_result

pytest.importorskip("sklearn")

STEPS = 60  # 13 an epoch
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


def final(cwd: Path) -> dict[str, bytes]:
    directory = cwd / "outputs" / "run" / "snapshots" / f"step_{STEPS:08d}"
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    assert names
    return {name: (directory / name).read_bytes() for name in names}


def train(cwd: Path, *overrides: str, ranks: int = 1) -> dict:
    cwd.mkdir(parents=True, exist_ok=True)
    done = call([*python_main(), *CONVNET, f"ddp.nproc_per_node={ranks}", *overrides], cwd)
    assert done.returncode == 0, done.stdout
    return read_result(cwd / "outputs" / "run")


def test_killed_with_augmentation_and_loader_processes(tmp_path):
    """SIGKILL of a rank, then of all processes, in the middle of epochs: byte for byte the
    uninterrupted run.
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
    assert final(tmp_path) == final(tmp_path / "uninterrupted")
    history = read_history(run / METRICS)
    assert (history.starts, [step for step, _ in history.series("train_loss")]) == (
        3,
        list(range(1, STEPS + 1)),
    )


@pytest.mark.slow
def test_a_killed_loader_process(tmp_path):
    """The run restarts.

    The console names the loader process, without a traceback from wherever the rank was.
    """
    train(tmp_path / "uninterrupted", ranks=2)
    command = [*python_main(), *CONVNET, "ddp.nproc_per_node=2", "data.num_workers=1"]
    run = tmp_path / "outputs" / "run"
    held = HeldJob(command, tmp_path, {19: 0})
    held.wait_for_step(19, lambda: committed(run))
    job = held.job
    loaders = [pid for rank in job.workers() for pid in children(rank)]
    assert len(loaders) == 2
    os.kill(loaders[1], signal.SIGKILL)
    held.resume()
    assert job.wait() == 0, job.text()
    assert "Traceback" not in job.text()
    assert re.search(
        r"error: rank 1: RuntimeError: DataLoader worker .* is killed by signal: Killed", job.text()
    )
    assert final(tmp_path) == final(tmp_path / "uninterrupted")


def test_killed_between_the_last_snapshot_and_the_test_split(tmp_path):
    """Run again, the test metrics and the end of the run are recorded, once."""
    settings = [WITH_TOY, "experiment=toy", "trainer.max_epochs=1", "run.name=run"]
    assert call([*python_main(), *settings], tmp_path).returncode == 0
    run = tmp_path / "outputs" / "run"
    lines, before = (run / METRICS).read_bytes().splitlines(keepends=True), read_result(run)
    assert b"test_loss" in lines[-2] and b"complete" in lines[-1]
    (run / METRICS).write_bytes(b"".join(lines[:-2]))  # as a kill before leaves it
    (run / "result.json").unlink()
    for _ in range(2):
        done = call([*python_main(), *settings], tmp_path)
        assert done.returncode == 0, done.stdout
        history = read_history(run / METRICS)
        assert history.series("test_loss") == [(before["step"], pytest.approx(before["test_loss"]))]
        assert history.is_complete and (run / METRICS).read_bytes().count(b"complete") == 1
        assert read_result(run)["test_loss"] == pytest.approx(before["test_loss"])


@pytest.mark.slow
def test_statistics_over_all_ranks(tmp_path):
    """1, 2 and 3 ranks train the same model, and evaluate every one of 200 and 300 samples once."""
    one, two, three = (train(tmp_path / str(n), ranks=n) for n in (1, 2, 3))
    for name in ("val_loss", "val_accuracy", "test_loss", "test_accuracy"):
        assert one[name] == pytest.approx(two[name], abs=1e-5)
        assert one[name] == pytest.approx(three[name], abs=1e-5)
    assert one["samples"] == STEPS * 96 and "tokens" not in one


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "trainer.activation_checkpointing=true",
            "trainer.activation_checkpointing=true needs a model with blocks",
        ),
    ],
)
def test_what_does_not_fit_the_recipe_is_refused(override, expected, tmp_path):
    done = call([*python_main(), *CONVNET, override], tmp_path)
    assert done.returncode == 2, done.stdout
    # A slow machine says before it that it is loading the data.
    assert done.stdout.splitlines()[-1].startswith(f"config error: {expected}")
    assert not (tmp_path / "outputs").exists()


def test_unequal_micro_batches_are_refused(tmp_path):
    done = call([*python_main(), *CONVNET, "ddp.nproc_per_node=5"], tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stdout.splitlines() if "error" in line]
    assert line.startswith(
        "config error: ddp.sync_batchnorm=true needs one micro-batch per rank: "
        "trainer.batch_size=96"
    )
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_the_convnet_recipe(tmp_path):
    """Its metrics reach the log, TensorBoard, metrics.jsonl and result.json."""
    recipe = [WITH_DIGITS, "experiment=digits_convnet", "ddp.nproc_per_node=2", "run.name=run"]
    done = call([*python_main(), *recipe], tmp_path)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "outputs" / "run"
    result = read_result(run)
    assert result["test_accuracy"] >= 0.97
    assert (
        f"test loss {result['test_loss']:.4f}, accuracy {result['test_accuracy']:.4f}"
        in done.stdout.splitlines()[-1]
    )
    events = EventAccumulator(str(run / "tensorboard" / "rank0")).Reload()
    assert events.Scalars("test/accuracy")[-1].value == pytest.approx(result["test_accuracy"])
    assert (
        len(events.Scalars("val/accuracy"))
        == len(read_history(run / METRICS).series("val_accuracy"))
        == 4
    )
    again = call([*python_main(), *recipe], tmp_path)
    assert (
        again.stdout.splitlines()[-1].split(" after ")[0]
        == done.stdout.splitlines()[-1].split(" after ")[0]
    )
    evaluate = [
        python_main()[0],
        "-m",
        "mingpt_ddp.evaluate",
        str(run),
        "split=test",
        "precision=fp32",
        "code=examples/digits/digits.py",
    ]
    measured = json.loads(call(evaluate, Path(__file__).resolve().parents[2]).stdout)
    # trained in another precision
    assert measured["accuracy"] == pytest.approx(result["test_accuracy"], abs=0.02)
