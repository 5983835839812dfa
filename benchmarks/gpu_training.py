"""Define the parts of gpu.py that compare training with nanoGPT, and the commands that they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common import ROOT, cell, in_fresh_process, spread
from gpu_runs import Descent, Part, Table, descend, flops_per_token, ratios, shown, spreads
from stopwatch import pace
from trainers import (
    MODERN,
    NANOGPT,
    OURS,
    PLAIN,
    SETTINGS,
    Setting,
    copy_with_data,
    nanogpt,
    ours,
    path_overrides,
)

TINY = Setting(2, 2, 16, context=16, batch=4, warmup=2, timed=6, log_every=1)
CHAR = replace(SETTINGS["char"], warmup=100, timed=400, log_every=50)
GPT2 = replace(SETTINGS["gpt2"], warmup=20, timed=100)
RECIPES = {"gpt": PLAIN, "modern": MODERN}
TARGET = 1.47  # nats per character, the loss that nanoGPT's README reports for its settings
SEEDS = (101, 102)
# The first of these experiments that exists is trained.
BEST = ("shakespeare_char_best", "shakespeare_char")


def our_command(part: Part, setting: Setting, recipe: list[str], *overrides: str) -> list[str]:
    """Build our training command, compiled on a GPU if possible. Later overrides win."""
    compiled = f"trainer.compile={'auto' if part.compiles and not part.dry else 'false'}"
    command = ours(setting, part.text, part.scratch, recipe, part.device)
    return [*command, "data.sha256=null", compiled, *overrides]


def nanogpt_command(part: Part, setting: Setting) -> list[str]:
    compiled = part.compiles and not part.dry
    return [*nanogpt(setting, part.device), f"--compile={compiled}"]


def nanogpt_copy(part: Part) -> Path | None:
    if part.nanogpt is None:
        part.skip("nanoGPT", "no --nanogpt DIR")
        return None
    return copy_with_data(part.nanogpt, part.text, part.scratch / "nanogpt")


def tokens_per_s(
    part: Part, setting: Setting, command: list[str], cwd: Path, pattern: str
) -> float:
    return round(
        setting.tokens / pace(command, cwd, pattern, setting.span, limit_s=part.left_s()).wall_s, 1
    )


def our_speed(
    part: Part,
    setting: Setting,
    recipe: list[str],
    *overrides: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[], float]:
    """Make a function that measures our tokens/s.

    Args:
        part: The part.
        setting: The shape of the model and of the batch.
        recipe: Overrides for the recipe.
        overrides: Further overrides.
        variables: Further environment variables.
    """
    command = our_command(part, setting, recipe, *overrides)
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    return partial(tokens_per_s, part, setting, command, part.scratch, OURS)


# 3: the speed of training.


def training_speed(part: Part) -> Table:
    """Compare the speed of training to nanoGPT, the measured matmul rate and the vendor's peak."""
    settings = {"tiny": TINY} if part.dry else {"10.7M": CHAR, "GPT-2's shape": GPT2}
    commands = {
        f"{k}, {name}": our_command(part, s, recipe)
        for k, s in settings.items()
        for name, recipe in RECIPES.items()
    }
    candidates: dict[str, Callable[[], float]] = {}
    copy = nanogpt_copy(part)
    for key, setting in settings.items():
        for name, recipe in RECIPES.items():
            candidates[f"{key}, {name}"] = our_speed(part, setting, recipe)
        if copy:
            command = nanogpt_command(part, setting)
            candidates[f"{key}, nanoGPT"] = partial(
                tokens_per_s, part, setting, command, copy, NANOGPT
            )
    words = {name: command[2:] for name, command in commands.items()}
    count = partial(
        in_fresh_process, flops_per_token, words, len(set(part.text.read_text(encoding="utf-8")))
    )
    flops = part.measure("FLOPs per token", count) or {}
    # nanoGPT's model has the same shapes as ours.
    flops |= {f"{key}, nanoGPT": flops[f"{key}, gpt"] for key in settings if flops}
    speeds = part.alternate("tokens/s", candidates)
    figures: dict[str, Any] = {
        "settings": {key: asdict(setting) for key, setting in settings.items()}
    }
    figures |= {
        "flops_per_token": flops,
        "tokens_per_s": spreads(speeds),
        "over_nanogpt": {},
        "utilization": {},
    }
    rows = []
    for name, values in speeds.items():
        ratio = (
            None
            if "nanoGPT" in name
            else ratios(values, speeds.get(f"{name.rpartition(', ')[0]}, nanoGPT"))
        )
        speed = spread(values)
        shares = [
            share(speed["median"] * flops.get(name, 0), part.facts[r])
            for r in ("matmul_flops", "peak_flops")
        ]
        figures["over_nanogpt"][name] = ratio
        figures["utilization"][name] = dict(zip(("measured", "vendor"), shares, strict=True))
        rows.append(
            [
                name,
                cell(speed),
                shown(ratio, ".2f"),
                *("-" if s is None else f"{s:.1%}" for s in shares),
            ]
        )
    return (
        figures,
        ["model", "tokens/s", "over nanoGPT", "of the measured rate", "of the vendor's peak"],
        rows,
    )


def share(flops: float, rate: float | None) -> float | None:
    return flops / rate if flops and rate else None


# 5 and 6: validation losses.


