"""Add the gradients of a step in one order, so that any number of ranks trains to the same bits.

The gradients of micro-batch 0, 1, 2 and so on are added one after the other, whichever rank has
computed them (`group/ordered_sum.py`). DistributedDataParallel first adds the gradients of each
rank.
"""

import time
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch
from mingpt_ddp.distributed.group.json_collectives import refuse_differing_names
from mingpt_ddp.distributed.group.ordered_sum import Reducer, build_reducer
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.distributed.strategies.zero1 import OwnedState
from mingpt_ddp.errors import ConfigError, TrainingError
from mingpt_ddp.torch_internals import for_each

# Types that parameters may have. Losses and metrics are added in the same type.
EXACT_TYPES = (torch.float32, torch.float64)


def check_canonical(ddp: DDPConfig, trainer: TrainerConfig) -> None:
    """Refuse settings whose sums depend on the number of ranks.

    Raises:
        ConfigError: A setting is refused. The message names the key to change.
    """
    if trainer.micro_batch_size is None:
        batch = trainer.batch_size
        size = max(n for n in range(1, max(1, batch // 4) + 1) if batch % n == 0)
        raise ConfigError(
            "ddp.reduction=canonical needs the same micro-batches on any number of ranks; for up "
            f"to {batch // size} ranks, set trainer.micro_batch_size={size}, for example"
        )
    allowed = {
        "ddp.strategy": (ddp.strategy, ("auto", "single", "ddp", "zero1")),
        "ddp.comm_hook": (ddp.comm_hook, ("none",)),
        "ddp.tensor_parallel": (ddp.tensor_parallel, (1,)),
        "ddp.sync_batchnorm": (ddp.sync_batchnorm, (False,)),
        "ddp.find_unused_parameters": (ddp.find_unused_parameters, (False,)),
        "trainer.batch_size_per_rank": (trainer.batch_size_per_rank, (None,)),
        "trainer.compile": (trainer.compile, ("auto", False)),
    }
    for key, (value, values) in allowed.items():
        if value not in values:
            names = " or ".join("null" if name is None else str(name).lower() for name in values)
            raise ConfigError(
                f"ddp.reduction=canonical cannot give the same bits on any number of ranks with "
                f"{key}={str(value).lower()}; set it to {names}"
            )


class CanonicalStrategy(Strategy):
    """Compute the gradients of each micro-batch separately, and add them in a fixed order."""

    name = "ddp"
    is_canonical = True

    def __init__(
        self,
        ddp: DDPConfig,
        trainer: TrainerConfig,
        device: torch.device,
        group: ProcessGroup,
        compiles: bool,
    ) -> None:
        super().__init__(ddp, trainer, device, group, compiles)
        self.warmup_passes = 0  # nothing depends on the first backward pass
        self._reducer: Reducer | None = None
        self._views: list[Tensor] = []  # views of the reducer's flat tensor, one per gradient
        # View of the flat tensor's end, after the gradients. It holds the sums of the losses and
        # metrics, in the order of _names.
        self._summed_shares = torch.empty(0)
        self._names: list[str] = []
        self._first_buffers: list[Tensor] = []  # copies of the buffers, made before the first step
        self._n_micro_batches = 0  # number of micro-batches in a step, over all ranks
        self._n_rounds = 0  # number of rounds that have begun in this step

    def check_start(self, micro_batch_size: int, recorded: Mapping[str, Any] | None) -> None:
        threads = self.group.all_gather(torch.get_num_threads())
        if len({*threads}) > 1:
            raise ConfigError(
                "ddp.reduction=canonical needs the same number of threads on every rank, but the "
                f"ranks have {threads}; set OMP_NUM_THREADS"
            )
        if recorded is None:
            return
        environment = recorded.get("environment")
        if not isinstance(environment, dict) or environment.get("reduction") != "canonical":
            return
        settings = {
            "trainer.micro_batch_size": (recorded["micro_batch_size"], micro_batch_size),
            "OMP_NUM_THREADS": (environment.get("threads"), threads[0]),
        }
        for name, (before, now) in settings.items():
            if before != now:
                raise ConfigError(
                    f"{name}={now} would change the bits of a run with ddp.reduction=canonical; "
                    f"set {name}={str(before)[:20]}, or ddp.reduction=fast"
                )

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        for name, module in model.named_modules():
            if getattr(module, "running_mean", None) is not None:
                raise ConfigError(
                    f"ddp.reduction=canonical cannot keep the running statistics of {name}, which "
                    "depend on the number of ranks; use GroupNorm, or ddp.reduction=fast"
                )
        types = {p.dtype for p in model.parameters() if p.requires_grad}
        if len(types) > 1 or not types <= set(EXACT_TYPES):
            raise ConfigError(
                "ddp.reduction=canonical needs parameters of one type, fp32 or fp64, not "
                f"{', '.join(sorted(map(str, types)))}; use ddp.reduction=fast"
            )

    def wrap(self, model: nn.Module, graphs: bool = False) -> nn.Module:
        if self.group.world_size > 1:
            self._broadcast_weights(model)
        self._first_buffers = [buffer.clone() for buffer in model.buffers()]
        return model

    def watch(self, model: nn.Module, n_micro_batches: int) -> None:
        super().watch(model, n_micro_batches)
        self._n_micro_batches = n_micro_batches

    def loss_scale(self, plan: BatchPlan) -> float:
        return 1 / plan.n_micro

    @property
    def metric_weight(self) -> float:
        # All ranks have the same value, but a mean over ranks would be rounded.
        return float(self.group.is_rank_zero)

    def begin_step(self) -> None:
        super().begin_step()
        self.all_reduce_s = 0.0
        self._n_rounds = 0

    def finish(
        self, micro: MicroBatch, shares: dict[str, Tensor], parameters: list[nn.Parameter]
    ) -> dict[str, Tensor]:
        self._take_gradients(parameters, shares)
        if not micro.is_last:
            return {}
        self.reduce_gradients(parameters)
        whole = self._summed_shares.clone()
        if not self.group.is_rank_zero:
            whole.zero_()
        return dict(zip(self._names, whole, strict=True))

    @torch.no_grad()
    def _take_gradients(self, parameters: list[nn.Parameter], shares: dict[str, Tensor]) -> None:
        """Send the gradients, losses and metrics of a micro-batch.

        They are added while the next micro-batch is computed.

        Raises:
            TrainingError: A parameter has no gradient, or a loss or metric is missing.
        """
        start = time.perf_counter()
        trained = self._trained(parameters)
        if self._reducer is None:
            self._allocate(trained, shares)
        assert self._reducer is not None
        if sorted(shares) != self._names:
            lacking = ", ".join(sorted({*shares} ^ {*self._names}))
            raise TrainingError(
                "ddp.reduction=canonical needs the same losses and metrics in every micro-batch; "
                f"some micro-batches lack {lacking}; return them for every micro-batch"
            )
        self._reducer.wait()
        gradients = []
        for parameter in trained:
            if parameter.grad is None:
                raise TrainingError(
                    "ddp.reduction=canonical needs a gradient of every parameter in every "
                    "micro-batch; use ddp.reduction=fast"
                )
            gradients.append(parameter.grad)
            parameter.grad = None
        for_each("copy_", self._views, gradients)
        self._summed_shares.copy_(torch.stack([shares[name] for name in self._names]))
        self._send()
        self.all_reduce_s += time.perf_counter() - start

    @staticmethod
    def _trained(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in parameters if p.requires_grad]

    def _allocate(self, parameters: list[nn.Parameter], shares: dict[str, Tensor]) -> None:
        """Divide a flat tensor into gradients, losses and metrics. A collective."""
        sizes = [p.numel() for p in parameters]
        self._names = sorted(shares)
        self.group.check_agreement(self._names, refuse_differing_names)
        n = sum(sizes)
        total = n + len(shares)
        self._reducer = build_reducer(self.group, total, parameters[0].dtype, self.device)
        parts = self._reducer.flat[:n].split(sizes)
        self._views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        self._summed_shares = self._reducer.flat[n:total]

    def _send(self) -> None:
        """Begin the next round. In the last one, only the first ranks may have a micro-batch."""
        assert self._reducer is not None
        W = self.group.world_size
        self._reducer.send(min(W, self._n_micro_batches - self._n_rounds * W))
        self._n_rounds += 1

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        start = time.perf_counter()
        assert self._reducer is not None
        # This rank may have no micro-batch in the last round while other ranks have one.
        if self._n_rounds * self.group.world_size < self._n_micro_batches:
            self._reducer.wait()
            self._send()
        self._reducer.flat.copy_(self._reducer.total())
        for parameter, view in zip(self._trained(parameters), self._views, strict=True):
            parameter.grad = view
        self.all_reduce_s += time.perf_counter() - start

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Check that no step has changed a buffer. Then all ranks have the same buffers.

        Raises:
            TrainingError: A forward pass has changed a buffer.
        """
        pairs = zip(self._first_buffers, model.buffers(), strict=True)
        if not all(_is_equal(first, buffer) for first, buffer in pairs):
            raise TrainingError(
                "ddp.reduction=canonical needs buffers that a forward pass does not change; use "
                "ddp.reduction=fast"
            )


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal. NaN equals NaN."""
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@final
class CanonicalZero1Strategy(OwnedState, CanonicalStrategy):
    """Add gradients in a fixed order, and update only the parameters that this rank owns."""
