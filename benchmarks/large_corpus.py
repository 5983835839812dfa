"""Measure the memory and the speed of encoding a large text, and of fetching batches from it.

The script writes a UTF-8 text of the given size into a temporary directory. The text is mostly
ASCII, but has characters of two, three and four bytes, which the reader's chunks split at every
possible offset. Then new processes with the imports of main.py

1. do nothing else, which shows the memory of the imports alone,
2. encode the text with mingpt_ddp.data.prepare.prepare_all,
3. find it in the cache, like every later start,
4. fetch batches from it: the first one, which shuffles the epoch's windows, and then many.

Memory is the process's ru_maxrss, with nothing subtracted. It includes resident pages of mapped
files, which the kernel can reclaim. The exit code is 1 if encoding takes more memory than the
limit. The script needs three times the size of the text on the disk.

    python benchmarks/large_corpus.py --gigabytes 2
    # BPE needs another limit: learning 200,000 words takes 490 MB, even for 10 MB of text
    python benchmarks/large_corpus.py --gigabytes 0.5 --tokenizer bpe --limit 1000 \\
        --out benchmarks/results/large_corpus_bpe.json
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import in_fresh_process, log, parser, report

LIMIT = 500  # MB, of 10^6 bytes
BATCHES, BATCH, CONTEXT = 2000, 64, 256
HEADER = ["process", "seconds", "speed", "peak resident memory, MB"]


def write_text(path: Path, n_bytes: int) -> None:
    """Write random words. One block of them is repeated, each time rotated at random."""
    generator = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    # Code points whose UTF-8 has 2, 2, 3 and 4 bytes.
    others = [(0xE0, 0xFF), (0x430, 0x450), (0x4E00, 0x5000), (0x1F600, 0x1F640)]
    alphabets = [letters] * 12 + ["".join(map(chr, range(*span))) for span in others]
    words = (
        "".join(generator.choices(generator.choice(alphabets), k=generator.randint(1, 9)))
        for _ in range(200_000)
    )
    block = " ".join(words)
    written = 0
    with open(path, "wb") as file:
        while written < n_bytes:
            at = generator.randrange(len(block))
            written += file.write((block[at:] + block[:at]).encode())


def peak_mb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


def own_mb() -> float:
    """Return the anonymous resident memory of this process, or 0 if /proc does not show it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return round(int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6, 1)


def data_config(text: Path, tokenizer: str) -> Any:
    import mingpt_ddp.training.run  # noqa: F401  (torch and the other imports of a training process)
    from mingpt_ddp.config.keys.components import DataConfig

    return DataConfig(
        name="large",
        path=str(text),
        sha256=None,
        block_size=CONTEXT,
        stride=None,
        train_split=0.9,
        truncate=1.0,
        cache_dir=str(text.parent / "cache"),
        tokenizer=tokenizer,
    )


def imports(text: Path, tokenizer: str) -> dict[str, float]:
    begin = time.perf_counter()
    data_config(text, tokenizer)
    return {"seconds": time.perf_counter() - begin, "peak_mb": peak_mb()}


def encode(text: Path, tokenizer: str) -> dict[str, float]:
    config = data_config(text, tokenizer)
    from mingpt_ddp.data.prepare import prepare_all
    from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state

    begin = time.perf_counter()
    encoded = prepare_all(config)[""]
    seconds = time.perf_counter() - begin
    speed = text.stat().st_size / 1e6 / seconds
    figures = {
        "tokens": encoded.length,
        "distinct": tokenizer_from_state(encoded.tokenizer).vocab_size,
    }
    return {"seconds": seconds, "mb_per_s": speed, "peak_mb": peak_mb(), **figures}


