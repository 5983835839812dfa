"""Mix windows of several texts in proportion to the weights in `data.sources`.

A window is a run of consecutive tokens. Which windows are in a batch depends only on the seed and
the step.
"""

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataloader import Device, TokenLoader
from mingpt_ddp.data.rng import Ints, derive_seed, feistel_permute
from mingpt_ddp.errors import DataError


class WeightedLoader(TokenLoader):
    """The training parts of several texts as an endless sequence of batches.

    An epoch has as many windows as all texts have together. Each text contributes a share by its
    weight. No window of a text is repeated before all windows of the text have been used, even
    across epochs.
    """

    def __init__(
        self,
        tokens: Ints,
        sizes: list[int],
        config: DataConfig,
        batch_size: int,
        seed: int,
        device: Device = "cpu",
    ) -> None:
        """
        Args:
            tokens: The training parts, one after the other.
            sizes: Number of tokens in each part.
            config: The settings of the texts, with their weights.
            batch_size: Number of sequences in a step, over all ranks.
            seed: Seed of the order of the windows.
            device: The device of the batches. The tokens stay on a GPU with enough memory.

        Raises:
            DataError: A part is shorter than one window, or all parts together are too short for
                one batch.
        """
        super().__init__(tokens, config.block_size, config.stride, batch_size, seed, device)
        sources = config.sources or []
        weights = np.array([weight for _, weight in sources])
        self._windows = [(size - config.block_size) // self.stride for size in sizes]
        for (path, _), windows in zip(sources, self._windows, strict=True):
            if windows < 1:
                raise DataError(
                    f"the training part of {path} in data.sources is shorter than one window; use "
                    "a longer text or a smaller data.block_size"
                )
        self._begins = [0, *np.cumsum(sizes)[:-1].tolist()]
        self._set_epoch_size(sum(self._windows))
        shares = np.cumsum(weights / weights.sum()) * self.windows_per_epoch
        # Before an epoch is shuffled, its windows are sorted by text, so each text has a range of
        # window numbers. These are the ends of the ranges.
        self._ends = np.round(shares).astype(np.int64)
        self._ends[-1] = self.windows_per_epoch
        for (path, _), share in zip(sources, np.diff(self._ends, prepend=0), strict=True):
            if share == 0:
                raise DataError(
                    f"{path} in data.sources has less than one window per epoch; raise its weight"
                )

    def _starts_of(self, epoch: int, order: Ints) -> Ints:
        """Compute where the windows with the numbers in `order` begin, each in its own text."""
        starts = np.empty_like(order)
        begin = 0
        for text, windows in enumerate(self._windows):
            end = int(self._ends[text])
            chosen = (begin <= order) & (order < end)
            drawn = (epoch * (end - begin) + order[chosen] - begin) % windows
            window = feistel_permute(drawn, windows, derive_seed("source", self.seed, text))
            offset = derive_seed("offset", self.seed, epoch, text) % self.stride
            starts[chosen] = self._begins[text] + offset + window * self.stride
            begin = end
        return starts
