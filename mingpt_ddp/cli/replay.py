"""Train some steps of a run again, and check that the weights have the recorded hashes."""

import contextlib
import io
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mingpt_ddp.cli.api import train
from mingpt_ddp.cli.recorded_run import Interval, RecordedRun, choose_interval, read_snapshot
from mingpt_ddp.config.compose.hydra_utils import hydra_value
from mingpt_ddp.config.config import may_change_results
from mingpt_ddp.config.keys.optimizer_config import DECAYING
from mingpt_ddp.config.recorded import is_untrusted
from mingpt_ddp.config.validation import check
from mingpt_ddp.process.interrupts import raise_interrupts
from mingpt_ddp.process.terminal import echo, echo_error
from mingpt_ddp.snapshots.format import TENSOR_KINDS, WEIGHT_KINDS, directory_name
from mingpt_ddp.snapshots.hashes import HashByKind, hash_snapshot
from mingpt_ddp.snapshots.write.ledger import LEDGER, Ledger
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.code_identity import describe_change, recorded_code
from mingpt_ddp.tasks.recorded_text import recorded_text

# Exit codes of the command. 2 is the exit code of an error.
CONFIRMED = 0
REFUTED = 1
UNDECIDED = 3
REPLAY_RUN_NAME = "replay"
TEMPORARY = "mingpt_ddp-replay-"  # prefix of the temporary directory
# Show only these lines of a replay: steps, errors and warnings.
SHOWN_LINES = re.compile(r"step \d+/|(\w+ )?error|warning", re.IGNORECASE)
# A replay saves at most this many snapshots for each hash that it compares.
MAX_SAVES = 4
# In these groups, a replay uses the default of each key that does not change the result of a step.
GROUPS_WITH_DEFAULTS = ("trainer", "snapshot", "tracker")
# Overrides that switch off what a replay does not need: evaluations and older snapshots.
REPLAY_OVERRIDES = (
    "trainer.eval_every=null",
    "trainer.eval_steps=1",
    "snapshot.keep_last=1",
    "snapshot.keep_best=false",
)


def choose_ranks(ranks: int | None, environment: Mapping[str, Any]) -> int:
    """Return the number of ranks that repeat the steps.

    Raises:
        ConfigError: The number differs from the number of ranks of the run, which would change the
            bits.
    """
    if environment.get("reduction") == "canonical":
        return ranks or 1
    trained = environment.get("world_size", 1)
    check(
        ranks in (None, trained),
        f"nproc_per_node={ranks} would change the bits, because the run had {trained} ranks and "
        f"ddp.reduction=fast; set nproc_per_node={trained}, or leave it out",
    )
    return int(trained)


def replay(url: str, steps: int, ranks: int | None, words: list[str]) -> int:
    """Repeat steps and print whether they confirm the recorded hashes. Return the exit code.

    Args:
        url: URL of the run or its snapshots, which are untrusted.
        steps: Number of steps to repeat.
        ranks: Number of ranks. None for as many ranks as the run had, or for one rank with
            ddp.reduction=canonical.
        words: Additional arguments of the train command that repeats the steps.
    """
    raise_interrupts()  # so that the training ends and its directory is deleted
    recorded = RecordedRun.read(url)
    interval = choose_interval(recorded, steps, words)
    environment = interval.state["environment"]
    ranks = choose_ranks(ranks, environment)
    expected, damage = expected_hashes(recorded, interval)
    if damage:
        echo(f"refuted: {damage}")
        return REFUTED
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as directory:
        repeated, repeated_state = train_again(
            recorded, interval, ranks, words, Path(directory), {}
        )
    if files := describe_change(recorded_code(interval.state), recorded_code(repeated_state)):
        echo_error(f"the code differs from the code of step {interval.target}: {files}")
    if where := find_other_hash(interval, expected, repeated):
        if reasons := find_reasons(interval, repeated_state):
            echo(f"undecided: {where}; this does not prove damage, because {'; '.join(reasons)}")
            return UNDECIDED
        echo(f"refuted: {where}")
        return REFUTED
    where = "" if recorded.ledger else f" of the snapshot (there is no {LEDGER})"
    echo(
        f"confirmed: steps {interval.base + 1} to {interval.target}, repeated with "
        f"ddp.nproc_per_node={ranks}, give the recorded "
        f"{', '.join(kind for kind in WEIGHT_KINDS if kind in repeated[interval.target])}{where}"
    )
    return CONFIRMED


def expected_hashes(recorded: RecordedRun, interval: Interval) -> tuple[dict[int, HashByKind], str]:
    """Read the recorded hashes, and compare the snapshots at both ends with them.

    Returns:
        The recorded hashes by step, and a description of the snapshot whose content differs from
        its recorded hash ("" if there is none).
    """
    expected = recorded.recorded_hashes(interval)
    for step in (interval.base, interval.target):
        if step in recorded.states:
            content = recorded.hash_content(step)
            if difference := describe_difference(expected.setdefault(step, content), content):
                return expected, f"the snapshot of step {step} holds another {difference}"
    return expected, ""


def find_other_hash(
    interval: Interval, expected: Mapping[int, HashByKind], repeated: Mapping[int, HashByKind]
) -> str:
    """Describe the first repeated step whose hash is not as recorded. Return "" if all agree."""
    for step in sorted(expected.keys() & repeated.keys()):
        # Leave out hooks: a replay does not evaluate, so their state may differ.
        if difference := describe_difference(expected[step], repeated[step], WEIGHT_KINDS):
            return f"step {step}, repeated from step {interval.base}, gives another {difference}"
    return ""


