"""Preemption by a scheduler's SIGTERM or SIGUSR1 and the user's Ctrl-C: a snapshot of that step, and a resumed run.

The signals are real. A module on PYTHONPATH pauses a process at a named point, so that they come at a known moment, and
reports when a signal has been handled.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from launching import Job, committed, is_running, python_main, torchrun, wait_for
from multiprocess.ranks import configure, run_ranks
from pause_points import SETTINGS, STEPS, Held, patches, train, weights, worker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

HOLD_AT_STEP = """
def patch(loader):
    step_of = loader.TokenLoader.get_batch
    settling = [True]
    def step(self, number, plan, rank):
        if number == <step> and not settling[0]:
            hold("step<step>")
        settling[0] = False
        return step_of(self, number, plan, rank)
    loader.TokenLoader.get_batch = step
PATCHES["mingpt_ddp.data.dataloader"] = patch
"""


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def points(run: Path, tag: str, rank: int = 0) -> list[tuple[int, float]]:
    """A curve as TensorBoard reads it."""
    events = EventAccumulator(str(run / "tensorboard" / f"rank{rank}"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The directory of the run that nobody disturbed, by number of ranks."""
    done: dict[int, Path] = {}

    def get(ranks: int) -> Path:
        if ranks not in done:
            root = tmp_path_factory.mktemp("undisturbed")
            run_ranks(ranks, train, root / "ranks", values=configure(*SETTINGS, f"run.root={root}"))
            done[ranks] = root / "run"
        return done[ranks]

    return get


def check_stopped(held: Held, run: Path, step: int) -> None:
    assert committed(run)[-1] == step, held.job.text()
    assert result(run)["status"] == "preempted"
    assert result(run)["step"] == step
    assert f"preempted at step {step}; rerun the same command to resume" in held.job.text()


def finish(cwd: Path, steps: list[int], reference: Path, ranks: int = 1) -> None:
    """The same run again, undisturbed: to the very end of the run that always was.

    Args:
        steps: with which it went on, from the first time to this one.
    """
    run = cwd / "outputs" / "run"
    if ranks == 1:
        job = Job([*python_main(), *SETTINGS], cwd)
        assert job.wait(60) == 0, job.text()
    else:  # no signal, no need for an agent, which takes its time
        run_ranks(ranks, train, cwd / "ranks", values=configure(*SETTINGS, f"run.root={run.parent}"))
    log = (run / "main.rank0.log").read_text()
    assert re.findall(r"resuming from the snapshot of step (\d+) ", log) == [str(step) for step in steps]
    check_same(run, reference)


def check_same(run: Path, reference: Path) -> None:
    assert result(run)["status"] == "complete"
    assert weights(run) == weights(reference)
    for key in ("step", "train_loss", "val_loss", "best_val_loss"):
        assert result(run)[key] == result(reference)[key], key
    (steps, losses), (steps_there, losses_there) = (zip(*points(r, "val/loss"), strict=True) for r in (run, reference))
    assert steps == steps_there
    assert losses == pytest.approx(losses_there, abs=1e-5)  # another size of the batches rounds otherwise
    for rank in range(len(list(reference.glob("tensorboard/rank*")))):
        assert points(run, "train/loss", rank) == points(reference, "train/loss", rank)


def test_one_process(tmp_path, undisturbed):
    """Twice; one Ctrl-C is like a SIGTERM."""
    run = tmp_path / "outputs" / "run"
    for number, step in ((signal.SIGTERM, 7), (signal.SIGINT, 13)):
        held = Held(python_main(), tmp_path, patches(HOLD_AT_STEP, step=step))
        held.wait_until(f"step{step}")
        os.kill(held.job.process.pid, number)
        held.wait_until("signal")
        held.go()
        assert held.end() == 0, held.job.text()
        check_stopped(held, run, step)
    finish(tmp_path, [7, 13], undisturbed(1))


def test_local_agent_forwards_signals(tmp_path, undisturbed):
    """A Ctrl-C goes to all processes of the terminal, and still counts once."""
    run, two = tmp_path / "outputs" / "run", "ddp.nproc_per_node=2"
    for number, step, send in (
        (signal.SIGUSR1, 7, os.kill),
        (signal.SIGTERM, 10, os.kill),
        (signal.SIGINT, 13, os.killpg),
    ):
        held = Held(python_main(), tmp_path, patches(HOLD_AT_STEP, step=step), two)
        held.wait_until(f"step{step}", 0, 1)
        send(held.job.process.pid, number)
        held.wait_until("signal", 0, 1)
        held.go()
        assert held.end() == 0, held.job.text()
        check_stopped(held, run, step)
        assert "Traceback" not in held.job.text()
    finish(tmp_path, [7, 10, 13], undisturbed(2), ranks=2)


