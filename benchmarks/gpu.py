"""Run all measurements that need a GPU. They come in parts, which later calls can continue.

0  find problems first: where the host waits for the GPU in a step, an evaluation, staging, decoding
   and logging; a profiled run; the peak of the memory, compared to what `python -m mingpt_ddp plan`
   expects
1  run the tests marked gpu: quick ones, then bf16 in two parts, then the others
2  compare the bits of runs with and without kill -9 of a worker, with trainer.compile=true and
   trainer.deterministic=true, and measure what these two cost
3  measure tokens/s and utilization at 10.7M parameters (nanoGPT's shakespeare_char) and in GPT-2's
   shape (12 layers, 768 wide, context 1024: 124M parameters with its own vocabulary, 86M with the
   65 characters that are used here), compared to nanoGPT, to the measured rate of matrix products
   and to the vendor's bf16 peak
4  measure CUDA graphs, sampling with one stream and with ten, and the stall of a snapshot of 124M
   parameters, compared to torch.save
5  measure the time to a validation loss of 1.47 on tinyshakespeare, ours and nanoGPT's
6  train experiment=shakespeare_char_best with two seeds
7  compare the package with other ways that may be faster: host memory, flags, broadcasts, DDP's
   timer, all-reduces and all-gathers, cuDNN attention, a padded vocabulary, trainer.compile
8  run ranks on one GPU: two over gloo, one of which is killed, and one over NCCL in every strategy

A part prints a table, writes gpu_<part>.json, and lists the measurements that it skipped for lack
of time. Each finished measurement is kept in gpu_<part>.kept.json. Call the part again for skipped
and failed measurements and for more repetitions, or with --fresh to measure everything again.
Compiled code is cached in the same directory. nanoGPT is not part of this project. Its own train.py
and model.py run from a temporary copy of the checkout that --nanogpt names. Nothing here needs a
network.

    export MINGPT_SHAKESPEARE=input.txt
    for parts in "0 1" "2 1" "3 7" "4 8" 5; do python benchmarks/gpu.py --part $parts; done
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = range(9)
sys.path.append(str(ROOT / "scripts"))
from download_wheels import name_of, requirements  # noqa: E402


def missing_packages() -> list[str]:
    """List the packages that are not installed, among torch and the packages of `make wheels`."""
    names = ["torch", *map(name_of, requirements())]
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
    made.add_argument(
        "--part",
        type=int,
        nargs="+",
        required=True,
        choices=PARTS,
        help="numbers of parts, run in this order; each gets an equal share of the remaining time",
    )
    made.add_argument(
        "--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT (default: skip nanoGPT)"
    )
    made.add_argument(
        "--out",
        type=Path,
        default=ROOT / "outputs" / "gpu",
        help="directory for the results (default: %(default)s)",
    )
    made.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="longest duration of this call (default: %(default)s)",
    )
    made.add_argument(
        "--repetitions",
        type=int,
        default=5,
        help="largest number of repetitions of each measurement (default: %(default)s)",
    )
    made.add_argument(
        "--wheels",
        default="wheels",
        metavar="DIR",
        help="directory of `make wheels`, which the message about missing packages names",
    )
    made.add_argument(
        "--fresh",
        action="store_true",
        help="forget the measurements of earlier calls of these parts",
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
    # Import these only now, because they need numpy.
    from common import in_fresh_process
    from gpu_runs import device_facts

    out = chosen.out.resolve()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(out / "compiled"))
    try:
        device = "cpu" if chosen.dry_run else "cuda"
        facts = in_fresh_process(device_facts, device, limit_s=ends_at - time.monotonic())
    except Exception as error:
        sys.exit(f"{str(error).strip()[-2000:]}; --dry-run needs no GPU")
    has_failed = False
    for done, number in enumerate(chosen.part):
        now = time.monotonic()
        share_s = (ends_at - now) / (len(chosen.part) - done)
        has_failed |= run_part(number, chosen, out, facts, now + share_s)
    sys.exit(1 if has_failed else 0)


def run_part(
    number: int, chosen: argparse.Namespace, out: Path, facts: dict[str, Any], ends_at: float
) -> bool:
    """Measure a part, then print and write its results. Return True if something failed."""
    from common import report
    from gpu_kept import Kept
    from gpu_parts import PARTS
    from gpu_runs import Part, text_or_random

    title, measure = PARTS[number]
    dry = chosen.dry_run
    kept_at = out / f"gpu_{number}.kept.json"
    runs = out / f"runs_{number}"
    if chosen.fresh:
        kept_at.unlink(missing_ok=True)
        shutil.rmtree(runs, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory:
        text, is_shakespeare = text_or_random(Path(directory), 40_000 if dry else 1_000_000)
        name = "tinyshakespeare" if is_shakespeare else "random characters"
        about = {"dry_run": dry, "text": name, "device": facts["device"], "torch": facts["torch"]}
        part = Part(
            dry,
            Path(directory),
            text,
            chosen.nanogpt,
            1 if dry else chosen.repetitions,
            ends_at,
            facts,
            Kept(kept_at, about),
            runs,
        )
        figures, header, rows = measure(part)
    results: dict[str, Any] = {"part": number, "title": title, "dry_run": dry, "facts": facts}
    results |= {"figures": figures, "text": name}
    results |= {"left_out": part.notes, "failures": part.failures}
    print(f"{title}: {facts['device']}, {facts['memory_gib']} GiB, {facts['precision']}\n")
    readme = [
        (
            f"{title}: {row[0]}",
            ", ".join(
                f"{figure} {unit}"
                for unit, figure in zip(header[1:], row[1:], strict=True)
                if figure != "-"
            ),
        )
        for row in rows
    ]
    report(out / f"gpu_{number}.json", results, header, rows, [] if dry else readme)
    for kind, lines in (("skipped", part.notes), ("FAILED", part.failures)):
        for line in lines:
            print(f"\n{kind}: {line}")
    print(flush=True)
    return bool(part.failures)


if __name__ == "__main__":
    main()
