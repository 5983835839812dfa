"""At its start, a run logs its differences from earlier attempts, if there are any."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from make_format2 import DATA, MORE_STEPS, STEPS, configuration, train
from multiprocess.ranks import configure
from tasks import text_task

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.process.env import DistEnv, process_start_time
from mingpt_ddp.snapshots.format import MANIFEST, STATE, encode_manifest
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.saves.resume import check_state_size
from mingpt_ddp.training.start.start_log import full_metrics_warning, log_load, log_start

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "gpt-adamw"


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch) -> Path:
    """Create a working directory with a run of STEPS steps."""
    shutil.copytree(DATA / NAME, tmp_path / "cwd")
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"


def lines_with(lines: list[str], *texts: str) -> list[str]:
    return [line for line in lines if any(text in line for text in texts)]


def test_a_limit_below_the_snapshot(log_lines):
    train(NAME, STEPS - 2)
    beyond, unused = lines_with(log_lines, "complete")
    assert beyond == "INFO complete: the snapshot of step 4 is beyond the limit of 2 steps"
    assert unused == (
        "WARNING the run is complete, so it was not trained with trainer.max_steps: 4 -> 2"
    )


# Changes since the last attempt


def test_a_resume_logs_its_changes_and_the_number_of_steps_left(log_lines, cwd):
    """The table compares the run with its snapshot. Without a change there is no table."""
    shutil.rmtree("run")
    train(NAME, STEPS)
    assert lines_with(log_lines, "changed") == []
    state = json.loads(next(cwd.glob("run/snapshots/*/state.json")).read_text())
    assert state["environment"]["torch"] == torch.__version__
    assert (state["environment"]["threads"], state["environment"]["transport"]) == (1, "none")
    torch.set_num_threads(2)
    train(NAME, STEPS + 2)
    assert lines_with(log_lines, "changed") == [
        "INFO these values have changed from step 5 on (2 steps are left):\n"
        "key                before  now\n"
        "trainer.max_steps  4       6\n"
        "threads            1       2\n"
        "steps              4       6"
    ]


@pytest.mark.parametrize(
    ("recorded", "cells"),
    [
        ({"torch": "1.0", "added_later": 1}, ["torch"]),
        ({"torch": "a\nb" + "x" * 10**6}, ["torch"]),
        ("text", []),
    ],
    ids=["torch", "hostile", "another type"],
)
def test_changes_of_the_environment_are_named_in_short_cells(recorded, cells, log_lines):
    store = SnapshotStore("run/snapshots")
    state = json.loads(store.storage.read(f"step_{STEPS:08d}/{STATE}")) | {"environment": recorded}
    files = store.files(STEPS) | store.write_files(STEPS, {STATE: json.dumps(state).encode()})
    store.write_files(STEPS, {MANIFEST: encode_manifest(STEPS, files)})
    train(NAME, STEPS + 1)
    (table,) = lines_with(log_lines, "changed")
    keys = [row.split()[0] for row in table.splitlines()[2:]]
    assert [key for key in keys if "." not in key and key != "steps"] == cells
    assert len(table) < 1000


def test_settings_of_a_run_without_a_snapshot_are_compared_with_its_last_start(log_lines):
    shutil.rmtree("run/snapshots")
    train(NAME, STEPS + 1)
    (table,) = lines_with(log_lines, "changed")
    assert (
        table.splitlines()[0] == "INFO these values have changed from step 1 on (5 steps are left):"
    )
    assert ["trainer.max_steps", "4", "5"] in [row.split() for row in table.splitlines()]


@pytest.mark.parametrize(
    ("words", "line", "is_logged"),
    [
        ("optimizer.lr=3e-4", "INFO optimizer adamw: lr 0.0003", True),
        (
            "optimizer=muon",
            "INFO optimizer muon: lr 0.04, embedding_lr 0.1, head_lr 0.02, vector_lr 0.1",
            True,
        ),
        (
            "optimizer.warmup_steps=100",
            "WARNING the warm-up takes 100 of 60 steps; lower optimizer.warmup_steps to reach "
            "optimizer.lr",
            True,
        ),
        (
            "optimizer.warmup_steps=100 optimizer.schedule_steps=500",
            "WARNING the warm-up takes 100 of 60 steps; lower optimizer.warmup_steps to reach "
            "optimizer.lr",
            False,
        ),
    ],
)
def test_the_rates_of_the_optimizer_are_named(words, line, is_logged, log_lines, tmp_path):
    """Muon's learning rate has another magnitude than AdamW's."""
    limits = ["trainer.max_steps=60", "trainer.max_epochs=null", "trainer.device=cpu"]
    config = from_mapping(configure("model=gpt_nano", *limits, *words.split()))
    runtime = Runtime(config, DistEnv())
    model = torch.nn.Linear(2, 2)
    log_start(runtime, text_task(config), model, tmp_path, RunLength(config, 45))
    assert (line in log_lines) == is_logged


# Deleted snapshots


@pytest.mark.parametrize("reached", [f"step {STEPS}", None])
def test_deleted_snapshots_are_reported(reached, log_lines):
    """They are reported even if a kill came before metrics.jsonl has a line with a step."""
    shutil.rmtree("run/snapshots")
    if reached is None:
        Path("run/metrics.jsonl").write_text('{"start": 1.0, "step": 0, "world_size": 1}\n')
    losses = train(NAME, STEPS)
    what = f"had reached {reached}" if reached else "has trained before"
    assert lines_with(log_lines, "WARNING") == [
        f"WARNING the run {what}, but there is no snapshot: it starts again at step 0"
    ]
    assert len(losses) == STEPS


def test_a_new_run_reports_no_deleted_snapshots(log_lines):
    shutil.rmtree("run")
    train(NAME, STEPS)
    train(NAME, MORE_STEPS)
    assert lines_with(log_lines, "WARNING", "no snapshot") == []


# Clocks


def test_goodput_counts_from_the_first_start(monkeypatch, cwd, log_lines):
    """The run may have been off for a day."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    train(NAME, MORE_STEPS)
    result = json.loads((cwd / "run" / "result.json").read_text())
    assert 0 < result["goodput"] <= result["wall_seconds"] / 86_400
    (line,) = lines_with(log_lines, "goodput")
    pattern = r"INFO goodput \d+\.\d%: starts, pauses, snapshots and repeated steps took .+ of .+"
    assert re.fullmatch(pattern, line)
    monkeypatch.setattr(time, "time", lambda: real() + 7 * 86_400)
    train(NAME, MORE_STEPS)  # the run is already complete
    again = json.loads((cwd / "run" / "result.json").read_text())
    assert again["goodput"] > result["goodput"] / 3


