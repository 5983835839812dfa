"""What a run has recorded, and which of its steps can be repeated."""

import bisect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.snapshots.format import TENSOR_KINDS, directory_name, step_of
from mingpt_ddp.snapshots.ledger import (
    Hashes,
    Ledger,
    Record,
    digest_settings,
    hash_snapshot,
)
from mingpt_ddp.snapshots.load import find_steps, load
from mingpt_ddp.snapshots.store import SnapshotStore

SHOWN = 8  # numbers of steps that an error lists


@dataclass(frozen=True)
class Interval:
    """The steps to repeat: those after `base`, up to `target`."""

    base: int  # step of a snapshot, or 0: the start of the run
    target: int  # step of a snapshot, or of a line of the ledger
    state: dict[str, Any]  # of the attempt that trained them, or of one with the same settings
    state_step: int  # of the snapshot that `state` is from, if need be before the target


@dataclass(frozen=True)
class Recorded:
    """What a run has recorded: its committed snapshots and its ledger."""

    stores: dict[int, SnapshotStore]  # by step
    states: dict[int, dict[str, Any]]  # state.json by step
    ledger: dict[int, Record]

    @classmethod
    def read(cls, url: str, follow: bool) -> "Recorded":
        """
        Args:
            url: of a run, its snapshots or one of them, untrusted.
            follow: as for `find_steps`.

        Raises:
            SnapshotError: there is no committed snapshot, or it does not say how to repeat a run.
        """
        stores: dict[int, SnapshotStore] = {}
        for store, steps in find_steps(url, follow):
            for step in steps:
                if store.is_committed(step):
                    stores.setdefault(step, store)
        if not stores:
            raise SnapshotError(f"there is no whole snapshot at {url}")
        states = {step: read_state(store, step) for step, store in stores.items()}
        ledger = {} if "://" in url else Ledger(run_of(Path(url))).read()
        return cls(stores, states, ledger)

    def intervals(self, has_start: bool) -> dict[int, Interval]:
        """Return the newest interval of each number of steps.

        All its steps were trained with the settings that the next snapshot records, or the newest
        one if that was deleted.

        Args:
            has_start: the first steps of the run can be repeated too.
        """
        of_states = {step: digest_settings(state) for step, state in self.states.items()}
        settings = {step: record.settings for step, record in self.ledger.items()} | of_states
        snapshots = sorted(self.states)
        recorded = sorted(settings)
        found: dict[int, Interval] = {}
        for base in [*([0] if has_start else []), *snapshots]:
            targets = recorded[bisect.bisect_right(recorded, base) :]
            for target in targets:
                if settings[target] != settings[targets[0]]:
                    break
                later = snapshots[min(bisect.bisect_left(snapshots, target), len(snapshots) - 1)]
                known = found.get(target - base)
                is_newest = known is None or known.target < target
                if of_states[later] == settings[target] and is_newest:
                    found[target - base] = Interval(base, target, self.states[later], later)
        return found

    def content(self, step: int) -> Hashes:
        """Return the hashes of what a snapshot holds now.

        Raises:
            SnapshotError: it is damaged.
        """
        return hash_snapshot(read_snapshot(self.stores[step], step))

    def expected(self, interval: Interval) -> dict[int, Hashes]:
        """Return the recorded hashes by step, of the interval and its base."""
        hashes = {}
        for step, record in self.ledger.items():
            if interval.base <= step <= interval.target:
                hashes[step] = record.hashes
        return hashes


def read_snapshot(store: SnapshotStore, step: int) -> Any:
    """Read a whole snapshot; raise SnapshotError if it is damaged."""
    return load(f"{store.url}/{directory_name(step)}", TENSOR_KINDS)


def read_state(store: SnapshotStore, step: int) -> dict[str, Any]:
    """Return the state of a snapshot.

    Raises:
        SnapshotError: it is damaged, was written by an earlier version, or by no run.
    """
    state = load(f"{store.url}/{directory_name(step)}", kinds=()).state
    config = state.get("config") if isinstance(state, dict) else None
    if not (
        isinstance(config, dict)
        and {*config} >= {"run", "trainer", "optimizer", "ddp"}
        and all(isinstance(group, dict) for group in config.values())
        and isinstance(state.get("environment"), dict)
        and isinstance(state.get("train_state"), dict)
        and all(type(state.get(key)) is int for key in ("steps", "micro_batch_size"))
    ):
        raise SnapshotError(f"the snapshot of step {step} does not say how to repeat its run")
    return dict(state)


def run_of(path: Path) -> Path:
    """Return the run directory of itself, its snapshots or one of them."""
    path = path.absolute()
    if step_of(path.name) is not None:
        path = path.parent
    return path.parent if path.name == "snapshots" else path


def choose_interval(recorded: Recorded, steps: int, words: list[str]) -> Interval:
    """Return the newest interval of so many steps.

    Args:
        words: more of the command line that trains.

    Raises:
        SnapshotError: there is none; names the nearest numbers of steps.
    """
    run = recorded.states[max(recorded.states)]["config"]["run"]
    source = str(run.get("init_from"))
    is_left_out = "://" in source and not any(word.startswith("run.init_from=") for word in words)
    has_start = run.get("resume") in ("auto", "never") and not is_left_out
    found = recorded.intervals(has_start)
    if steps in found:
        return found[steps]
    if not found:
        raise SnapshotError("no recorded step follows a snapshot with the same settings")
    nearest = sorted(sorted(found, key=lambda number: abs(number - steps))[:SHOWN])
    which = ", ".join(map(str, nearest))
    if len(found) > len(nearest):
        which += f", or another of {len(found)} up to {max(found)}"
    raise SnapshotError(
        f"no recorded step is {steps} steps after a snapshot that is still there, or after the "
        f"start of the run, with the same settings; set replay to {which}"
    )
