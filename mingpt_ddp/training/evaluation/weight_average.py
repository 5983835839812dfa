"""The exponential moving average of the weights (EMA), for evaluation, sampling and exports.

Source: Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"; the
warm-up of the decay is that of TensorFlow's ExponentialMovingAverage.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models.dtensor import local_tensor
from mingpt_ddp.snapshots.state_dict import model_state
from mingpt_ddp.torch_internals import for_each

MIN_AVERAGED_BYTES = 4  # per number: 16 bits do not resolve the small steps of an average


def check_averaged(model: nn.Module, decay: float) -> None:
    """Refuse a model with parameters that cannot be averaged.

    Args:
        decay: Value of trainer.ema.

    Raises:
        ConfigError: The message names the parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype.itemsize < MIN_AVERAGED_BYTES:
            raise ConfigError(f"trainer.ema={decay} needs {name} in fp32; average it in your model")


class WeightAverage:
    """The average of each parameter that this rank holds, or of its part of one.

    Without a decay it does nothing.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        """
        Args:
            model: prepared by the strategy, not wrapped; the average starts from its weights.
            decay: of the average per step, trainer.ema.
        """
        self.model = model
        self.decay = decay
        self._parameters = list(model.parameters()) if decay is not None else []
        self._averages = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the present weights of the model."""
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.copy_(parameter)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after an optimizer step.

        The first steps are averaged over a shorter time.
        """
        if self.decay is None:
            return
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = [local_tensor(average) for average in self._averages]
        parameters = [local_tensor(parameter) for parameter in self._parameters]
        for_each("lerp_", averages, parameters, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averages as its weights.

        Nothing else may read or change them meanwhile.
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
        """Return the model's state with the averages for its weights, as the kind `ema`."""
        if self.decay is None:
            return {}
        averages: dict[Tensor, Tensor] = dict(zip(self._parameters, self._averages, strict=True))
        state = model_state(self.model)
        for name, value in self.model.state_dict(keep_vars=True).items():
            if value in averages:
                state[name] = averages[value]
        return {"ema": state}
