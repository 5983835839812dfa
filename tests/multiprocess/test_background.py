"""Asynchronous snapshots that are sharded over the ranks, and failures while they are written."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TINY, committed, wait_for

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import read_env
from mingpt_ddp.snapshots import format, manager
from mingpt_ddp.snapshots.staging_buffer import SafetensorsBuffer
from mingpt_ddp.snapshots.state_dict import model_state, optimizer_state
from mingpt_ddp.snapshots.write import async_writer as background
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.training import run as composition
from mingpt_ddp.training.start import stages
from mingpt_ddp.training.trainable import Trainable
from mingpt_ddp.training.trainer import Trainer
from multiprocess.ranks import Ranks, configure, run_ranks

STEPS = 24
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    "trainer.micro_batch_size=2",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=null",
    "snapshot.keep_last=100",
    "snapshot.keep_best=false",
]
# With this limit in bytes, even the small tensors of these tests are sharded.
SHARD_BYTES = 1000


def settings(root: Path, name: str, *overrides: str) -> dict[str, Any]:
    return configure(*SETTINGS, *overrides, f"run.root={root}", f"run.name={name}")


def digest(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> str:
    content = [
        f"{kind} {name} {tensor.dtype} {list(tensor.shape)}".encode()
        + tensor.detach().contiguous().numpy().tobytes()
        for kind, named in sorted(tensors.items())
        for name, tensor in sorted(named.items())
    ]
    return hashlib.sha256(b"".join(content)).hexdigest()


def train(
    values: dict[str, Any],
    shard_bytes: int = SHARD_BYTES,
    lag: int = 0,
    fail: dict[str, list[int]] | None = None,
    hang: tuple[int, int, str] | None = None,
) -> dict[str, Any]:
    """Train with faulty storage.

    Args:
        shard_bytes: Tensors are sharded if each shard has at least this many bytes.
        lag: Each write waits until training is this many steps ahead. Copies to the staging
            buffer are slow too.
        fail: For each rank, the steps whose files cannot be written.
        hang: A rank, a step and a file. In its first snapshot from this step on, the rank writes
            one file, writes the step of the snapshot to `file`, and hangs.
    """
    format.MIN_SHARD_BYTES = shard_bytes
    manager.QUICK_SAVE_S = 0.0 if lag else 60.0  # the load of the machine must not matter
    rank, current = int(os.environ["RANK"]), {"step": 0}
    step_changed = threading.Condition()
    report: dict[str, Any] = {"writes": [], "buffers": 0, "restored": None, "error": None}

    def step(self: Trainer, number: int) -> Any:
        if lag:
            time.sleep(0.03)  # lets other threads run, also on a busy machine
        with step_changed:
            current["step"] = number
            step_changed.notify_all()
        return original_step(self, number)

    def write_files(self: SnapshotStore, number: int, contents: Any) -> Any:
        if contents.keys() <= {"manifest.json"}:
            return original_write_files(self, number, contents)
        with step_changed:
            step_changed.wait_for(lambda: current["step"] >= min(number + lag, STEPS))
        if number in (fail or {}).get(str(rank), []):
            raise OSError(errno.ENOSPC, "no space is left")
        if hang and hang[0] == rank and hang[1] <= number:
            name = next(iter(contents))
            original_write_files(self, number, {name: contents[name]})
            Path(hang[2]).write_text(str(number))
            time.sleep(1000)
        files = original_write_files(self, number, contents)
        report["writes"].append([number, current["step"]])
        return files

    def restore(found: Any, trainable: Trainable, scaler: Any) -> Any:
        state = original_restore(found, trainable, scaler)
        model = trainable.model
        optimizer = optimizer_state(model, trainable.optimizer)
        tensors = {"model": model_state(model), "optimizer": optimizer}
        report["restored"] = [found.step, digest(tensors)]
        return state

    class SlowBuffer(SafetensorsBuffer):
        def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
            super().__init__(tensors)
            report["buffers"] += 1

        def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
            if lag:
                time.sleep(0.015)  # makes each of the two copies slow while training continues
            super().fill(tensors)

    original_step, original_write_files = Trainer._train, SnapshotStore.write_files
    original_restore = stages.restore
    Trainer._train, SnapshotStore.write_files = step, write_files
    stages.restore, background.SafetensorsBuffer = restore, SlowBuffer
    logs.to_console(read_env())
    config = from_mapping(values)
    runtime = Runtime(config, read_env())
    try:
        composition.train_run(Job(config), runtime)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    runtime.close()
    return report


def files(run: Path, step: int) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in (run / "snapshots" / f"step_{step:08d}").iterdir()
    }


def tensor_files(run: Path, step: int) -> dict[str, bytes]:
    return {
        name: content for name, content in files(run, step).items() if name.endswith(".safetensors")
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("background")


@pytest.fixture(scope="module")
def synchronous(root):
    """Return a function that trains on a number of ranks, saving every step synchronously."""
    done: dict[int, Path] = {}

    def get(ranks: int) -> Path:
        if ranks not in done:
            name = f"synchronous{ranks}"
            values = settings(root, name, "snapshot.every_steps=1", "snapshot.background=false")
            outcomes = run_ranks(ranks, train, root / "ranks" / name, values=values)
            assert [outcome["error"] for outcome in outcomes] == [None] * ranks
            done[ranks] = root / name
        return done[ranks]

    return get


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_writes_a_shard(ranks, root, synchronous):
    names = {
        f"{kind}-{i + 1:05d}-of-{ranks:05d}.safetensors"
        for kind in ("model", "optimizer")
        for i in range(ranks)
    }
    found = files(synchronous(ranks), 4)
    assert found.keys() == {*names, "state.json", "manifest.json"}
    shares = [
        sum(len(c) for name, c in found.items() if f"-{i + 1:05d}-of" in name) for i in range(ranks)
    ]
    assert max(shares) < 1.5 * min(shares)


@pytest.mark.parametrize(("written", "read"), [(2, 1), (2, 3), (3, 2)])
def test_any_number_of_ranks_reads_the_shards(written, read, root, synchronous):
    """Every rank restores the weights and the optimizer state that were saved."""
    source = synchronous(written) / "snapshots"
    snapshot = SnapshotStore(str(source)).read(12)
    expected = digest({"model": snapshot.model, "optimizer": snapshot.optimizer})
    name = f"from{written}on{read}"
    values = settings(root, name, f"run.resume={source}/step_00000012", "trainer.max_steps=14")
    outcomes = run_ranks(read, train, root / "ranks" / name, values=values)
    assert [outcome["error"] for outcome in outcomes] == [None] * read
    assert [outcome["restored"] for outcome in outcomes] == [[12, expected]] * read


def test_small_tensors_are_not_sharded(root, synchronous):
    """One file contains the same tensors as the shards do."""
    values = settings(root, "whole", "trainer.max_steps=4", f"optimizer.schedule_steps={STEPS}")
    run_ranks(2, train, root / "ranks" / "whole", values=values, shard_bytes=1 << 24)
    assert tensor_files(root / "whole", 4).keys() == {"model.safetensors", "optimizer.safetensors"}
    one, other = (
        SnapshotStore(str(run / "snapshots")).read(4) for run in (root / "whole", synchronous(2))
    )
    assert digest({"m": one.model, "o": one.optimizer}) == digest(
        {"m": other.model, "o": other.optimizer}
    )


@pytest.fixture(scope="module")
def slow_storage(root):
    """Return a function that trains on a number of ranks while each write is seven steps late.

    It returns the run directory and the reports of the ranks.
    """
    done: dict[int, tuple[Path, list[dict[str, Any]]]] = {}

    def get(ranks: int) -> tuple[Path, list[dict[str, Any]]]:
        if ranks not in done:
            name = f"slow{ranks}"
            values = settings(root, name, "snapshot.every_steps=3")
            done[ranks] = (
                root / name,
                run_ranks(ranks, train, root / "ranks" / name, values=values, lag=7),
            )
        return done[ranks]

    return get


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_snapshot_has_the_state_of_its_step(ranks, slow_storage, synchronous):
    """Training continues while the snapshot is staged and written, but does not change it."""
    run, outcomes = slow_storage(ranks)
    assert [outcome["error"] for outcome in outcomes] == [None] * ranks
    steps = committed(run)
    assert steps[0] == 3
    assert steps[-1] == STEPS
    for step in steps:
        assert tensor_files(run, step) == tensor_files(synchronous(ranks), step), f"step {step}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_does_not_wait_for_slow_storage(ranks, slow_storage):
    """Snapshots that are due meanwhile are postponed. The newest state is saved as soon as
    possible.
    """
    run, outcomes = slow_storage(ranks)
    for outcome in outcomes:
        assert outcome["buffers"] == 2, "one each for model and optimizer, which are reused"
        lags = [ahead - step for step, ahead in outcome["writes"] if step + 7 <= STEPS]
        assert len(lags) >= 2
        assert min(lags) >= 7
    first, second = committed(run)[:2]
    assert second >= first + 7, "two snapshots were written at a time"


# Failures


def warnings(run: Path, rank: int = 0) -> list[str]:
    lines = (run / f"main.rank{rank}.log").read_text().splitlines()
    return [line.partition(" WARNING ")[2] for line in lines if " WARNING " in line]


def test_one_failure_is_reported_and_training_continues(root, synchronous):
    values = settings(root, "once", "snapshot.every_steps=4")
    outcomes = run_ranks(2, train, root / "ranks" / "once", values=values, fail={"1": [8]})
    run = root / "once"
    assert [outcome["error"] for outcome in outcomes] == [None, None]
    assert committed(run) == [4, *range(12, STEPS + 1, 4)]
    for rank in (0, 1):
        (warning,) = warnings(run, rank)
        assert "cannot write the snapshot of step 8" in warning
        assert "rank 1: no space is left; training continues (failure 1 of 3 allowed)" in warning
    assert tensor_files(run, STEPS) == tensor_files(synchronous(2), STEPS)


def test_a_kill_during_a_write_keeps_the_older_snapshot(root, synchronous):
    run, marker = root / "killed", root / "half"
    values = settings(root, "killed", "snapshot.every_steps=4")
    with Ranks(2, train, root / "ranks" / "killed", values=values, hang=[1, 8, str(marker)]):
        wait_for(lambda: marker.exists() and marker.read_text(), what="a partial snapshot")
        # Only file names are compared, since the other rank may be renaming a file.
        step = int(marker.read_text())
        assert any((run / "snapshots" / f"step_{step:08d}").iterdir())
    assert committed(run) == [4]
    outcomes = run_ranks(2, train, root / "ranks" / "resumed", values=values)
    assert [(outcome["error"], outcome["restored"][0]) for outcome in outcomes] == [(None, 4)] * 2
    assert tensor_files(run, STEPS) == tensor_files(synchronous(2), STEPS)
