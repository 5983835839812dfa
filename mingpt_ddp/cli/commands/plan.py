"""Say what a configuration means, without training it.

    python -m mingpt_ddp.plan model=gpt_mini trainer.max_epochs=10 ddp.nproc_per_node=2 [format=json]
    python -m mingpt_ddp.plan model=gpt2 device=h100 ddp.nproc_per_node=8 [nodes=8] [network_gbps=400] [vocab_size=50257]

group.key=value     as for training: the same presets, keys and errors
format              text (the default) or json, in bytes and seconds
device              GPUs to plan for instead of this machine: a100-40gb, a100-80gb, h100, h200, b200, l40s or 4090
nodes               machines with ddp.nproc_per_node of them each (1)
network_gbps        what a machine sends to others, all its adapters together, in gigabits per second (400)
vocab_size          tokens of the vocabulary, instead of the text's own

Prints parameters and FLOPs, length, batch, memory, snapshots and time, the batch at other numbers of ranks, and what
looks doubtful. For the times, one rank trains alone on this machine for some seconds; it writes no run directory.
With device= nothing is measured: memory, traffic and the least time of a step of every strategy follow from formulas,
on a machine without a GPU and without memory for the model.
"""  # noqa: E501

import json
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

from omegaconf import DictConfig

from mingpt_ddp.cli.arguments import answer, human_size, parse_value
from mingpt_ddp.cli.train_job import prepare
from mingpt_ddp.config.builders import attribute_errors_to_user_code
from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.keys.fields import PositiveInt
from mingpt_ddp.config.validation import build, check
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import cli_errors, echo, exit_process
from mingpt_ddp.errors import ConfigError, duration
from mingpt_ddp.metrics.gpus import Machine
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.training.start.checked_config import checked_config

FORMATS = ("text", "json")
OWN_KEYS = ("format", "device", "nodes", "network_gbps", "vocab_size")
HEADINGS = ("ranks", "batch", "micro-batch", "per rank", "idle", "learning rate")
PEAK_KINDS = (
    *("weights", "gradients", "optimizer", "average"),
    *("activations", "temporaries", "gathered", "data"),
)
NOT_KNOWN = "not known"  # of a model or task of one's own
Row: TypeAlias = tuple[str, str]  # a name, and what it is


def main() -> None:
    """Run `python -m mingpt_ddp.plan`."""
    words, values = _split(sys.argv[1:])
    with cli_errors():
        if text := answer(__doc__, words, needs_arguments=False):
            echo(text)
            sys.exit(0)
        sys.argv[1:] = words
        prepare(DistEnv())
        form = values.pop("format", "text")
        check(form in FORMATS, f"format={form} must be text or json")
        target = _target(values)
        check(not {"-m", "--multirun"} & {*words}, "a plan is of one run; leave out -m")
        composed: list[DictConfig] = []

        def plan(cfg: DictConfig) -> None:
            composed.append(cfg)
            _print_plan(cfg, form == "json", target)

        try:
            text = hydra_utils.run_hydra(plan)
        except Exception as error:
            if composed or isinstance(error, ConfigError):  # not from Hydra
                raise
            raise ConfigError(explain(error)) from error
        if text:
            echo(text)
    exit_process(None, 0)


