"""The validation loss: each character of a text, or of a fixed sample of windows, predicted once, over all ranks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mingpt_ddp.data.dataloader import TokenWindows
from mingpt_ddp.data.rng import derive_seed, feistel_permute
from mingpt_ddp.distributed.logs import progress_bar
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models import eval_mode

TOKENS_PER_BATCH = 4096


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
        self.n_targets, n_windows = len(tokens) - 1, (len(tokens) - 1) // block_size
        self.starts: Sequence[int] = range(0, n_windows * block_size, block_size)  # of the windows
        if windows is not None and windows < n_windows:
            sample = feistel_permute(np.arange(windows), n_windows, derive_seed("evaluation"))
            self.starts, self.n_targets = (np.sort(sample) * block_size).tolist(), windows * block_size

    @torch.no_grad()
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
            for number, (starts, length) in enumerate(self._batches()):
                if stopped := stop():
                    break
                bar.update(len(starts) * length)
                if number % group.world_size == group.rank:
                    group.set_activity("evaluating")
                    windows = TokenWindows(self.tokens, length + 1, self.runtime.device, resident=False)
                    x, y = windows.gather(np.array(starts))
                    with self.runtime.autocast():
                        loss_sum += model(x, y).double() * y.numel()
        sums = group.all_reduce(torch.tensor([float(loss_sum), float(stopped)], dtype=torch.float64))
        return None if sums[1] else float(sums[0]) / self.n_targets

    def _batches(self) -> Iterator[tuple[Sequence[int], int]]:
        """Yield the starts and the length of disjoint windows, then those of the rest as one shorter window."""
        T, rows = self.block_size, max(1, TOKENS_PER_BATCH // self.block_size)
        for first in range(0, len(self.starts), rows):
            yield self.starts[first : first + rows], T
        if rest := self.n_targets % T:
            yield [self.n_targets - rest], rest
