"""One optimizer step: forward and backward on this rank's micro-batches, clipping, the update.

The task turns a model and a micro-batch into a mean loss. The strategy (distributed/strategies)
averages the gradients over the ranks.
"""

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import BatchPlan, Loader, MicroBatch
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.phases import ACTIVITIES, StepPhases
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.optim.lr_schedule import get_lr, scale_lr, weight_decay_factor
from mingpt_ddp.tasks.task import Task, named_losses
from mingpt_ddp.training.step_control import StepControl, StepFlags
from mingpt_ddp.training.trainable import Trainable

log = logging.getLogger(__name__)


def count_steps(config: Config, steps_per_epoch: int) -> int:
    """Return the optimizer steps of the whole run: the smaller of its two limits."""
    limits = []
    if config.trainer.max_steps is not None:
        limits.append(config.trainer.max_steps)
    if config.trainer.max_epochs is not None:
        limits.append(config.trainer.max_epochs * steps_per_epoch)
    return min(limits)


@dataclass(frozen=True)
class StepResult:
    """What happened in a step."""

    flags: StepFlags
    grad_norm: Tensor  # before clipping
    losses: dict[str, Tensor]  # this rank's share of the step's mean loss, and of its parts
    lr: float = 0.0
    anomaly: str | None = None  # why the update was skipped


