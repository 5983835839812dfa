"""What is measured, and what TensorBoard finds of it after a run that was interrupted."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams

from mingpt_ddp.config.config import from_dictconfig
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.meters import Meter, TensorBoardLogger

CONF = Path(__file__).resolve().parents[3] / "conf"


@pytest.fixture(scope="module")
def config():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return from_dictconfig(compose("config", ["trainer.device=cpu"]))


@pytest.fixture(scope="module")
def runtime(config) -> Runtime:
    return Runtime(config, DistEnv())


# TensorBoard.


def read_back(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_back(directory).Scalars(tag)]


def test_scalars_and_text_arrive(tmp_path):
    board = TensorBoardLogger(tmp_path, first_step=1, is_main=True)
    board.scalars(1, {"train/loss": 4.5, "train/lr": 0.25})
    board.scalars(2, {"train/loss": 4.0})
    board.text(2, "sample", "one\n  two")
    board.close()
    assert points(tmp_path, "train/loss") == [(1, 4.5), (2, 4.0)]
    assert points(tmp_path, "train/lr") == [(1, 0.25)]
    assert texts(tmp_path) == [(2, "    one\n      two")]  # Markdown shows indented lines as they are


def test_no_file_before_there_is_something_to_tell(tmp_path):
    board = TensorBoardLogger(tmp_path, first_step=5, is_main=True)
    board.flush()
    board.go_back(3)
    board.close()
    assert not list(tmp_path.iterdir())
    board.open()
    board.close()
    assert len(list(tmp_path.iterdir())) == 1


def texts(directory: Path) -> list[tuple[int, str]]:
    """As TensorBoard's own pages read them: the accumulator above never purges what is not a number."""
    events = plugin_event_accumulator.EventAccumulator(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors("sample/text_summary")]


def log_steps(board: TensorBoardLogger, steps: range, value: float) -> None:
    for step in steps:
        board.scalars(step, {"train/loss": value})
        if step % 4 == 0:
            board.scalars(step, {"val/loss": value})
            board.text(step, "sample", f"{value}")


@pytest.mark.parametrize("closed", [True, False], ids=["ended", "killed"])
def test_a_resumed_run_leaves_no_doubled_points(tmp_path, closed):
    """Steps 7 to 10 were logged, but the last snapshot was that of step 6: they are trained, and logged, again."""
    first = TensorBoardLogger(tmp_path, first_step=1, is_main=True)
    log_steps(first, range(1, 11), value=1.0)
    first.flush()
    if closed:
        first.close()
    second = TensorBoardLogger(tmp_path, first_step=7, is_main=True)
    log_steps(second, range(7, 13), value=2.0)
    second.close()
    assert points(tmp_path, "train/loss") == [(s, 1.0) for s in range(1, 7)] + [(s, 2.0) for s in range(7, 13)]
    assert points(tmp_path, "val/loss") == [(4, 1.0), (8, 2.0), (12, 2.0)]
    assert texts(tmp_path) == [(4, "    1.0"), (8, "    2.0"), (12, "    2.0")]


def test_a_run_that_is_resumed_twice(tmp_path):
    for first, last, value in ((1, 10, 1.0), (5, 8, 2.0), (7, 12, 3.0)):
        board = TensorBoardLogger(tmp_path, first_step=first, is_main=True)
        log_steps(board, range(first, last + 1), value)
        board.close()
    assert points(tmp_path, "train/loss") == [
        *((step, 1.0) for step in range(1, 5)),
        *((step, 2.0) for step in range(5, 7)),
        *((step, 3.0) for step in range(7, 13)),
    ]


