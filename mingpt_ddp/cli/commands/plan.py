"""Show the length, the memory and the doubtful settings of a run, without training it.

    python -m mingpt_ddp plan model=gpt_mini trainer.max_epochs=10 ddp.nproc_per_node=2 [format=json]
    python -m mingpt_ddp plan model=gpt2 device=h100 ddp.nproc_per_node=8 [nodes=8] [network_gbps=400] [vocab_size=50257]

group.key=value     presets and keys as for training
format              text (the default) or json, with sizes in bytes and times in seconds
device              plan for these GPUs instead of this machine: a100-40gb, a100-80gb, h100, h200, b200, l40s or 4090
nodes               number of machines, each with ddp.nproc_per_node GPUs (1)
network_gbps        network bandwidth of a machine, summed over its adapters, in gigabits per second (400)
vocab_size          size of the vocabulary to plan for; by default, the text determines it

Prints the model, the length of the run, the memory that each strategy needs, the batch at other numbers of ranks, and
settings that look doubtful. The memory comes from formulas. Without device=, one rank also trains 20 steps, to measure
their time. The command writes no run directory.
"""  # noqa: E501

import json
import sys
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from mingpt_ddp.cli.arguments import answer, human_size, parse_value
from mingpt_ddp.cli.command_line import prepare_command_line
from mingpt_ddp.config.builders import attribute_errors_to_user_code
from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.compose.resolve import resolve
from mingpt_ddp.config.keys.fields import PositiveInt
from mingpt_ddp.config.validation import build, check
from mingpt_ddp.errors import ConfigError, duration
from mingpt_ddp.metrics.gpus import Machine
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.exit import exit_process
from mingpt_ddp.process.root_cause import cli_errors
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.training.checked_job import checked_job

FORMATS = ("text", "json")
PLAN_KEYS = ("format", "device", "nodes", "network_gbps", "vocab_size")
HEADINGS = ("ranks", "batch", "micro-batch", "per rank", "idle", "learning rate")
MEMORY_KINDS = (
    "weights",
    "gradients",
    "optimizer",
    "average",
    "activations",
    "temporaries",
    "data",
)
# Shown for a size that cannot be computed, because the model or the task is the user's own code.
UNKNOWN = "not known"


def main() -> None:
    """Run `python -m mingpt_ddp plan`."""
    words, values = _split(sys.argv[1:])
    with cli_errors():
        if text := answer(__doc__, words, needs_arguments=False):
            echo(text)
            sys.exit(0)
        sys.argv[1:] = words
        prepare_command_line(DistEnv())
        form = values.pop("format", "text")
        check(form in FORMATS, f"format={form} must be text or json")
        target = _target(values)
        check(not {"-m", "--multirun"} & {*words}, "plan describes one run; leave out -m")
        composed: list[DictConfig] = []

        def plan(cfg: DictConfig) -> None:
            composed.append(cfg)
            _print_plan(cfg, form == "json", target)

        try:
            text = hydra_utils.run_hydra(plan)
        except Exception as error:
            if composed or isinstance(error, ConfigError):  # Hydra did not raise this error
                raise
            raise ConfigError(explain(error)) from error
        if text:
            echo(text)
    exit_process(None, 0)


