"""What a start keeps of the records of its run, and whether its own can be read again."""

import contextlib
import logging
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.components import DataConfig, Form
from mingpt_ddp.config.recorded import with_data_format
from mingpt_ddp.config.validation import check
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.snapshots.format import MAX_STATE_BYTES, STATE, encode_json
from mingpt_ddp.storage.yaml_and_json import dump_yaml, load_yaml
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.start.first_checks import Recorded

log = logging.getLogger(__name__)

PROGRESS = 1 << 20  # bytes of a state.json that are left for what training adds


def with_recorded_format(config: Config, state: Any, typed: Container[str]) -> Config:
    """Return the configuration with the `data.format` by which a run has read its texts before.

    Args:
        state: of the snapshot to resume, untrusted; None: there is none.
        typed: the keys that the command line sets.

    Raises:
        ConfigError: the command line names another format.
    """
    if state is None or not isinstance(config.data, DataConfig):
        return config
    form: Any = None
    decided = "text"  # by auto, at the first start
    with contextlib.suppress(LookupError, TypeError):  # it is damaged, and refused later
        form = with_data_format(state["config"])["data"]["format"]
        decided = state["text"].get("format", "text")
    if form not in get_args(Form):
        form = "text"
    if form != "auto":
        decided = form
    if "data.format" in typed and form != config.data.format:
        if config.data.format not in ("auto", decided):
            raise ConfigError(
                f"data.format={config.data.format}: the run has read its texts before with "
                f"data.format={decided}; leave it out, or choose another run.name"
            )
        log.info("the run goes on with data.format=%s, as it has read its texts before", form)
    return replace(config, data=replace(config.data, format=form))


def check_records(task: Task, hydra_files: Mapping[str, str], *, is_new: bool = True) -> None:
    """Refuse a configuration, or a state of the data, that readers would refuse.

    Args:
        hydra_files: content of `.hydra/`, by file name.
        is_new: the run has no snapshot, whose state could be read.

    Raises:
        ConfigError: says what is too large.
    """
    config = task.config.to_dict()
    try:
        dump_yaml(config)
        for content in hydra_files.values():
            load_yaml(content)
    except ValueError as error:
        raise ConfigError(
            f"the recorded configuration could not be read again: {error}; shorten it, as by a "
            "directory instead of its files"
        ) from error
    size = len(encode_json({**task.state(), "config": config})) if is_new else 0
    check(
        size <= MAX_STATE_BYTES - PROGRESS,
        f"no snapshot could be read again: {STATE} would begin with {size:,} bytes, of which "
        f"at most {MAX_STATE_BYTES - PROGRESS:,} leave room for training; it holds the "
        "configuration and what the data needs to be read; make one of them smaller",
    )


def check_canonical_start(
    runtime: Runtime, micro_batch_size: int, recorded: Recorded | None
) -> None:
    """Check what the bits of a canonical run depend on. A collective.

    Args:
        recorded: of the snapshot that the run resumes from, if there is one.

    Raises:
        ConfigError: the ranks have different numbers of threads, or the snapshot has another one or
            other micro-batches.
    """
    if not runtime.strategy.is_canonical:
        return
    threads = runtime.group.all_gather(torch.get_num_threads())
    if len({*threads}) > 1:
        raise ConfigError(
            f"ddp.reduction=canonical needs as many threads on every rank, not {threads}; set "
            "OMP_NUM_THREADS"
        )
    if recorded is None:
        return
    environment = recorded.state.get("environment")
    if not isinstance(environment, dict) or environment.get("reduction") != "canonical":
        return
    settings = {
        "trainer.micro_batch_size": (recorded.micro_batch_size, micro_batch_size),
        "OMP_NUM_THREADS": (environment.get("threads"), threads[0]),
    }
    for name, (before, now) in settings.items():
        if before != now:
            raise ConfigError(
                f"{name}={now} would change the bits of a run with ddp.reduction=canonical; set "
                f"{name}={str(before)[:20]}, or ddp.reduction=fast"
            )