def test_hparams_stay_in_the_directory_of_the_run_and_are_those_of_its_last_end(tmp_path, config):
    """A run below the run would show up in TensorBoard as one more."""
    board = TensorBoardLogger(tmp_path, first_step=1, is_main=True)
    board.scalars(1, {"train/loss": 1.0})
    board.hparams(config.to_dict(), {"hparam/val_loss": 1.5})
    board.close()
    time.sleep(1.1)  # event files are read in the order of their names, which have the second in them
    longer = replace(config, trainer=replace(config.trainer, max_steps=77))
    board = TensorBoardLogger(tmp_path, first_step=2, is_main=True)
    board.hparams(longer.to_dict(), {"hparam/val_loss": 1.25})
    board.close()
    assert [path for path in tmp_path.rglob("*") if path.is_dir()] == []
    events = read_back(tmp_path)
    assert [event.value for event in events.Scalars("hparam/val_loss")] == [1.25]
    assert points(tmp_path, "train/loss") == [(1, 1.0)]
    assert len(list(tmp_path.glob("*.hparams"))) == 1 and len(list(tmp_path.iterdir())) == 3
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    start = hparams.parse_session_start_info_plugin_data(content)
    assert start.hparams["trainer.max_steps"].number_value == 77, "what the run was when it ended the first time"
    assert {"optimizer.lr", "data.block_size"} <= set(start.hparams)


# Meters.


def record(meter: Meter, *losses: float) -> None:
    for loss in losses:
        meter.record(torch.tensor(loss), torch.tensor(10 * loss), data_time_s=0.25)


def test_means_since_the_last_reading(runtime):
    meter = Meter(runtime, tokens_per_step=768)
    record(meter, 4.0, 3.0, 2.0)
    first = meter.read()
    assert first.loss == pytest.approx(3.0)
    assert first.grad_norm == 20.0  # of the last step
    assert first.data_time_s == pytest.approx(0.25)
    assert first.peak_memory > 10 * 2**20
    record(meter, 1.0)
    assert meter.read().loss == pytest.approx(1.0)


def test_time_and_throughput(runtime):
    meter = Meter(runtime, tokens_per_step=768)
    record(meter, 1.0, 1.0)
    time.sleep(0.1)
    readings = meter.read()
    assert 0.05 <= readings.step_s < 0.5
    assert readings.tokens_per_s == pytest.approx(768 / readings.step_s)


def test_a_pause_does_not_count(runtime):
    """An evaluation or a snapshot must not look like slow steps."""
    meter = Meter(runtime, tokens_per_step=768)
    record(meter, 1.0)
    begin = time.perf_counter()
    time.sleep(0.8)
    meter.pause(time.perf_counter() - begin)
    assert meter.read().step_s < 0.6


def test_an_interval_that_a_snapshot_cuts_in_two(runtime):
    """The mean over 5 steps is the same whether the process was replaced after 3 of them or not."""
    losses = [4.1, 3.7, 3.2, 2.9, 2.5]
    whole = Meter(runtime, tokens_per_step=1)
    record(whole, *losses)
    before = Meter(runtime, tokens_per_step=1)
    record(before, *losses[:3])
    loss_sum, steps = before.state()
    assert (loss_sum, steps) == (pytest.approx(11.0), 3)
    after = Meter(runtime, tokens_per_step=1)
    after.load_state(loss_sum, steps)
    record(after, *losses[3:])
    readings, expected = after.read(), whole.read()
    assert readings.loss == expected.loss == pytest.approx(sum(losses) / 5)
    assert after.state() == whole.state() == (0.0, 0)


def test_the_state_is_taken_without_disturbing_the_interval(runtime):
    meter = Meter(runtime, tokens_per_step=1)
    record(meter, 4.0)
    assert meter.state() == meter.state() == (4.0, 1)
    record(meter, 2.0)
    assert meter.read().loss == 3.0


def test_a_loss_that_is_not_a_number_is_seen(runtime):
    meter = Meter(runtime, tokens_per_step=1)
    record(meter, 4.0, math.nan, 4.0)
    assert math.isnan(meter.read().loss)


def test_what_concerns_the_whole_run_stands_in_rank_0s_directory_alone(tmp_path):
    for rank in (0, 1):
        board = TensorBoardLogger(tmp_path / str(rank), first_step=1, is_main=rank == 0)
        board.scalars(1, {"train/loss": 2.0})
        board.results(1, {"val/loss": 3.0})
        board.text(1, "sample", "text")
        board.close()
    tags = [EventAccumulator(str(tmp_path / str(rank))).Reload().Tags() for rank in (0, 1)]
    assert sorted(tags[0]["scalars"]) == ["train/loss", "val/loss"]
    assert tags[1]["scalars"] == ["train/loss"]
    assert tags[0]["tensors"]
    assert not tags[1]["tensors"]
