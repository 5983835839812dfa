"""Check sweeps with concurrent jobs: their bits, kills, signals, failures and slots."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import re
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest
from holding import HeldRun
from launching import (
    Job,
    call,
    children,
    environment,
    is_running,
    last_step,
    python_main,
    torchrun,
    wait_for,
)
from runs import fail, succeed
from searching import (
    DIRECTORY,
    SEARCH,
    SHORT,
    ends,
    history_lines,
    recorded,
    results,
    starts,
    states,
    statuses,
    weights,
)

GRID = ["-m", *SHORT, "run.name=sweep"]
LONG = [*GRID, "trainer.max_steps=100000", "trainer.eval_every=100000", "snapshot.every_steps=null"]
SWEEP = Path("outputs", "sweep")
TWO = "sweep.parallel=2"


def sweep(*overrides: str) -> list[str]:
    return [*python_main(), *overrides]


def failures(directory: Path) -> list[list[str]]:
    """Return the job and the reason for each failure."""
    lines = map(json.loads, (directory / "failures.jsonl").read_text().splitlines())
    return [[line["job"], line["reason"]] for line in lines]


def until(job: Job, condition, what: str) -> None:
    """Wait for a condition while a sweep runs."""
    wait_for(lambda: condition() or job.process.poll() is not None, what=what)
    assert job.process.poll() is None, job.text()


def two_train(job: Job, directory: Path) -> list[int]:
    """Wait until two jobs train. Return the process ids of their ranks."""

    def ready() -> bool:
        training = [
            run
            for run in directory.glob("*/")
            if last_step(run) > 2 and not (run / "result.json").exists()
        ]
        return len(training) == 2 and len(job.workers()) == 2

    until(job, ready, "two jobs")
    return job.workers()


def fork_server(job: Job) -> int:
    (server,) = [child for child in children(job.process.pid) if children(child)]
    return server


def test_concurrent_jobs_have_the_bits_of_consecutive_jobs_and_single_runs(tmp_path):
    values = ["optimizer.lr=1e-3,2e-3", "run.seed=1,2"]
    found = {}
    for parallel in (1, 2):
        cwd = tmp_path / str(parallel)
        cwd.mkdir()
        text = succeed(sweep(*GRID, *values, f"sweep.parallel={parallel}"), cwd)
        assert "sweep: 4 jobs, 0 already complete, 0 failed" in text
        found[parallel] = weights(cwd / SWEEP)
    assert len(found[1]) == 4 and found[1] == found[2]
    succeed(sweep(*SHORT, "optimizer.lr=2e-3", "run.seed=1", "run.name=alone"), tmp_path)
    (alone,) = (tmp_path / "outputs/alone").glob("snapshots/step_00000004/model.safetensors")
    (same,) = [name for name in found[2] if name.startswith("optimizer.lr=0.002,run.seed=1")]
    assert alone.read_bytes() == found[2][same]


def test_a_search_killed_with_several_jobs_continues_with_one(tmp_path):
    """Each trial keeps its values and is trained once. Later values depend on earlier results."""
    overrides = [*SEARCH, "sweep.trials=8", "sweep.sampler_settings={n_startup_trials: 2}"]
    job = Job(sweep(*overrides, TWO), tmp_path)
    until(job, lambda: len(statuses(tmp_path / DIRECTORY)) >= 3, "three jobs")
    job.kill_tree()
    before = [trial["params"] for trial in recorded(tmp_path / DIRECTORY)]
    ended = starts(tmp_path / DIRECTORY).keys() & statuses(tmp_path / DIRECTORY).keys()
    succeed(sweep(*overrides, "sweep.parallel=1"), tmp_path)
    check_ended(tmp_path / DIRECTORY, 8)
    drawn = [trial["params"] for trial in recorded(tmp_path / DIRECTORY)]
    assert drawn[: len(before)] == before
    assert {starts(tmp_path / DIRECTORY)[name] for name in ended} == {1}


def kill(job: Job, what: str, generator: random.Random) -> None:
    """SIGKILL one rank, the parent, the fork server of the ranks, or all processes."""
    if what == "a rank":
        if ranks := job.workers():
            os.kill(generator.choice(ranks), signal.SIGKILL)
        return
    if what == "the fork server":
        os.kill(fork_server(job), signal.SIGKILL)
        return
    if what == "the parent":
        ranks = job.kill_agent()
        wait_for(lambda: not any(map(is_running, ranks)), what="the end of the ranks")
        return
    job.kill_tree()


def killed_often(command: list[str], directory: Path, cwd: Path, kills: list[str]) -> None:
    """Run a sweep to its end, with kills at random moments."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    generator = random.Random(seed)
    job = Job(command, cwd)
    for what in kills:
        line = history_lines(directory) + generator.randint(5, 25)
        wait_for(
            lambda: history_lines(directory) >= line or job.process.poll() is not None,  # noqa: B023
            what=f"line {line}",
        )
        if job.process.poll() is not None:
            break
        time.sleep(generator.uniform(0, 0.5))
        before = starts(directory)
        finished = set(results(directory))
        with contextlib.suppress(ProcessLookupError, ValueError):  # the process has just ended
            kill(job, what, generator)
        if what in ("the parent", "everything"):
            job.process.wait()
            job = Job(command, cwd)
        print(f"killed {what} at line {line}")
        for name in finished:
            assert starts(directory)[name] == before[name]
    assert job.wait() == 0, job.text()
    assert "0 failed" in job.text()


