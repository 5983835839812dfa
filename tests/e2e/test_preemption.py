"""Preemption by a scheduler's SIGTERM or SIGUSR1 and the user's Ctrl-C: a snapshot of that step,
and a resumed run.

The signals are real. A module on PYTHONPATH pauses a process at a named point, so that they arrive
at a known moment, and reports when a signal has been handled.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import Job, UnforkedJob, committed, is_running, python_main, torchrun, wait_for
from multiprocess.ranks import configure, run_ranks
from pause_points import SETTINGS, STEPS, PausedJob, patches, train, weights, worker
from random_faults import processes_in
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PAUSE_AT_STEP = """
def patch(loader):
    original = loader.TokenLoader.get_batch
    warming_up = [True]
    def get_batch(self, step, plan, rank):
        if step == <step> and not warming_up[0]:
            pause("step<step>")
        warming_up[0] = False
        return original(self, step, plan, rank)
    loader.TokenLoader.get_batch = get_batch
PATCHES["mingpt_ddp.data.dataloader"] = patch
"""


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def points(run: Path, tag: str, rank: int = 0) -> list[tuple[int, float]]:
    """Read a curve as TensorBoard does."""
    events = EventAccumulator(
        str(run / "tensorboard" / f"rank{rank}"), size_guidance={"scalars": 0}
    ).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the directory of the uninterrupted run, by number of ranks."""
    done: dict[int, Path] = {}

    def get(ranks: int) -> Path:
        if ranks not in done:
            root = tmp_path_factory.mktemp("uninterrupted")
            run_ranks(ranks, train, root / "ranks", values=configure(*SETTINGS, f"run.root={root}"))
            done[ranks] = root / "run"
        return done[ranks]

    return get


def check_stopped(paused: PausedJob, run: Path, step: int) -> None:
    assert committed(run)[-1] == step, paused.job.text()
    assert result(run)["status"] == "preempted"
    assert result(run)["step"] == step
    assert f"preempted at step {step}; rerun the same command to resume" in paused.job.text()


def finish(cwd: Path, steps: list[int], reference: Path, ranks: int = 1) -> None:
    """Resume the run without interruption, and compare its end with that of the reference.

    Args:
        steps: the steps that it resumed from, in order, this time included.
    """
    run = cwd / "outputs" / "run"
    if ranks == 1:
        job = Job([*python_main(), *SETTINGS], cwd)
        assert job.wait() == 0, job.text()
    else:  # no signal is sent, so no agent, which is slow, is needed
        run_ranks(
            ranks, train, cwd / "ranks", values=configure(*SETTINGS, f"run.root={run.parent}")
        )
    log = (run / "main.rank0.log").read_text()
    assert re.findall(r"resuming from the snapshot of step (\d+) ", log) == [
        str(step) for step in steps
    ]
    check_same(run, reference)


def check_same(run: Path, reference: Path) -> None:
    assert result(run)["status"] == "complete"
    assert weights(run) == weights(reference)
    for key in ("step", "train_loss", "val_loss", "best_val_loss"):
        assert result(run)[key] == result(reference)[key], key
    (steps, losses), (expected_steps, expected) = (
        zip(*points(r, "val/loss"), strict=True) for r in (run, reference)
    )
    assert steps == expected_steps
    assert losses == pytest.approx(expected, abs=1e-5)  # batches of another size round differently
    for rank in range(len(list(reference.glob("tensorboard/rank*")))):
        assert points(run, "train/loss", rank) == points(reference, "train/loss", rank)


def test_one_process(tmp_path, uninterrupted):
    """Preempted twice; the first Ctrl-C acts like a SIGTERM."""
    run = tmp_path / "outputs" / "run"
    for number, step in ((signal.SIGTERM, 7), (signal.SIGINT, 13)):
        paused = PausedJob(python_main(), tmp_path, patches(PAUSE_AT_STEP, step=step))
        paused.wait_until(f"step{step}")
        os.kill(paused.job.process.pid, number)
        paused.wait_until("signal")
        paused.resume()
        assert paused.wait() == 0, paused.job.text()
        check_stopped(paused, run, step)
    finish(tmp_path, [7, 13], uninterrupted(1))


def test_local_agent_forwards_signals(tmp_path, uninterrupted):
    """Ctrl-C reaches all processes of the terminal, and still counts once."""
    run, two_ranks = tmp_path / "outputs" / "run", "ddp.nproc_per_node=2"
    for number, step, send in (
        (signal.SIGUSR1, 7, os.kill),
        (signal.SIGINT, 13, os.killpg),
    ):
        paused = PausedJob(python_main(), tmp_path, patches(PAUSE_AT_STEP, step=step), two_ranks)
        paused.wait_until(f"step{step}", 0, 1)
        send(paused.job.process.pid, number)
        paused.wait_until("signal", 0, 1)
        paused.resume()
        assert paused.wait() == 0, paused.job.text()
        check_stopped(paused, run, step)
        assert "Traceback" not in paused.job.text()
    finish(tmp_path, [7, 13], uninterrupted(2), ranks=2)


