"""Measure the model of a snapshot with the metrics of its task.

    python -m mingpt_ddp evaluate outputs/demo split=test
    torchrun --nproc_per_node=2 -m mingpt_ddp evaluate outputs/demo data.path=other.txt
    python -m mingpt_ddp evaluate outputs/seed1 outputs/seed2 outputs/seed3

snapshot        path or fsspec URL of a run directory, of its directory of snapshots, or of one snapshot; every rank must be
                able to read it. If you name several, each model is measured on the text of the first run. Compare models
                with different tokenizers by bits_per_byte
step            newest (the default), best (lowest validation loss) or the number of a step
split           val (the default) or test; the whole split is measured, even if trainer.eval_steps is set
data.path       a text to measure instead of the text of the run. It is measured as a whole, and the model must know its
                characters. For a dataset of your own: the path where its files are now
device          auto (the default, uses the GPU if there is one), cpu or cuda
precision       auto (the default, as in training on this device), fp32, bf16 or fp16
code            your Python file that registers the task, the model or the dataset, if they are not built in

Prints the metrics as JSON.
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

TOKEN_KEYS = ("tokenizer", "vocab_size", "end_token", "block_size")  # keys of data
URL_KEYS = ("path", "sources", "val_paths", "split_paths")  # keys of data that contain URLs
# Keys of a snapshot's state, one of which holds the SHA-256 of the data.
STATE_KEYS_OF_DATA = ("text", "data")


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
    """Measure each snapshot, and return its metrics by its URL.

    This is a collective operation: all ranks that a launcher has started call it.

    Raises:
        SnapshotError: There is no snapshot, no model can be built from it, or the snapshots are not
            comparable.
        DataError: The data is missing or has changed, or it has characters that the model does not
            know.
    """
    # torch takes a second to import, so import it only after the keys are validated.
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
                raise DataError(
                    f"the data of {url} has no {config.split} split; set split to val or test, or "
                    "measure another text with data.path=..."
                )
            measured[url] = metrics
    for line in tasks[first].data_notes():
        runtime.group.env.call_on_rank_zero(partial(log.info, "%s", line))
    runtime.close()
    return measured


def _adopt(task: "Task", config: EvaluateConfig, url: str, state: Any) -> None:
    """Prepare a task for the model of a snapshot. The state of the snapshot is untrusted."""
    try:
        task.adopt(state, is_other_data=config.data_path is not None)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(
            f"the snapshot of {url} has an invalid state: {error}; choose another snapshot"
        ) from error


def _build(task: "Task", run_config: Config, tensors: dict[str, "Tensor"]) -> "nn.Module":
    from mingpt_ddp.snapshots.read.load_model import build_from_tensors
    from mingpt_ddp.snapshots.state_dict import load_model_state

    if is_user_defined("task", run_config.task.name):  # the task may build the model itself
        model = task.build_model()
        load_model_state(model, tensors)
        return model
    return build_from_tensors(run_config.model, task.shape, tensors)


def _run_config(config: EvaluateConfig, url: str, state: Any, first: Any = None) -> Config:
    """Adapt the configuration of a snapshot's run to this machine and this command.

    Args:
        url: URL of the snapshot, for messages.
        state: State of the snapshot. Untrusted.
        first: State of the snapshot whose text is measured, also untrusted. None if this snapshot
            is measured on its own text.
    """
    try:
        recorded = without_unknown(state["config"])
        values = {group: dict(keys) for group, keys in recorded.items()}
        values["trainer"] |= {
            "device": config.device,
            "precision": config.precision,
            "eval_steps": None,
        }
        # An evaluation needs no schedule. The recorded one may belong to the user's code.
        values["optimizer"] |= {"schedule": "constant", "schedule_settings": None}
        values |= {"ddp": {}, "snapshot": {}}
        if first is not None:
            _measure_like(values, first["config"])
            if config.data_path is None and _data_sha256(state) != _data_sha256(first):
                raise ValueError(
                    f"its data differs from the data of {config.snapshot[0]}; measure it alone, or "
                    "measure all snapshots on the same text with data.path=..."
                )
        if config.data_path is None:
            values = with_data_format(values)
        data = values["data"]
        # Values to use instead of the recorded ones. The recorded cache directory and number of
        # processes belong to the machine that trained the run.
        replaced: dict[str, Any] = {"cache_dir": None, "num_workers": 0}
        if config.data_path is not None:
            check("path" in data, "its data has no key data.path; leave out data.path")
            replaced |= {
                "path": config.data_path,
                "sha256": None,
                "truncate": 1.0,
                "sources": None,
                "val_paths": None,
                "split_paths": None,
            }
        if data.get("tokenizer") not in ("char", "byte"):
            # The task uses the tokenizer in the snapshot, not the recorded path of a tokenizer.
            replaced["tokenizer"] = "bpe"
        paths = [{**data, **replaced}.get(key) for key in URL_KEYS]
        check(
            "::" not in json.dumps(paths),
            "its data is a chain of URLs, which this command does not open; set data.path",
        )
        data |= {key: value for key, value in replaced.items() if key in data}
        return from_mapping(values)
    except NotRegisteredError as error:
        raise SnapshotError(
            f"the snapshot of {url} needs your own code: {error.args[0]}; if you trust the Python "
            "file that registers it, name the file, as in code=my_project/mine.py"
        ) from error
    except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as error:
        message = str(error.args[0]) if error.args else type(error).__name__
        raise SnapshotError(f"the snapshot of {url} cannot be evaluated: {message}") from error


def _data_sha256(state: Any) -> list[Any]:
    """Return the SHA-256 of the data, or [] if the state has none. The state is untrusted."""
    return [state[key]["sha256"] for key in STATE_KEYS_OF_DATA if key in state]


def _measure_like(values: dict[str, Any], first: Any) -> None:
    """Change a run's values so that it is measured on the text and the split of the first run.

    The run keeps its own tokenizer.

    Args:
        values: Configuration of the run by group. Changed in place.
        first: Recorded configuration of the first run.

    Raises:
        ValueError: The two runs have different tasks.
    """
    data = values["data"]
    default = DEFAULT_CHOICE["task"]
    name = values.get("task", {}).get("name", default)
    expected = first.get("task", {}).get("name", default)
    if name != expected:
        raise ValueError(
            f"task.name={name} cannot be compared with task.name={expected}; measure it alone"
        )
    if "block_size" in data:  # the data is a text
        kept = {key: data[key] for key in TOKEN_KEYS if key in data}
        values["data"] = {**first["data"], "end_token": False, **kept}
