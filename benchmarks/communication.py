"""Measure the training speed of two ranks relative to the same ranks without communication.

The run is the user's command, `torchrun --nproc_per_node=2 main.py`, on the CPU with one thread per
rank. In the same processes, blocks of steps with communication alternate with blocks of steps
without any. In the latter, gradients are not reduced (DDP's no_sync) and flags are not gathered.
This script patches the package to do so, because there is no setting for it. Every block begins
with a barrier. The speed of a block is measured by the clock, averaged over the ranks, and by the
CPU time of all threads and ranks, which is fairer if the machine has other load. DDP measures the
exposed communication, which computation does not overlap, as a run logs it.

    python benchmarks/communication.py
    python benchmarks/communication.py --overrides ddp.comm_hook=bf16
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import ROOT, cell, compare, corpus_path, environment, log, parser, report, spread
from trainers import FOREVER, PLAIN, SETTINGS, ours

HEADER = [
    "setting",
    "ranks",
    "speed against no synchronisation",
    "the same by CPU time",
    "step, ms",
    "exposed, ms",
]
PLAN = "MINGPT_COMMUNICATION"  # name of the environment variable with a worker's settings


BLOCK_STEPS = {"small": 40, "mid": 3}  # number of steps in a block


def measure(trainer: Any, steps: int, blocks: int) -> dict[str, list[list[float]]]:
    """Measure alternating blocks of steps on this rank.

    Returns:
        For each block, the seconds per step: wall time, CPU time and exposed communication.
    """
    import torch

    from mingpt_ddp.torch_internals import time_communication

    runtime = trainer.runtime
    shared = runtime.strategy.maybe_no_sync, runtime.group.all_gather_async
    alone = (
        lambda model, last: model.no_sync(),
        lambda values: lambda: values.repeat(runtime.group.world_size, 1),
    )
    time_communication(trainer.train_step.parallel_model, every=1)
    found: dict[str, list[list[float]]] = {"shared": [], "alone": []}
    step = 0
    for block in range(-1, blocks):  # block -1 is a warm-up
        for name, (gradients, gather) in {"shared": shared, "alone": alone}.items():
            runtime.strategy.maybe_no_sync, runtime.group.all_gather_async = shared
            runtime.group.barrier()
            runtime.strategy.maybe_no_sync, runtime.group.all_gather_async = gradients, gather
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step += 1
                trainer._train(step)
            wall, cpu = (time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps
            exposed = runtime.strategy.comm_times(trainer.train_step.parallel_model)[1]
            # Without communication the weights of the ranks have diverged. Make them equal again.
            with torch.no_grad():
                for parameter in trainer.train_step.model.parameters():
                    torch.distributed.broadcast(parameter, src=0)
            if block >= 0:
                found[name].append([wall, cpu, exposed])
    return found


def worker_main(plan: dict[str, Any]) -> None:
    """Run the package's train command on one rank. `fit` is replaced by the measurement."""
    from mingpt_ddp.cli.commands import train as launch
    from mingpt_ddp.config.job import RunStatus
    from mingpt_ddp.training import trainer

    def fit(self: Any) -> Any:
        self.train_step.warm_up()
        found = measure(self, plan["steps"], plan["blocks"])
        Path(plan["out"], f"rank{self.runtime.group.rank}.json").write_text(json.dumps(found))
        self.runtime.group.barrier()
        self.metrics.close()
        return trainer.TrainingEnd(RunStatus.PREEMPTED, {})

    trainer.Trainer.fit = fit  # type: ignore[method-assign]
    launch.main()


def run(name: str, ranks: int, blocks: int, overrides: list[str], text: Path) -> dict[str, Any]:
    """Run the ranks, and summarize their measurements.

    Args:
        name: Name of the setting.
        ranks: Number of ranks.
        blocks: Number of pairs of blocks.
        overrides: Further overrides of the run.
        text: Path of the training text.
    """
    with tempfile.TemporaryDirectory(prefix="communication-") as scratch:
        _, _, *words = ours(SETTINGS[name], text, Path(scratch), PLAIN)
        words += [f"trainer.log_every={FOREVER}", "ddp=auto", *overrides]
        plan = {"steps": BLOCK_STEPS[name], "blocks": blocks, "out": scratch}
        variables = {**environment(threads=1), PLAN: json.dumps(plan), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={ranks}",
                __file__,
                *words,
            ],
            env=variables,
            cwd=scratch,
            text=True,
            capture_output=True,
            check=False,
        )
        files = [Path(scratch, f"rank{rank}.json") for rank in range(ranks)]
        if not all(file.exists() for file in files):
            sys.exit(f"the run failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return summarize([json.loads(file.read_text()) for file in files])


def summarize(found: list[dict[str, list[list[float]]]]) -> dict[str, Any]:
    """Add up the speeds of the ranks. Take exposed communication from the slowest rank.

    Args:
        found: The measurements of each rank.
    """
    speeds, cpus = {}, {}
    for name in ("shared", "alone"):
        by_block = list(zip(*(rank[name] for rank in found), strict=True))
        speeds[name] = [sum(1 / wall for wall, _, _ in block) for block in by_block]
        cpus[name] = [sum(cpu for _, cpu, _ in block) for block in by_block]
    exposed = [
        max(e for _, _, e in block)
        for block in zip(*(rank["shared"] for rank in found), strict=True)
    ]
    return {
        "relative_speed": compare(speeds["shared"], speeds["alone"]),
        "relative_cpu": compare(cpus["alone"], cpus["shared"]),
        "step_ms": spread([1e3 * len(found) / speed for speed in speeds["shared"]]),
        "exposed_ms": spread([1e3 * seconds for seconds in exposed]),
    }


def main() -> None:
    options = parser(__doc__, "communication")
    options.add_argument("--settings", nargs="+", choices=BLOCK_STEPS, default=list(BLOCK_STEPS))
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument(
        "--blocks", type=int, default=15, help="pairs of blocks (default: %(default)s)"
    )
    options.add_argument("--overrides", nargs="*", default=[], help="further overrides for the run")
    chosen = options.parse_args()
    text = corpus_path()
    results: dict[str, Any] = {}
    rows = []
    for name in chosen.settings:
        log(f"{name}: {chosen.blocks} pairs of blocks of {BLOCK_STEPS[name]} steps")
        found = run(name, chosen.ranks, chosen.blocks, chosen.overrides, text)
        results[name] = {"setting": asdict(SETTINGS[name]), **found}
        shares = [cell(found[key], ".3f") for key in ("relative_speed", "relative_cpu")]
        rows.append(
            [
                name,
                str(chosen.ranks),
                *shares,
                *(cell(found[key], ".1f") for key in ("step_ms", "exposed_ms")),
            ]
        )
    figures = {"ranks": chosen.ranks, "overrides": chosen.overrides, "settings": results}
    report(chosen.out, figures, HEADER, rows, readme(results, chosen.ranks))


def readme(results: dict[str, Any], ranks: int) -> list[tuple[str, str]]:
    return [
        (
            f"{ranks} ranks of one thread, {found['setting']['n_layer']} layers, "
            f"{found['setting']['n_embd']} wide: "
            "speed relative to the same ranks without any exchange; exposed communication per step",
            f"{cell(found['relative_speed'], '.2f')}; {cell(found['exposed_ms'], '.1f')} ms",
        )
        for found in results.values()
    ]


if __name__ == "__main__":
    if PLAN in os.environ:
        worker_main(json.loads(os.environ[PLAN]))
    else:
        main()
