"""TensorBoard shows each point of a run once, also after interruptions."""

from __future__ import annotations

import itertools
import resource
import time
from pathlib import Path

import pytest
from multiprocess.ranks import configure
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata as hparams

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.metrics.trackers.tensorboard import TensorBoardLogger


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Let a second pass at each call. Readers sort event files by the second."""
    seconds = itertools.count(int(time.time()))
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))


def start(directory: Path, step: int) -> TensorBoardLogger:
    logger = TensorBoardLogger(directory)
    logger.start(step, world_size=1)
    return logger


def read_back(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_back(directory).Scalars(tag)]


def test_no_file_before_the_first_value(tmp_path):
    logger = start(tmp_path, 4)
    logger.rollback(2)
    logger.close()
    assert not list(tmp_path.iterdir())
    logger.open()
    logger.close()
    assert len(list(tmp_path.iterdir())) == 1


def texts(directory: Path) -> list[tuple[int, str]]:
    """Read texts as TensorBoard's pages do. The accumulator above purges only scalars."""
    events = plugin_event_accumulator.EventAccumulator(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    return [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in events.Tensors("sample/text_summary")
    ]


def log_steps(logger: TensorBoardLogger, steps: range, value: float) -> None:
    for step in steps:
        logger.log(step, {"train/loss": value})
        if step % 4 == 0:
            logger.log(step, {"val/loss": value})
            logger.log_text(step, "sample", f"{value}\n  b")


def shown(value: float) -> str:
    """Return the text as Markdown. It shows indented lines unchanged."""
    return f"    {value}\n      b"


@pytest.mark.parametrize("closed", [True, False], ids=["ended", "killed"])
def test_a_resumed_run_has_no_duplicate_points(tmp_path, closed):
    """Steps 7 to 10 are logged three times.

    The last snapshot is from step 6, so they are trained again. A rollback repeats them once
    more.
    """
    first = start(tmp_path, 0)
    log_steps(first, range(1, 11), value=1.0)
    if closed:
        first.close()
    second = start(tmp_path, 6)
    log_steps(second, range(7, 13), value=9.0)
    second.rollback(6)
    log_steps(second, range(7, 13), value=2.0)
    second.close()
    assert points(tmp_path, "train/loss") == [(s, 1.0) for s in range(1, 7)] + [
        (s, 2.0) for s in range(7, 13)
    ]
    assert points(tmp_path, "val/loss") == [(4, 1.0), (8, 2.0), (12, 2.0)]
    assert texts(tmp_path) == [(4, shown(1.0)), (8, shown(2.0)), (12, shown(2.0))]


def test_hparams_are_in_the_run_directory(tmp_path):
    """In a directory below the run, TensorBoard would show them as a separate run.

    The HParams tab has no first card with a point at step 0.
    """
    directory = tmp_path / "big" / "rank0"
    logger = start(directory, 0)
    logger.log(1, {"train/loss": 1.0, "val/loss": 1.5})
    logger.complete(1, from_mapping(configure("run.name='sweep/lr=1e-3'")))
    logger.close()
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "big"), "big").Reload()
    assert {run: sorted(tags["scalars"]) for run, tags in runs.Runs().items()} == {
        "big/rank0": ["train/loss", "val/loss"]  # the name from --logdir_spec in docs/logs.md
    }
    assert points(directory, "val/loss") == [(1, 1.5)]
    events = read_back(directory)
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    session = hparams.parse_session_start_info_plugin_data(content)
    assert session.hparams["run.name"].string_value == "sweep/lr=1e-3"
    content = events.SummaryMetadata(hparams.EXPERIMENT_TAG).plugin_data.content
    experiment = hparams.parse_experiment_plugin_data(content)
    assert [info.name.tag for info in experiment.metric_infos] == ["val/loss"]
    names = {info.name for info in experiment.hparam_infos}
    assert {"optimizer.lr", "data.block_size"} <= names & {*session.hparams}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_loses_points_but_not_the_run(tmp_path, log_lines):
    """A limit on the file size has the same effect as a full disk."""
    logger = start(tmp_path, 0)
    logger.log(1, {"train/loss": 4.5})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        for step in range(2, 100):
            logger.log(step, {"train/loss": 4.0})
        logger.rollback(50)
        logger.log_text(51, "sample", "text")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logger.close()
    assert log_lines == [
        f"WARNING cannot write {tmp_path}, training continues without it: File too large"
    ]
    assert points(tmp_path, "train/loss")[0] == (1, 4.5)