def check_ended(directory: Path, count: int) -> None:
    """Check that Optuna reads all trials of a search, each once and with different values."""
    assert len(statuses(directory)) == count
    assert set(statuses(directory).values()) <= {"complete", "pruned"}
    found = recorded(directory)
    assert len(found) == count
    assert {trial["state"] for trial in found} <= {"COMPLETE", "PRUNED"}
    assert sorted(ends(directory)) == list(range(count)), "a trial ended twice, or never"
    assert {trial["job"] for trial in found} == set(statuses(directory))
    assert len({json.dumps(trial["params"]) for trial in found}) == count, "a value drawn twice"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_search_with_a_pruner_killed_five_times(tmp_path):
    """No job runs twice, and each complete job has the bits of a single run."""
    command = sweep(*SEARCH, "sweep.trials=24", "sweep.pruner=asha", TWO)
    kills = ["a rank", "the parent", "everything", "the fork server", "the parent"]
    directory = tmp_path / DIRECTORY
    killed_often(command, directory, tmp_path, kills)
    check_ended(directory, 24)
    assert "PRUNED" in states(directory)
    complete = [trial for trial in recorded(directory) if trial["state"] == "COMPLETE"]
    for number, trial in enumerate(complete):
        values = [f"{key}={value}" for key, value in trial["params"].items()]
        succeed(sweep(*SHORT, *values, f"run.name=alone/{number}"), tmp_path)
    searched, alone = weights(directory), weights(tmp_path / "outputs" / "alone")
    assert len(alone) == len(complete) > 1
    for number, trial in enumerate(complete):
        assert alone[f"{number}"] == searched[trial["job"]], trial


def test_a_killed_grid_equals_the_undisturbed_one(tmp_path):
    command = sweep(*GRID, "optimizer.lr=1e-3,2e-3,3e-3,4e-3,5e-3", "run.seed=1,2", TWO)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    succeed(command, undisturbed)
    killed_often(command, disturbed / SWEEP, disturbed, ["the parent", "a rank", "the fork server"])
    assert set(statuses(disturbed / SWEEP).values()) == {"complete"}
    assert weights(disturbed / SWEEP) == weights(undisturbed / SWEEP)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_saves_all_running_jobs(number, tmp_path):
    """No other job starts. The same command with a lower limit then finishes the sweep."""
    job = Job(sweep(*LONG, "run.seed=1,2,3", TWO), tmp_path)
    two_train(job, tmp_path / SWEEP)
    job.process.send_signal(number)
    assert job.wait() == 0, job.text()
    assert list(statuses(tmp_path / SWEEP).values()) == ["preempted"] * 2
    assert len(weights(tmp_path / SWEEP)) == 2
    assert "sweep: 0 of 3 jobs done; rerun the same command to resume" in job.text()
    steps = max(result["step"] for result in results(tmp_path / SWEEP).values()) + 2
    text = succeed(sweep(*LONG, f"trainer.max_steps={steps}", "run.seed=1,2,3", TWO), tmp_path)
    assert "sweep: 3 jobs, 0 already complete, 0 failed" in text
    assert sorted(starts(tmp_path / SWEEP).values()) == [1, 2, 2]


def test_a_signal_to_one_job_ends_the_sweep_after_the_others(tmp_path):
    """The other running jobs finish, and no new job starts."""
    overrides = ["sweep.trials=6", "trainer.max_steps=300", "trainer.eval_every=300"]
    job = Job(sweep(*SEARCH, *overrides, "snapshot.every_steps=null", TWO), tmp_path)
    ranks = two_train(job, tmp_path / DIRECTORY)
    os.kill(ranks[0], signal.SIGTERM)
    assert job.wait() == 0, job.text()
    *complete, preempted = sorted(statuses(tmp_path / DIRECTORY).values())
    assert preempted == "preempted" and complete and set(complete) == {"complete"}
    assert f"sweep: {len(complete)} of 6 jobs done; rerun the same command to resume" in job.text()


