"""Repeat one training step of a run, show its training text, and compare its results.

On as many ranks as the run had, the repeated step should have the recorded gradient norm and give
the recorded weights, to the last bit.
"""

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
from mingpt_ddp.errors import TrainingError, counted, duration, relative_path
from mingpt_ddp.metrics.jsonl import METRICS, Record, read_history
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.process.terminal import echo, echo_error
from mingpt_ddp.training.look import LOOK, LookRequest

# Log every step. Continue after a loss that is not finite, because the step to look at may come
# later.
MEASURING_OVERRIDES = ("trainer.log_every=1", "trainer.on_nonfinite=skip")
# These replace the settings of a run with several ranks, if only one rank repeats the step.
ONE_RANK_OVERRIDES = ("ddp.strategy=auto", "ddp.tensor_parallel=1", "ddp.comm_hook=none")
SHOWN_CHARACTERS = 50  # number of characters of each sequence that are printed


def look_at(
    url: str,
    step: int | Literal["worst"],
    directory: Path,
    without: int | None,
    ranks: int | None,
    words: list[str],
) -> dict[str, Any]:
    """Repeat a step. Return the loss of each sequence, the gradient norms and the verdict.

    Args:
        url: URL of the run or its snapshots, which are untrusted.
        step: Number of the step, or "worst" for the step with the largest logged loss.
        directory: An empty temporary directory for the repeated run. If the run has no snapshot of
            the previous step, the repeated run saves one there.
        without: Number of a sequence. The step is computed a second time without this sequence.
            None to compute the step only once.
        ranks: 1 to repeat the step on one rank. None for as many ranks as the run had.
        words: Additional arguments of the train command that repeats the step.

    Returns:
        The values that `format=json` prints.

    Raises:
        UserError: The step cannot be repeated.
    """
    check(
        step == "worst" or (type(step) is int and step > 0),
        f'step={step} must be a number from 1 on, or "worst"',
    )
    check(without is None or without > 0, f"without={without} must be a number from 1 on")
    recorded = RecordedRun.read(url)
    logged = {} if "://" in url else _read_metrics(run_of(Path(url)))
    target = _choose_step(step, recorded, logged)
    interval = interval_before(recorded, target, words)
    _announce(interval, logged)
    recorded_ranks = choose_ranks(None, interval.state["environment"])
    has_fewer_ranks = ranks == 1 < recorded_ranks
    if has_fewer_ranks:
        words = [*ONE_RANK_OVERRIDES, *words]
    else:
        ranks = choose_ranks(ranks, interval.state["environment"])
    words = [*MEASURING_OVERRIDES, f"snapshot.keep_every={max(1, target - 1)}", *words]
    result = directory / "look.json"
    request = json.dumps(asdict(LookRequest(target, str(result), without)))
    try:
        repeated, repeated_state = train_again(
            recorded, interval, ranks or 1, words, directory, {LOOK: request}
        )
    except TrainingError:
        if not result.exists():
            raise
        # The validation loss after the step is not finite, so the repeated run saved no snapshot.
        repeated, repeated_state = {}, interval.state
    check(
        result.exists(),
        f"step={target} cannot be repeated, because the run has skipped it after a rollback; "
        "choose another step",
    )
    expected, difference = expected_hashes(recorded, interval)
    is_damaged = bool(difference)
    difference = difference or find_other_hash(interval, expected, repeated)
    norms = _gradient_norms(logged, interval)
    changed_norms = norms - _gradient_norms(_read_metrics(directory / REPLAY_RUN_NAME), interval)
    if changed_norms and not difference:
        difference = "step {} does not give the recorded gradient norm {}".format(
            *min(changed_norms)
        )
    compared_steps = expected.keys() & repeated.keys() - {interval.base}
    verdict = "the run has recorded nothing about these steps that could be compared"
    if has_fewer_ranks and not is_damaged:
        verdict = "not the same bits, but equal within about 1e-6"
    elif difference:
        verdict = f"not the same bits as the run: {difference}"
    elif compared_steps or norms:
        n_norms = counted(len(norms), "gradient norm")
        compared = f"{n_norms}, hashes of {counted(len(compared_steps), 'step')}"
        verdict = f"the same bits as the run (compared: {compared})"
    return {
        "step": target,
        "repeated_from": interval.base,
        "verdict": "; ".join([verdict, *find_reasons(interval, repeated_state)]),
        **json.loads(result.read_text()),
    }


