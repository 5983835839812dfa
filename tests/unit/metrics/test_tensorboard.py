"""What TensorBoard shows of a run, also after interruptions."""

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
    """Attempts of a run are seconds apart, and readers sort event files by the second."""
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


def test_scalars_and_text_are_written(tmp_path):
    logger = start(tmp_path, 0)
    logger.log(1, {"train/loss": 4.5, "train/lr": 0.25})
    logger.log(2, {"train/loss": 4.0})
    logger.log_text(2, "sample", "one\n  two")
    logger.close()
    assert points(tmp_path, "train/loss") == [(1, 4.5), (2, 4.0)]
    assert points(tmp_path, "train/lr") == [(1, 0.25)]
    # Markdown shows indented lines as they are
    assert texts(tmp_path) == [(2, "    one\n      two")]


def test_no_file_before_the_first_value(tmp_path):
    logger = start(tmp_path, 4)
    logger.rollback(2)
    logger.close()
    assert not list(tmp_path.iterdir())
    logger.open()
    logger.close()
    assert len(list(tmp_path.iterdir())) == 1


def texts(directory: Path) -> list[tuple[int, str]]:
    """Read texts as the pages of TensorBoard do: the accumulator above purges only scalars."""
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
            logger.log_text(step, "sample", f"{value}")


@pytest.mark.parametrize("closed", [True, False], ids=["ended", "killed"])
def test_a_resumed_run_has_no_duplicate_points(tmp_path, closed):
    """Steps 7 to 10 were logged, but the last snapshot was that of step 6: they are trained and
    logged again.
    """
    first = start(tmp_path, 0)
    log_steps(first, range(1, 11), value=1.0)
    if closed:
        first.close()
    second = start(tmp_path, 6)
    log_steps(second, range(7, 13), value=2.0)
    second.close()
    assert points(tmp_path, "train/loss") == [(s, 1.0) for s in range(1, 7)] + [
        (s, 2.0) for s in range(7, 13)
    ]
    assert points(tmp_path, "val/loss") == [(4, 1.0), (8, 2.0), (12, 2.0)]
    assert texts(tmp_path) == [(4, "    1.0"), (8, "    2.0"), (12, "    2.0")]


def test_a_rollback_repeats_no_point(tmp_path):
    logger = start(tmp_path, 0)
    log_steps(logger, range(1, 6), value=1.0)
    logger.rollback(3)
    log_steps(logger, range(4, 6), value=2.0)
    logger.close()
    expected = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    assert points(tmp_path, "train/loss") == expected


def test_hparams_are_in_the_run_directory(tmp_path):
    """A directory below that of the run would show up in TensorBoard as one more run."""
    logger = start(tmp_path, 0)
    logger.log(1, {"train/loss": 1.0, "val/loss": 1.5})
    logger.complete(1, from_mapping(configure("run.name='sweep/lr=1e-3'")))
    logger.close()
    assert [path for path in tmp_path.rglob("*") if path.is_dir()] == []
    events = read_back(tmp_path)
    assert points(tmp_path, "val/loss") == [(1, 1.5)]
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    session = hparams.parse_session_start_info_plugin_data(content)
    assert session.hparams["run.name"].string_value == "sweep/lr=1e-3"
    assert {"optimizer.lr", "data.block_size"} <= set(session.hparams)
    content = events.SummaryMetadata(hparams.EXPERIMENT_TAG).plugin_data.content
    experiment = hparams.parse_experiment_plugin_data(content)
    assert [info.name.tag for info in experiment.metric_infos] == ["val/loss"]
    assert {"optimizer.lr", "data.block_size"} <= {info.name for info in experiment.hparam_infos}


def test_cards_are_those_of_logged_tags(tmp_path):
    """No card of the HParams tab comes first, with a point at step 0."""
    logger = start(tmp_path / "big" / "tensorboard" / "rank0", 0)
    logger.log(10, {"val/loss": 1.5, "train/loss": 1.0})
    logger.complete(10, from_mapping(configure()))
    logger.close()
    runs = (
        EventMultiplexer()
        .AddRunsFromDirectory(str(tmp_path / "big" / "tensorboard"), "big")
        .Reload()
    )
    assert {run: sorted(tags["scalars"]) for run, tags in runs.Runs().items()} == {
        "big/rank0": ["train/loss", "val/loss"]  # as --logdir_spec in docs/logs.md calls it
    }
    assert [
        event.step for tag in ("train/loss", "val/loss") for event in runs.Scalars("big/rank0", tag)
    ] == [10, 10]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_loses_points_but_not_the_run(tmp_path, log_lines):
    """A limit on the file size is like a full disk."""
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
