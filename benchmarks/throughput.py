"""Training tokens/s against nanoGPT at the same shapes: on one core or `--cores`, or on a GPU.

Our candidates: `gpt`, nanoGPT's architecture and optimizer, on a CPU also in its fp32; and
`modern`, the fast recipe (Muon, `trainer.precision=auto`: bf16 if the CPU is fast at it). nanoGPT
computes in fp32 on a CPU: its train.py has no autocast there, regardless of --dtype. With
--device=cuda all are compiled and in bf16.

Each runs its user command, each time in a new process: `main.py` with its loader, clipping,
metering and TensorBoard, and nanoGPT's own `train.py` from a temporary copy of its files. All have
gradients clipped at 1.0, no dropout, no biases, and log every few steps. One stopwatch serves all:
wall time and CPU time of the process when the log line of a step arrives. Startup and warm-up are
before the first stamp; none evaluates or saves in the timed span. Tokens per second of CPU time are
the fairer figure if other processes compete for the cores. nanoGPT is not part of this project;
give its checkout:

    python benchmarks/throughput.py --nanogpt ~/nanoGPT
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common import alternate, cell, compare, corpus_path, parser, report, spread
from stopwatch import pace
from trainers import (
    MODERN,
    NANOGPT,
    ON,
    OURS,
    PLAIN,
    PLAIN_FP32,
    SETTINGS,
    Setting,
    copy_with_data,
    nanogpt,
    ours,
)

HEADER = [
    "setting",
    "candidate",
    "tokens/s",
    "nanoGPT tokens/s",
    "ratio, pair by pair",
    "ratio by CPU time",
]
CANDIDATES = {
    "cpu": {"gpt fp32": PLAIN_FP32, "gpt": PLAIN, "modern": MODERN},
    "cuda": {"gpt": PLAIN, "modern": MODERN},
}
WHAT = {
    "gpt fp32": "with the same model, optimizer and precision",
    "gpt": "in `precision=auto`",
    "modern": "with `modern` and Muon, which need fewer steps",
}


def tokens_per_s(
    command: list[str], cwd: Path, pattern: str, setting: Setting, threads: int = 1
) -> tuple[int, int]:
    """Return tokens per second of wall time and of CPU time."""
    taken = pace(command, cwd, pattern, setting.span, threads)
    return round(setting.tokens / taken.wall_s), round(setting.tokens / taken.cpu_s)


def measure(
    setting: Setting, chosen: argparse.Namespace, text: Path, scratch: Path
) -> dict[str, Any]:
    names, device = chosen.candidates, chosen.device
    commands = {
        name: ours(setting, text, scratch, CANDIDATES[device][name], device) for name in names
    }
    if chosen.cores > 1:  # a process of one thread per core
        commands = {n: [*c, f"ddp.nproc_per_node={chosen.cores}"] for n, c in commands.items()}
    candidates = {
        name: partial(tokens_per_s, command, scratch, OURS, setting)
        for name, command in commands.items()
    }
    baseline = nanogpt(setting, device)
    candidates["nanogpt"] = partial(
        tokens_per_s, baseline, scratch / "nanogpt", NANOGPT, setting, chosen.cores
    )
    shape = f"{setting.n_layer} layers, {setting.n_embd} wide, context {setting.context}"
    measured = alternate(f"{shape}: tokens/s, tokens/CPU s", candidates, chosen.repetitions)
    result: dict[str, Any] = {"setting": asdict(setting)}
    for clock, kind in enumerate(("tokens_per_s", "tokens_per_cpu_s")):
        values = {name: [value[clock] for value in pairs] for name, pairs in measured.items()}
        result[kind] = {name: spread(speeds) for name, speeds in values.items()}
        result[kind]["ratio"] = {name: compare(values[name], values["nanogpt"]) for name in names}
    return result


def readme(settings: dict[str, Any], device: str, cores: int) -> list[tuple[str, str]]:
    """Return a row per shape, with all candidates."""
    clock, how = "tokens_per_s", "nanoGPT (compiled, bf16)"
    if device == "cpu":
        how = f"nanoGPT (eager, fp32), {cores} cores"
    if device == "cpu" and cores == 1:  # CPU time would favor waiting cores
        clock, how = "tokens_per_cpu_s", "nanoGPT (eager, fp32), by CPU time, one thread"
    rows = []
    for result in settings.values():
        shape = "{n_layer} layers, {n_embd} wide, context {context}, batch {batch}".format(
            **result["setting"]
        )
        figures = [
            f"{cell(ratio, '.2f')} times {WHAT[name]}"
            for name, ratio in result[clock]["ratio"].items()
        ]
        rows.append((f"training speed against {how}: {shape}", ", ".join(figures)))
    return rows


def main() -> None:
    options = parser(__doc__, "throughput")
    options.add_argument(
        "--nanogpt", type=Path, required=True, metavar="DIR", help="a checkout of nanoGPT"
    )
    options.add_argument(
        "--settings", nargs="+", choices=SETTINGS, help="default: small and mid, or char and gpt2"
    )
    options.add_argument(
        "--candidates", nargs="+", choices=WHAT, help="default: all that suit the device"
    )
    options.add_argument("--device", choices=ON, default="cpu")
    options.add_argument(
        "--cores", type=int, default=1, help="nanoGPT's threads, our processes (default: 1)"
    )
    options.add_argument(
        "--repetitions", type=int, default=5, help="of each candidate (default: %(default)s)"
    )
    chosen = options.parse_args()
    chosen.candidates = chosen.candidates or list(CANDIDATES[chosen.device])
    text = corpus_path()
    results: dict[str, Any] = {}
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="throughput-") as directory:
        scratch = Path(directory)
        copy_with_data(chosen.nanogpt, text, scratch / "nanogpt")
        for key in chosen.settings or ON[chosen.device]:
            result = measure(SETTINGS[key], chosen, text, scratch)
            results[key] = result
            wall, cpu = result["tokens_per_s"], result["tokens_per_cpu_s"]
            for name in chosen.candidates:
                ratios = [cell(clock["ratio"][name], ".2f") for clock in (wall, cpu)]
                rows.append([key, name, cell(wall[name]), cell(wall["nanogpt"]), *ratios])
    about = {"device": chosen.device, "cores": chosen.cores, "compile": chosen.device == "cuda"}
    readme_rows = readme(results, chosen.device, chosen.cores)
    report(chosen.out, {"settings": results, **about}, HEADER, rows, readme_rows)


if __name__ == "__main__":
    main()
