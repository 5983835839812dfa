"""Measure the final loss, the time of a step and the peak memory of every `ddp.strategy`.

The time is compared to ddp. The memory is measured on each rank in training, saving and resuming.
Ranks have one thread each and run on the CPU. For each precision and number of ranks, the
strategies alternate with ddp (on one rank, with `single`), each in its own process group. A ratio
compares neighbouring runs. The setting `small` has 0.8M parameters and 60 steps. The setting
`large` has 19M parameters and few tokens, on two ranks, so that most of its memory is the state.
Only `large` is resumed. Memory is VmHWM of the rank that uses most. For saving and resuming, the
figure is the memory that is added to the memory before. The size of the optimizer's state on a rank
is shown for comparison.

    python benchmarks/strategies.py
    python benchmarks/strategies.py --settings large --repetitions 1
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import ROOT, alternate, cell, compare, environment, log, parser, report, spread

HEADER = [
    "setting",
    "precision",
    "ranks",
    "strategy",
    "validation loss",
    "step, ms",
    "against ddp",
    "training, MiB",
    "state, MiB",
    "saving, + MiB",
    "resuming, + MiB",
]
PLAN = "MINGPT_STRATEGIES"  # name of the environment variable with a worker's output directory
STRATEGIES = {1: ["single"], 2: ["ddp", "zero1", "fsdp"]}
STRATEGIES |= {3: STRATEGIES[2], 4: [*STRATEGIES[2], "hsdp"]}
COMMON = [
    "model=gpt_micro",
    "optimizer=adamw",
    "data.truncate=0.1",
    "trainer.device=cpu",
    "trainer.max_epochs=null",
    "trainer.eval_every=null",
    "trainer.eval_steps=20",
    "snapshot.every_steps=null",
    "run.name=run",
]
SMALL = [
    *COMMON,
    "data.block_size=64",
    "trainer.batch_size=12",
    "trainer.micro_batch_size=3",
    "optimizer.lr=1e-3",
]
LARGE = [
    *COMMON,
    "data.block_size=16",
    "trainer.batch_size=4",
    "model.n_layer=6",
    "model.n_embd=512",
]
SETTINGS = {
    "small": ([*SMALL, "optimizer.warmup_steps=5"], 60),
    "large": ([*LARGE, "optimizer.warmup_steps=2"], 4),
}
WARMUP = 2  # number of steps that are not timed
MIB = 2**20


def memory(field: str) -> int:
    """Return VmHWM or VmRSS of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"^{field}:\s+(\d+) kB", status, flags=re.MULTILINE)[0]) * 1024


