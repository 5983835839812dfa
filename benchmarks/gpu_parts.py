"""Define the parts of gpu.py. Each returns figures for JSON, and the header and rows of a table."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import sampling
import snapshots
from common import ROOT, cell, environment, in_fresh_process, spread
from gpu_comparisons import comparisons
from gpu_first import first_look
from gpu_ranks import ranks_on_one_gpu
from gpu_runs import Part, Table, digest_of_training, ratios, shown, spreads
from gpu_training import (
    CHAR,
    RECIPES,
    TINY,
    best_loss,
    our_command,
    our_speed,
    time_to_loss,
    training_speed,
)
from trainers import PLAIN, SETTINGS

NO_GPU = "it needs a GPU"
TESTS = "tests/e2e/test_gpu.py"
OUTCOME = r"^\S+::(\S+) (PASSED|FAILED|ERROR|SKIPPED)"
COMPILE = "two_parts or test_compiled or test_sample_on"
PHASES = {
    "quick ones": f"not ({COMPILE})",
    "bf16 in two parts": "two_parts and bf16",
    "the others": f"({COMPILE}) and not (two_parts and bf16)",
}


# 1: the tests.


def run_tests(part: Part) -> Table:
    """Run the tests marked gpu that have not passed in an earlier call, in the order of PHASES."""
    key = "outcomes"
    outcomes: dict[str, str] = dict(part.kept.value(key)) if key in part.kept else {}
    output = ""
    for phase, words in PHASES.items():
        done = [name for name, outcome in outcomes.items() if outcome in ("PASSED", "SKIPPED")]
        new = part.attempt(f"tests, {phase}", partial(pytest, part, words, done)) or ""
        found = re.findall(OUTCOME, new, flags=re.MULTILINE)
        outcomes |= dict(found)
        part.kept.put(key, outcomes, 0.0)
        output += new
    if not outcomes and not part.notes:
        part.failures.append("tests: pytest ran none")
    counts = Counter(outcomes.values())
    part.failures += [
        f"test {name}" for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")
    ]
    figures = {"outcomes": dict(counts), "tests": outcomes, "output": output}
    rows = [[outcome.lower(), str(count)] for outcome, count in counts.items()]
    return figures, ["tests marked gpu", "number"], rows


def pytest(part: Part, words: str, done: list[str]) -> str:
    """Run pytest and return its output. When the time is up, it is interrupted.

    Args:
        part: The part, which has the remaining time.
        words: An expression that selects tests, for -k.
        done: Names of tests to leave out.
    """
    command = [sys.executable, "-m", "pytest", TESTS, "-m", "gpu", "-k", words, "-v", "--tb=short"]
    command += [f"--deselect={TESTS}::{name}" for name in done]
    process = subprocess.Popen(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=part.left_s())
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        part.skip(f"tests, -k '{words}'", "not all finished in time")
    return output


# 2: exactness after kill -9, and its cost.


def exactness(part: Part) -> Table:
    """Compare weights and moments, byte for byte, with and without kill -9 of a worker.

    Both are compiled and deterministic.
    """
    setting = TINY if part.dry else CHAR
    # The number of steps, the interval between snapshots, and the step of the kill.
    total, every, kill_at = (30, 5, 8) if part.dry else (400, 50, 120)
    exact = [
        "trainer.deterministic=true",
        "run.resume=auto",
        "ddp.nproc_per_node=1",
        f"trainer.max_steps={total}",
        f"snapshot.every_steps={every}",
        f"trainer.log_every={2 if part.dry else 10}",
    ]
    figures: dict[str, Any] = {"compiled": part.compiles and not part.dry, "identical": {}}
    # The killed run must compile again, without a cache.
    cold = ["env", f"TORCHINDUCTOR_CACHE_DIR={part.scratch / 'compiled again'}"]
    for name, recipe in RECIPES.items() if not part.dry else [("modern", RECIPES["modern"])]:
        digests = []
        for kill in (0, kill_at):
            run = f"{name}-{'killed' if kill else 'whole'}"
            command = our_command(
                part, setting, recipe, *exact, f"run.name={run}", "model.dropout=0.1"
            )
            command = [*cold, *command] if kill else command
            work = partial(digest_of_training, part, command, part.scratch / "runs" / run, kill)
            with part.within(0.4):
                digests.append(part.measure(f"bit-identity, {run}", work))
        figures["identical"][name] = None if None in digests else digests[0] == digests[1]
        if figures["identical"][name] is False:
            part.failures.append(f"{name}: the bytes after kill -9 differ")
    variants = {"deterministic": ["trainer.deterministic=true"], "eager": ["trainer.compile=false"]}
    variants |= {
        "eager, deterministic": [*variants["eager"], *variants["deterministic"]],
        "compiled": [],
    }
    if part.dry or not part.compiles:
        part.skip(
            "the cost of compiling", part.facts.get("cannot_compile") or "too long for a dry run"
        )
        variants = {name: words for name, words in variants.items() if "eager" in name}
    speeds = part.alternate(
        "tokens/s", {n: our_speed(part, setting, PLAIN, *w) for n, w in variants.items()}
    )
    base = speeds.get("eager")
    figures |= {"setting": asdict(setting), "tokens_per_s": spreads(speeds)}
    figures["over_eager"] = {name: ratios(values, base) for name, values in speeds.items()}
    figures["deterministic_over_compiled"] = ratios(
        speeds.get("deterministic"), speeds.get("compiled")
    )
    same = {True: "yes", False: "NO", None: "not measured"}
    rows = [
        [f"{n}: the same bytes after kill -9", same[identical], ""]
        for n, identical in figures["identical"].items()
    ]
    rows += [
        [f"gpt, {name}, tokens/s", cell(spread(values)), shown(figures["over_eager"][name])]
        for name, values in speeds.items()
    ]
    both = shown(figures["deterministic_over_compiled"])
    return (
        figures,
        ["what", "figure", "over eager"],
        [*rows, ["deterministic over compiled", both, ""]],
    )


# 4: CUDA graphs, sampling, snapshots.


def graphs_sampling_snapshots(part: Part) -> Table:
    figures: dict[str, Any] = {}
    rows: list[list[str]] = []
    with part.within(0.45):
        cuda_graphs(part, figures, rows)
    with part.within(0.5):
        sampled(part, figures, rows)
    if (found := part.measure("snapshots", partial(stalls, part))) is not None:
        found["stall_shorter"] = [
            a / max(b, 1e-9) for a, b in zip(found["sync"], found["stall"], strict=True)
        ]
        figures["snapshot_s"] = spreads(found)
        words = {
            "sync": "torch.save while training waits",
            "stall": "stall of a snapshot",
            "first": "the first stall",
        }
        words |= {"durable": "until it is durable"}
        rows += [
            [f"snapshot: {what}", cell(figures["snapshot_s"][name], ".4f"), "s"]
            for name, what in words.items()
        ]
        rows.append(
            ["snapshot: times shorter", cell(figures["snapshot_s"]["stall_shorter"], ",.0f"), ""]
        )
    return figures, ["what", "figure", "unit, or over the first of its kind"], rows


def cuda_graphs(part: Part, figures: dict[str, Any], rows: list[list[str]]) -> None:
    """Measure a small and a larger model, compiled with and without CUDA graphs."""
    if part.dry or not part.compiles:
        part.skip("CUDA graphs", part.facts.get("cannot_compile") or NO_GPU)
        return
    small = replace(SETTINGS["small"], warmup=200, timed=1000, log_every=100)
    for key, setting in {"4 layers, 128 wide": small, "10.7M": CHAR}.items():
        modes = {"compiled": "true", "CUDA graphs": "cuda_graphs"}
        speeds = part.alternate(
            f"{key}, tokens/s",
            {
                name: our_speed(part, setting, PLAIN, f"trainer.compile={mode}")
                for name, mode in modes.items()
            },
        )
        ratio = ratios(speeds.get("CUDA graphs"), speeds.get("compiled"))
        figures[f"cuda_graphs, {key}"] = {"tokens_per_s": spreads(speeds), "ratio": ratio}
        for name, values in speeds.items():
            rows.append(
                [
                    f"{key}, {name}",
                    cell(spread(values)),
                    shown(ratio) if name == "CUDA graphs" else "tokens/s",
                ]
            )


def sampled(part: Part, figures: dict[str, Any], rows: list[list[str]]) -> None:
    """Measure the characters/s of sampling with one stream and with ten."""
    precision, characters = part.facts.get("precision", "fp32"), 30 if part.dry else 2000
    candidates: dict[str, Callable[[], float]] = {}

    def measure(function: Callable[..., sampling.Speed], *arguments: Any) -> Callable[[], float]:
        return lambda: in_fresh_process(
            function, *arguments, part.device, characters, limit_s=part.left_s()
        )[0]

    if part.nanogpt is not None:
        candidates["nanoGPT, 1 stream"] = measure(sampling.nanogpt, part.nanogpt.resolve())
    for name in ("gpt",) if part.dry else RECIPES:
        for streams in (1, 10):
            candidates[f"{name}, {streams} stream{'s' * (streams > 1)}"] = measure(
                sampling.ours, name, precision, streams
            )
    speeds = part.alternate("characters/s", candidates)
    baseline = speeds.get("nanoGPT, 1 stream")
    figures["sampling"] = {
        "precision": precision,
        "characters_per_s": spreads(speeds),
        "over_nanogpt": {},
    }
    for name, values in speeds.items():
        ratio = ratios(values, baseline)
        figures["sampling"]["over_nanogpt"][name] = ratio
        rows.append(
            [
                f"sampling: {name}",
                cell(spread(values)),
                shown(ratio, ".1f") if ratio else "characters/s",
            ]
        )


def stalls(part: Part) -> dict[str, list[float]]:
    words = [
        f"trainer.device={part.device}",
        f"trainer.precision={part.facts.get('precision', 'fp32')}",
    ]
    if part.dry:
        words += ["model.n_layer=1", "model.n_head=2", "model.n_embd=16", "data.block_size=32"]
    times = min(3, part.repetitions)
    return in_fresh_process(
        snapshots.compare_stalls, str(part.scratch), times, *words, limit_s=part.left_s()
    )


PARTS: dict[int, tuple[str, Callable[[Part], Table]]] = {
    0: ("waits, a profile, memory", first_look),
    1: ("the tests marked gpu", run_tests),
    2: ("the same bits after kill -9, and the cost", exactness),
    3: ("the speed of training", training_speed),
    4: ("CUDA graphs, sampling, snapshots", graphs_sampling_snapshots),
    5: ("time to a validation loss", time_to_loss),
    6: ("the lowest loss", best_loss),
    7: ("what is likely faster", comparisons),
    8: ("ranks on one GPU", ranks_on_one_gpu),
}
