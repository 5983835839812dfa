"""Check that this checkout trains to the same bits as another checkout of the project.

Compare the checkouts before and after a change of the code, to show that every strategy, precision
and anomaly policy has kept its bits, and that killed runs have too. `python -m mingpt_ddp versions
... require=same_bits` checks one configuration, and `versions.py` compares the speed.

Both checkouts train short runs of tiny models in the same Python environment, with one thread per
rank. For each run the script compares, bit by bit:

model, optimizer, ema   the tensors of the last snapshot, after the pieces of shards are joined
state                   losses, loss scale and skipped steps in its state.json, without clocks
losses                  losses and gradient norms in metrics.jsonl

The exit code is 1 if any bit differs. It is also 1 if the event that a run is meant to test did not
happen, such as a fault or a skipped step.

    MINGPT_SHAKESPEARE=input.txt python benchmarks/same_weights.py --other REVISION
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import last_step, log, parser, report
from safetensors import deserialize
from stopwatch import kill_tree
from versions import PATIENCE_S, QUIET, Checkout, prepare_checkouts, wait_until, workers

from mingpt_ddp.metrics.jsonl import MetricsHistory, read_history

TEXT = ["data.truncate=0.1", "data.block_size=32", "trainer.batch_size=12"]
GPT = [*TEXT, "model=gpt_nano", "model.dropout=0.1"]
MUON = [*TEXT, "model=modern_nano", "optimizer=muon"]
# Three micro-batches. On two ranks, the second rank has one less, and a sharded strategy pads.
ODD = ["trainer.micro_batch_size=4"]
# Five micro-batches.
FIVE = ["trainer.batch_size=15", "trainer.micro_batch_size=3"]
# The learning rate is too low to learn. The loss stays near its average, and some batches exceed
# it.
SPIKES = ["trainer.spike_factor=1.0005", "optimizer.lr=1e-5", "optimizer.warmup_steps=0"]
# The learning rate is so high that gradients overflow in 16 bits.
OVERFLOWS = ["trainer.precision=fp16", "optimizer.lr=0.5", "optimizer.warmup_steps=0"]
COMMON = [
    *QUIET,
    "trainer.precision=fp32",
    "trainer.log_every=1",
    "trainer.max_steps=30",
    "snapshot.every_steps=5",
]
LOSSES = ("train_loss", "grad_norm", "val_")  # prefixes of keys in metrics.jsonl
# Fields of state.json that depend on the clock or are random.
CLOCKS = (
    "wall_seconds",
    "stall_seconds",
    "wasted_seconds",
    "save_stall_s",
    "save_durable_s",
    "saved_at",
    "run_id",
    "timed_seconds",
    "block_paces",
)
# Fields of state.json that only later or only earlier versions write.
NOT_IN_ALL = ("train_metrics", "timed_steps", "step_seconds", "paced_at", "failures")
PARTS = ("model", "optimizer", "ema", "state", "losses")


@dataclass(frozen=True)
class Case:
    """A run to compare.

    Attributes:
        overrides: Overrides of the run.
        ranks: Number of ranks.
        example: Folder in examples/ that has the presets of the run, or "". Earlier checkouts have
            them in conf/.
        has_text: True if the run trains on the text.
        kill_at: Step at which the run gets SIGKILL. The same command then runs again. None does
            not kill the run.
        event: Event that must happen in the run, or None.
    """

    overrides: list[str]
    ranks: int = 1
    example: str = ""
    has_text: bool = True
    kill_at: int | None = None
    event: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        digests: SHA-256 of each part.
        events: Number of times that each event happened.
    """

    digests: dict[str, str]
    events: dict[str, int]


def canonical(micro_batches: int, ranks: int) -> Case:
    batch = ["trainer.batch_size=20", f"trainer.micro_batch_size={20 // micro_batches}"]
    short = "trainer.max_steps=10"
    return Case([*GPT, *batch, short, "ddp.reduction=canonical"], ranks=ranks)


