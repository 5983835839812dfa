"""Training tokens/s of this project and its peers on one CPU thread.

The peers are litgpt, transformers, lightning and nanoGPT. The same shapes, batch and text for all,
gradients clipped at 1.0, no dropout; each with its own training loop in its default precision on a
CPU: litgpt's `pretrain` (compiled, bf16-mixed), transformers' Trainer with GPT2LMHeadModel (eager,
fp32), lightning's Trainer with a GPT of torch's own layers (eager, fp32; Lightning brings no
model), nanoGPT's train.py (eager, fp32). Ours are `gpt` (eager, fp32) and `modern` (eager, Muon,
`trainer.precision=auto`). They alternate, each in a new process; the same stopwatch reads the
clocks when the log line of a step arrives, which excludes startup, compilation and warm-up.

The packages are installed by pip from its configured index, each into its own environment, with the
version of torch that runs this script. The environments are kept, 1 GB each with a CPU build of
torch:

    python benchmarks/peers.py --nanogpt ~/nanoGPT
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import ROOT, alternate, cell, compare, corpus_path, log, parser, report, spread
from stopwatch import Pace, pace
from trainers import (
    MODERN,
    NANOGPT,
    ON,
    OURS,
    PLAIN_FP32,
    SETTINGS,
    Setting,
    copy_with_data,
    nanogpt,
    ours,
)

HEADER = ["setting", "trainer", "tokens/s", "tokens/CPU s", "ours, modern, over it", "by CPU time"]
PACKAGES = {
    "litgpt": ["litgpt==0.5.13"],
    "transformers": ["transformers==5.23.0", "accelerate==1.15.0"],
    "lightning": ["lightning==2.6.6"],
}
STEP = r"^(?:step|Epoch .*\| iter) (\d+)"  # litgpt has its own log format
INSTALL_S = 1800


def python_of(peer: str, environments: Path) -> Path:
    """Return the interpreter of the peer's environment.

    Create the environment if it is missing or has other packages.
    """
    wanted = [f"torch=={version('torch')}", "numpy", *PACKAGES[peer]]
    home = environments / peer
    python, record = home / "bin" / "python", home / "packages.txt"
    if not record.is_file() or record.read_text().splitlines() != wanted:
        log(f"installing {', '.join(wanted)} into {home}")
        record.unlink(missing_ok=True)
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", home], check=True, timeout=INSTALL_S
        )
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *wanted], check=True, timeout=INSTALL_S
        )
        record.write_text("\n".join(wanted) + "\n")
    return python


def peer_command(peer: str, python: Path, setting: Setting, text: Path, out: Path) -> list[str]:
    given = asdict(setting) | {"text": text, "out": out}
    fields = ("text", "out", "n_layer", "n_head", "n_embd", "context", "batch", "log_every")
    script = ROOT / "benchmarks" / "peers" / f"run_{peer}.py"
    return [str(python), str(script), *(f"--{field}={given[field]}" for field in fields)]


def run_peer(peer: str, python: Path, setting: Setting, text: Path) -> Pace:
    with tempfile.TemporaryDirectory(prefix=f"{peer}-") as out:
        return pace(
            peer_command(peer, python, setting, text, Path(out)), Path(out), STEP, setting.span
        )


def trainers(
    chosen: argparse.Namespace, setting: Setting, scratch: Path
) -> dict[str, Callable[[], Pace]]:
    text = corpus_path()
    made: dict[str, Callable[[], Pace]] = {
        name: partial(pace, ours(setting, text, scratch, recipe), scratch, OURS, setting.span)
        for name, recipe in {"ours, modern": MODERN, "ours, gpt": PLAIN_FP32}.items()
    }
    if chosen.nanogpt:
        copy = copy_with_data(chosen.nanogpt, text, scratch / f"nanogpt-{setting.n_layer}")
        made["nanoGPT"] = partial(pace, nanogpt(setting), copy, NANOGPT, setting.span)
    for peer in chosen.peers:
        made[peer] = partial(
            run_peer, peer, python_of(peer, chosen.environments.resolve()), setting, text
        )
    return made


def figures(setting: Setting, paces: dict[str, list[Pace]]) -> dict[str, Any]:
    speeds = {
        name: {
            clock: [setting.tokens / getattr(run, f"{clock}_s") for run in runs]
            for clock in ("wall", "cpu")
        }
        for name, runs in paces.items()
    }
    first = next(iter(speeds.values()))
    made: dict[str, Any] = {"setting": asdict(setting), "trainers": {}}
    for name, clocks in speeds.items():
        entry = {f"tokens_per_{clock}_s": spread(values) for clock, values in clocks.items()}
        entry |= {
            f"{clock}_ratio": compare(first[clock], values) for clock, values in clocks.items()
        }
        made["trainers"][name] = entry
    return made


def readme(settings: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for result in settings.values():
        shape = "{n_layer} layers, {n_embd} wide, context {context}".format(**result["setting"])
        ratios = [
            (name, entry["cpu_ratio"])
            for name, entry in result["trainers"].items()
            if not name.startswith("ours")
        ]
        what = (
            f"training tokens of `modern`, by CPU time, one thread, {shape}, against "
            f"{', '.join(n for n, _ in ratios)}"
        )
        rows.append((what, ", ".join(f"{ratio['median']:.2f}" for _, ratio in ratios) + " times"))
    return rows


def command_line() -> argparse.Namespace:
    options = parser(__doc__, "peers")
    options.add_argument(
        "--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT (default: skip it)"
    )
    options.add_argument("--peers", nargs="*", choices=PACKAGES, default=list(PACKAGES))
    options.add_argument("--settings", nargs="+", choices=SETTINGS, default=ON["cpu"])
    options.add_argument(
        "--repetitions", type=int, default=3, help="of each (default: %(default)s)"
    )
    where = ROOT / "data" / "cache" / "peers"
    options.add_argument(
        "--environments", type=Path, default=where, help="of the peers (default: %(default)s)"
    )
    return options.parse_args()


def main() -> None:
    chosen = command_line()
    results: dict[str, Any] = {}
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        for key in chosen.settings:
            setting = SETTINGS[key]
            paces = alternate(
                f"{key}, a step", trainers(chosen, setting, Path(scratch)), chosen.repetitions
            )
            results[key] = figures(setting, paces)
            for name, entry in results[key]["trainers"].items():
                speeds = [cell(entry[f"tokens_per_{clock}_s"]) for clock in ("wall", "cpu")]
                rows.append(
                    [
                        key,
                        name,
                        *speeds,
                        *(cell(entry[f"{clock}_ratio"], ".2f") for clock in ("wall", "cpu")),
                    ]
                )
    versions = {peer: PACKAGES[peer] for peer in chosen.peers}
    report(
        chosen.out,
        {"settings": results, "packages": versions, "threads": 1},
        HEADER,
        rows,
        readme(results),
    )


if __name__ == "__main__":
    main()