class TrainStep:
    """The optimizer steps of a run, `steps` in total."""

    def __init__(
        self,
        runtime: Runtime,
        task: Task,
        loader: Loader,
        plan: BatchPlan,
        trainable: Trainable,
    ) -> None:
        """Wrap the model with the strategy, which averages its gradients over the ranks."""
        self.config = task.config
        self.runtime = runtime
        self.strategy = runtime.strategy
        self.task = task
        self.loader = loader
        self.plan = plan
        self.model = trainable.model
        self.optimizer = trainable.optimizer
        self.average = trainable.average
        self.control = StepControl()  # a run sets its own, once it has what that needs
        self.steps = count_steps(self.config, loader.steps_per_epoch)
        self.lr_config = scale_lr(self.config.optimizer, self.config.trainer.batch_size)
        # of the configuration: loading the optimizer's state replaces its groups
        self.weight_decays = [group.get("weight_decay") for group in self.optimizer.param_groups]
        self.parameters = list(self.model.parameters())
        self.parallel_model = self.strategy.wrap(self.model)
        self.strategy.watch(self.model, plan.n_micro)
        self.phase = StepPhases(self.strategy)

    def run(self, step: int) -> StepResult:
        """Train one step; at an anomaly leave the weights as they are.

        Micro-batch j has the same random numbers on any rank. The gradients of the rank's
        micro-batches add up, and its last backward pass averages them over the ranks.
        """
        strategy = self.strategy
        scaler = self.runtime.scaler
        losses: dict[str, Tensor] = {}
        strategy.begin_step()
        with self.phase("fetch", step):
            batch = self.fetch(step)
        for micro in batch:
            is_last = micro is batch[-1]
            with strategy.maybe_no_sync(self.parallel_model, last=is_last):
                with self.phase("forward", step):
                    micro_losses = self.forward(step, micro)
                with self.phase("backward", step, waiting=is_last):
                    loss = micro_losses["loss"] * strategy.loss_scale(micro, self.plan)
                    scaler.scale(loss).backward()
            shares = self._loss_shares(micro_losses, micro)
            for name, share in shares.items():
                losses[name] = losses[name] + share if name in losses else share
            strategy.take_gradients(self.parameters, shares)
        strategy.reduce_gradients(self.parameters)
        losses = strategy.step_losses(losses)

        self.control.wait_for_staging()  # the last snapshot may still copy the weights
        receive_flags = self.control.send_flags(losses["loss"])  # they travel while we clip
        scaler.unscale_(self.optimizer)
        grad_norm = strategy.clip_grad_norm(self.parameters, self.config.trainer.grad_norm_clip)
        flags = receive_flags()
        anomaly = self.control.find_anomaly(flags, grad_norm)
        if anomaly is not None:
            scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            strategy.broadcast_buffers(self.model)  # the forward passes have changed them
            return StepResult(flags, grad_norm, losses, anomaly=anomaly)

        reads = scaler.is_enabled()  # from a GPU, which waits
        with self.control.measure_norms(step), self.phase("update", step, waiting=reads):
            lr = self.set_lr(step)
            seed_everything("update", self.config.run.seed, step)
            strategy.update(self.optimizer, scaler)
            scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            strategy.broadcast_buffers(self.model)
        self.average.update(step)
        return StepResult(flags, grad_norm, losses, lr)

    def fetch(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of this rank; steps count from 1."""
        batch = self.loader.get_batch(step, self.plan, self.runtime.group.data_rank)
        return self.strategy.pad(batch, self.plan.n_micro)

    def forward(self, step: int, micro: MicroBatch) -> dict[str, Tensor]:
        """Return the mean `loss` of a micro-batch, and its parts by name."""
        seed_everything("dropout", self.config.run.seed, step, micro.index)
        with self.runtime.autocast():
            batch = self.runtime.to_device(micro.batch)
            return named_losses(self.task.loss(self.parallel_model, batch))

    def _loss_shares(self, micro_losses: dict[str, Tensor], micro: MicroBatch) -> dict[str, Tensor]:
        """Return a micro-batch's shares of the losses of the step; {} of padding."""
        if not micro.weight:
            return {}
        shares = self.strategy.loss_shares(self.plan)
        return {name: value.detach() / shares for name, value in micro_losses.items()}

    def set_lr(self, step: int) -> float:
        """Set learning rate and weight decay of the parameter groups; return the run's rate."""
        lr = get_lr(step, self.lr_config, self.steps)
        factor = weight_decay_factor(step, self.lr_config, self.steps)
        for group, decay in zip(self.optimizer.param_groups, self.weight_decays, strict=True):
            group["lr"] = lr * group.get("lr_ratio", 1.0)
            if decay is not None:
                group["weight_decay"] = decay * factor
        return lr

    def warm_up(self) -> None:
        """Run the strategy's warm-up passes on the first micro-batch, and compile."""
        self.runtime.group.set_activity("preparing the first step")
        begin = time.perf_counter()
        if self.runtime.compiles:
            log.info("compiling the model; the first time this may take minutes")
        first = self.loader.get_batch(1, self.plan, self.runtime.group.data_rank)[0]
        self.strategy.warm_up(self.parallel_model, lambda: self.forward(1, first)["loss"])
        if self.runtime.compiles:
            log.info("compiled in %.1f s", time.perf_counter() - begin)

    def diagnose(self, step: int) -> str:
        """Repeat the passes of a step; return which rank's loss or gradient is not finite.

        Its backward differs from that of `run`: the ranks keep their gradients apart, so that it is
        known whose are wrong. A collective; call it when the gradients are free.
        """
        found = ""
        self.runtime.group.set_activity(ACTIVITIES["fetch"].format(step))
        for micro in self.fetch(step):
            with self.strategy.maybe_no_sync(self.parallel_model, last=False):
                with self.phase("forward", step):
                    loss = self.forward(step, micro)["loss"]
                with self.phase("backward", step):
                    scale = self.strategy.loss_scale(micro, self.plan)
                    self.runtime.scaler.scale(loss * scale).backward()
            found = found or self._find_nonfinite(loss, micro)
            if self.strategy.may_leave_passes(bool(found)):
                break
        self.optimizer.zero_grad(set_to_none=True)
        self.strategy.broadcast_buffers(self.model)
        culprits = []
        for rank, what in enumerate(self.runtime.group.all_gather(found)):
            if what:
                culprits.append(f"rank {rank}: {what}")
        if not culprits:
            return "not reproducible when the step is repeated: suspect the hardware"
        return "; ".join(culprits[:3])

    def _find_nonfinite(self, loss: Tensor, micro: MicroBatch) -> str:
        """Return what is not finite, the loss or a gradient; "" if nothing is."""
        if not torch.isfinite(loss):
            return f"the loss of micro-batch {micro.index}"
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            if not torch.isfinite(self.strategy.local(parameter.grad)).all():
                return f"{self.strategy.describe_gradient(name)} in micro-batch {micro.index}"
        return ""