def _read_metrics(directory: Path) -> dict[int, Record]:
    """Return the logged metrics of each step, or {} if the run has no log."""
    with contextlib.suppress(OSError):
        return read_history(directory / METRICS).by_step()
    return {}


def _gradient_norms(logged: Mapping[int, Record], interval: Interval) -> set[tuple[int, float]]:
    """Return the steps of an interval that have a logged gradient norm, with that norm."""
    steps = range(interval.base + 1, interval.target + 1)
    return {(n, logged[n]["grad_norm"]) for n in steps if logged.get(n, {}).get("grad_norm")}


def _choose_step(
    step: int | Literal["worst"], recorded: RecordedRun, logged: Mapping[int, Record]
) -> int:
    """Return the number of the step to look at.

    Raises:
        ConfigError: The run has no such step, or no logged losses to choose the worst from.
    """
    if step != "worst":
        last = max([*recorded.states, *logged])
        check(step <= last, f"step={step} is beyond the end of the run; choose a step up to {last}")
        return step
    losses = {n: row["train_loss"] for n, row in logged.items() if "train_loss" in row}
    check(losses != {}, "step=worst needs the logged losses of a local run; set step to a number")
    # None stands for a loss that is not finite, and counts as the largest.
    worst = max(losses, key=lambda n: (losses[n] is None, losses[n] or 0.0))
    first = max((n for n in losses if n < worst), default=0) + 1
    if first < worst:
        echo_error(
            f"the largest logged loss is the mean of steps {first} to {worst}; step {worst} is "
            "repeated, but another of these steps may have the largest loss"
        )
    return worst


def _announce(interval: Interval, logged: Mapping[int, Record]) -> None:
    """Print which steps are repeated, and how long that will take."""
    steps = interval.target - interval.base
    start = f"the snapshot of step {interval.base}"
    if interval.base == 0:
        start = (
            "the start, because there is no earlier snapshot (set snapshot.keep_every to keep more)"
        )
    times = [row["step_ms"] for row in logged.values() if (row.get("step_ms") or 0) > 0]
    time = f", about {duration(steps * statistics.median(times) / 1e3)}" if times else ""
    echo_error(f"repeating {counted(steps, 'step')} from {start}{time}")


def print_look(found: dict[str, Any], without: int | None) -> None:
    """Print the values that `look_at` returns: the sequences, the norms and the verdict."""
    rows = []
    for number, sequence in enumerate(found["sequences"], start=1):
        text = repr(sequence["text"][:SHOWN_CHARACTERS])
        rows.append([f"{number}.", f"{sequence['loss']:.4f}", _source(sequence["sources"]), text])
    steps = {f"step {found['step']}": found}
    if without is not None:
        steps[f"without sequence {without}"] = found["without"]
    table = [["", *steps]]
    for key in ("loss", "grad_norm"):
        table.append(
            [key.replace("grad_", "gradient "), *(f"{s[key]:.4f}" for s in steps.values())]
        )
    for layer in found["layers"]:
        table.append([f"  {layer}", *(f"{s['layers'][layer]:.4f}" for s in steps.values())])
    lines = [*table_lines(rows, left=(2, 3)), *table_lines(table, left=(0,)), found["verdict"]]
    echo("\n".join(lines))


def _source(origins: list[dict[str, Any]]) -> str:
    """Describe where a sequence begins.

    If the sequence ends in another document, also name that document.
    """
    names = []
    for origin in (origins[0], origins[-1]):
        document = f":{origin['document']}" if origin["document"] else ""
        names.append(f"{relative_path(Path(origin['file']))}{document}")
    begin = f"{names[0]} byte {origins[0]['byte']}"
    return begin if len(origins) == 1 else f"{begin} to {names[1]}"
