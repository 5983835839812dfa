"""The exponential moving average of the weights (EMA), for evaluation, sampling and exports.

Source: Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging". The decay
is warmed up as in TensorFlow's ExponentialMovingAverage.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models.dtensor import local_tensor
from mingpt_ddp.snapshots.state_dict import model_state
from mingpt_ddp.torch_internals import for_each

# Numbers of 16 bits are too coarse for the small changes of an average.
MIN_BYTES_PER_NUMBER = 4


def check_averaged(model: nn.Module, decay: float) -> None:
    """Refuse a model with parameters that cannot be averaged.

    Args:
        decay: Value of trainer.ema.

    Raises:
        ConfigError: The message names the parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype.itemsize < MIN_BYTES_PER_NUMBER:
            raise ConfigError(
                f"trainer.ema={decay} needs the parameter {name} in fp32; change its type, or "
                "average it in your model"
            )


class WeightAverage:
    """The moving average of the weights that this rank holds: whole parameters, or its shards.

    Without a decay this class does nothing.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        """
        Args:
            model: The model after `strategy.prepare` and without its wrapper. The average starts
                from its weights.
            decay: Decay of the average per step (trainer.ema). None for no average.
        """
        self.model = model
        self.decay = decay
        self._parameters = list(model.parameters()) if decay is not None else []
        self._averages = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def restart(self) -> None:
        """Let the average start again from the current weights of the model."""
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.copy_(parameter)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the current weights to the average, after an optimizer step.

        The decay is smaller in the first steps, so that the average forgets the initial weights.
        """
        if self.decay is None:
            return
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = [local_tensor(average) for average in self._averages]
        parameters = [local_tensor(parameter) for parameter in self._parameters]
        for_each("lerp_", averages, parameters, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """In this context, the model has the averages as its weights.

        No other thread may read or change the weights meanwhile.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            weights = parameter.clone()
            parameter.copy_(average)
            average.copy_(weights)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state for a snapshot, under the key `ema`. Return {} without a decay.

        It is the state of the model, with the averages in place of the weights.
        """
        if self.decay is None:
            return {}
        averages: dict[Tensor, Tensor] = dict(zip(self._parameters, self._averages, strict=True))
        state = model_state(self.model)
        for name, value in self.model.state_dict(keep_vars=True).items():
            if value in averages:
                state[name] = averages[value]
        return {"ema": state}
