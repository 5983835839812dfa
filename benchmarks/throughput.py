"""Training tokens/s of this project against nanoGPT: the same shapes, one thread, eager, fp32, on the CPU.

Both run as their users run them, each time in a fresh process: `main.py` with its loader, clipping, metering and
TensorBoard, and nanoGPT's own `train.py` from a temporary copy of its files. Both have AdamW, gradients clipped at
1.0, no dropout, no biases, and report every few steps. One stopwatch serves both: this script notes the time, and the
CPU time of the process, when the report of a step arrives, and ends the process at the last step it needs. The start
and the warm-up lie before the first stamp; neither evaluates or saves in the timed span. Tokens per second of CPU
time are the fairer figure where others compete for the cores (Linux tells it; elsewhere the wall clock stands in).
nanoGPT is not part of this project; give its checkout:

    python benchmarks/throughput.py --nanogpt ~/nanoGPT
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, alternate, cell, compare, corpus_path, environment, parser, report, spread

HEADER = ["setting", "mingpt_ddp tokens/s", "nanoGPT tokens/s", "ratio, pair by pair", "ratio by CPU time"]
FOREVER = 1_000_000  # steps; no run gets there


@dataclass(frozen=True)
class Setting:
    n_layer: int
    n_head: int
    n_embd: int
    context: int
    batch: int
    warmup: int  # steps before the first stamp
    timed: int  # steps between the first stamp and the last
    log_every: int


SETTINGS = {
    "small": Setting(4, 4, 128, context=64, batch=12, warmup=50, timed=300, log_every=10),
    "mid": Setting(6, 6, 384, context=256, batch=16, warmup=2, timed=8, log_every=1),
}


def cpu_seconds(process: int) -> float:
    """User and system time of a running process."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.perf_counter()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tokens_per_s(command: list[str], cwd: Path, pattern: str, setting: Setting) -> tuple[int, int]:
    """Run a trainer until it has reported the last step of the timed span: tokens per second, and per CPU second."""
    stamps: dict[int, tuple[float, float]] = {}
    tail: list[str] = []
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(threads=1), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            now = time.perf_counter(), cpu_seconds(process.pid)
            tail = [*tail[-20:], line]
            found = re.match(pattern, line)
            if found and int(found[1]) >= setting.warmup:
                stamps[int(found[1])] = now
                if max(stamps) - min(stamps) >= setting.timed:
                    break
        else:
            raise RuntimeError(f"{command[1]} ended before its step {setting.warmup + setting.timed}:\n{''.join(tail)}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    first, last = min(stamps), max(stamps)
    tokens = (last - first) * setting.batch * setting.context
    wall, cpu = (after - before for before, after in zip(stamps[first], stamps[last], strict=True))
    return round(tokens / wall), round(tokens / cpu)


def ours(setting: Setting, text: Path, scratch: Path) -> tuple[int, int]:
    shape = {"model.n_layer": setting.n_layer, "model.n_head": setting.n_head, "model.n_embd": setting.n_embd}
    shape |= {"data.block_size": setting.context, "trainer.batch_size": setting.batch}
    shape |= {"trainer.log_every": setting.log_every, "trainer.max_steps": FOREVER}
    overrides = ["model=gpt_micro", "model.dropout=0.0", "model.bias=false", "optimizer=adamw", "data=shakespeare"]
    overrides += ["trainer.device=cpu", "trainer.precision=fp32", "trainer.compile=false", "trainer.grad_norm_clip=1.0"]
    overrides += ["trainer.max_epochs=null", "trainer.eval_every=null", "snapshot.every_steps=null", "run.resume=never"]
    overrides += [f"data.path='{text}'", f"data.cache_dir='{scratch / 'cache'}'", f"run.root='{scratch / 'runs'}'"]
    overrides += [f"{key}={value}" for key, value in shape.items()]
    command = [sys.executable, str(ROOT / "main.py"), *overrides]
    return tokens_per_s(command, scratch, r"step (\d+)/", setting)


def nanogpt(setting: Setting, copy: Path) -> tuple[int, int]:
    shape = {"n_layer": setting.n_layer, "n_head": setting.n_head, "n_embd": setting.n_embd}
    shape |= {"block_size": setting.context, "batch_size": setting.batch, "log_interval": setting.log_every}
    options: dict[str, Any] = shape | {"eval_iters": 1, "eval_interval": FOREVER, "max_iters": FOREVER}
    options |= {"device": "cpu", "dtype": "float32", "compile": False, "dropout": 0.0, "grad_clip": 1.0}
    flags = [f"--{key}={value}" for key, value in options.items()]
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *flags]
    return tokens_per_s(command, copy, r"iter (\d+):", setting)