def reset_peak() -> int:
    """Reset VmHWM to the memory in use, and return this memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def worker_main(out: Path) -> None:
    """Run the package's train command on one rank, patched to measure.

    Args:
        out: Directory for the measurements.
    """
    from mingpt_ddp.cli.commands import train as launch
    from mingpt_ddp.distributed.group.process_group import ProcessGroup
    from mingpt_ddp.snapshots.manager import SnapshotManager
    from mingpt_ddp.training.start import stages
    from mingpt_ddp.training.trainer import Trainer

    found: dict[str, Any] = {"steps": [], "saving": 0, "resuming": 0}
    train = Trainer._train
    load_latest, restore = SnapshotManager.load_latest, stages.restore
    save, wait = SnapshotManager.save, SnapshotManager.wait
    before = 0

    def timed_step(self: Trainer, step: int) -> Any:
        began = time.perf_counter()
        flags = train(self, step)
        found["steps"].append(time.perf_counter() - began)
        found["training"] = memory("VmHWM")
        tensors = [
            t
            for state in self.train_step.optimizer.state.values()
            for t in state.values()
            if hasattr(t, "nbytes")
        ]
        found["state"] = sum(
            (t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors
        )
        return flags

    def measured_save(self: Any, *arguments: Any) -> None:
        nonlocal before
        before = reset_peak()
        save(self, *arguments)

    def measured_wait(self: Any, until: float | None = None) -> bool:
        is_done = wait(self, until)
        if before:
            found["saving"] = memory("VmHWM") - before
        return is_done

    def measured_load(self: Any, *arguments: Any) -> Any:
        nonlocal before
        before = reset_peak()
        return load_latest(self, *arguments)

    def measured_restore(*arguments: Any) -> Any:
        state = restore(*arguments)
        found["resuming"] = memory("VmHWM") - before
        return state

    def close(self: ProcessGroup) -> None:
        Path(out, f"rank{self.rank}.json").write_text(json.dumps(found))
        original_close(self)

    original_close = ProcessGroup.close
    Trainer._train = timed_step  # type: ignore[method-assign]
    SnapshotManager.save, SnapshotManager.wait = measured_save, measured_wait  # type: ignore[method-assign]
    SnapshotManager.load_latest, stages.restore = measured_load, measured_restore  # type: ignore[method-assign]
    ProcessGroup.close = close  # type: ignore[method-assign]
    launch.main()


def train(words: list[str], ranks: int, scratch: Path) -> list[dict[str, Any]]:
    """Run the ranks, and return the measurements of each."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        __file__,
    ]
    variables = {**environment(threads=1), PLAN: str(scratch), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*torchrun, *words], env=variables, cwd=scratch, text=True, capture_output=True, check=False
    )
    files = [scratch / f"rank{rank}.json" for rank in range(ranks)]
    if done.returncode or not all(file.exists() for file in files):
        sys.exit(f"the run failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return [json.loads(file.read_text()) for file in files]


def measure(
    overrides: list[str], steps: int, ranks: int, cache: Path, resumes: bool
) -> dict[str, Any]:
    """Train a run, and measure its loss, time and memory.

    Args:
        overrides: Overrides of the run.
        steps: Number of steps.
        ranks: Number of ranks.
        cache: Directory for the encoded text.
        resumes: Resume the run for one more step in new processes.

    Returns:
        The figures of the rank that has the largest value of each.
    """
    with tempfile.TemporaryDirectory(prefix="strategies-") as name:
        scratch = Path(name)
        words = [*overrides, f"data.cache_dir={cache}", f"run.root={scratch / 'runs'}"]
        first = train([*words, f"trainer.max_steps={steps}"], ranks, scratch)
        loss = json.loads((scratch / "runs" / "run" / "result.json").read_text())["val_loss"]
        second = (
            train([*words, f"trainer.max_steps={steps + 1}"], ranks, scratch) if resumes else []
        )
    figures = {
        key: max(rank[key] for rank in first) / MIB for key in ("training", "state", "saving")
    }
    step_ms = 1e3 * max(median(rank["steps"][WARMUP:]) for rank in first)
    resuming = {"resuming": max(rank["resuming"] for rank in second) / MIB} if resumes else {}
    return {"loss": loss, "step_ms": step_ms, **figures, **resuming}


def main() -> None:
    options = parser(__doc__, "strategies")
    options.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    options.add_argument(
        "--ranks", nargs="+", type=int, choices=STRATEGIES, default=list(STRATEGIES)
    )
    options.add_argument(
        "--repetitions", type=int, default=3, help="runs of every strategy (default: %(default)s)"
    )
    chosen = options.parse_args()
    results, rows = [], []
    with tempfile.TemporaryDirectory(prefix="strategies-cache-") as name:
        for setting in chosen.settings:
            overrides, steps = SETTINGS[setting]
            ranks_of = chosen.ranks if setting == "small" else [2]
            for precision, ranks in [(p, r) for p in chosen.precisions for r in ranks_of]:
                words = {
                    s: [*overrides, f"trainer.precision={precision}", f"ddp.strategy={s}"]
                    for s in STRATEGIES[ranks]
                }
                resumes = setting == "large"
                candidates = {
                    s: partial(measure, w, steps, ranks, Path(name), resumes)
                    for s, w in words.items()
                }
                found = alternate(
                    f"{setting}, {precision}, {ranks} ranks", candidates, chosen.repetitions
                )
                base = [each["step_ms"] for each in found[STRATEGIES[ranks][0]]]
                for strategy, measured in found.items():
                    columns = {
                        k: spread([each[k] for each in measured])
                        for k in measured[0]
                        if k != "loss"
                    }
                    losses = [each["loss"] for each in measured]  # they differ in the last digits
                    ratio = compare([each["step_ms"] for each in measured], base)
                    about = {
                        "setting": setting,
                        "precision": precision,
                        "ranks": ranks,
                        "strategy": strategy,
                    }
                    results.append({**about, "losses": losses, **columns, "ratio": ratio})
                    keys = ("training", "state", "saving", "resuming")
                    memories = [
                        f"{columns[key]['median']:,.1f}" if key in columns else "" for key in keys
                    ]
                    times = [cell(columns["step_ms"], ".1f"), cell(ratio, ".2f")]
                    rows.append(
                        [*map(str, about.values()), f"{median(losses):.7f}", *times, *memories]
                    )
    log(f"{len(rows)} rows")
    report(
        chosen.out,
        {"repetitions": chosen.repetitions, "results": results},
        HEADER,
        rows,
        readme(results),
    )


def readme(results: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Write a row for each setting, precision and number of ranks, with all strategies."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        ranks = f"{result['ranks']} rank{'s' if result['ranks'] > 1 else ''}"
        rows.setdefault(
            f"{result['setting']} model in {result['precision']} on {ranks}", []
        ).append(result)
    found = []
    for name, (base, *others) in rows.items():
        losses = [loss for result in (base, *others) for loss in result["losses"]]
        step_ms = base["step_ms"]["median"]
        parts = [f"{base['strategy']} {step_ms:.0f} ms, {base['state']['median']:.1f} MiB"]
        for other in others:
            times = other["ratio"]["median"]
            state = other["state"]["median"] / base["state"]["median"]
            parts.append(f"{other['strategy']} {times:.2f} times, {state:.2f} times")
        loss = f"loss {median(losses):.6f}, {max(losses) - min(losses):.0e} apart"
        what = f"strategies, {name}: validation loss; time of a step; optimizer state per rank"
        found.append((what, f"{loss}; {'; '.join(parts)}"))
    return found


if __name__ == "__main__":
    if PLAN in os.environ:
        worker_main(Path(os.environ[PLAN]))
    else:
        main()