CASES = {
    "gpt": Case([*GPT, "trainer.eval_every=7", "trainer.sample_every=11"]),
    "muon": Case(MUON),
    "muon-ranks": Case([*MUON, *ODD], ranks=2),
    "accumulation": Case([*GPT, "trainer.micro_batch_size=2"], ranks=2),
    "three-ranks": Case([*GPT, *FIVE], ranks=3),
    "fp16": Case([*GPT, *OVERFLOWS], event="overflows"),
    "zero1": Case([*GPT, *ODD, "ddp.strategy=zero1"], ranks=2),
    "fsdp": Case([*GPT, *ODD, "ddp.strategy=fsdp"], ranks=2),
    "hsdp": Case([*GPT, "trainer.micro_batch_size=2", "ddp.strategy=hsdp"], ranks=4),
    "fsdp-fp16-ema": Case(
        [*GPT, *ODD, *OVERFLOWS, "ddp.strategy=fsdp", "trainer.ema=0.9"],
        ranks=2,
        event="overflows",
    ),
    "tensor-parallel": Case(
        [*GPT, "model.n_head=2", "model.dropout=0", "ddp.tensor_parallel=2"], ranks=2
    ),
    "ema-smoothing": Case([*GPT, "trainer.ema=0.9", "task.label_smoothing=0.1"]),
    "three-ranks-fp16-ema": Case(
        [*GPT, *OVERFLOWS, "trainer.ema=0.9", "model.n_head=3", "model.n_embd=45", *FIVE],
        ranks=3,
        event="overflows",
    ),
    **{
        f"canonical-{micro_batches}-{ranks}": canonical(micro_batches, ranks)
        for micro_batches in (1, 2, 5)
        for ranks in range(1, min(micro_batches, 4) + 1)
    },
    "convnet": Case(["experiment=digits_convnet"], ranks=2, example="digits", has_text=False),
    "killed": Case(
        [*GPT, "trainer.log_every=3", "trainer.max_steps=60"], kill_at=12, event="resumes"
    ),
    "killed-ranks": Case(
        [*MUON, "trainer.log_every=3", "trainer.max_steps=60"],
        ranks=2,
        kill_at=12,
        event="resumes",
    ),
    "skip": Case([*GPT, *SPIKES, "trainer.on_nonfinite=skip"], event="skipped"),
    "rollback": Case([*GPT, *SPIKES, "trainer.on_nonfinite=rollback"], ranks=2, event="rollbacks"),
}


def train(name: str, case: Case, checkout: Checkout) -> Outcome:
    """Train a case to its end, and hash its results. Exit if its event did not happen."""
    run = checkout.scratch / "outputs" / name
    presets = checkout.home / "examples" / case.example
    command = [
        "main.py",
        *([f"--config-dir={presets}"] if case.example and presets.exists() else []),
        *(checkout.data if case.has_text else []),
        *COMMON,
        *case.overrides,
        *workers(case.ranks),
        f"run.name={name}",
    ]
    process = checkout.start(*command)
    if case.kill_at is not None:
        step = case.kill_at
        wait_until(lambda: can_resume(run, step), process, run, f"step {step} and a snapshot")
        kill_tree(process.pid)
        process.wait(PATIENCE_S)
        process = checkout.start(*command)
    checkout.finish(process)
    outcome = read_outcome(run)
    if case.event is not None and not outcome.events[case.event]:
        sys.exit(f"{checkout.home}: {name} is meant to test {case.event}, but had none")
    return outcome


def can_resume(run: Path, step: int) -> bool:
    return last_step(run) >= step and any(run.glob("snapshots/*/manifest.json"))


def read_outcome(run: Path) -> Outcome:
    """Hash a run's last snapshot and its losses, and count its events."""
    snapshot = max(run.glob("snapshots/step_*/manifest.json")).parent
    state = json.loads((snapshot / "state.json").read_text())
    history = read_history(run / "metrics.jsonl")
    items = sorted(state["train_state"].items())  # versions write them in different orders
    train_state = {k: v for k, v in items if k not in (*CLOCKS, *NOT_IN_ALL)}
    digests = {
        "state": digest_json([train_state, state["scaler"]]),
        "losses": digest_json(list(losses(history))),
    }
    for kind in ("model", "optimizer", "ema"):
        files = sorted(snapshot.glob(f"{kind}*.safetensors"))
        if files or kind != "ema":
            digests[kind] = digest_tensors(files)
    return Outcome(digests, count_events(history, state))