class StepLines(io.TextIOBase):
    """A stream that writes lines about steps and errors to stderr. stdout has only the verdict.

    It drops all other lines, because they describe a directory that will be deleted.
    """

    _rest = ""  # the beginning of a line whose end has not been written yet

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(SHOWN_LINES.match, lines):
            echo_error(line)
        return len(text)


def describe_difference(
    recorded: HashByKind, computed: HashByKind, kinds: Sequence[str] = TENSOR_KINDS
) -> str:
    """Return the first kind of tensors whose hashes differ, with both hashes. "" if all agree."""
    for kind in kinds:
        before = recorded.get(kind)
        now = computed.get(kind)
        if before != now:
            return f"{kind}: SHA-256 {str(now)[:12]}..., recorded {str(before)[:12]}..."
    return ""


def find_reasons(interval: Interval, repeated_state: Mapping[str, Any]) -> list[str]:
    """List the reasons why a replay may differ although nothing is damaged.

    Args:
        repeated_state: The state.json of the repeated run.
    """
    state = interval.state
    before, now = state["environment"], repeated_state["environment"]
    reasons = []
    for key in sorted(before.keys() & now.keys()):
        if before[key] != now[key]:
            reasons.append(f"{key} was {str(before[key])[:60]} and is {now[key]}")
    if files := describe_change(recorded_code(state), recorded_code(repeated_state)):
        reasons.append(f"the code differs: {files}")
    is_exact = state["config"]["trainer"].get("deterministic") is True
    # The name of a CPU ends with its instruction set in parentheses.
    if not is_exact and not re.search(r" \([A-Z0-9_ ]+\)$", str(before.get("device"))):
        reasons.append("the run was on a GPU without trainer.deterministic=true")
    skipped = state["train_state"].get("skipped_steps") or []
    within = [step for step in skipped if interval.base < step <= interval.target]
    if within:
        reasons.append(f"the run skipped step {within[0]} after a rollback")
    return reasons


def train_again(
    recorded: RecordedRun,
    interval: Interval,
    ranks: int,
    words: list[str],
    directory: Path,
    variables: Mapping[str, str],
) -> tuple[dict[int, HashByKind], dict[str, Any]]:
    """Repeat the steps of an interval in a new run.

    Args:
        directory: An empty temporary directory for the new run.
        variables: Additional environment variables for the processes that train.

    Returns:
        The hashes by step, and the state.json of the last step.

    Raises:
        UserError: The training failed.
    """
    threads = interval.state["environment"].get("threads")
    write_config(directory / "recorded", interval.state["config"])
    overrides = [*interval_overrides(recorded, interval, directory), *words]
    before = dict(os.environ)
    if type(threads) is int:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.update(variables)
    try:
        with contextlib.redirect_stdout(StepLines()):
            train(["again", str(directory / "recorded"), *overrides], ranks)
    finally:
        os.environ.clear()
        os.environ.update(before)
    run = directory / REPLAY_RUN_NAME
    hashes = {step: record.hashes for step, record in Ledger(run).read().items()}
    snapshot = read_snapshot(SnapshotStore(f"{run}/snapshots"), interval.target)
    hashes[interval.target] = hash_snapshot(snapshot)
    return hashes, snapshot.state


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write the config.yaml of the replay.

    Leave out keys that only the user may set, such as `code`, and keys that a replay does not need.
    """
    kept: dict[str, Any] = {}
    for group, keys in config.items():
        kept[group] = {}
        for key, value in keys.items():
            name = f"{group}.{key}"
            uses_default = group in GROUPS_WITH_DEFAULTS and not may_change_results(name, value)
            if not uses_default and not is_untrusted(name, value):
                kept[group][key] = value
    directory.mkdir()
    (directory / "config.yaml").write_text(yaml.safe_dump(kept))


def interval_overrides(recorded: RecordedRun, interval: Interval, directory: Path) -> list[str]:
    """Return the overrides that train only the interval, in a new run directory."""
    state = interval.state
    values: dict[str, Any] = {
        "run.root": str(directory),
        "run.name": REPLAY_RUN_NAME,
        "run.resume": "auto",
        "trainer.max_steps": interval.target,
        "trainer.micro_batch_size": state["micro_batch_size"],
        "snapshot.every_steps": save_interval(recorded.recorded_hashes(interval), interval),
    }
    if interval.base:
        values["run.resume"] = f"{recorded.store.url}/{directory_name(interval.base)}"
    optimizer = state["config"]["optimizer"]
    if optimizer.get("schedule_steps") is None:
        values["optimizer.schedule_steps"] = state["steps"]
        has_minutes = state["config"]["trainer"].get("max_minutes") is not None
        may_decay = optimizer.get("schedule") in DECAYING
        if has_minutes and may_decay and optimizer.get("decay_from") is None:
            # A run with a time limit fixes its number of steps at the step `paced_at`. The learning
            # rate does not decay before that step.
            paced_at = state["train_state"].get("paced_at")
            values["optimizer.decay_from"] = paced_at or state["steps"]
    if text := recorded_text(state):
        values["data.verify"] = "always"
        if state["config"]["data"].get("sources") is None:  # data.sources has no single hash
            values["data.sha256"] = text.sha256
    if state["config"]["ddp"].get("strategy") == "single":
        values["ddp.strategy"] = "auto"
    return [*REPLAY_OVERRIDES, *(f"{key}={hydra_value(value)}" for key, value in values.items())]


def save_interval(expected: Mapping[int, HashByKind], interval: Interval) -> int | None:
    """Return snapshot.every_steps for the replay, so that it saves all steps with a recorded hash.

    Return None if that would save too many snapshots. The replay then saves only the last step.
    """
    steps = [step for step in expected if step > interval.base]
    every = math.gcd(*steps, interval.target)
    saves = (interval.target - interval.base) // every
    return every if saves <= MAX_SAVES * max(1, len(steps)) else None