def test_a_failing_job_among_several(tmp_path):
    """The error names the job and is recorded. The job is retried as sweep.retries says."""
    text = fail(sweep(*GRID, "optimizer.lr=1e-3,1e30,2e-3", "sweep.retries=1", TWO), tmp_path)
    lines = text.splitlines()
    assert sum(line.startswith("job 2: training error: step ") for line in lines) == 2
    assert "job 2: retry 1 of 1" in lines
    assert "sweep: 3 jobs, 0 already complete, 1 failed" in lines
    assert (
        "job error: 1 of 3 jobs failed: optimizer.lr=1e+30; rerun the same command to retry"
        in lines
    )
    (first, reason), again = failures(tmp_path / SWEEP)
    assert first == "optimizer.lr=1e+30" and reason.startswith("training error: step ")
    assert again == [first, reason]
    assert list(statuses(tmp_path / SWEEP).values()).count("complete") == 2


def test_no_job_starts_after_too_many_failures(tmp_path):
    """An invalid combination of values, which is found when its job starts, is a failure too."""
    values = ["run.seed=1,2", "model.n_head=3,16", "model.n_embd=48,24"]
    text = fail(sweep(*GRID, *values, "sweep.max_failures=0", TWO), tmp_path)
    reason = "config error: model.n_embd=24 must be divisible by model.n_head=16"
    assert f"\njob 6: {reason}" in text
    label = "model.n_embd=24, run.seed=1, model.n_head=16"
    assert failures(tmp_path / SWEEP) == [[label, reason]]
    assert "no other job starts, because 1 job failed (sweep.max_failures=0)" in text
    assert f"job error: 1 of 6 jobs failed: {label}; 2 jobs did not start;" in text
    assert "Traceback" not in text


HOLD = """
def reach(step, rank):
    pause("training")
"""


def test_jobs_with_the_same_values_run_one_after_another(tmp_path):
    """The first job trains until the second job waits for it."""
    values = ["optimizer.lr=1e-3,0.001,1e-3,2e-3", "trainer.max_steps=8", TWO]
    held = HeldRun(sweep(*GRID, *values), tmp_path, HOLD)
    waiting = "job 2 waits for another job with the same values"
    until(held.job, lambda: waiting in held.job.text(), "it")
    held.resume()
    assert held.wait() == 0, held.job.text()
    assert [*starts(tmp_path / SWEEP).values()] == [1, 1]
    assert "sweep: 4 jobs, 0 already complete, 0 failed" in held.job.text()


def test_slots(tmp_path):
    """Each job has its own cores and threads. A sweep records their number."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    job = Job(sweep(*LONG, "run.seed=1,2", TWO), tmp_path, OMP_NUM_THREADS="")
    ranks = two_train(job, tmp_path / SWEEP)
    bound = [os.sched_getaffinity(rank) for rank in ranks]
    assert not bound[0] & bound[1]
    assert {len(each) for each in bound} == {len(cores) // 2}
    job.kill_tree()
    kept = json.loads((tmp_path / SWEEP / "sweep.json").read_text())
    assert (kept["cores"], kept["threads"]) == (len(cores) // 2, {"1": len(cores) // 2})


def test_the_progress_line_on_a_terminal(tmp_path):
    """A line below the log shows how many jobs have ended and run, and the best result.

    It is erased at the end.
    """
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    command = sweep(*GRID, "run.seed=1,2,3", TWO)
    env = environment(tmp_path, TERM="xterm")
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=side
    )
    os.close(side)
    shown = b""
    with contextlib.suppress(OSError):  # the sweep has closed the terminal
        while text := os.read(main, 1 << 16):
            shown += text
    os.close(main)
    assert process.wait() == 0, shown.decode()
    best = min(result["val_loss"] for result in results(tmp_path / SWEEP).values())
    last = re.findall(r"sweep: [^\r\n]*running[^\r\n]*", shown.decode())[-1]
    assert "3/3" in last and f"0 running, best validation loss {best:.4f}" in last
    assert "2 running" in shown.decode()
    assert re.match(r"\r +\r", shown.decode().partition(last)[2]), "it is not erased"


def test_ranks_in_lockstep_refuse_concurrent_jobs(tmp_path):
    done = call([*torchrun(2), *GRID, "run.seed=1,2", TWO], tmp_path)
    lines = [line for line in done.stdout.splitlines() if "error: " in line]
    assert len(lines) >= 1 and "sweep.parallel=2 does not work under torchrun" in lines[0]
    assert not (tmp_path / "outputs").exists()
