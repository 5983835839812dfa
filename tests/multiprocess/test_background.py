"""Snapshots that are written beside training, divided over the ranks: what is in them, and what goes wrong."""

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
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.snapshots import async_writer as background
from mingpt_ddp.snapshots import format, manager
from mingpt_ddp.snapshots.staging_buffer import SafetensorsBuffer
from mingpt_ddp.snapshots.state_dict import model_state, optimizer_state
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.training import run as composition
from mingpt_ddp.training.trainer import Trainer
from multiprocess.ranks import Ranks, configure, run_ranks

STEPS = 24
SETTINGS = [*TINY, "model.dropout=0.1", "trainer.micro_batch_size=2", f"trainer.max_steps={STEPS}"]
SETTINGS += ["trainer.eval_every=null", "snapshot.keep_last=100", "snapshot.keep_best=false"]
PART = 1000  # bytes: so small a part is worth a file of its own here


def settings(root: Path, name: str, *overrides: str) -> dict[str, Any]:
    return configure(*SETTINGS, *overrides, f"run.root={root}", f"run.name={name}")


def digest(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> str:
    content = [
        f"{kind} {name} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.detach().contiguous().numpy().tobytes()
        for kind, named in sorted(tensors.items())
        for name, tensor in sorted(named.items())
    ]
    return hashlib.sha256(b"".join(content)).hexdigest()


def train(
    values: dict[str, Any],
    part: int = PART,
    lag: int = 0,
    fail: dict[str, list[int]] | None = None,
    hang: tuple[int, int, str] | None = None,
    ruin: int | None = None,
) -> dict[str, Any]:
    """One run, with a storage as misfortune has it.

    Args:
        part: bytes below which the tensors are not divided.
        lag: a file is written only when training is so many steps ahead of it; copies are slow as well.
        fail: by rank, the steps whose files cannot be written.
        hang: rank, step and a file: in its first snapshot from that step on, the rank writes one file and no other, and
            then the step of the snapshot into the file.
        ruin: at this step a file takes the place of the directory of the snapshots.
    """
    format.MIN_SHARD_BYTES = part
    manager.QUICK_S = 0.0 if lag else 60.0  # how busy the machine is decides nothing
    rank, now = int(os.environ["RANK"]), {"step": 0}
    moved = threading.Condition()
    told: dict[str, Any] = {"overtaken": [], "images": 0, "restored": None, "error": None}

    def step(self: Trainer, number: int) -> None:
        with moved:
            now["step"] = number
            moved.notify_all()
        if number == ruin:
            directory = Path(values["run"]["root"]) / values["run"]["name"] / "snapshots"
            wait_for(lambda: committed(directory.parent), what="a snapshot")
            directory.rename(directory.with_name("moved"))
            directory.write_text("not a directory")
        original_step(self, number)

    def write_files(self: SnapshotStore, number: int, contents: Any) -> Any:
        if contents.keys() <= {"manifest.json"}:
            return original_write_files(self, number, contents)
        with moved:
            moved.wait_for(lambda: now["step"] >= min(number + lag, STEPS))
        if number in (fail or {}).get(str(rank), []):
            raise OSError(errno.ENOSPC, "no space is left")
        if hang and hang[0] == rank and hang[1] <= number:
            name = next(iter(contents))
            original_write_files(self, number, {name: contents[name]})
            Path(hang[2]).write_text(str(number))
            time.sleep(1000)
        files = original_write_files(self, number, contents)
        told["overtaken"].append([number, now["step"]])
        return files

    def restore(found: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Any:
        state = original_restore(found, model, optimizer, scaler)
        tensors = {"model": model_state(model), "optimizer": optimizer_state(model, optimizer)}
        told["restored"] = [found.step, digest(tensors)]
        return state

    class CountedImage(SafetensorsBuffer):
        def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
            super().__init__(tensors)
            told["images"] += 1

        def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
            if lag:
                time.sleep(0.015)  # for each of two files; training wants to go on
            super().fill(tensors)

    original_step, original_write_files = Trainer._step, SnapshotStore.write_files
    original_restore = composition.restore
    Trainer._step, SnapshotStore.write_files = step, write_files
    composition.restore, background.SafetensorsBuffer = restore, CountedImage
    logs.to_console(read_env())
    config = from_mapping(values)
    runtime = Runtime(config, read_env())
    try:
        composition.run(config, runtime, {})
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
    runtime.close()
    return told


def files(run: Path, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "snapshots" / f"step_{step:08d}").iterdir()}


def tensor_files(run: Path, step: int) -> dict[str, bytes]:
    return {name: content for name, content in files(run, step).items() if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("background")


@pytest.fixture(scope="module")
def synchronous(root):
    """For a number of ranks: the run that saves every step, and goes on only when it is saved."""
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
def test_every_rank_writes_a_part(ranks, root, synchronous):
    names = {f"{kind}-{i + 1:05d}-of-{ranks:05d}.safetensors" for kind in ("model", "optimizer") for i in range(ranks)}
    found = files(synchronous(ranks), 4)
    assert found.keys() == {*names, "state.json", "manifest.json"}
    shares = [sum(len(c) for name, c in found.items() if f"-{i + 1:05d}-of" in name) for i in range(ranks)]
    assert max(shares) < 1.5 * min(shares)


@pytest.mark.parametrize(("written", "read"), [(2, 1), (2, 3), (3, 2)])
def test_any_number_of_ranks_reads_the_parts(written, read, root, synchronous):
    """Weights and optimizer state arrive as they were, on every rank."""
    source = synchronous(written) / "snapshots"
    snapshot = SnapshotStore(str(source)).read(12)
    expected = digest({"model": snapshot.model, "optimizer": snapshot.optimizer})
    name = f"from{written}on{read}"
    values = settings(root, name, f"run.resume={source}/step_00000012", "trainer.max_steps=14")
    outcomes = run_ranks(read, train, root / "ranks" / name, values=values)
    assert [outcome["error"] for outcome in outcomes] == [None] * read
    assert [outcome["restored"] for outcome in outcomes] == [[12, expected]] * read


def test_what_is_small_is_not_divided(root, synchronous):
    """It is in one file what it would be in parts."""
    values = settings(root, "whole", "trainer.max_steps=4", f"optimizer.schedule_steps={STEPS}")
    run_ranks(2, train, root / "ranks" / "whole", values=values, part=1 << 24)
    assert tensor_files(root / "whole", 4).keys() == {"model.safetensors", "optimizer.safetensors"}
    one, other = (SnapshotStore(str(run / "snapshots")).read(4) for run in (root / "whole", synchronous(2)))
    assert digest({"m": one.model, "o": one.optimizer}) == digest({"m": other.model, "o": other.optimizer})


@pytest.fixture(scope="module")
def overtaken(root):
    """The storage is so slow that training is seven steps ahead whenever a file is written."""
    done: dict[int, tuple[Path, list[dict[str, Any]]]] = {}

    def get(ranks: int) -> tuple[Path, list[dict[str, Any]]]:
        if ranks not in done:
            name = f"overtaken{ranks}"
            values = settings(root, name, "snapshot.every_steps=3")
            done[ranks] = root / name, run_ranks(ranks, train, root / "ranks" / name, values=values, lag=7)
        return done[ranks]

    return get


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_snapshot_is_the_state_of_its_step(ranks, overtaken, synchronous):
    """Not that of a later one, though training goes on while it is copied and written."""
    run, outcomes = overtaken(ranks)
    assert [outcome["error"] for outcome in outcomes] == [None] * ranks
    steps = committed(run)
    assert steps[0] == 3
    assert steps[-1] == STEPS
    for step in steps:
        assert tensor_files(run, step) == tensor_files(synchronous(ranks), step), f"step {step}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_does_not_wait_for_a_slow_storage(ranks, overtaken):
    """What is due meanwhile is put off, and the newest state is saved as soon as that can be."""
    run, outcomes = overtaken(ranks)
    for outcome in outcomes:
        late = [ahead - step for step, ahead in outcome["overtaken"] if step + 7 <= STEPS]
        assert len(late) >= 2
        assert min(late) >= 7
    first, second = committed(run)[:2]
    assert second >= first + 7, "two at a time"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_memory_of_one_copy_is_used_again(ranks, overtaken):
    run, outcomes = overtaken(ranks)
    assert len(committed(run)) > 2
    assert [outcome["images"] for outcome in outcomes] == [2] * ranks, "model and optimizer, once each"


# What goes wrong.


def warnings(run: Path, rank: int = 0) -> list[str]:
    lines = (run / f"main.rank{rank}.log").read_text().splitlines()
    return [line.partition(" WARNING ")[2] for line in lines if " WARNING " in line]


def test_one_failure_is_told_and_training_goes_on(root, synchronous):
    values = settings(root, "once", "snapshot.every_steps=4")
    outcomes = run_ranks(2, train, root / "ranks" / "once", values=values, fail={"1": [8]})
    run = root / "once"
    assert [outcome["error"] for outcome in outcomes] == [None, None]
    assert committed(run) == [4, *range(12, STEPS + 1, 4)]
    for rank in (0, 1):
        (told,) = warnings(run, rank)
        assert "cannot write the snapshot of step 8" in told
        assert "rank 1: no space is left; training continues (failure 1 of 3 allowed)" in told
    assert tensor_files(run, STEPS) == tensor_files(synchronous(2), STEPS)


def test_failures_in_a_row_end_the_run_on_all_ranks(root):
    values = settings(root, "always", "snapshot.every_steps=4", "snapshot.max_failures=1")
    fail = {"1": list(range(8, STEPS + 1))}
    told = [outcome["error"] for outcome in run_ranks(2, train, root / "ranks" / "always", values=values, fail=fail)]
    assert told[0] == told[1]
    assert "StorageUnavailableError" in told[0]
    assert "cannot write the snapshot of step 12" in told[0]
    assert "rank 1: no space is left, 2 times in a row" in told[0]
    assert committed(root / "always") == [4]
    assert SnapshotStore(str(root / "always" / "snapshots")).read_latest().step == 4


def test_a_place_that_is_gone(root):
    """A file stands where the directory of the snapshots was."""
    values = settings(root, "gone", "snapshot.every_steps=4", "snapshot.max_failures=2")
    (told,) = run_ranks(1, train, root / "ranks" / "gone", values=values, ruin=6)
    assert "cannot write the snapshot of step 16" in told["error"]
    assert "Not a directory, 3 times in a row" in told["error"]
    run = root / "gone"
    assert len(warnings(run)) == 2
    assert sorted(path.parent.name for path in run.glob("moved/*/manifest.json")) == ["step_00000004"]


def test_a_kill_in_the_middle_of_a_write_leaves_the_older_snapshot(root, synchronous):
    run, marker = root / "killed", root / "half"
    values = settings(root, "killed", "snapshot.every_steps=4")
    with Ranks(2, train, root / "ranks" / "killed", values=values, hang=[1, 8, str(marker)]):
        wait_for(lambda: marker.exists() and marker.read_text(), what="half a snapshot")
        step = int(marker.read_text())  # names alone: the other rank may be renaming a file that it has written
        assert any((run / "snapshots" / f"step_{step:08d}").iterdir())
    assert committed(run) == [4]
    outcomes = run_ranks(2, train, root / "ranks" / "resumed", values=values)
    assert [(outcome["error"], outcome["restored"][0]) for outcome in outcomes] == [(None, 4)] * 2
    assert tensor_files(run, STEPS) == tensor_files(synchronous(2), STEPS)
