"""Measure the model of a snapshot with the metrics of its task.

    python -m mingpt_ddp evaluate outputs/demo split=test
    torchrun --nproc_per_node=2 -m mingpt_ddp evaluate outputs/demo data.path=other.txt
    python -m mingpt_ddp evaluate outputs/seed1 outputs/seed2 outputs/seed3

snapshot        a run directory, its snapshots or one of them; a path or any fsspec URL that every rank can read;
                several: the metrics of each, on the text of the first; bits_per_byte compares tokenizers
step            newest (the default), best (lowest validation loss) or a number
split           val (the default) or test: all of it, also where training measures only trainer.eval_steps
data.path       a text to measure instead, as a whole, in the characters that the model knows; or where the data is now
device          auto (the default: the GPU if there is one), cpu or cuda
precision       auto (the default: as in training on this device), fp32, bf16 or fp16
code            your Python file that registers the task, the model or the dataset, if they are not built in

The metrics are printed as JSON.
"""  # noqa: E501

import contextlib
import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mingpt_ddp.cli.arguments import run_command
from mingpt_ddp.config.builders import attribute_errors_to_user_code, run_file
from mingpt_ddp.config.config import DEFAULT_CHOICE, Config, from_mapping
from mingpt_ddp.config.recorded import with_data_format, without_unknown
from mingpt_ddp.config.user_code import is_user_defined
from mingpt_ddp.config.validation import NotRegisteredError, check
from mingpt_ddp.errors import ConfigError, DataError, SnapshotError
from mingpt_ddp.process.env import read_env
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.storage.urls import check_can_open

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mingpt_ddp.tasks.task import Task

log = logging.getLogger(__name__)

OF_TOKENS = ("tokenizer", "vocab_size", "end_token", "block_size")  # keys of data
OF_TEXTS = ("path", "sources", "val_paths", "split_paths")  # keys of data with URLs
OF_DATA = ("text", "data")  # keys of a state with the SHA-256 of the data


@dataclass(frozen=True)
class EvaluateConfig:
    """The keys of the command line, as the usage above describes them."""

    snapshot: list[str]
    step: int | Literal["newest", "best"] = "newest"
    split: Literal["val", "test"] = "val"
    data_path: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    code: str | None = None

    def __post_init__(self) -> None:
        for url in self.snapshot:
            check_can_open("snapshot", url)


def main() -> None:
    """Run `python -m mingpt_ddp evaluate`."""
    run_command(__doc__, _command)


def _command(config: EvaluateConfig) -> int:
    env = read_env()
    measured = evaluate(config)
    shown: dict[str, Any] = {}
    if config.data_path is not None:
        shown["data"] = config.data_path
    shown["split"] = config.split
    if len(measured) == 1:
        shown.update(*measured.values())
    else:
        shown["runs"] = [{"snapshot": url, **metrics} for url, metrics in measured.items()]
    env.call_on_rank_zero(lambda: echo(json.dumps(shown, indent=1)))
    return 0


def evaluate(config: EvaluateConfig) -> dict[str, dict[str, float]]:
    """Return the metrics of each snapshot by its URL.

    A collective of all ranks that a launcher has started.

    Raises:
        SnapshotError: there is no snapshot, no model can be built from it, or the snapshots do not
            compare.
        DataError: the data is not there, has changed, or has characters that the model does not
            know.
    """
    # torch takes a second to import: only after the keys are validated.
    from mingpt_ddp.distributed.runtime import Runtime
    from mingpt_ddp.models import move_model
    from mingpt_ddp.snapshots.read.load import load
    from mingpt_ddp.tasks import build_task
    from mingpt_ddp.training.evaluation.evaluator import Evaluator

    if config.code is not None:
        run_file(Path(config.code), "code")
    snapshots = {url: load(url, ("model",), config.step) for url in config.snapshot}
    first, *others = snapshots
    configs = {first: _run_config(config, first, snapshots[first].state)}
    for url in others:
        configs[url] = _run_config(config, url, snapshots[url].state, snapshots[first].state)
    runtime = Runtime(configs[first], read_env())
    runtime.resume_precision(configs[first], snapshots[first].state)
    measured = {}
    with attribute_errors_to_user_code(), contextlib.ExitStack() as refusals:
        tasks = {}
        for url, snapshot in snapshots.items():
            tasks[url] = build_task(configs[url], runtime.group, recorded_state=snapshot.state)
            refusals.enter_context(tasks[url].discarded_if_refused())
            _adopt(tasks[url], config, url, snapshot.state)
        for url, snapshot in snapshots.items():
            model = _build(tasks[url], configs[url], snapshot.model)
            move_model(model, runtime.device)
            metrics = Evaluator(tasks[url], runtime).run(model, config.split)
            if not metrics:
                raise DataError(f"the data of {url} has no {config.split} split")
            measured[url] = metrics
    for line in tasks[first].data_notes():
        runtime.group.env.call_on_rank_zero(partial(log.info, "%s", line))
    runtime.close()
    return measured