# Runs a command on a terminal of its own, with a progress line. It is gone when this process is
# killed.
TERMINAL = [
    sys.executable,
    "-c",
    "import pty, sys; pty.spawn(sys.argv[1:])",
    "sh",
    "-c",
    'stty cols 100 rows 40; exec "$@"',
    "sh",
]
NOHUP = ["nohup"]


@pytest.mark.parametrize(
    ("ranks", "prefix", "whole_group"),
    [
        (1, [], True),
        (2, [], True),
        (2, [], False),
        (1, NOHUP, True),
        pytest.param(2, NOHUP, True, marks=pytest.mark.slow),
    ],
    ids=["one process", "all processes", "the parent alone", "nohup", "nohup, two workers"],
)
def test_the_terminal_is_gone(ranks, prefix, whole_group, tmp_path, uninterrupted):
    """The run saves, although it can write to its terminal no more; with nohup it goes on."""
    run = tmp_path / "outputs" / "run"
    workers = ["ddp.nproc_per_node=2"] if ranks > 1 else []
    terminal = TERMINAL if whole_group else []
    command = [*terminal, *prefix, *python_main()]
    pause = patches(PAUSE_AT_STEP, step=7)
    paused = PausedJob(command, tmp_path, pause, *workers, TERM="xterm", CI="")
    paused.wait_until("step7", *range(ranks))
    if whole_group:
        paused.job.process.kill()
    else:
        paused.job.process.send_signal(signal.SIGHUP)
    if not prefix:
        paused.wait_until_marked("signal", *range(ranks))
    paused.resume()
    paused.job.process.wait()
    wait_for(lambda: not processes_in(tmp_path), what="the end of all processes")
    if prefix:
        check_same(run, uninterrupted(ranks))
    else:
        assert (committed(run), result(run)["status"]) == ([7], "preempted")
        assert "preempted at step 7" in (run / "main.rank0.log").read_text()
        finish(tmp_path, [7], uninterrupted(ranks), ranks)


def test_torchrun(tmp_path, uninterrupted):
    """A signal to one worker is enough.

    Signalled itself, torchrun exits with an error, but nothing is lost.
    """
    run = tmp_path / "outputs" / "run"
    paused = PausedJob(torchrun(2), tmp_path, patches(PAUSE_AT_STEP, step=7))
    paused.wait_until("step7", 0, 1)
    os.kill(worker(paused.job, 1), signal.SIGUSR1)
    paused.wait_until("signal", 1)
    paused.resume()
    assert paused.wait() == 0, paused.job.text()
    check_stopped(paused, run, 7)
    assert not (paused.site / "signal.0").exists()

    for number, step in ((signal.SIGTERM, 13), (signal.SIGHUP, 17)):
        paused = PausedJob(torchrun(2), tmp_path, patches(PAUSE_AT_STEP, step=step))
        paused.wait_until(f"step{step}", 0, 1)
        workers = paused.job.workers()
        paused.job.process.send_signal(number)
        paused.wait_until("signal", 0, 1)
        paused.resume()
        assert paused.wait() != 0
        check_stopped(paused, run, step)
        assert not any(map(is_running, workers))
    finish(tmp_path, [7, 13, 17], uninterrupted(2), ranks=2)


# Preempted outside of training steps

PAUSE_IN_EVALUATION = """
def patch(evaluate):
    from mingpt_ddp.data import dataloader
    batches = dataloader.TokenSplit.batches
    run = evaluate.Evaluator.run_unless_stopped
    evaluations = [0]
    def counted(self, *ranks):
        for number, batch in enumerate(batches(self, *ranks)):
            if number == 3 and evaluations[0] == <evaluation>:
                pause("evaluation")
            elif evaluations[0] == <evaluation>:
                with open(HERE / "batches", "a") as out:
                    print(number, file=out)
            yield batch
    def counted_run(self, *arguments, **named):
        evaluations[0] += 1
        return run(self, *arguments, **named)
    dataloader.TokenSplit.batches = counted
    evaluate.Evaluator.run_unless_stopped = counted_run
    dataloader.TOKENS_PER_BATCH = 16
PATCHES["mingpt_ddp.training.evaluation.evaluator"] = patch
"""


