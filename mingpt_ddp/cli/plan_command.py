"""Say what a configuration means, without training it.

    python -m mingpt_ddp.plan model=gpt_mini trainer.max_epochs=10 ddp.nproc_per_node=2 [format=json]

group.key=value     as for main.py: the same presets, keys and errors
format              text (the default) or json, in bytes and seconds

Prints parameters and FLOPs, length, batch, memory, snapshots and time, the batch at other numbers of ranks, and what
looks doubtful. For the times, one rank trains alone on this machine for some seconds; it writes no run directory.
"""  # noqa: E501

import json
import re
import sys
from datetime import timedelta
from typing import Any

import hydra
from omegaconf import DictConfig

from mingpt_ddp.cli.arguments import echo, human_size
from mingpt_ddp.cli.train_command import checked_config, prepare
from mingpt_ddp.config import hydra_utils
from mingpt_ddp.config.registry import attribute_errors_to_user_code
from mingpt_ddp.config.validation import check
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import cli_errors, exit_process
from mingpt_ddp.errors import ConfigError

FORMATS = ("text", "json")
SECTIONS = ("model", "length", "batch", "memory", "snapshots", "time")


def main() -> None:
    """Run `python -m mingpt_ddp.plan`."""
    words = [word for word in sys.argv[1:] if not re.match(r"(--)?format=", word)]
    formats = [word.partition("=")[2] for word in sys.argv[1:] if word not in words]
    with cli_errors():
        if {"-h", "--help"} & {*words}:
            echo(__doc__)
            sys.exit(0)
        sys.argv[1:] = words
        prepare(DistEnv())
        for text in formats:
            check(text in FORMATS, f"format={text} must be text or json")
        check(not {"-m", "--multirun"} & {*words}, "a plan is of one run; leave out -m")
        composed: list[DictConfig] = []

        def plan(cfg: DictConfig) -> None:
            composed.append(cfg)
            _print_plan(cfg, as_json=formats[-1:] == ["json"])

        try:
            directory = str(hydra_utils.config_directory())
            hydra.main(version_base="1.3", config_path=directory, config_name="config")(plan)()
        except Exception as error:
            if composed:  # not from Hydra
                raise
            raise ConfigError(hydra_utils.explain(error)) from error
    exit_process(None, 0)


def _print_plan(cfg: DictConfig, as_json: bool) -> None:
    with cli_errors(), attribute_errors_to_user_code():  # Hydra would print a line of its own
        config = checked_config(cfg)
        from mingpt_ddp.training.run_plan import (
            make_plan,  # imports torch: report a mistyped key first
        )

        plan = make_plan(config, hydra_utils.typed_keys())
    echo(json.dumps(plan, indent=1) if as_json else describe(plan))


def describe(plan: dict[str, Any]) -> str:
    """Return a plan as text."""
    model, length, batch, memory, saves, times = (plan[name] for name in SECTIONS)
    unit = length["unit"]
    size = {name: human_size(value) for name, value in memory.items()}
    flops = (
        f"; {model['flops_per_item']:.3g} FLOP per item, {model['flops']:.3g} in all"
        if model["flops"]
        else ""
    )
    write = "" if saves["write_s"] is None else f", written in {saves['write_s']:.2g} s"
    evaluations = f"{times['evaluations']:,} evaluations of {times['evaluation_s']:.3g} s"
    rows = [
        ("run", f"{plan['run']}, here on {plan['device']}"),
        ("data", plan["data"]),
        ("model", f"{model['name']}: {model['parameters']:,} parameters{flops}"),
        (
            "length",
            f"{length['steps']:,} steps, {length['epochs']:.3g} epochs, {length['items']:,} {unit}",
        ),
        ("", f"{model['items_per_parameter']:.3g} {unit} per parameter"),
        (
            "batch",
            (
                f"{batch['batch_size']} in {batch['micro_batches']} micro-batches, "
                f"{batch['items']:,} {unit} per step"
            ),
        ),
        ("memory", f"{size.pop('total')} of {size.pop('available')} per rank"),
        ("", ", ".join(f"{name} {value}" for name, value in size.items() if memory[name])),
        (
            "snapshots",
            f"{human_size(saves['bytes'])} each{write}; {human_size(saves['kept_bytes'])} stay",
        ),
        (
            "",
            (
                f"{saves['count']:,}, every {saves['every_steps']:,} steps "
                f"({_duration(saves['every_s'])})"
            ),
        ),
        ("time", f"{_duration(times['total_s'])}: steps of {times['step_s']:.3g} s, {evaluations}"),
        (
            "",
            (
                f"{times['items_per_s']:,.0f} {unit}/s; measured on one rank alone, without "
                "communication"
            ),
        ),
    ]
    lines = [f"{name:<11}{text}" for name, text in rows]
    lines += [
        "",
        "ranks   batch  micro-batch  per rank  idle  learning rate",
        *map(_ranks, plan["world_sizes"]),
        "",
    ]
    lines += (
        ["doubtful:", *(f"* {text}" for text in plan["doubts"])]
        if plan["doubts"]
        else ["nothing looks doubtful"]
    )
    return "\n".join(lines)


def _ranks(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['ranks']:>5}   {row['error']}"
    sizes = (
        f"{row['batch_size']:>5}  {row['micro_batch_size']:>11}  {row['micro_batches_per_rank']:>8}"
    )
    return f"{row['ranks']:>5}   {sizes}  {row['idle']:>4.0%}  {row['lr']:>13.3g}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if 1 <= seconds < 1e13 else f"{seconds:.2g} s"
