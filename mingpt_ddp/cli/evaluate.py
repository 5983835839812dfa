"""Measure the model of a snapshot with the metrics of its task.

    python -m mingpt_ddp.evaluate outputs/demo split=test
    torchrun --nproc_per_node=2 -m mingpt_ddp.evaluate outputs/demo data.path=other.txt

snapshot        a run directory, its snapshots or one of them; a path or any fsspec URL that every rank can read
step            newest (the default), best (lowest validation loss) or a number
split           val (the default) or test
data.path       a text to measure instead, as a whole, in the characters that the model knows; or where the data is now
device          auto (the default: the GPU if there is one), cpu or cuda
precision       auto (the default: as in training on this device), fp32, bf16 or fp16
code            your Python file that registers the task, the model or the dataset, if they are not built in

The metrics are printed as JSON.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mingpt_ddp.cli.arguments import echo, run_command
from mingpt_ddp.config.config import Config, NotRegisteredError, from_mapping
from mingpt_ddp.config.registry import attribute_errors_to_user_code, is_user_defined, run_file
from mingpt_ddp.config.validation import check
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.errors import ConfigError, DataError, SnapshotError


@dataclass(frozen=True)
class EvaluateConfig:
    """The keys of the command line, as the usage above describes them."""

    snapshot: str
    step: int | Literal["newest", "best"] = "newest"
    split: Literal["val", "test"] = "val"
    data_path: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    code: str | None = None


def main() -> None:
    """Run `python -m mingpt_ddp.evaluate`."""
    run_command(__doc__, _command)


def _command(config: EvaluateConfig) -> int:
    env = read_env()
    metrics = evaluate(config)
    about = {"split": config.split} if config.data_path is None else {"data": config.data_path, "split": config.split}
    env.call_on_rank_zero(lambda: echo(json.dumps({**about, **metrics}, indent=1)))
    return 0


def evaluate(config: EvaluateConfig) -> dict[str, float]:
    """Return the metrics by name. A collective of all ranks that a launcher has started.

    Raises:
        SnapshotError: there is no snapshot, or no model can be built from it.
        DataError: the data is not there, has changed, or has characters that the model does not know.
    """
    # torch takes a second to import: only after the keys are validated.
    from mingpt_ddp.distributed.runtime import Runtime
    from mingpt_ddp.snapshots.load import load
    from mingpt_ddp.snapshots.load_model import build_around
    from mingpt_ddp.snapshots.state_dict import load_model_state
    from mingpt_ddp.tasks import build_task
    from mingpt_ddp.training.evaluate import Evaluator

    if config.code is not None:
        run_file(Path(config.code), "code")
    snapshot = load(config.snapshot, ("model",), config.step)
    run_config = _run_config(config, snapshot.state)
    runtime = Runtime(run_config, read_env())
    with attribute_errors_to_user_code():
        task = build_task(run_config, runtime.group)
        try:
            task.adopt(snapshot.state, is_other_data=config.data_path is not None)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(f"the snapshot of {config.snapshot} has an invalid state: {error}") from error
        if is_user_defined("task", run_config.task.name):  # it may build the model itself
            model = task.build_model()
            load_model_state(model, snapshot.model)
        else:
            model = build_around(run_config.model, task.shape, snapshot.model)
        metrics = Evaluator(task, runtime).run(model.to(runtime.device), config.split)
    runtime.close()
    if not metrics:
        raise DataError(f"the data of {config.snapshot} has no {config.split} split")
    return metrics


def _run_config(config: EvaluateConfig, state: Any) -> Config:
    """Return the configuration of the snapshot's run, from an untrusted state, for this machine."""
    try:
        values = {group: dict(keys) for group, keys in state["config"].items()}
        values["trainer"] |= {"device": config.device, "precision": config.precision, "eval_steps": None}
        values |= {"ddp": {}, "snapshot": {}}
        data = values["data"]
        given: dict[str, Any] = {"cache_dir": None, "num_workers": 0}  # for this machine
        if config.data_path is not None:
            check("path" in data, "its data has no path; leave data.path out")
            given |= {"path": config.data_path, "sha256": None, "truncate": 1.0}
        check("::" not in str({**data, **given}.get("path")), "a chain of URLs is not followed; give data.path")
        data |= {key: value for key, value in given.items() if key in data}
        return from_mapping(values)
    except NotRegisteredError as error:
        raise SnapshotError(
            f"the snapshot of {config.snapshot} needs code of yours: {error.args[0]}; name the Python file that "
            "registers it, if you trust it, as in code=my_project/mine.py"
        ) from error
    except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as error:
        message = str(error.args[0]) if error.args else type(error).__name__
        raise SnapshotError(f"the snapshot of {config.snapshot} cannot be evaluated: {message}") from error
