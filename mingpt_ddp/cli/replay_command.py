"""Repeat steps of a run from one of its snapshots, and compare hashes with the recorded ones.

A replay finds what no comparison of ranks sees: a flipped bit in an activation or a gradient, and a
snapshot that was changed together with its manifest.
"""

import bisect
import contextlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mingpt_ddp.cli.again_command import LEFT_OUT, command_words
from mingpt_ddp.cli.api import train
from mingpt_ddp.cli.arguments import echo
from mingpt_ddp.config.config import CODE_LOCATION_KEYS
from mingpt_ddp.config.validation import check
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
from mingpt_ddp.sweeps.runs import hydra_value

CONFIRMED = 0
REFUTED = 1
UNDECIDED = 3  # as exit codes; 2 is an error
NAME = "replay"  # of the run that repeats the steps
SHOWN = 8  # numbers of steps that an error lists
MAX_SAVES = 4  # of a replay for each hash that it is compared with
# What a replay leaves out: none of it changes the weights.
QUIET = (
    *("trainer.eval_every=null", "trainer.eval_steps=1", "trainer.sample_every=null"),
    *("trainer.norms_every=null", "trainer.profile=null", "trainer.patience=null"),
    *("trainer.verify_every=0", "snapshot.every_epochs=null", "snapshot.every_minutes=null"),
    *("snapshot.keep_last=1", "snapshot.keep_every=null", "snapshot.keep_best=false"),
    *("snapshot.path=null", "snapshot.fallback_path=null", "trainer.max_epochs=null"),
    *("tracker.tensorboard=false", "tracker.csv=false", "tracker.wandb=false"),
    *("tracker.mlflow=false", "tracker.trackio=false"),
)


