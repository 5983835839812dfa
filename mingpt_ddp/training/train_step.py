"""One optimizer step: forward and backward on this rank's micro-batches, clipping, the update.

The task turns a model and a micro-batch into a mean loss. The strategy (distributed/strategies)
averages the gradients over the ranks.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import BatchPlan, Loader, MicroBatch
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.metrics.profile import FETCH
from mingpt_ddp.models import apply_activation_checkpointing
from mingpt_ddp.models.placement import split_blocks
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.optim.lr_schedule import get_lr, scale_lr, weight_decay_factor
from mingpt_ddp.optim.muon import Muon
from mingpt_ddp.tasks.task import Task, named_losses

log = logging.getLogger(__name__)


def count_steps(config: Config, steps_per_epoch: int) -> int:
    """Return the optimizer steps of the whole run: the smaller of its two limits."""
    limits = [
        config.trainer.max_steps,
        config.trainer.max_epochs and config.trainer.max_epochs * steps_per_epoch,
    ]
    return min(limit for limit in limits if limit is not None)


def build_model_and_optimizer(
    runtime: Runtime,
    task: Task,
    strategy: Strategy | None = None,
    initialize: Callable[[nn.Module], None] | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Build both, with weights drawn from the seed.

    Args:
        strategy: prepares the model for training on all ranks, a collective; None: this rank uses
            the model alone.
        initialize: replaces weights of the new model.
    """
    config = task.config
    seed_everything("weights", config.run.seed)
    model = task.build_model()
    if initialize:
        initialize(model)
    if config.trainer.activation_checkpointing:
        apply_activation_checkpointing(model)
    model = strategy.prepare(model) if strategy else split_blocks(model, runtime.devices)
    optimizer = build_optimizer(model, config.optimizer)
    if strategy:
        strategy.prepare_optimizer(optimizer)
    return model, optimizer


def sample(runtime: Runtime, task: Task, model: nn.Module, step: int) -> str | None:
    """Return a text that a prepared model generates, if the task has one; None on ranks without it.

    A collective.
    """
    if type(task).sample is Task.sample:
        return None
    return runtime.strategy.on_whole_model(
        model, task.build_model, lambda whole: task.sample(whole, step)
    )


