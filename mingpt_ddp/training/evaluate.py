"""The validation loss: every character of a text predicted once, the sum reduced over all ranks."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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

    def __init__(self, tokens: np.ndarray[Any, Any], block_size: int, runtime: Runtime) -> None:
        self.tokens, self.block_size, self.runtime = tokens, block_size, runtime

    def run(self, model: nn.Module, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Return the loss. A collective; batch i is computed by rank i mod world size.

        Args:
            stop: called before every batch; where it returns true on one rank, all ranks return None.
        """
        group = self.runtime.group
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        stopped = False
        with eval_mode(model):
            for number, batch in enumerate(self._batches()):
                if stopped := stop():
                    break
                if number % group.world_size == group.rank:
                    group.set_activity("evaluating")
                    x, y = map(self.runtime.to_device, batch)
                    with self.runtime.autocast():
                        loss_sum += model(x, y).double() * y.numel()
        sums = group.all_reduce(torch.tensor([float(loss_sum), float(stopped)], dtype=torch.float64))
        return None if sums[1] else float(sums[0]) / (len(self.tokens) - 1)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets (B, T): windows without overlap, then the rest as one shorter window (1, rest)."""
        T, n = self.block_size, len(self.tokens) - 1  # n characters have a predecessor
        whole = n // T * T
        edges = sorted({*range(0, whole, max(1, TOKENS_PER_BATCH // T) * T), whole, n})
        for start, stop in itertools.pairwise(edges):
            piece, length = torch.from_numpy(self.tokens[start : stop + 1].astype(np.int64)), min(T, stop - start)
            yield piece[:-1].view(-1, length), piece[1:].view(-1, length)