@dataclass(frozen=True)
class Interval:
    """The steps to repeat: those after `base`, up to `target`."""

    base: int  # step of a snapshot, or 0: the start of the run
    target: int  # step of a snapshot, or of a line of the ledger
    state: dict[str, Any]  # of the attempt that trained them


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

        All its steps were trained with the settings that the next snapshot records.

        Args:
            has_start: the first steps of the run can be repeated too.
        """
        of_states = {step: digest_settings(state) for step, state in self.states.items()}
        settings = {step: record.settings for step, record in self.ledger.items()} | of_states
        snapshots = sorted(self.states)
        recorded = [step for step in sorted(settings) if step <= snapshots[-1]]
        found: dict[int, Interval] = {}
        for base in [*([0] if has_start else []), *snapshots]:
            targets = recorded[bisect.bisect_right(recorded, base) :]
            for target in targets:
                if settings[target] != settings[targets[0]]:
                    break
                later = snapshots[bisect.bisect_left(snapshots, target)]
                known = found.get(target - base)
                is_newest = known is None or known.target < target
                if of_states[later] == settings[target] and is_newest:
                    found[target - base] = Interval(base, target, self.states[later])
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
    nearest = sorted(sorted(found, key=lambda number: abs(number - steps))[:SHOWN])
    raise SnapshotError(
        f"no recorded step is {steps} steps after a snapshot that is still there, or after the "
        f"start of the run, with the same settings; set replay to {', '.join(map(str, nearest))}"
        if nearest
        else "no recorded step follows a snapshot with the same settings"
    )


def choose_ranks(ranks: int | None, environment: Mapping[str, Any]) -> int:
    """Return on how many ranks to repeat the steps.

    Raises:
        ConfigError: another number than the run had would change the bits.
    """
    if environment.get("reduction") == "canonical":
        return ranks or 1
    trained = environment.get("world_size", 1)
    check(
        ranks in (None, trained),
        f"nproc_per_node={ranks} changes the bits of a run with ddp.reduction=fast, which had "
        f"{trained} ranks; set nproc_per_node={trained}",
    )
    return int(trained)


def replay(url: str, steps: int, ranks: int | None, words: list[str], follow: bool) -> int:
    """Print whether a replay confirms what is recorded; return the exit code.

    Args:
        url: of the run or its snapshots, untrusted.
        steps: to repeat.
        ranks: on which; None: one, or as many as the run had with ddp.reduction=fast.
        words: more of the command line that trains.
        follow: as for `find_steps`.
    """
    recorded = Recorded.read(url, follow)
    interval = choose_interval(recorded, steps, words)
    environment = interval.state["environment"]
    ranks = choose_ranks(ranks, environment)
    expected = recorded.expected(interval)
    for step in (interval.base, interval.target):
        if step in recorded.stores:
            content = recorded.content(step)
            if difference := describe_difference(expected.setdefault(step, content), content):
                echo(f"refuted: the snapshot of step {step} holds another {difference}")
                return REFUTED
    repeated, here = train_again(recorded, interval, ranks, words)
    for step in sorted(expected.keys() & repeated.keys()):
        if difference := describe_difference(expected[step], repeated[step]):
            where = f"step {step}, repeated from step {interval.base}, gives another {difference}"
            if reasons := find_reasons(interval, here):
                echo(f"undecided: {where}; this proves nothing, because {'; '.join(reasons)}")
                return UNDECIDED
            echo(f"refuted: {where}")
            return REFUTED
    echo(
        f"confirmed: steps {interval.base + 1} to {interval.target}, repeated with "
        f"ddp.nproc_per_node={ranks}, give the recorded {', '.join(repeated[interval.target])}"
    )
    return CONFIRMED


def describe_difference(recorded: Hashes, found: Hashes) -> str:
    """Return the first kind whose hashes differ, with both; "" if all are equal."""
    for kind in TENSOR_KINDS:
        before = recorded.get(kind)
        now = found.get(kind)
        if before != now:
            return f"{kind}: SHA-256 {str(now)[:12]}..., recorded {str(before)[:12]}..."
    return ""


def find_reasons(interval: Interval, here: Mapping[str, Any]) -> list[str]:
    """Return why a replay may differ without damage.

    Args:
        here: the environment of the replay.
    """
    state = interval.state
    there = state["environment"]
    reasons = []
    for key in sorted(there.keys() & here.keys()):
        if there[key] != here[key]:
            reasons.append(f"{key} was {str(there[key])[:60]} and is {here[key]}")
    is_exact = state["config"]["trainer"].get("deterministic") is True
    if not is_exact and not re.search(r" \([A-Z0-9_ ]+\)$", str(there.get("device"))):  # no CPU
        reasons.append("the run was on a GPU without trainer.deterministic=true")
    skipped = state["train_state"].get("skipped_steps") or []
    within = [step for step in skipped if interval.base < step <= interval.target]
    if within:
        reasons.append(f"the run skipped step {within[0]} after a rollback")
    return reasons


def train_again(
    recorded: Recorded, interval: Interval, ranks: int, words: list[str]
) -> tuple[dict[int, Hashes], dict[str, Any]]:
    """Train an interval in a temporary directory; return the hashes by step, and the environment.

    Raises:
        UserError: the training failed.
    """
    threads = interval.state["environment"].get("threads")
    if type(threads) is int:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    with tempfile.TemporaryDirectory(prefix="mingpt_ddp-replay-") as name:
        directory = Path(name)
        write_config(directory / "recorded", interval.state["config"])
        typed = [*changes(recorded, interval, directory), *words]
        with contextlib.redirect_stdout(sys.stderr):  # stdout has the verdict alone
            train(command_words(str(directory / "recorded"), typed), ranks)
        run = directory / NAME
        hashes = {step: record.hashes for step, record in Ledger(run).read().items()}
        snapshot = read_snapshot(SnapshotStore(f"{run}/snapshots"), interval.target)
    hashes[interval.target] = hash_snapshot(snapshot)
    return hashes, snapshot.state["environment"]


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write config.yaml without what a record must not decide, or a replay need not."""
    kept: dict[str, Any] = {}
    for group, keys in config.items():
        kept[group] = {}
        for key, value in keys.items():
            if f"{group}.{key}" not in LEFT_OUT and key not in CODE_LOCATION_KEYS:
                kept[group][key] = value
    directory.mkdir()
    (directory / "config.yaml").write_text(yaml.safe_dump(kept))


def changes(recorded: Recorded, interval: Interval, directory: Path) -> list[str]:
    """Return the overrides that train the interval alone, in a run directory of its own."""
    state = interval.state
    values: dict[str, Any] = {
        "run.root": str(directory),
        "run.name": NAME,
        "run.resume": "auto",
        "trainer.max_steps": interval.target,
        "trainer.micro_batch_size": state["micro_batch_size"],
        "snapshot.every_steps": save_interval(recorded.expected(interval), interval),
    }
    if interval.base:
        store = recorded.stores[interval.base]
        values["run.resume"] = f"{store.url}/{directory_name(interval.base)}"
    if state["config"]["optimizer"].get("schedule_steps") is None:
        values["optimizer.schedule_steps"] = state["steps"]
    if state["config"]["ddp"].get("strategy") == "single":
        values["ddp.strategy"] = "auto"
    return [*QUIET, *(f"{key}={hydra_value(value)}" for key, value in values.items())]


def save_interval(expected: Mapping[int, Hashes], interval: Interval) -> int | None:
    """Return every how many steps to save, to save at the recorded steps; None: at the end."""
    steps = [step for step in expected if step > interval.base]
    every = math.gcd(*steps, interval.target)
    saves = (interval.target - interval.base) // every
    return every if saves <= MAX_SAVES * max(1, len(steps)) else None
