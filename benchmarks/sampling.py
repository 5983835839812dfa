"""Compare the speed of sampling with nanoGPT: the same shape of model, one thread, on the CPU.

The models have 6 layers, 6 heads, a width of 384 and a context of 256. They sample 500 characters
after a prompt of one character, with temperature 0.8 and top_k 200 as in nanoGPT's sample.py.
nanoGPT computes in fp32 on a CPU, and samples its texts one after the other, so its speed is the
speed of one stream. Our models are `gpt`, the same architecture with as many weights, and `modern`.
Each runs in fp32, bf16 and fp16, with one stream and with ten at once. (With `precision=auto`,
mingpt_ddp/inference/decoding.py chooses the precision.) The weights are random, because the speed
does not depend on them.

The algorithms differ after character 256. nanoGPT recomputes the last 256 characters for each new
one. We keep a window of 128 to 256 characters with a KV cache
(`mingpt_ddp.inference.generate.generate`).

Every measurement runs in a new process. The clock runs from the built model to the last character,
after a warm-up of a few characters, and includes packing the weights. Characters per second of CPU
time are the fairer figure if other processes compete for the cores. nanoGPT is not part of this
project. Name a checkout of it:

    python benchmarks/sampling.py --nanogpt ~/nanoGPT
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import alternate, cell, compare, in_fresh_process, parser, report, spread

SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 384}
CONTEXT, VOCABULARY = 256, 65
CHARACTERS, WARM_UP = 500, 20
TEMPERATURE, TOP_K = 0.8, 200
HEADER = [
    "model",
    "precision",
    "streams",
    "characters/s",
    "nanoGPT characters/s",
    "ratio, pair by pair",
    "by CPU time",
]
NANOGPT = "nanogpt"
Speed = tuple[float, float]  # characters per second of wall time and of CPU time


def clocked(work: Callable[[], Any], characters: int) -> Speed:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return characters / (time.perf_counter() - wall), characters / (time.process_time() - cpu)


def nanogpt(checkout: Path, device: str = "cpu", characters: int = CHARACTERS) -> Speed:
    """Sample one stream with nanoGPT. On a GPU it uses bf16 autocast, as its sample.py does."""
    sys.path.insert(0, str(checkout))
    import torch
    from model import GPT, GPTConfig

    torch.set_num_threads(1)
    config = GPTConfig(block_size=CONTEXT, vocab_size=VOCABULARY, dropout=0.0, bias=False, **SHAPE)
    model = GPT(config).to(device).eval()
    prompt = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def write(count: int) -> None:
        model.generate(prompt, count, temperature=TEMPERATURE, top_k=TOP_K).cpu()

    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        write(WARM_UP)
        return clocked(lambda: write(characters), characters)


def ours(
    name: str, precision: str, streams: int, device: str = "cpu", characters: int = CHARACTERS
) -> Speed:
    import torch

    from mingpt_ddp.inference.decoding import prepare
    from mingpt_ddp.inference.generate import SamplingParams, generate

    torch.set_num_threads(1)
    prompt = torch.zeros(streams, 1, dtype=torch.int64, device=device)

    def write(model: torch.nn.Module, characters: int) -> None:
        prepare(model, precision, streams)
        *_, last = generate(model, prompt, characters, SamplingParams(TEMPERATURE, TOP_K))
        last.cpu()

    write(built(name).to(device), WARM_UP)
    model = built(name).to(device)
    return clocked(lambda: write(model, characters), characters * streams)


def built(name: str) -> Any:
    from mingpt_ddp.config.keys import schema as groups
    from mingpt_ddp.models import build_model

    rest: dict[str, Any] = {"bias": False, "activation": "gelu"} if name == "gpt" else {}
    config_of = {"gpt": "GPTConfig", "modern": "ModernConfig"}
    config = getattr(groups, config_of[name])(
        name=name, architecture=name, dropout=0.0, **SHAPE, **rest
    )
    return build_model(config, VOCABULARY, CONTEXT)


def readme(results: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Write a row for each model and number of streams, with all precisions."""
    rows: dict[str, list[str]] = {}
    for result in results:
        streams = "one stream" if result["streams"] == 1 else f"{result['streams']} streams at once"
        what = (
            "characters sampled against nanoGPT (fp32), by CPU time, one thread, 6 layers, 384 wide"
        )
        figures = rows.setdefault(f"{what}: `{result['model']}`, {streams}", [])
        figures.append(f"{cell(result['ratio_cpu'], '.1f')} times in {result['precision']}")
    return [(what, ", ".join(figures)) for what, figures in rows.items()]


def main() -> None:
    options = parser(__doc__, "sampling")
    options.add_argument(
        "--nanogpt", type=Path, required=True, metavar="DIR", help="a checkout of nanoGPT"
    )
    options.add_argument(
        "--models", nargs="+", choices=["gpt", "modern"], default=["gpt", "modern"]
    )
    options.add_argument("--streams", nargs="+", type=int, default=[1, 10])
    options.add_argument(
        "--repetitions", type=int, default=5, help="runs of each candidate (default: %(default)s)"
    )
    chosen = options.parse_args()
    if not (chosen.nanogpt / "model.py").is_file():
        sys.exit(f"--nanogpt {chosen.nanogpt} is not a checkout of nanoGPT: it has no model.py")
    keys = [
        (m, p, s) for s in chosen.streams for m in chosen.models for p in ("fp32", "bf16", "fp16")
    ]
    candidates: dict[str, Callable[[], Speed]] = {
        NANOGPT: partial(in_fresh_process, nanogpt, chosen.nanogpt.resolve())
    }
    candidates |= {
        f"{m}, {p}, {s} streams": partial(in_fresh_process, ours, m, p, s) for m, p, s in keys
    }
    measured = alternate("characters/s, characters/CPU s", candidates, chosen.repetitions)
    wall = {name: [per_s for per_s, _ in pairs] for name, pairs in measured.items()}
    cpu = {name: [per_cpu_s for _, per_cpu_s in pairs] for name, pairs in measured.items()}
    results, rows = [], []
    for (model, precision, streams), name in zip(keys, list(candidates)[1:], strict=True):
        result = {
            "model": model,
            "precision": precision,
            "streams": streams,
            "per_s": spread(wall[name]),
        }
        result |= {"per_cpu_s": spread(cpu[name]), "ratio": compare(wall[name], wall[NANOGPT])}
        result["ratio_cpu"] = compare(cpu[name], cpu[NANOGPT])
        results.append(result)
        ratios = [cell(result[kind], ".1f") for kind in ("ratio", "ratio_cpu")]
        rows.append(
            [
                model,
                precision,
                str(streams),
                cell(result["per_s"]),
                cell(spread(wall[NANOGPT]), ".1f"),
                *ratios,
            ]
        )
    theirs = {"per_s": spread(wall[NANOGPT]), "per_cpu_s": spread(cpu[NANOGPT])}
    setting = SHAPE | {"context": CONTEXT, "characters": CHARACTERS, "threads": 1}
    report(
        chosen.out,
        {"setting": setting, NANOGPT: theirs, "ours": results},
        HEADER,
        rows,
        readme(results),
    )


if __name__ == "__main__":
    main()
