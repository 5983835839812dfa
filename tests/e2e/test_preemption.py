"""Check preemption by a scheduler's SIGUSR1, a closed terminal, torchrun and the user's Ctrl-C.

The run saves the current step, and resumes from it. contract/test_resume.py and test_failures.py
check the simple cases. The signals are real. A user's hook holds the ranks in a step, so that the
signals arrive at a known moment. It also reports when a signal has been handled.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from holding import SCORES, SETTINGS, STEPS, HeldRun, pause_at, with_scores, worker
from launching import committed, is_running, python_main, torchrun, wait_for, with_code
from random_faults import processes_in
from runs import curve, read_result, train, weights

TWO_RANKS = [*python_main(), "ddp.nproc_per_node=2"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a function that trains an uninterrupted run on a number of ranks.

    It returns the run directory.
    """
    done: dict[int, Path] = {}

    def get(ranks: int) -> Path:
        if ranks not in done:
            root = tmp_path_factory.mktemp("uninterrupted")
            done[ranks] = train(root, *SETTINGS, f"ddp.nproc_per_node={ranks}")
        return done[ranks]

    return get


def hold(command: list[str], cwd: Path, step: int, *words: str, **extra: str) -> HeldRun:
    return HeldRun([*command, *SETTINGS, *words], cwd, pause_at(step), **extra)


def check_stopped(held: HeldRun, run: Path, step: int) -> None:
    assert committed(run)[-1] == step, held.job.text()
    assert read_result(run)["status"] == "preempted"
    assert read_result(run)["step"] == step
    assert f"preempted at step {step}; rerun the same command to resume" in held.job.text()


def finish(cwd: Path, steps: list[int], reference: Path, *words: str) -> None:
    """Resume the run without interruption, and compare its result with the reference.

    Args:
        cwd: The working directory of the run.
        steps: The steps that all starts have resumed from, including this start.
        reference: The directory of the uninterrupted run.
    """
    run = train(cwd, *SETTINGS, *words)
    log = (run / "main.rank0.log").read_text()
    resumed = re.findall(r"resuming from the snapshot of step (\d+) ", log)
    assert resumed == [str(step) for step in steps]
    check_same(run, reference)


def check_same(run: Path, reference: Path) -> None:
    assert read_result(run)["status"] == "complete"
    assert weights(run, STEPS) == weights(reference, STEPS)
    for key in ("step", "train_loss", "val_loss", "best_val_loss"):
        assert read_result(run)[key] == read_result(reference)[key], key
    assert curve(run, "val/loss") == curve(reference, "val/loss")
    for rank in range(len(list(reference.glob("tensorboard/rank*")))):
        assert curve(run, rank=rank) == curve(reference, rank=rank)


def test_local_agent_forwards_signals(tmp_path, uninterrupted):
    """Ctrl-C reaches all processes of the terminal, but still counts as one signal."""
    run = tmp_path / "outputs" / "run"
    for number, step, send in ((signal.SIGUSR1, 7, os.kill), (signal.SIGINT, 13, os.killpg)):
        held = hold(TWO_RANKS, tmp_path, step)
        held.wait_until(f"step{step}", 0, 1)
        send(held.job.process.pid, number)
        held.wait_until("signal", 0, 1)
        held.resume()
        assert held.wait() == 0, held.job.text()
        check_stopped(held, run, step)
        assert "Traceback" not in held.job.text()
    finish(tmp_path, [7, 13], uninterrupted(2), "ddp.nproc_per_node=2")


# Runs a command on its own terminal, with a progress line. The terminal is gone once this process
# is killed.
PTY = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"]
TERMINAL = [*PTY, "sh", "-c", 'stty cols 100 rows 40; exec "$@"', "sh"]
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
    """The run saves although its terminal is gone. Under nohup, it continues to train."""
    run = tmp_path / "outputs" / "run"
    terminal = TERMINAL if whole_group else []
    command = [*terminal, *prefix, *(TWO_RANKS if ranks > 1 else python_main())]
    held = hold(command, tmp_path, 7, TERM="xterm", CI="")
    held.wait_until("step7", *range(ranks))
    if whole_group:
        held.job.process.kill()
    else:
        held.job.process.send_signal(signal.SIGHUP)
    if not prefix:
        held.wait_until_marked("signal", *range(ranks))
    held.resume()
    held.job.process.wait()
    wait_for(lambda: not processes_in(tmp_path), what="the end of all processes")
    if prefix:
        check_same(run, uninterrupted(ranks))
    else:
        assert (committed(run), read_result(run)["status"]) == ([7], "preempted")
        assert "preempted at step 7" in (run / "main.rank0.log").read_text()
        finish(tmp_path, [7], uninterrupted(ranks), f"ddp.nproc_per_node={ranks}")


