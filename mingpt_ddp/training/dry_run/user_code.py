"""Check the user's code before a run writes anything: it must resume exactly."""

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
    FIRST_STATE,
    OTHER_STATE,
    Effect,
    refuse_another_result,
    refuse_other_effects,
    refuse_other_states,
)
from mingpt_ddp.training.dry_run.trial_run import DryRun, TrialRun
from mingpt_ddp.training.evaluation.weight_average import check_averaged
from mingpt_ddp.training.hooks.actions import refuse_unfit_hooks
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.trainable import build_trainable


def check_user_code(runtime: Runtime, task: Task, loader: Loader, plan: BatchPlan) -> None:
    """Try the user's code: rank zero alone, or all ranks if there are hooks that act.

    All ranks then take the same steps, with rank zero's batch. A collective.

    Raises:
        CodeError, ConfigError: as `check_parts` and `check_resumes_exactly`.
    """
    group = runtime.group
    dry_run = DryRun(runtime, task, loader, plan)
    names = group.run_on_rank_zero(lambda: check_parts(dry_run))

    def take_steps() -> list[Effect]:
        return check_resumes_exactly(dry_run, names)

    if BUILDERS["action"]:
        group.decide_on_rank_zero(take_steps, refuse_other_effects)
    else:
        group.run_on_rank_zero(take_steps)


def check_resumes_exactly(dry_run: DryRun, val_metrics: list[str]) -> list[Effect]:
    """Train some steps, restore the state before the last, and compare the last bit for bit.

    The last step runs twice: in the objects that took the first steps, and in fresh ones with the
    restored state. It follows an odd number of steps, three: an optimizer that acts at every second
    step, and keeps its own count, then acts differently in fresh objects. Hooks are called as in
    training. Hooks of evaluations are called after the third step, and again after the last step if
    one of them has state.

    Args:
        val_metrics: Names of the task's metrics of the validation split.

    Returns:
        The effect of each call of a hook, to compare between ranks.

    Raises:
        CodeError: the code raises, returns the wrong type or shape, or does not resume exactly.
        ConfigError: a parameter gets no gradient, which DDP would wait for.
    """
    task = dry_run.task
    few = dry_run.few
    with attribute_errors_to_user_code():
        first = TrialRun(dry_run, val_metrics)
        fresh = first.digest()
        first_states = first.hook_states()
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
        saved_states = first.hook_states()
        loss = first.step(4)
        first.evaluate(4, again=True)
        end = first.digest()
        effects = first.effects
        del first, trainable
        second = TrialRun(dry_run, val_metrics)
        refuse_other_states(first_states, second.hook_states(), FIRST_STATE)
        if fresh != second.digest():
            raise _not_exact(f"model {model_label(task.config.model)}", "first weights depend")
        second.load(saved)
        refuse_other_states(saved_states, second.hook_states(), OTHER_STATE)
        again = second.step(4)
        second.evaluate(4, again=True)
        if dry_run.is_exact:
            if not torch.equal(loss.nan_to_num(), again.nan_to_num()):
                raise _not_exact(f"model {model_label(task.config.model)}", "loss depends")
            last = [effect for effect in effects if effect["step"] == 4]
            refuse_another_result(last, second.effects)
            if end != second.digest():
                raise _not_exact(f"optimizer {task.config.optimizer.name}", "step depends")
        task.check_model(second.trainable.model, few[0], trained=True)
    return effects


def check_parts(dry_run: DryRun) -> list[str]:
    """Check hooks, schedule, what a model returns and can be saved as, and if it compiles.

    Returns:
        Names of the task's metrics of the validation split.

    Raises:
        CodeError: the code raises, or returns the wrong type or shape.
        ConfigError: a hook has state, and no rank holds all weights.
    """
    refuse_unfit_hooks(dry_run.runtime.strategy)
    config = dry_run.task.config
    batch = dry_run.batch
    with attribute_errors_to_user_code():
        length = RunLength(config, dry_run.loader.steps_per_epoch)
        steps = length.known_steps or config.optimizer.schedule_steps or 1
        check_schedule(config.optimizer, steps)
        whole = dry_run.runtime.to_device(batch[0].batch)
        return _check_model(dry_run.runtime, dry_run.task, whole, dry_run.few[0])


def _check_model(runtime: Runtime, task: Task, batch: Any, part: Any) -> list[str]:
    """Check what a user's model returns, what it can be saved as, and whether it compiles.

    Return the names of the task's metrics of the validation split.

    Args:
        batch: The batch of one micro-batch, on the device.
        part: The part of it that trial steps use.
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
