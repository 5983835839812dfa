"""Compare the result of a run under random faults with the result of an undisturbed run."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from chaos import PATIENCE_S, SETTINGS, Chaos
from chaos_log import InvariantError
from launching import Job, python_main
from snapshot_helpers import tensor_digests
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mingpt_ddp.metrics.jsonl import METRICS, read_history
from mingpt_ddp.snapshots.write.store import SnapshotStore


def undisturbed(cwd: Path, steps: int) -> Path:
    """Train the same run on a local disk, on one rank and without faults.

    Returns:
        The run directory.
    """
    # An interrupted call may have left a partial run.
    shutil.rmtree(cwd, ignore_errors=True)
    cwd.mkdir()
    settings = [*SETTINGS, f"trainer.max_steps={steps}", "snapshot.every_steps=null"]
    job = Job([*python_main(), *settings], cwd)
    if job.wait(PATIENCE_S + steps) != 0:
        raise InvariantError(job.text()[-3000:])
    return cwd / "outputs" / "run"


def check_result(chaos: Chaos, reference: Path) -> str:
    """Compare a complete run with the undisturbed one.

    Both must have the same tensors of the model and the optimizer, and the same losses and
    gradient norms in their histories. TensorBoard must show each step once, and all snapshots
    must be whole.

    The credentials of the store must be in `os.environ`.

    Returns:
        The SHA-256 of the model's tensors.

    Raises:
        InvariantError: The runs differ, or a snapshot is damaged.
    """
    found, expected = tensor_digests(chaos.url), tensor_digests(str(reference))
    rows, undisturbed_rows = (
        read_history(run / METRICS).by_step() for run in (chaos.run, reference)
    )
    differ = [step for step in sorted(rows) if not agree(rows[step], undisturbed_rows[step])]
    if found != expected or differ:
        since = f" since step {differ[0]}" if differ else ""
        raise InvariantError(f"other bits than undisturbed{since}: {found}, {expected}")
    recorded = [step for step, _ in read_history(chaos.run / METRICS).series("train_loss")]
    check_steps("metrics.jsonl", recorded, chaos)
    check_steps("TensorBoard", logged_steps(chaos.run, 0), chaos)
    store = SnapshotStore(chaos.url)
    for step in filter(store.is_committed, store.steps()):
        store.verify(step)
    return found["model"]


def check_steps(name: str, steps: list[int], chaos: Chaos) -> None:
    """Check that a history has each step once, except for steps that a full disk has lost."""
    every = set(range(1, chaos.report.steps + 1))
    twice = sorted(step for step, times in Counter(steps).items() if times > 1)
    if twice:
        raise InvariantError(f"{name} shows steps twice: {twice}")
    missing = every - set(steps) - chaos.checker.may_be_missing()
    if missing or not set(steps) <= every:
        raise InvariantError(f"{name} does not show the steps {sorted(missing)}")


def agree(row: dict, reference: dict) -> bool:
    """Compare the losses and gradient norms of a step.

    Only the keys that both rows have are compared: a run also evaluates at the step where it ends.
    """
    return all(
        row[key] == reference[key]
        for key in row.keys() & reference.keys()
        if key == "grad_norm" or "loss" in key
    )


def logged_steps(run: Path, rank: int) -> list[int]:
    """Return the steps of a rank's loss curve as TensorBoard reads them."""
    directory = run / "tensorboard" / f"rank{rank}"
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars("train/loss")]
