"""Check that this checkout trains to the same bits as another one of the project.

Run it before and after a change of the code, to show that every strategy, precision and anomaly
policy, and a killed run, have kept their bits. `python -m mingpt_ddp versions ...
require=same_bits` checks one configuration; `versions.py` compares the speed.

Both train short runs of tiny models in the same Python environment, with one thread per rank. Of
each run the script compares, bit by bit:

model, optimizer, ema   the tensors of the last snapshot; pieces of shards are joined first
state                   losses, loss scale and skipped steps in its state.json, without clocks
losses                  losses and gradient norms in metrics.jsonl

The exit code is 1 if any differs, or if a run lacked the fault or the skipped steps that it is for.

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
# Three micro-batches: on two ranks the second has one less, and a sharded strategy pads.
ODD = ["trainer.micro_batch_size=4"]
# Five micro-batches.
FIVE = ["trainer.batch_size=15", "trainer.micro_batch_size=3"]
# The rate is too low to learn: the loss stays about its average, and some batches are above it.
SPIKES = ["trainer.spike_factor=1.0005", "optimizer.lr=1e-5", "optimizer.warmup_steps=0"]
# The rate is so high that gradients overflow in 16 bits.
OVERFLOWS = ["trainer.precision=fp16", "optimizer.lr=0.5", "optimizer.warmup_steps=0"]
COMMON = [
    *QUIET,
    "trainer.precision=fp32",
    "trainer.log_every=1",
    "trainer.max_steps=30",
    "snapshot.every_steps=5",
]
LOSSES = ("train_loss", "grad_norm", "val_")  # prefixes of keys in metrics.jsonl
# In state.json.
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
# In state.json, of later or of earlier versions alone.
NOT_IN_ALL = ("train_metrics", "timed_steps", "step_seconds", "paced_at", "failures")
PARTS = ("model", "optimizer", "ema", "state", "losses")


@dataclass(frozen=True)
class Case:
    overrides: list[str]
    ranks: int = 1
    example: str = ""  # its presets, which earlier checkouts have in conf/
    has_text: bool = True
    kill_at: int | None = None  # a step; SIGKILL, then the same command again
    event: str | None = None  # what must happen in the run


@dataclass(frozen=True)
class Outcome:
    digests: dict[str, str]  # SHA-256 by part
    events: dict[str, int]  # how often each happened


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
    """Train a case to its end and digest what it left; exit if its event did not happen."""
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
        sys.exit(f"{checkout.home}: {name} is for {case.event}, and had none")
    return outcome


def can_resume(run: Path, step: int) -> bool:
    return last_step(run) >= step and any(run.glob("snapshots/*/manifest.json"))


def read_outcome(run: Path) -> Outcome:
    """Return the digests of a run's last snapshot and of its losses, and its events."""
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
    """Yield the losses and gradient norms of each record, without what depends on a clock."""
    for row in history.rows:
        yield {k: v for k, v in row.items() if k == "step" or k.startswith(LOSSES)}


def count_events(history: MetricsHistory, state: dict[str, Any]) -> dict[str, int]:
    """Return how often a run was resumed, rolled back, skipped a step, and lowered its scale."""
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
    """Return the SHA-256 of plain values; JSON has every bit of a number."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digest_tensors(files: list[Path]) -> str:
    """Return the SHA-256 of all tensors, however they are divided among files.

    A piece is named `<tensor>@<first row>-of-<rows>`, and its rows are consecutive bytes.

    Raises:
        ValueError: there is no tensor.
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
    """Return for each part whether both checkouts have the same bits; a dash if neither has it."""
    verdicts = {}
    for part in PARTS:
        found = {outcome.digests.get(part) for outcome in outcomes.values()}
        if found == {None}:
            verdicts[part] = "-"
        else:
            verdicts[part] = "same" if len(found) == 1 else "DIFFERS"
    return verdicts


def table_row(name: str, outcomes: dict[str, Outcome], verdicts: dict[str, str]) -> list[str]:
    """Return the cells of a case; its events are those of this checkout."""
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