def copy_with_data(checkout: Path, text: Path, copy: Path) -> Path:
    """The checkout's code in a directory of its own, with the text in the form that it reads."""
    if not (checkout / "train.py").is_file() or not (checkout / "config").is_dir():
        sys.exit(f"--nanogpt {checkout} is not a checkout of nanoGPT: it has no train.py or no config/")
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "assets", "*.ipynb", "*.bin", "out*"))
    characters = text.read_text(encoding="utf-8")
    vocabulary = {character: token for token, character in enumerate(sorted(set(characters)))}
    tokens = np.array([vocabulary[character] for character in characters], dtype=np.uint16)
    boundary = int(0.9 * len(tokens))
    data = copy / "data" / "shakespeare_char"
    data.mkdir(parents=True, exist_ok=True)
    tokens[:boundary].tofile(data / "train.bin")
    tokens[boundary:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(vocabulary)}))
    return copy


def readme(settings: dict[str, Any]) -> list[tuple[str, str]]:
    what = "training speed against nanoGPT by CPU time, one thread, eager fp32"
    return [
        (
            "{what}, {n_layer} layers, {n_embd} wide, context {context}".format(what=what, **result["setting"]),
            cell(result["tokens_per_cpu_s"]["ratio"], ".2f"),
        )
        for result in settings.values()
    ]


def main() -> None:
    options = parser(__doc__, "throughput")
    options.add_argument("--nanogpt", type=Path, required=True, metavar="DIR", help="a checkout of nanoGPT")
    options.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options.add_argument("--repetitions", type=int, default=5, help="pairs of runs (default: %(default)s)")
    chosen = options.parse_args()
    text = corpus_path()
    results: dict[str, Any] = {}
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="throughput-") as directory:
        scratch = Path(directory)
        copy = copy_with_data(chosen.nanogpt, text, scratch / "nanogpt")
        for name in chosen.settings:
            setting = SETTINGS[name]
            candidates = {
                "mingpt_ddp": partial(ours, setting, text, scratch),
                "nanogpt": partial(nanogpt, setting, copy),
            }
            measured = alternate(f"{name}, tokens/s and per CPU second", candidates, chosen.repetitions)
            results[name] = {"setting": asdict(setting)}
            for clock, kind in enumerate(("tokens_per_s", "tokens_per_cpu_s")):
                values = {candidate: [value[clock] for value in pairs] for candidate, pairs in measured.items()}
                results[name][kind] = {candidate: spread(speeds) for candidate, speeds in values.items()}
                results[name][kind]["ratio"] = compare(values["mingpt_ddp"], values["nanogpt"])
            wall, cpu = results[name]["tokens_per_s"], results[name]["tokens_per_cpu_s"]
            ratios = [cell(clock["ratio"], ".2f") for clock in (wall, cpu)]
            rows.append([name, cell(wall["mingpt_ddp"]), cell(wall["nanogpt"]), *ratios])
    about = {"threads": 1, "precision": "fp32", "compile": False}
    report(chosen.out, {"settings": results, **about}, HEADER, rows, readme(results))


if __name__ == "__main__":
    main()
