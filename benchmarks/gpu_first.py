"""Part 0 of gpu.py: find out in three minutes what would make longer measurements pointless."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from typing import Any

from common import ROOT, compose_config, environment, in_fresh_process
from gpu_runs import Part, Table
from gpu_waits import PERMITTED, cases, count_waits
from trainers import path_overrides

LIMIT_S = 180.0
HEADER = ["what", "figure", "expected, or why it may be"]
PROFILED_STEPS = range(5, 9)
PROFILED = r"profile:\n[\s\S]*?Self CPU time total: ([\d.]+)(us|ms|s)\b"
MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
GPT2_STEPS = ["model=gpt2", "data.block_size=1024", "trainer.batch_size=12"]
TINY_STEPS = ["model=gpt_nano", "data.block_size=16", "trainer.batch_size=4"]
# Overrides that change the peak of the memory.
MEMORY_CASES = {
    "eager": ["trainer.activation_checkpointing=false"],
    "recomputed": ["trainer.activation_checkpointing=true"],
}


def first_look(part: Part) -> Table:
    """Count waits, profile some steps, and compare the planned memory with the peak."""
    figures: dict[str, Any] = {}
    rows: list[list[str]] = []
    with part.within(min(1.0, LIMIT_S / part.left_s())):
        waits(part, figures, rows)
        profiled(part, figures, rows)
        for name, words in MEMORY_CASES.items():
            memory(part, name, words, figures, rows)
    return figures, HEADER, rows


def data(part: Part) -> list[str]:
    paths = path_overrides(part.text, part.scratch)
    return ["data=shakespeare", "data.sha256=null", *paths]


# Waits.


def waits(part: Part, figures: dict[str, Any], rows: list[list[str]]) -> None:
    """Count where the host waits for the GPU. A wait that is not permitted is a failure."""
    count = partial(in_fresh_process, count_waits, part.device, data(part), cases(part.dry))
    with part.within(0.6):
        found = part.measure("waits", partial(count, limit_s=part.left_s()))
    if found is None:
        return
    figures["waits"] = {"cases": cases(part.dry), "places": found}
    for phase, file, line, function, number in found:
        why = PERMITTED.get((phase, file, function))
        rows.append([f"waits in {phase}: {file}:{line}, {function}", str(number), why or "none"])
        if why is None:
            part.failures.append(f"{phase}: {number} waits at {file}:{line}, {function}")
    total = sum(number for *_, number in found)
    rows.append([f"waits of {len(cases(part.dry))} cases", str(total), "as above"])


# A profile.


def profiled(part: Part, figures: dict[str, Any], rows: list[list[str]]) -> None:
    """Profile four steps of a short run, which must print a table and write a trace."""
    found = part.measure("a profiled run", partial(profile, part))
    if found is None:
        return
    figures["profile"] = found
    rows.append(["a profiled step, ms", f"{found['step_ms']:.2f}", "-"])


def profile(part: Part) -> dict[str, Any]:
    words = [*data(part), "model=gpt_nano" if part.dry else "model=gpt_mini"]
    first, last = PROFILED_STEPS[0], PROFILED_STEPS[-1]
    words += [f"trainer.profile=[{first},{last}]", "trainer.max_steps=10"]
    words += ["trainer.eval_every=null"]
    words += ["data.truncate=0.05", "run.name=profiled", f"trainer.device={part.device}"]
    words += ["trainer.compile=false", "snapshot.every_steps=null"]
    output = finished([sys.executable, str(ROOT / "main.py"), *words], part)
    summary = re.search(PROFILED, output)
    traces = [*(part.scratch / "runs" / "profiled" / "profile").glob("rank0*")]
    if summary is None or not traces:
        raise RuntimeError(f"no profile was written:\n{output[-2000:]}")
    table = output[summary.start() :].splitlines()
    return {
        "step_ms": float(summary[1]) * MILLISECONDS[summary[2]] / len(PROFILED_STEPS),
        "trace_bytes": traces[0].stat().st_size,
        "summary": table[:20],
    }


def finished(command: list[str], part: Part) -> str:
    """Run a command and return its output.

    Raises:
        RuntimeError: The command failed. The error shows the end of its output.
    """
    done = subprocess.run(
        command,
        cwd=part.scratch,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=part.left_s(),
    )
    if done.returncode:
        raise RuntimeError(done.stdout.strip()[-2000:])
    return done.stdout


# Memory.


def memory(
    part: Part, name: str, words: list[str], figures: dict[str, Any], rows: list[list[str]]
) -> None:
    """Compare the peak of the memory in a few steps with the peak that `plan` expects for them."""
    shape = TINY_STEPS if part.dry else GPT2_STEPS
    precision = "fp32" if part.dry else "bf16"
    words = [
        *data(part),
        *shape,
        *words,
        f"trainer.precision={precision}",
        "trainer.max_steps=3",
        "trainer.compile=false",
        "trainer.eval_every=null",
    ]
    measure = partial(in_fresh_process, peak_bytes, part.device, words)
    peak = part.measure(f"peak, {name}", partial(measure, limit_s=part.left_s()))
    planned = part.measure(f"plan, {name}", partial(planned_bytes, part, words))
    figures.setdefault("memory", {})[name] = {"peak_bytes": peak, "planned_bytes": planned}
    what = f"peak of {'gpt_nano' if part.dry else 'gpt2, 12 x 1024'}, {precision}, {name}, GiB"
    expected = f"plan: {planned / 2**30:.2f}" if planned else "plan: not available"
    if planned and peak:
        expected += f", peak over plan {peak / planned:.3f}"
    rows.append([what, f"{peak / 2**30:.2f}" if peak else "-", expected])


def peak_bytes(device: str, words: list[str]) -> int | None:
    """Measure torch.cuda.max_memory_allocated of three steps, including model and optimizer.

    Return None on a CPU, where torch does not count memory. Call this function in a new process.
    """
    import torch

    from mingpt_ddp.data.dataloader import plan_batches
    from mingpt_ddp.distributed.runtime import Runtime
    from mingpt_ddp.process.env import DistEnv
    from mingpt_ddp.tasks import build_task
    from mingpt_ddp.training.train_step import TrainStep
    from mingpt_ddp.training.trainable import build_trainable

    config = compose_config(*words, f"trainer.device={device}")
    runtime = Runtime(config, DistEnv())
    task = build_task(config, runtime.group)
    loader = task.train_loader(runtime.device)
    trainable = build_trainable(runtime, task)
    train_step = TrainStep(runtime, task, loader, plan_batches(config, 1), trainable)
    for step in (1, 2, 3):
        train_step.passes(step)
        train_step.clip()
        train_step.update(step)
    loader.close()
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def planned_bytes(part: Part, words: list[str]) -> int | None:
    """Ask `plan` for the peak of one rank on this GPU. Return None if `plan` fails."""
    gpu = "h200" if "H200" in part.facts.get("device", "") else "h100"
    command = [sys.executable, "-m", "mingpt_ddp", "plan", *words, f"device={gpu}", "format=json"]
    command = ["env", f"PYTHONPATH={ROOT}", *command]
    try:
        output = finished(command, part)
        plan = json.loads(output[output.index("{") :])
        return int(plan["strategies"]["single"]["peak_bytes"])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        line = str(error).strip().splitlines()[-1]
        part.skip("the plan of a GPU", f"not available: {line}")
        return None
