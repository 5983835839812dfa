"""One optimizer step: forward and backward on this rank's micro-batches, clipping, the update.

The task turns a model and a micro-batch into a mean loss. The strategy (distributed/strategies)
averages the gradients over the ranks.
"""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mingpt_ddp.data.dataloader import BatchPlan, Loader, MicroBatch
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.device.compile import replays_graphs, report_compile_errors
from mingpt_ddp.distributed.phases import ACTIVITIES, StepPhases
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models.dtensor import local_tensor
from mingpt_ddp.optim.lr_schedule import get_lr, scale_lr, weight_decay_factor
from mingpt_ddp.tasks.outputs import Outputs, check_outputs, outputs_of
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.length import RunLength, known_length
from mingpt_ddp.training.trainable import Trainable

log = logging.getLogger(__name__)

# Computes the loss instead of the task, from a micro-batch and its tensors on the device.
Measure: TypeAlias = Callable[[MicroBatch, Any], Outputs]


class TrainStep:
    """Takes the optimizer steps of a run: passes, clipping and the update."""

    def __init__(
        self,
        runtime: Runtime,
        task: Task,
        loader: Loader,
        plan: BatchPlan,
        trainable: Trainable,
        length: RunLength | None = None,
    ) -> None:
        """Wrap the model with the strategy, which averages its gradients over the ranks.

        Args:
            runtime: The runtime of this rank.
            task: The task, which computes the loss.
            loader: The loader of the training split.
            plan: How a batch is split into micro-batches.
            trainable: The model, its optimizer and its hooks.
            length: Tracks the number of steps of the run. None if trainer.max_minutes does not
                limit the run.

        Raises:
            ConfigError: The number of steps is not known, although `length` is None.
        """
        config = task.config
        self.runtime = runtime
        self.strategy = runtime.strategy
        self.task = task
        self.loader = loader
        self.plan = plan
        self.trainable = trainable
        self.model = trainable.model
        self.optimizer = trainable.optimizer
        self.average = trainable.average
        self.length = length or known_length(config, loader.steps_per_epoch)
        self.lr_config = scale_lr(config.optimizer, config.trainer.batch_size)
        # Remember the configured values here. When the state of the optimizer is loaded, it
        # replaces the parameter groups.
        self.weight_decays = [group.get("weight_decay") for group in self.optimizer.param_groups]
        self.parameters = list(self.model.parameters())
        graphs = runtime.compiles and replays_graphs(config, self.model, plan)
        self.parallel_model = self.strategy.wrap(self.model, graphs)
        self.strategy.watch(self.model, plan.n_micro)
        self.phase = StepPhases(self.strategy)
        self.actions = trainable.actions
        self.actions.watch_passes(self.model)
        self._step = 0  # number of the step whose passes ran last
        # This rank's shares of the losses and metrics of that step.
        self._losses: dict[str, Tensor] = {}

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        return self.length.steps

    def passes(self, step: int, measure: Measure | None = None) -> dict[str, Tensor]:
        """Run the forward and backward passes of this rank's micro-batches.

        Micro-batch j has the same random numbers on any rank. The gradients of the rank's
        micro-batches add up, and the last backward pass averages them over the ranks.

        Args:
            step: Number of the step. The first step is 1.
            measure: Computes the loss instead of the task. None for the task's own loss.

        Returns:
            This rank's shares of the step's losses and metrics, by name. The losses are the mean
            `loss` and its parts. Each metric has two entries, a sum and a count. `clip` and
            `update` add the metrics of hooks to this dictionary.
        """
        losses: dict[str, Tensor] = {}
        self._step = step
        self.strategy.begin_step()
        self.actions.begin_passes()
        with self.phase("fetch", step):
            batch = self.fetch(step)
        for micro in batch:
            with self.strategy.maybe_no_sync(self.parallel_model, last=micro.is_last):
                with self.phase("forward", step):
                    outputs = self.forward(step, micro, measure)
                with self.phase("backward", step, waiting=micro.is_last):
                    loss = outputs.losses["loss"] * micro.scale
                    self.runtime.scaler.scale(loss).backward()
            self.actions.measure(step, micro, outputs.losses["loss"])
            shares = self._shares(outputs, micro)
            losses = self.strategy.finish(micro, shares, self.parameters)
        self._losses = losses
        return losses

    def clip(self) -> Tensor:
        """Clip the gradients by norm, then by value. Return their global norm before clipping."""
        trainer = self.task.config.trainer
        self.runtime.scaler.unscale_(self.optimizer)
        self._losses |= self.actions.change_gradients(self._step, self.model, self._losses)
        norm = self.strategy.clip_grad_norm(self.parameters, trainer.grad_norm_clip)
        limit = trainer.grad_value_clip
        if limit is not None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    local_tensor(parameter.grad).clamp_(-limit, limit)
        return norm

    def update(self, step: int) -> float:
        """Update the weights and their average. Return the learning rate."""
        scaler = self.runtime.scaler
        # An enabled scaler reads from the GPU, and waits for it.
        with self.phase("update", step, waiting=scaler.is_enabled()):
            lr = self.set_lr(step)
            seed_everything("update", self.task.config.run.seed, step)
            self.strategy.update(self.model, self.optimizer, scaler)
            scale = scaler.get_scale() if self.actions.actions else 0.0
            scaler.update()
            if scale and scaler.get_scale() < scale:  # the scaler has skipped an overflowing step
                self.actions.discard()
            else:
                self._losses |= self.actions.change_weights(step, self.model, self._losses)
            self.optimizer.zero_grad(set_to_none=True)
        self.average.update(step)
        return lr

    def discard(self) -> None:
        """Drop the gradients of the passes. Weights and hooks stay as they were before the step."""
        self.actions.discard()
        self.runtime.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.strategy.broadcast_buffers(self.model)  # the forward passes have changed them

    def fetch(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of this rank.

        Args:
            step: Number of the step. The first step is 1.
        """
        batch = self.loader.get_batch(step, self.plan, self.runtime.group.data_rank)
        return self.strategy.micro_batches(batch, self.plan)

    def _shares(self, outputs: Outputs, micro: MicroBatch) -> dict[str, Tensor]:
        """Return the shares of a micro-batch in the step's losses and metrics.

        Return {} for a micro-batch with scale 0. With fsdp, a rank that has fewer micro-batches
        than other ranks repeats its last micro-batch, only to take part in the collectives.
        """
        if not micro.scale:
            return {}
        return outputs.shares(micro.loss_divisor, self.runtime.group.tensor_size)

    def forward(self, step: int, micro: MicroBatch, measure: Measure | None = None) -> Outputs:
        """Compute the mean losses of a micro-batch, and its metrics.

        Args:
            step: Number of the step. It seeds the dropout.
            micro: The micro-batch.
            measure: Computes the loss instead of the task. None for the task's own loss.

        Raises:
            CodeError: A loss or metric cannot be averaged.
        """
        seed_everything("dropout", self.task.config.run.seed, step, micro.index)
        with self.runtime.autocast():
            batch = self.runtime.to_device(micro.batch)
            if measure is not None:
                return measure(micro, batch)
            outputs = outputs_of(self.task.loss(self.parallel_model, batch), self.model)
        check_outputs(f"step {step}", outputs)
        return outputs

    def set_lr(self, step: int) -> float:
        """Set the learning rate and weight decay of all parameter groups for a step.

        Return the learning rate of the run, from which the rate of each group follows.
        """
        config = self.length.with_decay_from(self.lr_config)
        lr = get_lr(step, config, self.steps)
        factor = weight_decay_factor(step, config, self.steps)
        for group, decay in zip(self.optimizer.param_groups, self.weight_decays, strict=True):
            group["lr"] = lr * group.get("lr_ratio", 1.0)
            if decay is not None:
                group["weight_decay"] = decay * factor
        return lr

    def warm_up(self) -> None:
        """Run the strategy's warm-up passes on the first micro-batch, which compile the model."""
        self.runtime.group.set_activity("preparing the first step")
        begin = time.perf_counter()
        compiles = self.runtime.compiles
        if compiles:
            log.info("compiling the model; the first time this may take minutes")
        first = self.loader.get_batch(1, self.plan, self.runtime.group.data_rank)[0]
        with report_compile_errors(self.task.config) if compiles else nullcontext():
            self.strategy.warm_up(
                self.parallel_model, lambda: self.forward(1, first).losses["loss"]
            )
        if compiles:
            graphs = ", with CUDA graphs" if self.strategy.graphs else ""
            log.info("compiled in %.1f s%s", time.perf_counter() - begin, graphs)

    def diagnose(self, step: int) -> str:
        """Repeat the passes of a step. Say on which rank the loss or a gradient is not finite.

        In contrast to `passes`, the gradients are not averaged over the ranks, so that the rank
        with a wrong gradient can be found. The current gradients are lost. A collective.
        """
        problem = ""
        self.runtime.group.set_activity(ACTIVITIES["fetch"].format(step))
        for micro in self.fetch(step):
            with self.strategy.maybe_no_sync(self.parallel_model, last=False):
                with self.phase("forward", step):
                    loss = self.forward(step, micro).losses["loss"]
                with self.phase("backward", step):
                    self.runtime.scaler.scale(loss * micro.scale).backward()
            problem = problem or self._find_nonfinite(loss, micro)
            if self.strategy.may_leave_passes(bool(problem)):
                break
        self.optimizer.zero_grad(set_to_none=True)
        self.strategy.broadcast_buffers(self.model)
        culprits = []
        for rank, problem_there in enumerate(self.runtime.group.all_gather(problem)):
            if problem_there:
                culprits.append(f"rank {rank}: {problem_there}")
        if not culprits:
            return "not reproducible when the step is repeated: suspect the hardware"
        return "; ".join(culprits[:3])

    def _find_nonfinite(self, loss: Tensor, micro: MicroBatch) -> str:
        """Name the loss or the gradient that is not finite. Return "" if all are finite."""
        if not torch.isfinite(loss):
            return f"the loss of micro-batch {micro.index}"
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            if not torch.isfinite(local_tensor(parameter.grad)).all():
                return f"{self.strategy.describe_gradient(name)} in micro-batch {micro.index}"
        return ""
