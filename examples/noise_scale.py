r"""Log the gradient noise scale of the model and of each layer.

    python main.py experiment=demo run.name=noise ddp.nproc_per_node=2 trainer.max_steps=20 \
        trainer.micro_batch_size=4 +data.code=$PWD/examples/noise_scale.py

The noise scale is the trace of the covariance of the gradients over their squared norm, in
micro-batches: times trainer.micro_batch_size it is in sequences. A batch far below it learns from
noise; one far above it wastes data. metrics.jsonl and TensorBoard have it as train_noise_scale,
train_noise_scale_blocks.0 and so on. It needs at least two micro-batches in a step. Over few steps
an estimate is rough, and may be negative.

Put it before hooks that change the gradients. Tensor parallelism and ddp.sync_batchnorm are
refused.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162),
appendix A.1.
"""

import re

import torch
from torch import Tensor

from mingpt_ddp.registry import acts

# The layer of a parameter: blocks.0 of blocks.0.up.weight, head of head.weight.
LAYER = re.compile(r"(.*?\.)?\d+(?=\.)|[^.]+")
DECAY = 0.95  # of the moving averages


def squared_norms(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the squared norms of the whole gradient and of each layer's."""
    squares: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        square = gradient.double().square().sum()
        for metric in ("noise_scale", f"noise_scale_{(LAYER.match(name) or [name])[0]}"):
            squares.setdefault(metric, []).append(square)
    return {metric: torch.stack(each).sum() for metric, each in squares.items()}


@acts("gradients")
class NoiseScale:
    """Compare the gradients of micro-batches with their mean, the gradient of the whole batch."""

    def __init__(self) -> None:
        # Moving averages (2) of the trace and of the squared norm, by metric.
        self.averages: dict[str, Tensor] = {}

    def micro_batch(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return squared_norms(gradients)

    def __call__(
        self, step: int, gradients: dict[str, Tensor], micro_batches: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        for metric, of_mean in squared_norms(gradients).items():
            n = len(micro_batches[metric])
            if n > 1:
                of_one = micro_batches[metric].mean()
                trace = (of_one - of_mean) * n / (n - 1)
                latest = torch.stack([trace, (n * of_mean - of_one) / (n - 1)])
                average = self.averages.get(metric, latest)
                self.averages[metric] = DECAY * average + (1 - DECAY) * latest
        # Each is a sum and a count: logged is their ratio, over the steps since the last log line.
        return {metric: (trace, square) for metric, (trace, square) in self.averages.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return self.averages

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.averages = state