def test_torchrun(tmp_path, uninterrupted):
    """A signal to one worker is enough.

    If torchrun itself gets a signal, it exits with an error, but no step is lost.
    """
    run = tmp_path / "outputs" / "run"
    held = hold(torchrun(2), tmp_path, 7)
    held.wait_until("step7", 0, 1)
    os.kill(worker(held.job, 1), signal.SIGUSR1)
    held.wait_until("signal", 1)
    held.resume()
    assert held.wait() == 0, held.job.text()
    check_stopped(held, run, 7)
    assert not (held.site / "signal.0").exists()

    for number, step in ((signal.SIGTERM, 13), (signal.SIGHUP, 17)):
        held = hold(torchrun(2), tmp_path, step)
        held.wait_until(f"step{step}", 0, 1)
        workers = held.job.workers()
        held.job.process.send_signal(number)
        held.wait_until("signal", 0, 1)
        held.resume()
        assert held.wait() != 0
        check_stopped(held, run, step)
        assert not any(map(is_running, workers))
    finish(tmp_path, [7, 13, 17], uninterrupted(2), "ddp.nproc_per_node=2")


# Preempted outside of training steps

# The evaluation after a step pauses before its fourth batch.
EVALUATION = """
def forward_begins(step, training):
    if step != <step> or training:
        return
    batches = len([*HERE.glob("batch*")])
    if batches == 3:
        pause("evaluation")
    touch(f"batch{batches}")
"""


@pytest.mark.parametrize("step", [10, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_an_interrupted_evaluation_runs_again(step, tmp_path):
    run = tmp_path / "outputs" / "run"
    words = [*with_scores(SETTINGS, tmp_path), "data.truncate=1"]
    model = SCORES + EVALUATION.replace("<step>", str(step))
    held = HeldRun([*python_main(), *words], tmp_path, model, group="model")
    held.wait_until("evaluation")
    os.kill(held.job.process.pid, signal.SIGTERM)
    held.wait_until("signal")
    held.resume()
    assert held.wait() == 0, held.job.text()
    check_stopped(held, run, step)
    before = len([*held.site.glob("batch*")])
    assert before == 4, "the evaluation was not interrupted"
    words.append(f"model.code={held.site}/hold.py")
    assert train(tmp_path, *words) == run
    check_same(run, train(tmp_path / "undisturbed", *words))
    assert len([*held.site.glob("batch*")]) > 2 * before


def test_a_signal_before_training_ends_the_process(tmp_path):
    held = HeldRun([*python_main(), *SETTINGS], tmp_path, 'pause("start")')
    held.wait_until("start")
    os.kill(held.job.process.pid, signal.SIGTERM)
    assert held.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in held.job.text()
    assert not (tmp_path / "outputs" / "run" / "result.json").exists()


# Without time for a snapshot

SLOW_WRITES = """
import time
from pathlib import Path
from mingpt_ddp.snapshots.write.store import SnapshotStore

write_files = SnapshotStore.write_files

def slowly(self, step, contents):
    if step >= {first} and contents.keys() - {{"manifest.json"}}:
        Path(__file__).with_name(f"writing{{step}}").touch()
        time.sleep({seconds})
    return write_files(self, step, contents)

SnapshotStore.write_files = slowly
"""


@pytest.mark.parametrize(
    ("grace_s", "first", "seconds", "is_begun"),
    # Either the write takes longer than the grace period and this test, or no write begins
    # because the earlier ones were too slow.
    [(8, 6, 600, True), (2, 1, 2.5, False)],
    ids=["too slow", "not started"],
)
def test_the_older_snapshot_is_kept_without_time_for_another(
    grace_s, first, seconds, is_begun, tmp_path, uninterrupted
):
    run, site = tmp_path / "outputs" / "run", tmp_path / "slow"
    slow = with_code(site, SLOW_WRITES.format(first=first, seconds=seconds))
    words = ["snapshot.every_steps=5", f"snapshot.grace_seconds={grace_s}"]
    held = hold(python_main(), tmp_path, 8, *words, PYTHONPATH=slow)
    held.wait_until("step8")
    wait_for(lambda: committed(run) == [5], what="the snapshot")
    os.kill(held.job.process.pid, signal.SIGTERM)
    held.wait_until("signal")
    held.resume()
    assert held.wait() == 0, held.job.text()
    assert (site / "writing8").exists() == is_begun
    assert (committed(run), read_result(run)["status"]) == ([5], "preempted")
    expected = "preempted at step 8 without time for a snapshot: the newest one is from step 5"
    assert expected in held.job.text()
    if is_begun:
        finish(tmp_path, [5], uninterrupted(1))
    else:
        assert not (run / "snapshots" / "step_00000008").exists()
