"""Check the user's code before a run writes anything.

A run with this code must resume exactly: after an interruption it computes the same bits as without
one.
"""

from typing import Any

import torch

from mingpt_ddp.config.builders import BUILDERS, attribute_errors_to_user_code
from mingpt_ddp.config.keys.model_config import model_label
from mingpt_ddp.data.dataloader import BatchPlan, Loader
from mingpt_ddp.distributed.device.compile import check_compiles
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError
from mingpt_ddp.models import flops_per_token
from mingpt_ddp.optim.lr_schedule import check_schedule
from mingpt_ddp.snapshots import state_dict
from mingpt_ddp.tasks.outputs import check_outputs, outputs_of
from mingpt_ddp.tasks.task import Task, check_metrics
from mingpt_ddp.training.dry_run.hook_effects import (
    INITIAL_STATE_DIFFERS,
    LOADED_STATE_DIFFERS,
    Effect,
    refuse_different_effects,
    refuse_different_result,
    refuse_different_states,
)
from mingpt_ddp.training.dry_run.trial_run import DryRun, TrialRun
from mingpt_ddp.training.evaluation.weight_average import check_averaged
from mingpt_ddp.training.hooks.actions import refuse_unfit_hooks
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.trainable import build_trainable


def check_user_code(runtime: Runtime, task: Task, loader: Loader, plan: BatchPlan) -> None:
    """Try the user's code in a dry run. A collective.

    If there are hooks that act on the run, all ranks take the same steps, with the batch of rank
    zero, and the effects of the hooks are compared. Without such hooks, only rank zero takes steps.

    Raises:
        CodeError: The code raises an exception, returns the wrong type or shape, or does not resume
            exactly.
        ConfigError: A hook or the model does not work with the configuration.
    """
    group = runtime.group
    dry_run = DryRun(runtime, task, loader, plan)
    names = group.run_on_rank_zero(lambda: check_parts(dry_run))

    def take_steps() -> list[Effect]:
        return check_resumes_exactly(dry_run, names)

    if BUILDERS["action"]:
        group.decide_on_rank_zero(take_steps, refuse_different_effects)
    else:
        group.run_on_rank_zero(take_steps)


def check_resumes_exactly(dry_run: DryRun, val_metrics: list[str]) -> list[Effect]:
    """Take four steps, repeat the last one from a restored state, and compare all bits.

    The last step runs twice: in the objects that took the first three steps, and in new objects
    with the restored state. There is an odd number of steps before it, to find an optimizer that
    acts differently at every second step and does not save its count of steps: in the new objects
    it takes step four as its first step, which differs from its fourth step.

    Hooks are called as in training. Hooks of evaluations are called after the third step, and again
    after the last step if one of them has state.

    Args:
        dry_run: The runtime, task and data of the run.
        val_metrics: Names of the task's metrics of the validation split.

    Returns:
        The effect of each call of a hook, to compare between ranks.

    Raises:
        CodeError: The code raises an exception, returns the wrong type or shape, or does not resume
            exactly.
        ConfigError: A parameter gets no gradient, so that DDP would wait for it.
    """
    task = dry_run.task
    trial_batches = dry_run.trial_batches
    with attribute_errors_to_user_code():
        first = TrialRun(dry_run, val_metrics)
        initial_digest = first.digest()
        initial_hook_states = first.hook_states()
        first.step(1)
        trainable = first.trainable
        state_dict.check_savable(
            trainable.model,
            trainable.optimizer,
            by_rows=dry_run.runtime.strategy.weights == "rows",
        )
        first.step(2)
        first.step(3)
        first.evaluate(3)
        saved = first.copy()
        saved_hook_states = first.hook_states()
        loss = first.step(4)
        first.evaluate(4, is_repeated=True)
        final_digest = first.digest()
        effects = first.effects
        del first, trainable
        second = TrialRun(dry_run, val_metrics)
        refuse_different_states(initial_hook_states, second.hook_states(), INITIAL_STATE_DIFFERS)
        if initial_digest != second.digest():
            raise _not_exact(f"model {model_label(task.config.model)}", "initial weights depend")
        second.load(saved)
        refuse_different_states(saved_hook_states, second.hook_states(), LOADED_STATE_DIFFERS)
        repeated_loss = second.step(4)
        second.evaluate(4, is_repeated=True)
        if dry_run.is_exact:
            if not torch.equal(loss.nan_to_num(), repeated_loss.nan_to_num()):
                raise _not_exact(f"model {model_label(task.config.model)}", "loss depends")
            last = [effect for effect in effects if effect["step"] == 4]
            refuse_different_result(last, second.effects)
            if final_digest != second.digest():
                raise _not_exact(f"optimizer {task.config.optimizer.name}", "step depends")
        task.check_model(second.trainable.model, trial_batches[0], trained=True)
    return effects


def check_parts(dry_run: DryRun) -> list[str]:
    """Check the user's hooks, schedule, model and task one by one, without training.

    Args:
        dry_run: The runtime, task and data of the run.

    Returns:
        Names of the task's metrics of the validation split.

    Raises:
        CodeError: The code raises an exception, or returns the wrong type or shape.
        ConfigError: A hook or the model does not work with the configuration.
    """
    refuse_unfit_hooks(dry_run.runtime.strategy)
    config = dry_run.task.config
    micro_batches = dry_run.micro_batches
    with attribute_errors_to_user_code():
        length = RunLength(config, dry_run.loader.steps_per_epoch)
        steps = length.known_steps or config.optimizer.schedule_steps or 1
        check_schedule(config.optimizer, steps)
        whole = dry_run.runtime.to_device(micro_batches[0].batch)
        return _check_model(dry_run.runtime, dry_run.task, whole, dry_run.trial_batches[0])


def _check_model(runtime: Runtime, task: Task, batch: Any, part: Any) -> list[str]:
    """Check that a user's model returns valid outputs, can be saved, and compiles.

    Return the names of the task's metrics of the validation split.

    Args:
        batch: The batch of one micro-batch, on the device.
        part: The part of this batch that the trial steps use.
    """
    config = task.config
    trainable = build_trainable(runtime.alone(), task)
    model = trainable.model
    flops_per_token(model)
    state_dict.check_savable(model, trainable.optimizer)
    if config.trainer.ema is not None:
        check_averaged(model, config.trainer.ema)
    runtime.strategy.check_model(model)
    with runtime.autocast():
        task.check_model(model, batch, trained=False)
        outputs = outputs_of(task.loss(model, part), model)
        check_outputs(f"the model {model_label(config.model)}", outputs)
        check_metrics(config.task.name, outputs.losses | outputs.metrics)
        measured = task.metrics(model, part)
    if runtime.compiles:
        check_compiles(model, config, lambda model: task.loss(model, part))
    return [*measured]


def _not_exact(part: str, depends: str) -> CodeError:
    return CodeError(
        f"the {part} would not resume exactly: its {depends} on more than the snapshot and torch's "
        "seed; keep its state in parameters, buffers or optimizer.state, and draw random numbers "
        "from torch's global generator"
    )