def _adopt(task: "Task", config: EvaluateConfig, url: str, state: Any) -> None:
    """Prepare a task for the model of a snapshot, whose state is untrusted."""
    try:
        task.adopt(state, is_other_data=config.data_path is not None)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"the snapshot of {url} has an invalid state: {error}") from error


def _build(task: "Task", run_config: Config, tensors: dict[str, "Tensor"]) -> "nn.Module":
    from mingpt_ddp.snapshots.read.load_model import build_around
    from mingpt_ddp.snapshots.state_dict import load_model_state

    if is_user_defined("task", run_config.task.name):  # it may build the model itself
        model = task.build_model()
        load_model_state(model, tensors)
        return model
    return build_around(run_config.model, task.shape, tensors)


def _run_config(config: EvaluateConfig, url: str, state: Any, first: Any = None) -> Config:
    """Return the configuration of the snapshot's run, from an untrusted state, for this machine.

    Args:
        first: State of the snapshot whose text is measured, if it is another one. Also untrusted.
    """
    try:
        recorded = without_unknown(state["config"])
        values = {group: dict(keys) for group, keys in recorded.items()}
        values["trainer"] |= {
            "device": config.device,
            "precision": config.precision,
            "eval_steps": None,
        }
        # An evaluation follows no schedule, which the user's code may have registered.
        values["optimizer"] |= {"schedule": "constant", "schedule_settings": None}
        values |= {"ddp": {}, "snapshot": {}}
        if first is not None:
            _measure_like(values, first["config"])
            if config.data_path is None and _data_sha256(state) != _data_sha256(first):
                raise ValueError(
                    f"it has other data than {config.snapshot[0]}; measure it alone, or all on a "
                    "text: data.path=..."
                )
        if config.data_path is None:
            values = with_data_format(values)
        data = values["data"]
        given: dict[str, Any] = {"cache_dir": None, "num_workers": 0}  # for this machine
        if config.data_path is not None:
            check("path" in data, "its data has no path; leave data.path out")
            given |= {
                "path": config.data_path,
                "sha256": None,
                "truncate": 1.0,
                "sources": None,
                "val_paths": None,
                "split_paths": None,
            }
        if data.get("tokenizer") not in ("char", "byte"):  # that of the snapshot is used
            given["tokenizer"] = "bpe"
        paths = [{**data, **given}.get(key) for key in OF_TEXTS]
        check("::" not in json.dumps(paths), "a chain of URLs is not followed; give data.path")
        data |= {key: value for key, value in given.items() if key in data}
        return from_mapping(values)
    except NotRegisteredError as error:
        raise SnapshotError(
            f"the snapshot of {url} needs code of yours: {error.args[0]}; name the Python file "
            "that registers it, if you trust it, as in code=my_project/mine.py"
        ) from error
    except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as error:
        message = str(error.args[0]) if error.args else type(error).__name__
        raise SnapshotError(f"the snapshot of {url} cannot be evaluated: {message}") from error


def _data_sha256(state: Any) -> list[Any]:
    """Return the SHA-256 of the data, or [] if the task records none. The state is untrusted."""
    return [state[key]["sha256"] for key in OF_DATA if key in state]


def _measure_like(values: dict[str, Any], first: Any) -> None:
    """Measure a run on the same split of the same text as the first, with its own tokenizer.

    Raises:
        ValueError: The tasks differ.
    """
    data = values["data"]
    default = DEFAULT_CHOICE["task"]
    name = values.get("task", {}).get("name", default)
    expected = first.get("task", {}).get("name", default)
    if name != expected:
        raise ValueError(
            f"task.name={name} does not compare with task.name={expected}; measure it alone"
        )
    if "block_size" in data:  # a text
        kept = {key: data[key] for key in OF_TOKENS if key in data}
        values["data"] = {**first["data"], "end_token": False, **kept}