class TrainStep:
    """The optimizer steps of a run, `steps` in total."""

    def __init__(
        self,
        runtime: Runtime,
        task: Task,
        loader: Loader,
        plan: BatchPlan,
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        self.config = task.config
        self.runtime = runtime
        self.task = task
        self.loader = loader
        self.plan = plan
        self.model = model
        self.optimizer = optimizer
        self.steps = count_steps(self.config, loader.steps_per_epoch)
        self.lr_config = scale_lr(self.config.optimizer, self.config.trainer.batch_size)
        if isinstance(optimizer, Muon) and not runtime.strategy.is_sharded:
            optimizer.rank = runtime.group.rank
            optimizer.world_size = runtime.group.world_size
        # of the configuration
        self._weight_decays = [group.get("weight_decay") for group in optimizer.param_groups]
        self.parameters = list(model.parameters())
        self.parallel_model = runtime.strategy.wrap(model)
        waits = (
            runtime.strategy.shards_model
            or self.config.ddp.tensor_parallel > 1
            or self.config.ddp.sync_batchnorm
        )
        runtime.strategy.clock.attach(model, is_split=waits)
        self.data_time_s = 0.0  # seconds to fetch the last batch

    def warm_up(self) -> None:
        """Run the warm-up passes on the first batch, and compile; the meters exclude both."""
        self.runtime.group.set_activity("preparing the first step")
        begin = time.perf_counter()
        if self.runtime.compiles:
            log.info("compiling the model; the first time this may take minutes")
        first = self.loader.get_batch(1, self.plan, self.runtime.group.data_rank)[0]
        self.runtime.strategy.warm_up(self.parallel_model, lambda: self._losses(first)["loss"])
        if self.runtime.compiles:
            log.info("compiled in %.1f s", time.perf_counter() - begin)

    def forward_backward(self, step: int) -> dict[str, Tensor]:
        """Accumulate the gradients of the step's mean `loss`.

        Return this rank's share of it and of its parts.
        """
        self.runtime.strategy.begin_step()
        self.runtime.strategy.clock.start()
        losses: dict[str, Tensor] = {}
        batch = self._fetch(step)
        self.runtime.strategy.clock.fetched(len(batch))
        for micro in batch:
            parts = self._forward_backward(step, micro, syncs=micro is batch[-1])
            for name, loss in parts.items() if micro.weight else ():
                losses[name] = losses[name] + loss if name in losses else loss
        self.runtime.strategy.reduce_gradients(self.parameters)
        return losses

    @torch.profiler.record_function(FETCH)
    def _fetch(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches.

        As many as any rank's if each forward pass is a collective.
        """
        self.runtime.group.set_activity(f"fetching the batch of step {step}")
        begin = time.perf_counter()
        batch = self.loader.get_batch(step, self.plan, self.runtime.group.data_rank)
        self.data_time_s = time.perf_counter() - begin
        if self.runtime.strategy.shards_model and len(batch) < -(
            -self.plan.n_micro // self.plan.world_size
        ):
            batch = [*batch, replace(batch[-1], weight=0.0)]
        return batch

    def _forward_backward(self, step: int, micro: MicroBatch, syncs: bool) -> dict[str, Tensor]:
        """Accumulate the gradients of one micro-batch; return its share of the step's mean losses.

        Args:
            syncs: this backward pass reduces the gradients over the ranks.
        """
        # in both passes, which then wait for all ranks
        gathers = self.runtime.strategy.shards_model
        self.runtime.group.set_activity(f"in the forward pass of step {step}", waiting=gathers)
        seed_everything("dropout", self.config.run.seed, step, micro.index)
        n_micro = self.plan.n_micro
        group = self.runtime.group
        with self.runtime.strategy.maybe_no_sync(self.parallel_model, last=syncs):
            losses = self._losses(micro)
            self.runtime.group.set_activity(
                f"in the backward pass of step {step}", waiting=syncs or gathers
            )
            # DDP averages over the ranks; the step averages over the micro-batches.
            self.runtime.scaler.scale(
                losses["loss"] * (micro.weight * group.data_size / n_micro)
            ).backward()
        # the ranks of a copy of the model compute the same loss
        shares = n_micro * group.tensor_size
        return {name: loss.detach() / shares for name, loss in losses.items()}

    def _losses(self, micro: MicroBatch) -> dict[str, Tensor]:
        with self.runtime.autocast():
            return named_losses(
                self.task.loss(self.parallel_model, self.runtime.to_device(micro.batch))
            )

    def clip_grad_norm(self) -> Tensor:
        """Clip the gradients; return their norm before clipping."""
        self.runtime.scaler.unscale_(self.optimizer)
        norm = self.runtime.strategy.clip_grad_norm(
            self.parameters, self.config.trainer.grad_norm_clip
        )
        return norm.to(self.runtime.device)  # without gradients torch returns a CPU zero

    def optimizer_step(self, step: int) -> float:
        """Update the weights; return the learning rate."""
        lr = get_lr(step, self.lr_config, self.steps)
        factor = weight_decay_factor(step, self.lr_config, self.steps)
        # new after a rollback
        for group, decay in zip(self.optimizer.param_groups, self._weight_decays, strict=True):
            group["lr"] = lr * group.get("lr_ratio", 1.0)
            if decay is not None:
                group["weight_decay"] = decay * factor
        # for optimizers that draw random numbers
        seed_everything("update", self.config.run.seed, step)
        self.runtime.strategy.update(self.optimizer, self.runtime.scaler)
        self.clear()
        self.runtime.strategy.broadcast_buffers(self.model)
        return lr

    def clear(self) -> None:
        """Free the gradients, after an update or instead of one."""
        self.runtime.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def diagnose(self, step: int) -> str:
        """Repeat the step without an update; return which rank's loss or gradient is not finite.

        A collective; call it after `clear`.
        """
        found = ""
        batch = self._fetch(step)
        strategy = self.runtime.strategy
        where = " (of any rank)" if strategy.shards_model else ""  # they are reduced in every pass
        for micro in batch:
            loss = self._forward_backward(step, micro, syncs=False)["loss"]
            own = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
            gradients = {
                f"the gradient of {name}{where} in": strategy.local(grad)
                for name, grad in own.items()
            }
            tensors = {"the loss of": loss, **gradients}
            wrong = next((k for k, t in tensors.items() if not torch.isfinite(t).all()), "")
            found = found or (wrong and f"{wrong} micro-batch {micro.index}")
            if self.runtime.group.any_in_copy(bool(found)) and not strategy.shards_model:
                break
        self.optimizer.zero_grad(set_to_none=True)
        culprits = [
            f"rank {rank}: {what}"
            for rank, what in enumerate(self.runtime.group.all_gather(found))
            if what
        ]
        return (
            "; ".join(culprits[:3])
            or "not reproducible when the step is repeated: suspect the hardware"
        )
