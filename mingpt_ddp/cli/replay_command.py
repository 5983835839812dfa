"""Repeat steps of a run from one of its snapshots, and compare hashes with the recorded ones.

A replay finds what no comparison of ranks sees: a flipped bit in an activation or a gradient, and a
snapshot that was changed together with its manifest.
"""

import contextlib
import os
import shlex
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
from mingpt_ddp.snapshots.format import TENSOR_KINDS, directory_name
from mingpt_ddp.snapshots.ledger import Hashes, Ledger, hash_tensors
from mingpt_ddp.snapshots.load import find_steps
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.sweeps.runs import hydra_value

NAME = "replay"  # of the run that repeats the steps
SHOWN = 8  # numbers of steps that an error lists
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

    base: int  # step of a snapshot, or 0
    target: int  # step with a recorded hash


@dataclass(frozen=True)
class Recorded:
    """What a run has recorded: its snapshots and its ledger."""

    stores: dict[int, SnapshotStore]  # by the step of a committed snapshot
    ledger: dict[int, Hashes]

    @classmethod
    def read(cls, url: str) -> "Recorded":
        """
        Raises:
            SnapshotError: there is no committed snapshot.
        """
        stores: dict[int, SnapshotStore] = {}
        for store, steps in find_steps(url, follow=True):
            for step in steps:
                if store.is_committed(step):
                    stores.setdefault(step, store)
        if not stores:
            raise SnapshotError(f"there is no whole snapshot at {url}")
        ledger: dict[int, Hashes] = {}
        if "://" not in url:
            path = Path(url).absolute()  # a run directory, its snapshots or one of them
            for directory in (path, *path.parents[:2]):
                ledger = ledger or Ledger(directory).read()
        return cls(stores, ledger)

    def interval(self, steps: int) -> Interval:
        """Return the newest interval of so many steps.

        Raises:
            SnapshotError: no recorded step follows a snapshot, or the start, after so many.
        """
        bases = [0, *self.stores]
        newest = max(self.stores)
        found: dict[int, Interval] = {}
        for target in sorted({*self.ledger, *self.stores}):
            for base in bases:
                if base < target <= newest:
                    found[target - base] = Interval(base, target)
        if steps in found:
            return found[steps]
        shortest = sorted(found)[:SHOWN]
        raise SnapshotError(
            f"no recorded step is {steps} steps after a snapshot or the start of the run; set "
            f"replay to {', '.join(map(str, shortest))}{' ...' if len(found) > SHOWN else ''}"
        )

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the attempt that trained a step, as its next snapshot has it.

        Raises:
            SnapshotError: it was written by an earlier version, or by no run.
        """
        holder = min(each for each in self.stores if each >= step)
        _, state = self.stores[holder].read_metadata(holder)
        numbers = (state.get("steps"), state.get("micro_batch_size"))
        is_whole = all(isinstance(state.get(key), dict) for key in ("config", "environment"))
        if not is_whole or any(type(number) is not int for number in numbers):
            raise SnapshotError(f"the snapshot of step {holder} does not say how to repeat its run")
        return dict(state)

    def changed(self, step: int) -> str | None:
        """Return which tensors a snapshot does not hold as they were written; None if it does."""
        if step not in self.stores or step not in self.ledger:
            return None
        return first_difference(self.ledger[step], self.content(step))

    def content(self, step: int) -> Hashes:
        """Return the hashes of what a snapshot holds now."""
        snapshot = self.stores[step].read(step, TENSOR_KINDS)
        tensors = {kind: getattr(snapshot, kind) for kind in TENSOR_KINDS}
        return {kind: hash_tensors(named) for kind, named in tensors.items() if named}


def first_difference(recorded: Hashes, found: Hashes) -> str | None:
    """Return the first kind whose hashes differ, with both; None if all are equal."""
    for kind in TENSOR_KINDS:
        before = recorded.get(kind)
        now = found.get(kind)
        if before != now:
            return f"{kind} (SHA-256 {str(before)[:12]}... recorded, {str(now)[:12]}... found)"
    return None


def replay(url: str, steps: int, ranks: int | None, words: str) -> int:
    """Print whether a replay confirms what is recorded; return the exit code, 1 if it does not.

    Args:
        url: of the run or its snapshots, untrusted.
        steps: to repeat.
        ranks: on which; None: one, or as many as the run had with ddp.reduction=fast.
        words: more of the command line that trains.
    """
    recorded = Recorded.read(url)
    interval = recorded.interval(steps)
    state = recorded.state(interval.target)
    environment = state["environment"]
    ranks = choose_ranks(ranks, environment)
    if not is_divided_by_rows(state):
        for step in (interval.base, interval.target):
            if difference := recorded.changed(step):
                return refute(
                    f"the snapshot of step {step} does not hold what was saved", difference
                )
    threads = environment.get("threads")
    if type(threads) is int:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    with tempfile.TemporaryDirectory(prefix="mingpt_ddp-replay-") as name:
        directory = Path(name)
        write_config(directory / "recorded", state["config"])
        typed = [*changes(recorded, interval, state, directory), *shlex.split(words)]
        with contextlib.redirect_stdout(sys.stderr):  # which keeps the verdict by itself
            train(command_words(str(directory / "recorded"), typed), ranks)
        run = directory / NAME
        repeated = Ledger(run).read()
        _, new_state = SnapshotStore(f"{run}/snapshots").read_metadata(interval.target)
    expected = dict(recorded.ledger)
    if interval.target not in expected:
        expected[interval.target] = recorded.content(interval.target)
    for step in sorted(expected.keys() & repeated.keys()):
        if difference := first_difference(expected[step], repeated[step]):
            others = describe_changes(environment, new_state["environment"])
            return refute(f"step {step}, repeated from step {interval.base}", difference + others)
    kinds = ", ".join(expected[interval.target])
    echo(
        f"confirmed: steps {interval.base + 1} to {interval.target}, repeated with "
        f"ddp.nproc_per_node={ranks}, give the recorded {kinds}"
    )
    return 0


def refute(what: str, difference: str) -> int:
    echo(f"refuted: {what}: {difference}")
    return 1


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


def is_divided_by_rows(state: Mapping[str, Any]) -> bool:
    """Return whether the ledger has the hashes of pieces of tensors, not of the whole."""
    return state["config"].get("ddp", {}).get("strategy") in ("fsdp", "hsdp")


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


def changes(
    recorded: Recorded, interval: Interval, state: Mapping[str, Any], directory: Path
) -> list[str]:
    """Return the overrides that train the interval alone, in a run directory of its own."""
    between = [step for step in recorded.ledger if interval.base < step < interval.target]
    spacing = min([*between, interval.target]) - interval.base
    values: dict[str, Any] = {
        "run.root": str(directory),
        "run.name": NAME,
        "run.resume": "auto",
        "trainer.max_steps": interval.target,
        "trainer.micro_batch_size": state["micro_batch_size"],
        "snapshot.every_steps": spacing,
    }
    if interval.base:
        store = recorded.stores[interval.base]
        values["run.resume"] = f"{store.url}/{directory_name(interval.base)}"
    if state["config"].get("optimizer", {}).get("schedule_steps") is None:
        values["optimizer.schedule_steps"] = state["steps"]
    if state["config"].get("ddp", {}).get("strategy") == "single":
        values["ddp.strategy"] = "auto"
    return [*QUIET, *(f"{key}={hydra_value(value)}" for key, value in values.items())]


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what is different here than where the run was trained, as the end of a sentence."""
    names = []
    for key in sorted(before.keys() & now.keys()):
        if before[key] != now[key]:
            names.append(f"{key} {str(before[key])[:60]} there, {now[key]} here")
    return (
        f"; this proves nothing, because the machine differs: {', '.join(names)}" if names else ""
    )