def fetch(text: Path, tokenizer: str) -> dict[str, float]:
    config = data_config(text, tokenizer)
    from mingpt_ddp.data.dataloader import BatchPlan, TokenLoader
    from mingpt_ddp.data.dataset import TextDataset
    from mingpt_ddp.data.prepare import prepare_all

    loader = TokenLoader(
        TextDataset(prepare_all(config)[""], config).train, CONTEXT, config.stride, BATCH, seed=1
    )
    plan = BatchPlan(BATCH, BATCH, world_size=1)
    begin = time.perf_counter()
    loader.get_batch(1, plan, rank=0)
    first = time.perf_counter()
    after_first = peak_mb()
    for step in range(2, BATCHES + 2):
        loader.get_batch(step, plan, rank=0)
    seconds = time.perf_counter() - first
    figures = {
        "first_batch_s": first - begin,
        "first_batch_peak_mb": after_first,
        "windows": loader.windows_per_epoch,
    }
    figures["own_mb_at_end"] = own_mb()
    return {"seconds": seconds, "batches_per_s": BATCHES / seconds, "peak_mb": peak_mb(), **figures}


def readme(results: dict[str, Any]) -> list[tuple[str, str]]:
    tokenizer = "" if results["tokenizer"] == "char" else f" by {results['tokenizer']}"
    text = f"a text of {results['gigabytes']:g} GB{tokenizer}"
    return [
        (f"peak memory while encoding {text}", f"{results['encode']['peak_mb']:.0f} MB"),
        (f"seconds to find {text} in the cache", f"{results['cached']['seconds']:.3f} s"),
    ]


def main() -> None:
    options = parser(__doc__, "large_corpus")
    options.add_argument(
        "--gigabytes", type=float, default=2.0, help="size of the text (default: %(default)s)"
    )
    options.add_argument(
        "--tokenizer", default="char", help="char, byte or bpe (default: %(default)s)"
    )
    options.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        help="largest memory while encoding, in MB (default: %(default)s)",
    )
    options.add_argument(
        "--scratch", type=Path, help="parent of the temporary directory (default: the system's)"
    )
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="large-corpus-", dir=chosen.scratch) as directory:
        text = Path(directory) / "text.txt"
        log(f"writing {chosen.gigabytes} GB")
        write_text(text, int(chosen.gigabytes * 1e9))
        measured: dict[str, dict[str, float]] = {}
        for name, work in {
            "imports": imports,
            "encode": encode,
            "cached": encode,
            "fetch": fetch,
        }.items():
            measured[name] = in_fresh_process(work, text, chosen.tokenizer)
            log(f"{name}: {measured[name]}")
    speeds = {
        "imports": "",
        "fetch": f"{measured['fetch']['batches_per_s']:,.0f} batches of {BATCH} x {CONTEXT} per s",
    }
    speeds |= {name: f"{measured[name]['mb_per_s']:,.0f} MB/s" for name in ("encode", "cached")}
    rows = [
        [name, f"{m['seconds']:.3g}", speeds[name], f"{m['peak_mb']:,.0f}"]
        for name, m in measured.items()
    ]
    first = measured["fetch"]
    rows.insert(
        3,
        [
            "first batch",
            f"{first['first_batch_s']:.1f}",
            "",
            f"{first['first_batch_peak_mb']:,.0f}",
        ],
    )
    rows.append(
        ["fetch, at its end, without mapped files", "", "", f"{first['own_mb_at_end']:,.0f}"]
    )
    figures = {
        name: {key: round(value, 3) for key, value in m.items()} for name, m in measured.items()
    }
    results = {
        "gigabytes": chosen.gigabytes,
        "tokenizer": chosen.tokenizer,
        "limit_mb": chosen.limit,
        **figures,
    }
    report(chosen.out, results, HEADER, rows, readme(results))
    if measured["encode"]["peak_mb"] > chosen.limit:
        sys.exit(
            f"encoding took {measured['encode']['peak_mb']:,.0f} MB, more than "
            f"{chosen.limit:,.0f} MB"
        )


if __name__ == "__main__":
    main()