def _split(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words of the configuration, and the values of OWN_KEYS."""
    words = []
    values: dict[str, str] = {}
    rest = iter(arguments)
    for word in rest:
        key, equals, text = word.removeprefix("--").partition("=")
        if key in OWN_KEYS and (equals or word.startswith("--")):
            values[key] = text if equals else next(rest, "")
        else:
            words.append(word)
    return words, values


@dataclass(frozen=True)
class Target(Machine):
    """The GPUs to plan for, and the model there."""

    vocab_size: PositiveInt | None = None  # instead of the text's own


def _target(texts: dict[str, str]) -> Target | None:
    """Return the GPUs to plan for, if any.

    Raises:
        ConfigError: a value is invalid, or belongs to none.
    """
    if not texts:
        return None
    first, text = next(iter(texts.items()))
    check("device" in texts, f"{first}={text} is of a plan for GPUs; add device=h100")
    values = {key: parse_value(text) for key, text in texts.items()}
    values["device"] = texts["device"].lower()
    return build(Target, values, "")


def _print_plan(cfg: DictConfig, as_json: bool, target: Target | None) -> None:
    with cli_errors(), attribute_errors_to_user_code():  # Hydra would print a line of its own
        config = checked_config(cfg)
        typed = hydra_utils.typed_keys()
        # torch takes a second to import: report a mistyped key first
        if target is None:
            from mingpt_ddp.planning.measured_plan import make_plan

            plan = make_plan(config, typed)
        else:
            from mingpt_ddp.planning.gpu_plan import make_gpu_plan

            plan = make_gpu_plan(config, target, typed, target.vocab_size)
        echo(json.dumps(plan, indent=1) if as_json else describe(plan))


def describe(plan: dict[str, Any]) -> str:
    """Return a plan as text."""
    rows = [
        ("run", f"{plan['run']}, {'for' if 'gpu' in plan else 'here on'} {plan['device']}"),
        ("data", plan["data"]),
        *_model_rows(plan),
    ]
    if "gpu" not in plan:
        rows += _memory_rows(plan["memory"])
        rows += _snapshot_rows(plan["snapshots"])
        rows += _time_rows(plan["time"], plan["length"]["unit"])
    lines = [f"{name:<11}{text}" for name, text in rows]
    if "gpu" in plan:
        lines += ["", *_gpu_lines(plan["gpu"])]
    lines += ["", *_rank_lines(plan["world_sizes"]), ""]
    if plan["doubts"]:
        lines.append("doubtful:")
        lines += [f"* {text}" for text in plan["doubts"]]
    else:
        lines.append("nothing looks doubtful")
    return "\n".join(lines)


def _gpu_lines(gpu: dict[str, Any]) -> list[str]:
    """Describe what each strategy needs of a rank."""
    works = {name: each for name, each in gpu["strategies"].items() if each["passes"]}
    kinds = [
        kind for kind in PEAK_KINDS if any(each[f"{kind}_bytes"] != 0 for each in works.values())
    ]
    rows = [("strategy", "peak", *kinds, "largest", "sends", "least step", "limit")]
    for name, figures in works.items():
        bound = figures["step_s_bound"]
        largest = figures["largest_micro_batch_size"]
        limit = max(("compute", "memory", "wire"), key=lambda part: figures[f"{part}_s"] or 0)
        if figures["ranks_per_copy"] > 1:
            name = f"{name}={figures['ranks_per_copy']}"
        rows.append(
            (
                name,
                *(_size(figures[f"{kind}_bytes"]) for kind in ("peak", *kinds)),
                NOT_KNOWN if largest is None else str(largest),
                human_size(figures["wire_bytes_per_step"]),
                "-" if bound is None else f"{bound:.3g} s",
                "does not fit" if bound is None else limit,
            )
        )
    lines = table_lines(rows, left=(0,))
    lines.append("")
    for name, figures in gpu["strategies"].items():
        if figures["reason"] and gpu["ranks"] > 1:
            lines.append(f"{name}: {figures['reason']}")
    rates = f"a GPU sends {gpu['link_bytes_per_s'] / 1e9:.0f} GB/s"
    if gpu["network_bytes_per_s"]:
        rates += f", a node {gpu['network_bytes_per_s'] / 1e9:.3g} GB/s to others (network_gbps)"
    lines.append(f"largest: micro-batch that fits; sends: a rank in a step; {rates}")
    lines.append("not counted:")
    lines += [f"* {text}" for text in gpu["left_out"]]
    return lines


def _size(size: int | None) -> str:
    return NOT_KNOWN if size is None else human_size(size)


def _model_rows(plan: dict[str, Any]) -> list[Row]:
    """Describe the model, and the length and batch of its training."""
    model = plan["model"]
    length = plan["length"]
    batch = plan["batch"]
    unit = length["unit"]
    size = f"{model['name']}: {model['parameters']:,} parameters"
    if model["flops"]:
        size += f"; {model['flops_per_item']:.3g} FLOP per item, {model['flops']:.3g} in all"
    steps = f"{length['steps']:,} steps, {length['epochs']:.3g} epochs"
    return [
        ("model", size),
        ("length", f"{steps}, {length['items']:,} {unit}"),
        ("", f"{model['items_per_parameter']:.3g} {unit} per parameter"),
        (
            "batch",
            f"{batch['batch_size']} in {batch['micro_batches']} micro-batches, "
            f"{batch['items']:,} {unit} per step",
        ),
    ]


def _memory_rows(memory: dict[str, int]) -> list[Row]:
    parts = []
    for name, size in memory.items():
        if size and name not in ("total", "available"):
            parts.append(f"{name} {human_size(size)}")
    total = f"{human_size(memory['total'])} of {human_size(memory['available'])} per rank"
    return [("memory", total), ("", ", ".join(parts))]


def _snapshot_rows(saves: dict[str, Any]) -> list[Row]:
    written = "" if saves["write_s"] is None else f", written in {saves['write_s']:.2g} s"
    kept = human_size(saves["kept_bytes"])
    every = f"{saves['every_steps']:,} steps ({_duration(saves['every_s'])})"
    return [
        ("snapshots", f"{human_size(saves['bytes'])} each{written}; {kept} stay"),
        ("", f"{saves['count']:,}, every {every}"),
    ]


def _time_rows(times: dict[str, Any], unit: str) -> list[Row]:
    evaluations = f"{times['evaluations']:,} evaluations of {times['evaluation_s']:.3g} s"
    rate = f"{times['items_per_s']:,.0f} {unit}/s"
    return [
        ("time", f"{_duration(times['total_s'])}: steps of {times['step_s']:.3g} s, {evaluations}"),
        ("", f"{rate}; measured on one rank alone, without communication"),
    ]


def _rank_lines(world_sizes: list[dict[str, Any]]) -> list[str]:
    """Return a table of the batch at other numbers of ranks, then those that cannot train."""
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
