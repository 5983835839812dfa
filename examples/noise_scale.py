r"""Log the gradient noise scale of the model and of each layer.

    python main.py experiment=demo run.name=noise ddp.nproc_per_node=2 trainer.max_steps=20 \
        trainer.micro_batch_size=4 +data.code=$PWD/examples/noise_scale.py

The noise scale is the trace of the covariance of the micro-batch gradients, divided by the squared
norm of their mean. Its unit is a micro-batch: multiply it by trainer.micro_batch_size to get
sequences. If the batch is much smaller than the noise scale, a step mostly follows noise. If it is
much larger, more sequences hardly improve the step. metrics.jsonl and TensorBoard have the noise
scale as train_noise_scale, train_noise_scale_blocks.0 and so on. A step needs at least two
micro-batches. An estimate from few steps is rough, and may be negative.

Register this hook before hooks that change the gradients. Tensor parallelism and
ddp.sync_batchnorm are refused, because the hook does not work with them.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162),
appendix A.1.
"""

import re

import torch
from torch import Tensor

from mingpt_ddp.registry import acts

# Matches the layer in the name of a parameter: blocks.0 in blocks.0.up.weight, head in head.weight.
LAYER = re.compile(r"(.*?\.)?\d+(?=\.)|[^.]+")
DECAY = 0.95  # weight of the past in the moving averages


def squared_norms(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the squared norm of the whole gradient and of the gradient of each layer."""
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
        # For each metric a tensor (2,): the moving averages of the trace and of the squared norm.
        self.averages: dict[str, Tensor] = {}

    def micro_batch(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return squared_norms(gradients)

    def __call__(
        self, step: int, gradients: dict[str, Tensor], micro_batches: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        for metric, batch_square in squared_norms(gradients).items():
            n = len(micro_batches[metric])
            if n > 1:
                # micro_square is the mean of the squared norms of the micro-batch gradients.
                # batch_square is the squared norm of their mean. Both together give unbiased
                # estimates of the trace and of the squared norm (appendix A.1).
                micro_square = micro_batches[metric].mean()
                trace = (micro_square - batch_square) * n / (n - 1)
                square = (n * batch_square - micro_square) / (n - 1)
                latest = torch.stack([trace, square])
                average = self.averages.get(metric, latest)
                self.averages[metric] = DECAY * average + (1 - DECAY) * latest
        # A metric is a sum and a count. Both are added up over the steps since the last log line,
        # and their ratio is logged.
        return {metric: (trace, square) for metric, (trace, square) in self.averages.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return self.averages

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.averages = state