@pytest.mark.parametrize(
    ("evaluation", "step"), [(1, 10), pytest.param(3, STEPS, marks=pytest.mark.slow)]
)
def test_an_interrupted_evaluation_runs_again(evaluation, step, tmp_path, uninterrupted):
    run = tmp_path / "outputs" / "run"
    paused = PausedJob(python_main(), tmp_path, patches(PAUSE_IN_EVALUATION, evaluation=evaluation))
    paused.wait_until("evaluation")
    os.kill(paused.job.process.pid, signal.SIGTERM)
    paused.wait_until("signal")
    paused.resume()
    assert paused.wait() == 0, paused.job.text()
    check_stopped(paused, run, step)
    assert (paused.site / "batches").read_text().split() == ["0", "1", "2"], (
        "the evaluation was not interrupted"
    )
    if step == STEPS:
        job = Job([*python_main(), *SETTINGS], tmp_path)
        assert job.wait() == 0, job.text()
        check_same(run, uninterrupted(1))
    else:
        finish(tmp_path, [step], uninterrupted(1))


def test_a_signal_before_training_ends_the_process(tmp_path, monkeypatch):
    pause_at_import = 'PATCHES["mingpt_ddp.data.dataset"] = lambda module: pause("start")'
    monkeypatch.setattr(PausedJob, "start", UnforkedJob)  # which imports it
    paused = PausedJob(python_main(), tmp_path, pause_at_import)
    paused.wait_until("start")
    os.kill(paused.job.process.pid, signal.SIGTERM)
    assert paused.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in paused.job.text()
    assert not (tmp_path / "outputs" / "run" / "result.json").exists()


def test_the_second_ctrl_c_exits_at_once(tmp_path):
    paused = PausedJob(python_main(), tmp_path, patches(PAUSE_AT_STEP, step=5))
    paused.wait_until("step5")
    os.kill(paused.job.process.pid, signal.SIGINT)
    paused.wait_until("signal")
    os.kill(paused.job.process.pid, signal.SIGINT)
    assert paused.wait() == 128 + signal.SIGINT
    assert committed(tmp_path / "outputs" / "run") == []
    assert "Traceback" not in paused.job.text()


# Without time for a snapshot

SLOW_WRITES = """
def slow(store):
    write_files = store.SnapshotStore.write_files
    def slowly(self, step, contents):
        if step >= <first> and contents.keys() - {"manifest.json"}:
            touch("writing")
            time.sleep(<seconds>)
        return write_files(self, step, contents)
    store.SnapshotStore.write_files = slowly
PATCHES["mingpt_ddp.snapshots.store"] = slow
"""


def preempt_at_step_8(paused: PausedJob) -> None:
    """Send SIGTERM before step 8, and wait for the exit."""
    paused.wait_until("step8")
    wait_for(
        lambda: committed(paused.job.output.parent / "outputs" / "run") == [5], what="the snapshot"
    )
    (paused.site / "writing").unlink(missing_ok=True)
    os.kill(paused.job.process.pid, signal.SIGTERM)
    paused.wait_until("signal")
    paused.resume()
    assert paused.wait() == 0, paused.job.text()


def test_the_older_snapshot_is_kept_without_time_for_another(tmp_path, uninterrupted):
    """Another one is started, but its write outlasts the grace period and the timeout of this
    test.
    """
    run = tmp_path / "outputs" / "run"
    slow = patches(PAUSE_AT_STEP + SLOW_WRITES, step=8, first=6, seconds=600)
    paused = PausedJob(
        python_main(), tmp_path, slow, "snapshot.every_steps=5", "snapshot.grace_seconds=8"
    )
    preempt_at_step_8(paused)
    assert (paused.site / "writing").exists()
    assert committed(run) == [5]
    assert result(run)["status"] == "preempted"
    assert (
        "preempted at step 8 without time for a snapshot: the last one is of step 5"
        in paused.job.text()
    )
    finish(tmp_path, [5], uninterrupted(1))


def test_a_snapshot_longer_than_the_grace_period_is_not_started(tmp_path):
    slow = patches(PAUSE_AT_STEP + SLOW_WRITES, step=8, first=1, seconds=2.5)
    paused = PausedJob(
        python_main(), tmp_path, slow, "snapshot.every_steps=5", "snapshot.grace_seconds=2"
    )
    preempt_at_step_8(paused)
    assert not (paused.site / "writing").exists()
    run = tmp_path / "outputs" / "run"
    assert committed(run) == [5]
    assert not (run / "snapshots" / "step_00000008").exists()
    assert "without time for a snapshot: the last one is of step 5" in paused.job.text()
