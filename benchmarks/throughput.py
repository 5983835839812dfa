"""Compare the training speed in tokens/s with nanoGPT, at the same shapes, on a CPU or a GPU.

On a CPU, one core is used, or as many as --cores says. Our candidates are `gpt`, which has
nanoGPT's architecture and optimizer, and `modern`, the fast recipe with Muon. Both use
`trainer.precision=auto`, which is bf16 if the CPU is fast at it. On a CPU, `gpt` is also measured
in fp32 like nanoGPT, whose train.py has no autocast on a CPU, whatever --dtype says. With
--device=cuda all candidates are compiled and in bf16.

Every measurement runs the user's command in a new process: `main.py` with its loader, clipping,
metering and TensorBoard, or nanoGPT's own `train.py` from a temporary copy of its files. All clip
gradients at 1.0, have no dropout and no biases, and log every few steps. The same stopwatch reads
the wall time and the CPU time of each process when the log line of a step arrives. Startup and
warm-up come before the first reading. No candidate evaluates or saves in the timed span. Tokens per
second of CPU time are the fairer figure if other processes compete for the cores. nanoGPT is not
part of this project. Name a checkout of it:

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
    """Measure the tokens per second of wall time and of CPU time."""
    taken = pace(command, cwd, pattern, setting.span, threads)
    return round(setting.tokens / taken.wall_s), round(setting.tokens / taken.cpu_s)


def measure(
    setting: Setting, chosen: argparse.Namespace, text: Path, scratch: Path
) -> dict[str, Any]:
    names, device = chosen.candidates, chosen.device
    commands = {
        name: ours(setting, text, scratch, CANDIDATES[device][name], device) for name in names
    }
    # We use a process with one thread on each core.
    if chosen.cores > 1:
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
    """Write a row for each shape, with all candidates."""
    clock, how = "tokens_per_s", "nanoGPT (compiled, bf16)"
    if device == "cpu":
        how = f"nanoGPT (eager, fp32), {cores} cores"
    # With several cores, CPU time would favor a program whose cores wait.
    if device == "cpu" and cores == 1:
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
        "--settings",
        nargs="+",
        choices=SETTINGS,
        help="shapes to measure (default: small and mid on a CPU, char and gpt2 on a GPU)",
    )
    options.add_argument(
        "--candidates",
        nargs="+",
        choices=WHAT,
        help="our candidates (default: all that the device can run)",
    )
    options.add_argument("--device", choices=ON, default="cpu")
    options.add_argument(
        "--cores",
        type=int,
        default=1,
        help="number of nanoGPT's threads and of our processes (default: 1)",
    )
    options.add_argument(
        "--repetitions", type=int, default=5, help="runs of each candidate (default: %(default)s)"
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