def test_torchrun(tmp_path, undisturbed):
    """A signal to one worker is enough; torchrun exits with an error after one to itself, but nothing is lost."""
    run = tmp_path / "outputs" / "run"
    held = Held(torchrun(2), tmp_path, patches(HOLD_AT_STEP, step=7))
    held.wait_until("step7", 0, 1)
    os.kill(worker(held.job, 1), signal.SIGUSR1)
    held.wait_until("signal", 1)
    held.go()
    assert held.end() == 0, held.job.text()
    check_stopped(held, run, 7)
    assert not (held.site / "signal.0").exists()

    held = Held(torchrun(2), tmp_path, patches(HOLD_AT_STEP, step=13))
    held.wait_until("step13", 0, 1)
    workers = held.job.workers()
    held.job.process.terminate()
    held.wait_until("signal", 0, 1)
    held.go()
    assert held.end() != 0
    check_stopped(held, run, 13)
    assert not any(map(is_running, workers))
    finish(tmp_path, [7, 13], undisturbed(2), ranks=2)


# In the middle of other things.

HOLD_IN_EVALUATION = """
def patch(evaluate):
    batches, run = evaluate.Evaluator._batches, evaluate.Evaluator.run
    evaluations = [0]
    def counted(self):
        for number, batch in enumerate(batches(self)):
            if number == 3 and evaluations[0] == <evaluation>:
                hold("evaluation")
            elif evaluations[0] == <evaluation>:
                with open(HERE / "batches", "a") as out:
                    print(number, file=out)
            yield batch
    def counted_run(self, *arguments, **named):
        evaluations[0] += 1
        return run(self, *arguments, **named)
    evaluate.Evaluator._batches, evaluate.Evaluator.run = counted, counted_run
    evaluate.TOKENS_PER_BATCH = 16
PATCHES["mingpt_ddp.training.evaluate"] = patch
"""


@pytest.mark.parametrize(("evaluation", "step"), [(1, 10), (3, STEPS)])
def test_an_evaluation_is_broken_off_and_made_up_for(evaluation, step, tmp_path, undisturbed):
    run = tmp_path / "outputs" / "run"
    held = Held(python_main(), tmp_path, patches(HOLD_IN_EVALUATION, evaluation=evaluation))
    held.wait_until("evaluation")
    os.kill(held.job.process.pid, signal.SIGTERM)
    held.wait_until("signal")
    held.go()
    assert held.end() == 0, held.job.text()
    check_stopped(held, run, step)
    assert (held.site / "batches").read_text().split() == ["0", "1", "2"], "it went on"
    if step == STEPS:
        job = Job([*python_main(), *SETTINGS], tmp_path)
        assert job.wait(60) == 0, job.text()
        check_same(run, undisturbed(1))
    else:
        finish(tmp_path, [step], undisturbed(1))


def test_a_signal_before_training_ends_the_process(tmp_path):
    hold_at_import = 'PATCHES["mingpt_ddp.data.dataset"] = lambda module: hold("start")'
    held = Held(python_main(), tmp_path, hold_at_import)
    held.wait_until("start")
    os.kill(held.job.process.pid, signal.SIGTERM)
    assert held.end(5) == 128 + signal.SIGTERM
    assert "Traceback" not in held.job.text()
    assert not (tmp_path / "outputs" / "run" / "result.json").exists()


def test_the_second_ctrl_c_exits_at_once(tmp_path):
    held = Held(python_main(), tmp_path, patches(HOLD_AT_STEP, step=5))
    held.wait_until("step5")
    os.kill(held.job.process.pid, signal.SIGINT)
    held.wait_until("signal")
    os.kill(held.job.process.pid, signal.SIGINT)
    assert held.end(5) == 128 + signal.SIGINT
    assert committed(tmp_path / "outputs" / "run") == []
    assert "Traceback" not in held.job.text()


# Without time for a snapshot.

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


def end_at_step_8(held: Held) -> None:
    """By a SIGTERM."""
    held.wait_until("step8")
    wait_for(lambda: committed(held.job.output.parent / "outputs" / "run") == [5], what="the snapshot")
    (held.site / "writing").unlink(missing_ok=True)
    os.kill(held.job.process.pid, signal.SIGTERM)
    held.wait_until("signal")
    held.go()
    assert held.end() == 0, held.job.text()


def test_the_older_snapshot_stays_where_there_is_no_time(tmp_path, undisturbed):
    """A new one is begun, which would take longer than there is, and longer than this test waits."""
    run = tmp_path / "outputs" / "run"
    slow = patches(HOLD_AT_STEP + SLOW_WRITES, step=8, first=6, seconds=600)
    held = Held(python_main(), tmp_path, slow, "snapshot.every_steps=5", "snapshot.grace_seconds=2")
    end_at_step_8(held)
    assert (held.site / "writing").exists()
    assert committed(run) == [5]
    assert result(run)["status"] == "preempted"
    assert "preempted at step 8 without time for a snapshot: the last one is of step 5" in held.job.text()
    finish(tmp_path, [5], undisturbed(1))


def test_what_would_take_too_long_is_not_begun(tmp_path):
    slow = patches(HOLD_AT_STEP + SLOW_WRITES, step=8, first=1, seconds=2.5)
    held = Held(python_main(), tmp_path, slow, "snapshot.every_steps=5", "snapshot.grace_seconds=2")
    end_at_step_8(held)
    assert not (held.site / "writing").exists()
    run = tmp_path / "outputs" / "run"
    assert committed(run) == [5]
    assert not (run / "snapshots" / "step_00000008").exists()
    assert "without time for a snapshot: the last one is of step 5" in held.job.text()