def test_a_clock_that_goes_back(log_lines, monkeypatch, cwd):
    """It goes back by 60 days at the start, and further whenever it is read.

    No time is negative, and goodput stays between 0 and 1.
    """
    real, calls = time.time, itertools.count()

    def stepped_back() -> float:
        return real() - 5_183_989 - 1000 * next(calls)

    monkeypatch.setattr(time, "time", stepped_back)
    train(NAME, MORE_STEPS)
    result = json.loads((cwd / "run" / "result.json").read_text())
    assert 0 < result["goodput"] <= 1 and result["wall_seconds"] > 0
    state = json.loads(max(cwd.glob("run/snapshots/*/state.json")).read_text())["train_state"]
    assert state["wasted_seconds"] > 0
    (line,) = lines_with(log_lines, "the first step was done after")
    assert float(line.split()[-2]) > 0


STAGES = ("processes", "rendezvous", "run directory", "data", "model and snapshot", "first step")


def test_the_stages_of_a_start_add_up(log_lines):
    """A short run does not log goodput."""
    train(NAME, MORE_STEPS)
    (whole,) = lines_with(log_lines, "the first step was done after")
    (line,) = lines_with(log_lines, "the stages of this start took:")
    found = re.findall(r"(?:: |, )([a-z ]+) (\d+\.\d\d) s", line)
    assert [stage for stage, _ in found] == [*STAGES]
    total_s = float(whole.split()[-2])
    assert sum(float(seconds) for _, seconds in found) == pytest.approx(total_s, abs=0.05)
    assert not lines_with(log_lines, "is the first step that"), "no step is repeated"


def test_the_first_new_step_after_repeated_ones(cwd, log_lines):
    """The last attempt has logged two steps after its last snapshot, so they are repeated."""
    with open(cwd / "run" / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {STEPS + 1}, "train_loss": 2.0}}\n')
    train(NAME, MORE_STEPS)
    (line,) = lines_with(log_lines, "is the first step that")
    text = "is the first step that no earlier attempt had done; it was done after"
    assert re.fullmatch(rf"INFO step {STEPS + 2} {text} \d+\.\d\d s", line)


def test_the_process_start_time_does_not_depend_on_the_clock(monkeypatch):
    begin = process_start_time()
    assert begin <= time.monotonic()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    # Seconds. Another clock would be years off.
    assert process_start_time() == pytest.approx(begin, abs=60)


def test_a_state_that_could_not_be_read_again_is_refused(cwd):
    """It is refused before anything is written. e2e/test_many_texts.py has a long configuration."""
    before = sorted(cwd.rglob("*"))
    task = text_task(configuration(NAME, MORE_STEPS))
    task.state = lambda: {"vocabulary": "x" * 15_900_000}
    with pytest.raises(ConfigError, match=r"state.json would have 15,9[\d,]+ bytes at the start"):
        check_state_size(task)
    task.state = lambda: {"vocabulary": "".join(map(chr, range(32, 0xD800)))}
    check_state_size(task)
    assert sorted(cwd.rglob("*")) == before


def test_more_steps_than_metrics_jsonl_can_hold(log_lines):
    log_every = 10
    assert full_metrics_warning(log_every, 1_000_000) is None
    full = full_metrics_warning(log_every, 20_000_000)
    assert full.startswith("metrics.jsonl will be full at about step ") and "log_every" in full


@pytest.mark.parametrize(
    ("load", "cores", "is_warned"), [(2.9, 2, False), (3.0, 2, True), (9, 8, False)]
)
def test_a_busy_machine_gives_one_line(load, cores, is_warned, caplog):
    caplog.set_level("INFO")
    log_load(load, cores)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == is_warned
    assert not is_warned or lines[0].startswith("this machine has 2 cores and a load of 3.0: ")
