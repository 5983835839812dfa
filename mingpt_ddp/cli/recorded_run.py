"""Read the record of a run, and choose which of its steps to repeat.

The record consists of the run's committed snapshots, and of its ledger: a file with the hashes of
all snapshots that the run has saved.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.errors import SnapshotError, counted
from mingpt_ddp.snapshots.format import TENSOR_KINDS, directory_name, step_of
from mingpt_ddp.snapshots.hashes import HashByKind, hash_snapshot
from mingpt_ddp.snapshots.read.load import find_steps, load
from mingpt_ddp.snapshots.write.ledger import Ledger, Record, digest_settings
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.run_directory import refuse_other_loop

MAX_OFFERS = 8  # largest number of intervals that an error message offers


@dataclass(frozen=True)
class Interval:
    """The steps to repeat, from the step after `base` to `target`."""

    base: int  # step of a snapshot, or 0 for the start of the run
    target: int  # a later step; the command `replay` only takes the step of a snapshot
    # state.json of the target's snapshot. If the target has no snapshot, this is the state.json of
    # the next later snapshot or, if there is none, of the newest snapshot.
    state: dict[str, Any]


@dataclass(frozen=True)
class RecordedRun:
    """The record of a run: its committed snapshots and its ledger."""

    store: SnapshotStore
    states: dict[int, dict[str, Any]]  # state.json by step
    ledger: dict[int, Record]

    @classmethod
    def read(cls, url: str) -> "RecordedRun":
        """Read the record of a run.

        Args:
            url: URL of the run, of its directory of snapshots, or of a snapshot. Untrusted.

        Raises:
            SnapshotError: There is no committed snapshot, or a snapshot does not describe how to
                repeat its run.
            ConfigError: A user's script with its own training loop has trained the run, so main.py
                cannot repeat it.
        """
        if "://" not in url:
            refuse_other_loop(run_of(Path(url)))
        store, steps = find_steps(url)
        states = {step: read_state(store, step) for step in steps if store.is_committed(step)}
        if not states:
            raise SnapshotError(
                f"there is no whole snapshot at {url}; name a run directory that has snapshots"
            )
        ledger = {} if "://" in url else Ledger(run_of(Path(url))).read()
        return cls(store, states, ledger)

    def hash_content(self, step: int) -> HashByKind:
        """Hash the present content of a snapshot.

        Raises:
            SnapshotError: The snapshot is damaged.
        """
        return hash_snapshot(read_snapshot(self.store, step))

    def have_same_settings(self, base: int, end: int) -> bool:
        """Return True if the settings did not change from the step after `base` to `end`."""
        return len({self._settings[step] for step in self._settings if base < step <= end}) < 2

    @functools.cached_property
    def _settings(self) -> dict[int, str]:
        """Digest of the settings by step, for the steps that have a record."""
        settings = {step: record.settings_digest for step, record in self.ledger.items()}
        return settings | {step: digest_settings(state) for step, state in self.states.items()}

    def can_repeat_from_start(self, words: list[str]) -> bool:
        """Return True if the run can be repeated from its start.

        Args:
            words: Additional arguments of the train command that repeats the steps.
        """
        run = self.states[max(self.states)]["config"]["run"]
        source = str(run.get("init_from"))
        # A replay does not read the weights of a recorded URL unless the user gives the URL again.
        lacks_weights = "://" in source and not any(
            word.startswith("run.init_from=") for word in words
        )
        return run.get("resume") in ("auto", "never") and not lacks_weights

    def recorded_hashes(self, interval: Interval) -> dict[int, HashByKind]:
        """Return the recorded hashes of the interval's steps and of its base, by step."""
        hashes = {}
        for step, record in self.ledger.items():
            if interval.base <= step <= interval.target:
                hashes[step] = record.hashes
        return hashes


def read_snapshot(store: SnapshotStore, step: int) -> Any:
    """Read a whole snapshot. Raise SnapshotError if it is damaged."""
    return load(f"{store.url}/{directory_name(step)}", TENSOR_KINDS)


def read_state(store: SnapshotStore, step: int) -> dict[str, Any]:
    """Read the state of a snapshot.

    Raises:
        SnapshotError: The snapshot is damaged, or its state lacks values that a replay needs
            (because an earlier version of the package wrote it, or something other than a run).
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
        raise SnapshotError(
            f"the snapshot of step {step} does not contain the settings that are needed to repeat "
            "its run; name another run"
        )
    return dict(state)


def run_of(path: Path) -> Path:
    """Return the run directory that a path belongs to.

    Args:
        path: Path of the run directory, of its directory of snapshots, or of a snapshot.
    """
    path = path.absolute()
    if step_of(path.name) is not None:
        path = path.parent
    return path.parent if path.name == "snapshots" else path


def choose_interval(recorded: RecordedRun, steps: int, words: list[str]) -> Interval:
    """Return the newest interval with a number of steps, all trained with the same settings.

    Args:
        steps: Number of steps in the interval.
        words: Additional arguments of the train command that repeats the steps.

    Raises:
        SnapshotError: No interval has this number of steps. The message lists numbers of steps that
            are possible.
    """
    snapshots = sorted(recorded.states, reverse=True)
    bases = [*snapshots, 0] if recorded.can_repeat_from_start(words) else snapshots
    for target in snapshots:
        base = target - steps
        if base in bases and recorded.have_same_settings(base, target):
            return Interval(base, target, recorded.states[target])
    offers = dict[int, str]()  # possible values of `steps`, as words of the command line
    for target in snapshots[:MAX_OFFERS]:
        for base in bases:
            if base < target and recorded.have_same_settings(base, target):
                offers.setdefault(target - base, f"steps={target - base} ({base + 1} to {target})")
    problem = (
        f"no interval of {counted(steps, 'step')} begins at a snapshot or at the start of the run, "
        "ends at a snapshot, and has the same settings throughout"
    )
    if not offers:
        raise SnapshotError(
            f"{problem}; no other number of steps is possible either: name a run that has kept "
            "more snapshots (snapshot.keep_last)"
        )
    shown = " or ".join([*offers.values()][:MAX_OFFERS])
    raise SnapshotError(f"{problem}; set {shown}")


def interval_before(recorded: RecordedRun, target: int, words: list[str]) -> Interval:
    """Return the steps from the newest snapshot before a step, or from the start, to that step.

    Args:
        words: Additional arguments of the train command that repeats the steps.

    Raises:
        SnapshotError: The settings changed between the snapshot and the step. Or there is no
            earlier snapshot, and the run cannot be repeated from its start.
    """
    earlier = [step for step in recorded.states if step < target]
    later = [step for step in recorded.states if step >= target]
    base = max(earlier, default=0)
    if not earlier and not recorded.can_repeat_from_start(words):
        raise SnapshotError(
            f"there is no snapshot before step {target}, and this run cannot be repeated from its "
            f"start; choose a step after its first snapshot, step {min(later)}"
        )
    end = min(later, default=target)
    if not recorded.have_same_settings(base, end):
        raise SnapshotError(
            f"the settings of the run changed between steps {base} and {end}, so step {target} "
            "cannot be repeated; choose a step between two snapshots with the same settings"
        )
    return Interval(base, target, recorded.states[end if later else base])
