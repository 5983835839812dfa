"""Repeat a step of a run, to see which text it learnt from and whether it has the same bits."""

import contextlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from mingpt_ddp.cli.recorded_run import Interval, RecordedRun, interval_before, run_of
from mingpt_ddp.cli.replay import (
    REPLAY_RUN_NAME,
    choose_ranks,
    expected_hashes,
    find_other_hash,
    find_reasons,
    train_again,
)
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import RunError, counted, duration, relative_path
from mingpt_ddp.metrics.jsonl import METRICS, Record, read_history
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.process.terminal import echo, echo_error
from mingpt_ddp.tasks.task import recorded_sha256
from mingpt_ddp.training.look import LOOK, LOOK_FILE, LookRequest

# A step that has no finite loss ends neither the training nor the look at it.
MEASURED = ("trainer.log_every=1", "trainer.on_nonfinite=skip")
ON_ONE_RANK = ("ddp.strategy=auto", "ddp.tensor_parallel=1", "ddp.comm_hook=none")
SHOWN_CHARACTERS = 50  # of a sequence


def look_at(
    url: str,
    step: int | Literal["worst"],
    directory: Path,
    without: int | None = None,
    ranks: int | None = None,
    words: list[str] | None = None,
    needs_weights: bool = False,
) -> dict[str, Any]:
    """Repeat a step, and return what was found. A number that is not finite is None.

    Args:
        url: URL of the run or its snapshots, which are untrusted.
        step: "worst" for the step with the largest logged loss.
        directory: An empty temporary directory. It will have the repeated run.
        without: Number of a sequence to leave out when the step is rehearsed again.
        ranks: 1 for one rank. None for as many as the run had.
        words: More words of the command line that trains.
        needs_weights: Write the weights before the step to the directory.

    Raises:
        UserError: The step cannot be repeated.
    """
    words = words or []
    recorded = RecordedRun.read(url)
    logged = _read_metrics(run_of(Path(url))) if "://" not in url else {}
    target = _choose_step(step, recorded, logged)
    interval = interval_before(recorded, target, words)
    state = interval.state
    _announce(interval, logged)
    environment = state["environment"]
    has_same_ranks = ranks != 1 or choose_ranks(None, environment) == 1
    if has_same_ranks:
        ranks = choose_ranks(ranks, environment)
    else:
        words = [*ON_ONE_RANK, *words]
    request = LookRequest(target, recorded_sha256(state), str(directory), without, needs_weights)
    repeated, here = train_again(
        recorded,
        interval,
        ranks or 1,
        [*MEASURED, *words],
        directory,
        {LOOK: json.dumps(asdict(request))},
    )
    try:
        content = (directory / LOOK_FILE).read_text()
    except FileNotFoundError:
        raise RunError(f"the run has skipped step {target} after a rollback") from None
    found: dict[str, Any] = json.loads(content, parse_constant=lambda name: None)
    if not has_same_ranks:
        verdict = "not the same bits, within about 1e-6"
    else:
        expected, difference = expected_hashes(recorded, interval)
        hashed = [each for each in expected.keys() & repeated.keys() if each > interval.base]
        rows = _read_metrics(directory / REPLAY_RUN_NAME)
        number, other = _compare_metrics(interval, logged, rows)
        difference = difference or find_other_hash(interval, expected, repeated) or other
        verdict = f"the same bits as the run, by {counted(number, 'logged number')}"
        verdict += f" and the hashes of {counted(len(hashed), 'step')}"
        if difference:
            verdict = f"not the same bits as the run: {difference}"
        elif not number and not hashed:
            verdict = "the run has recorded nothing of these steps to compare with"
    reasons = find_reasons(interval, here)
    return {"step": target, "verdict": "; ".join([verdict, *reasons]), **found}


def _read_metrics(directory: Path) -> dict[int, Record]:
    """Return the logged numbers of a run by step."""
    with contextlib.suppress(OSError):
        return read_history(directory / METRICS).by_step()
    return {}


def _choose_step(
    step: int | Literal["worst"], recorded: RecordedRun, logged: Mapping[int, Record]
) -> int:
    """Return the number of the step.

    Raises:
        ConfigError: The run has no such step.
    """
    if step == "worst":
        losses = {n: row["train_loss"] for n, row in logged.items() if "train_loss" in row}
        check(losses != {}, "step=worst needs the logged losses of a local run; name a step")
        # None, which is no finite loss, is the worst.
        worst = max(losses, key=lambda n: (losses[n] is None, losses[n] or 0.0))
        first = max((n for n in losses if n < worst), default=0) + 1
        if first < worst:
            echo_error(
                f"the largest logged loss is the mean of steps {first} to {worst}; this is the "
                "last of them, and another may be the worst"
            )
        return worst
    last = max([*recorded.states, *logged])
    check(step <= last, f"step={step} is beyond the end of the run, which is at step {last}")
    return step


def _announce(interval: Interval, logged: Mapping[int, Record]) -> None:
    """Print which steps are repeated, and how long that will take."""
    steps = interval.target - interval.base
    start = f"the snapshot of step {interval.base}"
    if interval.base == 0:
        start = "the start, because no snapshot is earlier (snapshot.keep_every keeps more)"
    times = [row["step_ms"] for row in logged.values() if row.get("step_ms")]
    time = f", about {duration(steps * statistics.median(times) / 1e3)}" if times else ""
    echo_error(f"repeating {counted(steps, 'step')}{time}, from {start}")


def _compare_metrics(
    interval: Interval, logged: Mapping[int, Record], repeated: Mapping[int, Record]
) -> tuple[int, str]:
    """Compare logged numbers. Return how many agree, and the first that does not, or ""."""
    keys = ["grad_norm"]
    if interval.state["config"]["trainer"].get("log_every") == 1:
        keys.append("train_loss")  # otherwise it is a mean over steps
    number = 0
    for step in range(interval.base + 1, interval.target + 1):
        for key in keys:
            before, now = (rows.get(step, {}).get(key) for rows in (logged, repeated))
            if before is None or now is None:
                continue
            if before != now:
                return number, f"step {step} has {key} {now}, logged was {before}"
            number += 1
    return number, ""


def print_look(found: dict[str, Any], without: int | None) -> None:
    """Print what `look_at` has found."""
    rows = []
    for number, sequence in enumerate(found["sequences"], start=1):
        text = repr(sequence["text"][:SHOWN_CHARACTERS])
        rows.append([f"{number}.", _number(sequence["loss"]), _source(sequence["sources"]), text])
    for line in table_lines(rows, left=(2, 3)):
        echo(line)
    steps = [(f"step {found['step']}", found)]
    if without is not None:
        steps.append((f"without sequence {without}", found["without"]))
    rows = [["", *(title for title, _ in steps)]]
    for name in ("loss", "grad_norm"):
        rows.append(
            [name.replace("grad_", "gradient "), *(_number(each[name]) for _, each in steps)]
        )
    for layer in found["layers"]:
        rows.append([f"  {layer}", *(_number(each["layers"][layer]) for _, each in steps)])
    for line in table_lines(rows, left=(0,)):
        echo(line)
    echo(found["verdict"])


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _source(origins: list[dict[str, Any]]) -> str:
    """Return the place where a sequence begins, and the document in which it ends."""
    names = []
    for origin in (origins[0], origins[-1]):
        document = f":{origin['document']}" if origin["document"] else ""
        names.append(relative_path(Path(origin["file"])) + document)
    begin = f"{names[0]} byte {origins[0]['byte']}"
    return begin if len(origins) == 1 else f"{begin} to {names[1]}"
