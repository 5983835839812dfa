"""All measurements that need a GPU: six parts of at most 8 minutes each.

1  the tests marked gpu
2  the same bits after kill -9 of a worker, with trainer.compile=true and
   trainer.deterministic=true, and their cost
3  tokens/s and utilization at 10.7M parameters (nanoGPT's shakespeare_char) and in GPT-2's shape
   (12 layers, 768 wide, context 1024: 124M parameters with its own vocabulary, 86M with the 65
   characters that are used here), against nanoGPT, the measured rate of matrix products and the
   vendor's bf16 peak
4  CUDA graphs, sampling one stream and ten, the stall of a snapshot of 124M parameters against
   torch.save
5  time to a validation loss of 1.47 on tinyshakespeare, ours and nanoGPT's
6  experiment=shakespeare_char_best on two seeds

A part prints a table, writes gpu_<part>.json, and lists what it skipped for lack of time. Compiled
code is cached in the same directory, so that a repeated part has more time for repetitions. nanoGPT
is not part of this project: its own train.py and model.py run from a temporary copy of the checkout
that --nanogpt names. Nothing here needs a network.

    export MINGPT_SHAKESPEARE=input.txt
    for part in 1 2 3 4 5 6; do python benchmarks/gpu.py --part $part --nanogpt ~/nanoGPT; done
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def missing_packages() -> list[str]:
    """Return the packages that setup.cfg requires, and pytest, that are not installed."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = [*setup["options"]["install_requires"].split("\n"), "pytest"]
    names = [re.split(r"[<>=~!\[; ]", line.strip())[0] for line in wanted if line.strip()]
    return [name for name in names if not is_installed(name)]


def is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def command_line() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--part", type=int, required=True, choices=range(1, 7))
    made.add_argument(
        "--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT (default: skip it)"
    )
    made.add_argument(
        "--out",
        type=Path,
        default=ROOT / "outputs" / "gpu",
        help="directory (default: %(default)s)",
    )
    made.add_argument(
        "--minutes", type=float, default=8.0, help="of this part, at most (default: %(default)s)"
    )
    made.add_argument(
        "--repetitions",
        type=int,
        default=5,
        help="of each measurement, at most (default: %(default)s)",
    )
    made.add_argument(
        "--wheels",
        default="WHEELS",
        metavar="DIR",
        help="directory of wheels, for the message on missing packages",
    )
    made.add_argument(
        "--dry-run", action="store_true", help="smoke test: tiny sizes on the CPU, one repetition"
    )
    return made.parse_args()


def refuse(chosen: argparse.Namespace) -> None:
    """Exit with one line, before anything is written, if a requirement is missing."""
    if missing := " ".join(missing_packages()):
        sys.exit(
            f"missing: {missing}; python -m pip install --no-index --find-links "
            f"{chosen.wheels} {missing}"
        )
    if chosen.nanogpt and not all(
        (chosen.nanogpt / name).is_file() for name in ("train.py", "model.py")
    ):
        sys.exit(
            f"--nanogpt {chosen.nanogpt} is not a checkout of nanoGPT: it has no train.py or "
            "no model.py"
        )


def main() -> None:
    chosen, ends_at = command_line(), time.monotonic()
    ends_at += 60 * chosen.minutes
    refuse(chosen)
    # These import numpy.
    from common import in_fresh_process, report
    from gpu_parts import PARTS
    from gpu_runs import Part, device_facts, text_or_random

    title, measure = PARTS[chosen.part]
    out, dry = chosen.out.resolve(), chosen.dry_run
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(out / "compiled"))
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory:
        text, is_shakespeare = text_or_random(Path(directory), 40_000 if dry else 1_000_000)
        part = Part(
            dry, Path(directory), text, chosen.nanogpt, 1 if dry else chosen.repetitions, ends_at
        )
        find_facts = partial(in_fresh_process, device_facts, part.device, limit_s=part.left_s())
        part.facts = part.attempt("the device", find_facts) or {}
        if not part.facts:
            sys.exit(f"{(part.failures or part.notes)[0]}; --dry-run needs no GPU")
        figures, header, rows = measure(part)
    facts = part.facts
    results: dict[str, Any] = {
        "part": chosen.part,
        "title": title,
        "dry_run": dry,
        "facts": facts,
        "figures": figures,
    }
    results |= {"text": "tinyshakespeare" if is_shakespeare else "random characters"}
    results |= {"left_out": part.notes, "failures": part.failures}
    print(f"{title}: {facts['device']}, {facts['memory_gib']} GiB, {facts['precision']}\n")
    readme = [
        (
            f"{title}: {row[0]}",
            ", ".join(f"{c} {h}" for h, c in zip(header[1:], row[1:], strict=True)),
        )
        for row in rows
    ]
    report(out / f"gpu_{chosen.part}.json", results, header, rows, [] if dry else readme)
    for kind, lines in (("skipped", part.notes), ("FAILED", part.failures)):
        for line in lines:
            print(f"\n{kind}: {line}")
    sys.exit(1 if part.failures else 0)


if __name__ == "__main__":
    main()