def _split(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words of the configuration, and the values of PLAN_KEYS."""
    words = []
    values: dict[str, str] = {}
    rest = iter(arguments)
    for word in rest:
        key, equals, text = word.removeprefix("--").partition("=")
        if key in PLAN_KEYS and (equals or word.startswith("--")):
            values[key] = text if equals else next(rest, "")
        else:
            words.append(word)
    return words, values


@dataclass(frozen=True)
class Target(Machine):
    """The GPUs to plan for, and a vocabulary size that replaces the size from the text."""

    vocab_size: PositiveInt | None = None


def _target(texts: dict[str, str]) -> Target | None:
    """Return the GPUs to plan for. Return None to plan for this machine.

    Raises:
        ConfigError: A value is invalid, or device= is missing.
    """
    if not texts:
        return None
    first, text = next(iter(texts.items()))
    check("device" in texts, f"{first}={text} needs a device to plan for; add device=h100")
    values = {key: parse_value(text) for key, text in texts.items()}
    values["device"] = texts["device"].lower()
    return build(Target, values, "")


def _print_plan(cfg: DictConfig, as_json: bool, target: Target | None) -> None:
    # If an error reached Hydra, Hydra would print lines of its own about it.
    with cli_errors(), attribute_errors_to_user_code():
        job = checked_job(resolve(cfg))
        # torch takes a second to import, so report a mistyped key first.
        from mingpt_ddp.study.planning.plan import make_plan

        vocab_size = target.vocab_size if target else None
        plan = make_plan(job, target, vocab_size)
        echo(json.dumps(plan, indent=1) if as_json else describe(plan))


def describe(plan: dict[str, Any]) -> str:
    """Format a plan as text."""
    model, length, batch = plan["model"], plan["length"], plan["batch"]
    unit = length["unit"]
    size = f"{model['name']}: {model['parameters']:,} parameters"
    if model["flops"]:
        size += f"; {model['flops_per_item']:.3g} FLOP per item, {model['flops']:.3g} in all"
    steps = f"{length['steps']:,} steps, {length['epochs']:.3g} epochs, {length['items']:,} {unit}"
    micro = f"{batch['batch_size']} in {batch['micro_batches']} micro-batches"
    saves = plan["snapshots"]
    rows = [
        ("run", f"{plan['run']}, on {plan['device']}"),
        ("data", plan["data"]),
        ("model", size),
        ("length", f"{steps}; {model['items_per_parameter']:.3g} {unit} per parameter"),
        ("batch", f"{micro}, {batch['items']:,} {unit} per step"),
        (
            "snapshots",
            f"{human_size(saves['bytes'])} each; {human_size(saves['kept_bytes'])} for all that "
            "are kept",
        ),
    ]
    if times := plan["measured"]:
        mfu = f" (MFU {times['mfu']:.1%})" if times["mfu"] else ""
        evaluations = f"{times['evaluations']:,} evaluations of {times['evaluation_s']:.3g} s"
        total = _duration(times["total_s"])
        rows += [
            ("time", f"{total}: steps of {times['step_s']:.3g} s{mfu}, {evaluations}"),
            (
                "",
                f"{times['items_per_s']:,.0f} {unit}/s; measured on one rank, "
                "without communication",
            ),
            ("", f"peak memory of this process: {human_size(times['peak_bytes'])}"),
        ]
    lines = [f"{name:<11}{text}" for name, text in rows]
    lines += ["", *_strategy_lines(plan), "", *_rank_lines(plan["world_sizes"]), ""]
    if plan["doubts"]:
        lines += ["doubtful:", *(f"* {text}" for text in plan["doubts"])]
    else:
        lines.append("nothing looks doubtful")
    return "\n".join(lines)


def _strategy_lines(plan: dict[str, Any]) -> list[str]:
    """Format a table of the memory and time of each strategy, and reasons why some cannot run."""
    table = {name: row for name, row in plan["strategies"].items() if "passes" in row}
    kinds = [
        kind for kind in MEMORY_KINDS if any(row[f"{kind}_bytes"] != 0 for row in table.values())
    ]
    rows = [("strategy", "peak", *kinds, "largest", "sends", "step at peak", "limit")]
    for name, row in table.items():
        if row["ranks_per_copy"] > 1:
            name = f"{name}={row['ranks_per_copy']}"
        sizes = [row[f"{kind}_bytes"] for kind in ("peak", *kinds)]
        largest, step_s = row["largest_micro_batch_size"], row["step_s_at_peak"]
        limit = "wire" if (row["wire_s"] or 0) > (row["compute_s"] or 0) else "compute"
        rows.append(
            (
                name,
                *(UNKNOWN if size is None else human_size(size) for size in sizes),
                UNKNOWN if largest is None else str(largest),
                human_size(row["wire_bytes_per_step"]),
                "-" if step_s is None else f"{step_s:.3g} s",
                "does not fit" if row["reason"] else "-" if step_s is None else limit,
            )
        )
    lines = [*table_lines(rows, left=(0,)), ""]
    lines += [f"{name}: {r['reason']}" for name, r in plan["strategies"].items() if r["reason"]]
    lines.append(
        f"each rank has {human_size(plan['memory_bytes'])} of memory; the peaks are accurate to "
        "10% for steps on a GPU without torch.compile; in addition, CUDA itself needs 0.5 GiB, and "
        "NCCL's buffers and fragmentation need some more"
    )
    return lines


def _rank_lines(world_sizes: list[dict[str, Any]]) -> list[str]:
    """Format a table of the batch at other numbers of ranks.

    For a number of ranks that cannot train, add a line with the error.
    """
    rows: list[tuple[str, ...]] = [HEADINGS]
    errors = []
    for row in world_sizes:
        if "error" in row:
            errors.append(f"{row['ranks']} ranks: {row['error']}")
            continue
        keys = ("ranks", "batch_size", "micro_batch_size", "micro_batches_per_rank")
        numbers = [str(row[key]) for key in keys]
        rows.append((*numbers, f"{row['idle']:.0%}", f"{row['lr']:.3g}"))
    return [*table_lines(rows), *errors]


def _duration(seconds: float) -> str:
    return duration(seconds) if 1 <= seconds < 1e13 else f"{seconds:.2g} s"