def losses(history: MetricsHistory) -> Iterable[dict[str, Any]]:
    """Yield the losses and gradient norms of each record, without fields that depend on a clock."""
    for row in history.rows:
        yield {k: v for k, v in row.items() if k == "step" or k.startswith(LOSSES)}


def count_events(history: MetricsHistory, state: dict[str, Any]) -> dict[str, int]:
    """Count how often a run was resumed, rolled back, skipped a step and lowered its loss scale."""
    trained = sum("train_loss" in row for row in history.rows)
    reported = state["train_state"]["step"] // state["config"]["trainer"]["log_every"]
    scale = state["scaler"].get("scale", 2.0**16)
    return {
        "resumes": history.faults,
        "rollbacks": history.rollbacks,
        "skipped": reported - trained,
        "overflows": round(16 - math.log2(scale)),
    }


def digest_json(value: Any) -> str:
    """Compute the SHA-256 of plain values. JSON keeps every bit of a number."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digest_tensors(files: list[Path]) -> str:
    """Compute the SHA-256 of all tensors. It does not depend on how files share the tensors.

    A piece is named `<tensor>@<first row>-of-<rows>`, and its rows are consecutive bytes.

    Raises:
        ValueError: There is no tensor.
    """
    pieces = defaultdict(list)
    for file in files:
        for piece, view in deserialize(file.read_bytes()):
            tensor, _, rows = piece.partition("@")
            first = int(rows.partition("-")[0] or 0)
            pieces[tensor].append((first, view))
    if not pieces:
        raise ValueError("the snapshot has no tensors")
    digest = hashlib.sha256()
    for tensor, parts in sorted(pieces.items()):
        parts.sort(key=lambda part: part[0])
        _, head = parts[0]
        digest.update(f"{tensor} {head['dtype']} {head['shape'][1:]} ".encode())
        for _, view in parts:
            digest.update(view["data"])
    return digest.hexdigest()


def compare_parts(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Compare the bits of each part. The verdict is a dash if neither checkout has the part."""
    verdicts = {}
    for part in PARTS:
        found = {outcome.digests.get(part) for outcome in outcomes.values()}
        if found == {None}:
            verdicts[part] = "-"
        else:
            verdicts[part] = "same" if len(found) == 1 else "DIFFERS"
    return verdicts


def table_row(name: str, outcomes: dict[str, Outcome], verdicts: dict[str, str]) -> list[str]:
    """Write the row of a case, with the events in this checkout."""
    happened = [f"{event}: {count}" for event, count in outcomes["this"].events.items() if count]
    ranks = str(CASES[name].ranks)
    return [name, ranks, ", ".join(happened) or "-", *(verdicts[part] for part in PARTS)]


def main() -> None:
    options = parser(__doc__, "same_weights")
    options.add_argument(
        "--other", required=True, metavar="REVISION", help="a commit, a branch or a directory"
    )
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    chosen = options.parse_args()
    results = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="same-weights-") as scratch:
        checkouts = prepare_checkouts(chosen.other, Path(scratch))
        for name in chosen.cases:
            outcomes = {which: train(name, CASES[name], each) for which, each in checkouts.items()}
            verdicts = compare_parts(outcomes)
            log(f"{name}: {verdicts}")
            results[name] = {which: each.digests for which, each in outcomes.items()}
            rows.append(table_row(name, outcomes, verdicts))
    report(chosen.out, {"digests": results}, ["run", "ranks", "events", *PARTS], rows)
    differing = [row[0] for row in rows if "DIFFERS" in row]
    if differing:
        sys.exit(f"other bits in {len(differing)} of {len(rows)} runs: {', '.join(differing)}")


if __name__ == "__main__":
    main()
