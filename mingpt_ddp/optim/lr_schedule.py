"""The schedules of the learning rate and of weight decay."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.keys.optimizer_config import OptimizerConfig
from mingpt_ddp.config.user_code import check_takes
from mingpt_ddp.errors import CodeError

T = TypeVar("T", bound=OptimizerConfig)


def scale_lr(config: T, batch_size: int) -> T:
    """Return the configuration with `lr` scaled to the batch size, as `lr_scaling` says.

    The learning rates of all parameter groups are scaled by the same factor.

    Sources: for linear scaling with SGD, Goyal et al. 2017, "Accurate, Large Minibatch SGD"
    (arXiv:1706.02677); for scaling by the square root with Adam, Malladi et al. 2022, "On the SDEs
    and Scaling Rules for Adaptive Gradient Algorithms" (arXiv:2205.10287).
    """
    if config.lr_scaling == "none" or config.reference_batch_size is None:
        return config
    factor = batch_size / config.reference_batch_size
    if config.lr_scaling == "sqrt":
        factor = math.sqrt(factor)
    return replace(config, lr=config.lr * factor)


def get_lr(step: int, config: OptimizerConfig, run_steps: int) -> float:
    """Return the learning rate of a step. Steps count from 1.

    After a linear warm-up, the rate decays from `lr` to `min_lr_ratio * lr` at the last step of the
    schedule. It is constant after that. The decay begins after the warm-up, or after the step
    `decay_from` if that is later. A user's schedule replaces the warm-up too.

    Source of wsd (warm-up, stable, decay): Hu et al. 2024, "MiniCPM" (arXiv:2404.06395). The decay
    is linear here.
    """
    total = config.schedule_steps or run_steps
    if schedule := BUILDERS["schedule"].get(config.schedule):
        return config.lr * _user_factor(schedule, step, total, config)
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    begin = max(config.warmup_steps, config.decay_from or 0)
    if config.schedule == "constant" or step <= begin:
        return config.lr
    progress = min(1.0, (step - begin) / max(1, total - begin))
    if config.schedule == "cosine":
        coeff = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.schedule == "linear":
        coeff = 1 - progress
    else:  # wsd
        remaining = 1 - min(1.0, step / total)
        coeff = min(1.0, remaining / config.decay_ratio)
    # coeff decreases from 1 to 0.
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * coeff)


def _user_factor(
    schedule: Callable[..., Any], step: int, total: int, config: OptimizerConfig
) -> float:
    """Return the value of a user's schedule at a step.

    Raises:
        CodeError: The schedule returned something other than a finite number of at least 0.
    """
    where = f"the schedule {config.schedule}"
    factor = schedule(step, total, config.schedule_config())
    try:
        rate = float(factor)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodeError(f"{where} must return a number, not {str(factor)[:100]}") from error
    if not (math.isfinite(rate) and rate >= 0):
        raise CodeError(
            f"{where} must return a finite number of at least 0, but returned {rate} at step {step}"
        )
    return rate


def check_schedule(config: OptimizerConfig, run_steps: int) -> None:
    """Check a user's schedule: call it for about a hundred steps, in order and then backwards.

    The learning rate of a step must not depend on the calls before it.

    Raises:
        CodeError: The schedule depends on more than its arguments, or returned an invalid rate. The
            message names the step.
    """
    schedule = BUILDERS["schedule"].get(config.schedule)
    if schedule is None:
        return
    check_takes(schedule, ("step", "steps", "config"), f"the schedule {config.schedule}")
    steps = [*range(1, run_steps + 1, max(1, run_steps // 100)), run_steps]
    rates = [get_lr(step, config, run_steps) for step in steps]
    for step, rate in zip(reversed(steps), reversed(rates), strict=True):
        if get_lr(step, config, run_steps) != rate:
            raise CodeError(
                f"the schedule {config.schedule}: the rate of step {step} depends on more than "
                "the arguments step, steps and config, so that a restart would change it; compute "
                "it from these arguments alone"
            )


def weight_decay_factor(step: int, config: OptimizerConfig, run_steps: int) -> float:
    """Return the factor by which `weight_decay` is multiplied at a step. Steps count from 1.

    The schedules linear and cosine reach `final_weight_decay_ratio` at the last step of the
    schedule. The factor is constant after that.
    """
    if config.weight_decay_schedule == "lr":
        return get_lr(step, config, run_steps) / config.lr
    if config.weight_decay_schedule == "constant":
        return 1.0
    progress = min(1.0, step / (config.schedule_steps or run_steps))
    if config.weight_decay_schedule == "cosine":
        progress = 0.5 * (1 - math.cos(math.pi * progress))
    return 1 + (config.final_weight_decay_ratio - 1) * progress
