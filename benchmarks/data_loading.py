"""Batches/s of this project's loader against a minGPT-style dataset, in one process.

The baseline is the usual character dataset: a text as a Python string, a dictionary from characters
to integers, one item per window as two tensors, and torch's DataLoader with a RandomSampler. Both
deliver the batches of a one-rank training step, x and y (batch, context) of int64, from the same
90% of tinyshakespeare, one thread, no workers. Work per process (reading, encoding) is not timed;
work per epoch is. The clock is the process's CPU time, which excludes other load on the machine.
The share of a training step is the loader's time for a batch over the CPU time of a whole step of
our fastest recipe at that shape, `modern` with Muon, as `main.py` trains it.

    MINGPT_SHAKESPEARE=input.txt python benchmarks/data_loading.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from common import alternate, cell, compare, corpus_path, parser, report, spread
from stopwatch import pace
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from trainers import MODERN, ON, OURS, SETTINGS, Setting, ours

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataloader import BatchPlan, TokenLoader
from mingpt_ddp.data.dataset import TextDataset
from mingpt_ddp.data.prepare import prepare_all

HEADER = [
    "context",
    "batch",
    "TokenLoader batches/s",
    "Dataset + DataLoader batches/s",
    "ratio, pair by pair",
    "share of a training step",
]
WARM_UP = 5  # batches
BETWEEN = 32  # batches between clock readings, which take a tenth of the time of a batch


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every window of a text, encoded one character at a time."""

    def __init__(self, text: str, context: int) -> None:
        self.text, self.context = text, context
        self.token = {character: token for token, character in enumerate(sorted(set(text)))}

    def __len__(self) -> int:
        return len(self.text) - self.context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        tokens = [
            self.token[character] for character in self.text[start : start + self.context + 1]
        ]
        return torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])


def from_windows(windows: Windows, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    sampler = RandomSampler(windows, replacement=True, num_samples=1_000_000_000)
    return iter(DataLoader(windows, batch_size=batch, sampler=sampler, num_workers=0))


def from_loader(corpus: TextDataset, context: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    loader = TokenLoader(corpus.train, context, None, batch, seed=1)
    plan = BatchPlan(batch, batch, world_size=1)
    step = 0
    while True:
        step += 1
        (micro,) = loader.get_batch(step, plan, rank=0)
        yield micro.batch


def batches_per_s(
    batches: Iterator[tuple[Tensor, Tensor]], shape: tuple[int, int], seconds: float
) -> float:
    """Return the batches/s over at least `seconds` of CPU time, after a warm-up."""
    for _ in range(WARM_UP):
        x, y = next(batches)
        assert x.shape == y.shape == shape and x.dtype == y.dtype == torch.int64
    count, begin = 0, time.process_time()
    while (elapsed := time.process_time() - begin) < seconds:
        for _ in range(BETWEEN):
            next(batches)
        count += BETWEEN
    return float(f"{count / elapsed:.4g}")


def step_s(setting: Setting, text: Path, scratch: Path) -> float:
    """Return the CPU seconds of a training step."""
    return pace(ours(setting, text, scratch, MODERN), scratch, OURS, setting.span).cpu_s


def main() -> None:
    options = parser(__doc__, "data_loading")
    options.add_argument(
        "--repetitions", type=int, default=9, help="pairs of spans (default: %(default)s)"
    )
    options.add_argument(
        "--seconds", type=float, default=1.0, help="length of one span (default: %(default)s)"
    )
    chosen = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    results, rows, figures = [], [], []
    with tempfile.TemporaryDirectory(prefix="data-loading-") as scratch:
        for setting in (SETTINGS[key] for key in ON["cpu"]):
            context, batch = setting.context, setting.batch
            config = DataConfig(
                name="text",
                path=str(corpus_path()),
                sha256=None,
                block_size=context,
                stride=None,
                train_split=0.9,
                truncate=1.0,
                cache_dir=scratch,
            )
            corpus = TextDataset(prepare_all(config)[""], config)
            text = corpus.tokenizer.decode(corpus.train.tolist())
            measure = partial(batches_per_s, shape=(batch, context), seconds=chosen.seconds)
            sources = {
                "loader": from_loader(corpus, context, batch),
                "dataset": from_windows(Windows(text, context), batch),
            }
            candidates = {name: partial(measure, source) for name, source in sources.items()}
            values = alternate(
                f"context {context}, batch {batch}, batches/s", candidates, chosen.repetitions
            )
            ratio = compare(values["loader"], values["dataset"])
            speeds = {name: spread(measured) for name, measured in values.items()}
            step = step_s(setting, corpus_path(), Path(scratch))
            share = 1 / speeds["loader"]["median"] / step
            shape = {"context": context, "batch": batch}
            results.append(
                {
                    **shape,
                    "batches_per_s": speeds,
                    "ratio": ratio,
                    "step_s": step,
                    "share_of_step": share,
                }
            )
            rows.append(
                [
                    *map(str, shape.values()),
                    *map(cell, speeds.values()),
                    cell(ratio, ".1f"),
                    f"{share:.4%}",
                ]
            )
            what = (
                "batches against a dataset of windows behind a DataLoader, context "
                f"{context}, batch {batch}"
            )
            figures.append((what, f"{cell(ratio, '.0f')} times"))
            figures.append(
                (
                    f"share of a training step that fetches its batch, context {context}",
                    f"{share:.3%}",
                )
            )
    report(chosen.out, {"shapes": results, "threads": 1, "workers": 0}, HEADER, rows, figures)


if __name__ == "__main__":
    main()