def our_training(part: Part, root: Path, run: str, seed: int, target: float) -> Descent:
    """Train the best experiment that exists. If its run exists below `root`, continue it."""
    there = [name for name in BEST if (ROOT / "conf" / "experiment" / f"{name}.yaml").is_file()]
    where = [
        *path_overrides(part.text, root),
        "data.sha256=null",
        f"run.name={run}",
        f"run.seed={seed}",
    ]
    command = [
        sys.executable,
        str(ROOT / "main.py"),
        f"experiment={there[0]}",
        f"trainer.device={part.device}",
        *where,
    ]
    if part.dry:
        command += [
            "model.n_layer=1",
            "model.n_head=2",
            "model.n_embd=16",
            "data.block_size=16",
            "data.stride=null",
        ]
        command += [
            "trainer.batch_size=4",
            "trainer.max_steps=20",
            "trainer.eval_every=10",
            "data.truncate=0.2",
        ]
    return descend(
        part, command, part.scratch, r"^step (\d+): validation loss ([\d.]+)", OURS, target
    )


def nanogpt_training(part: Part, copy: Path, target: float) -> Descent:
    """Train nanoGPT with its own settings. Its loss is an estimate over 200 random batches."""
    command = [
        sys.executable,
        "train.py",
        "config/train_shakespeare_char.py",
        f"--device={part.device}",
        f"--compile={part.compiles and not part.dry}",
    ]
    if part.dry:
        command = [
            *nanogpt_command(part, TINY),
            "--eval_interval=10",
            "--eval_iters=2",
            "--max_iters=20",
        ]
    report = r"^step (\d+): train loss [\d.]+, val loss ([\d.]+)"
    return descend(part, command, copy, report, NANOGPT, target)


def wants_shakespeare(part: Part) -> bool:
    """Return True, and skip the part, if it needs tinyshakespeare and has a random text."""
    if part.text.name == "random.txt" and not part.dry:
        part.skip("everything", "MINGPT_SHAKESPEARE does not name the text")
        return True
    return False


def reached(run: Descent, target: float) -> dict[str, Any]:
    """Return the values of a run, which must have reached the target or ended by itself.

    Raises:
        RuntimeError: The run was stopped for lack of time.
    """
    if run.best > target and not run.has_ended:
        raise RuntimeError(f"stopped at a loss of {run.best}, before {target}")
    return asdict(run)


def time_to_loss(part: Part) -> Table:
    """Measure the seconds from the start of a process until it logs the target validation loss.

    The table gives them with and without startup and compilation. Our loss is over the whole
    validation split. nanoGPT's loss is its own estimate. Both times include the evaluations.
    """
    target = 4.2 if part.dry else TARGET
    header = [
        "run",
        "s from the start",
        "s after its first report of a step",
        "lowest loss, nats/character",
    ]
    if wants_shakespeare(part):
        return {}, header, []
    candidates: dict[str, Callable[[], dict[str, Any]]] = {}

    def ours_with_another_seed() -> dict[str, Any]:
        seed = part.repetition
        return reached(our_training(part, part.scratch, f"run-{seed}", seed, target), target)

    candidates["ours"] = ours_with_another_seed
    if copy := nanogpt_copy(part):
        candidates["nanoGPT"] = lambda: reached(nanogpt_training(part, copy, target), target)
    descents = part.alternate(f"to a loss of {target}", candidates)
    figures = {"target": target, "runs": descents}
    rows = []
    for name, runs in descents.items():
        for run in (Descent(**values) for values in runs):
            seconds = run.seconds_to(target)
            after = (
                None if seconds is None or not run.first_step_s > 0 else seconds - run.first_step_s
            )
            rows.append(
                [
                    name,
                    *("-" if s is None else f"{s:.1f}" for s in (seconds, after)),
                    f"{run.best:.4f}",
                ]
            )
    return figures, header, rows


def best_loss(part: Part) -> Table:
    """Train the best experiment to its end, with two seeds. A later call continues a run."""
    header = ["seed", "steps", "lowest loss, nats/character", "last loss", "s of all calls"]
    if not (ROOT / "conf" / "experiment" / f"{BEST[0]}.yaml").is_file():
        part.skip(f"experiment={BEST[0]}", f"there is none; {BEST[1]} instead")
    if wants_shakespeare(part):
        return {}, header, []
    figures: dict[str, Any] = {"runs": {}}
    rows = []
    for seed in SEEDS:
        run = trained_so_far(part, seed)
        if run is not None:
            figures["runs"][seed] = asdict(run)
            seconds, step, last = run.losses[-1]
            rows.append([str(seed), str(step), f"{run.best:.4f}", f"{last:.4f}", f"{seconds:.0f}"])
            if not run.has_ended:
                part.skip(f"the rest of seed {seed}", "out of time; run the part again")
    return figures, header, rows


def trained_so_far(part: Part, seed: int) -> Descent | None:
    """Continue the run of a seed, unless it has ended. Return the losses of all calls."""
    what = f"seed {seed}"
    before = Descent(**part.kept.value(what)) if what in part.kept else Descent([], 0.0)
    if before.has_ended:
        return before
    root = part.out or part.scratch  # a later call continues runs in part.out
    new = part.attempt(what, partial(our_training, part, root, f"seed-{seed}", seed, 0.0))
    if new is None:
        return before if before.losses else None
    passed_s = before.losses[-1][0] if before.losses else 0.0
    later = [(passed_s + seconds, step, loss) for seconds, step, loss in new.losses]
    whole = Descent(
        [*before.losses, *later], before.first_step_s or new.first_step_s, new.has_ended
    )
    part.kept.put(what, asdict(whole), whole.losses[-1][0])
    return whole
