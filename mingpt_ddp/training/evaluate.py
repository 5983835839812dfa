"""The loss over a whole text: every character predicted once, the sum shared by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mingpt_ddp.distributed.runtime import Runtime, eval_mode

TOKENS_PER_BATCH = 4096


class Evaluator:
    """Mean cross-entropy of a model over a text, in nats per character."""

    def __init__(self, tokens: np.ndarray[Any, Any], block_size: int, runtime: Runtime) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.runtime = runtime

    def run(self, model: nn.Module, stop: Callable[[], bool] = lambda: False) -> float | None:
        """A collective. The windows stand end to end: every character but the first is predicted exactly once.

        Args:
            stop: asked before every batch; when it says yes on one rank, the result is None on all.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        stopped = False
        with eval_mode(model):
            for number, (x, y) in enumerate(self._batches()):
                if stopped := stop():
                    break
                if number % self.runtime.group.world_size == self.runtime.group.rank:
                    self.runtime.group.set_activity("evaluating")
                    x, y = self.runtime.to_device(x), self.runtime.to_device(y)
                    with self.runtime.autocast():
                        total += model(x, y).double() * y.numel()
        sums = self.runtime.group.all_reduce(
            torch.stack([total.cpu(), torch.tensor(float(stopped), dtype=torch.float64)])
        )
        return None if sums[1] else float(sums[0]) / (len(self.tokens) - 1)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole windows in batches (B, T), then what is left as one short window (1, rest)."""
        T, n = self.block_size, len(self.tokens) - 1  # n characters have a predecessor
        rows = max(1, TOKENS_PER_BATCH // T)
        whole = n // T * T
        for start in range(0, whole, rows * T):
            yield self._pair(start, min(start + rows * T, whole), T)
        if whole < n:
            yield self._pair(whole, n, n - whole)

    def _pair(self, start: int, stop: int, T: int) -> tuple[Tensor, Tensor]:
        piece = torch.from_numpy(self.tokens[start : stop + 1].astype(np.int64))
        return piece[:-1].view(-1, T), piece[1:].view(-1, T)
