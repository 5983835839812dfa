"""The validation loss: each character of a text, or of a fixed sample of windows, predicted once, over all ranks."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mingpt_ddp.data.rng import derive_seed, feistel_permute
from mingpt_ddp.distributed.logs import progress_bar
from mingpt_ddp.distributed.runtime import Runtime

TOKENS_PER_BATCH = 4096


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients, then restore the model's mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class Evaluator:
    """Mean cross-entropy of a model over a text, in nats per character."""

    def __init__(
        self, tokens: np.ndarray[Any, Any], block_size: int, runtime: Runtime, windows: int | None = None
    ) -> None:
        """
        Args:
            windows: number of windows to evaluate, the same ones every time; None: the whole text.
        """
        self.tokens, self.block_size, self.runtime = tokens, block_size, runtime
        self.starts: np.ndarray[Any, Any] | None = None  # of the windows
        self.n_targets, n_windows = len(tokens) - 1, (len(tokens) - 1) // block_size
        if windows is not None and windows < n_windows:
            sample = feistel_permute(np.arange(windows), n_windows, derive_seed("evaluation"))
            self.starts, self.n_targets = np.sort(sample) * block_size, windows * block_size

    def run(self, model: nn.Module, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Return the loss. A collective; batch i is computed by rank i mod world size.

        Args:
            stop: polled before every batch; if it returns True on any rank, all ranks return None.
        """
        group = self.runtime.group
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        stopped = False
        bar = progress_bar(group.env, 0, self.n_targets, desc="evaluating", unit="char", delay=1)
        with eval_mode(model), bar:
            for number, batch in enumerate(self._batches()):
                if stopped := stop():
                    break
                bar.update(batch[1].numel())
                if number % group.world_size == group.rank:
                    group.set_activity("evaluating")
                    x, y = map(self.runtime.to_device, batch)
                    with self.runtime.autocast():
                        loss_sum += model(x, y).double() * y.numel()
        sums = group.all_reduce(torch.tensor([float(loss_sum), float(stopped)], dtype=torch.float64))
        return None if sums[1] else float(sums[0]) / self.n_targets

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets (B, T): disjoint windows, then the rest as one shorter window (1, rest)."""
        T, rows = self.block_size, max(1, TOKENS_PER_BATCH // self.block_size)
        if self.starts is not None:
            for starts in np.split(self.starts, range(rows, len(self.starts), rows)):
                windows = torch.from_numpy(self.tokens[starts[:, None] + np.arange(T + 1)].astype(np.int64))
                yield windows[:, :-1], windows[:, 1:]
            return
        n = self.n_targets
        whole = n // T * T
        edges = sorted({*range(0, whole, rows * T), whole, n})
        for start, stop in itertools.pairwise(edges):
            piece, length = torch.from_numpy(self.tokens[start : stop + 1].astype(np.int64)), min(T, stop - start)
            yield piece[:-1].view(-1, length), piece[1:].view(-1, length)
