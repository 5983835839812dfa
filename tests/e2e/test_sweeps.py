"""Sweeps: in lockstep and below one parent, killed anywhere, edited, with failing jobs."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import ROOT, TINY, Job, call, committed, last_step, python_main, torchrun, wait_for

from mingpt_ddp.metrics.jsonl import METRICS, read_history

SHORT = [
    *TINY,
    "trainer.max_steps=6",
    "trainer.eval_every=3",
    "snapshot.every_steps=2",
    "trainer.log_every=1",
]
TWELVE = [*SHORT, "optimizer.lr=1e-3,2e-3,4e-3", "model.n_embd=24,48", "run.seed=1,2"]
KILLS = 3
LIMIT_S = 240


@dataclass(frozen=True)
class FinishedJob:
    """The result of a finished job."""

    loss: float
    weights: bytes
    starts: int


def ranks_in_lockstep(*overrides: str) -> list[str]:
    return [*torchrun(2), "-m", *overrides]


def one_parent(*overrides: str) -> list[str]:
    return [*python_main(), "-m", "ddp.nproc_per_node=2", *overrides]


def single_process(*overrides: str) -> list[str]:
    return [*python_main(), "-m", *overrides]


def finished(sweep: Path) -> dict[str, FinishedJob]:
    """Return the finished jobs of a sweep, by directory name."""
    done = {}
    for result in sweep.glob("*/result.json"):
        job = result.parent
        values = json.loads(result.read_text())
        if values["status"] == "complete":
            newest = job / "snapshots" / f"step_{values['step']:08d}" / "model.safetensors"
            done[job.name] = FinishedJob(
                values["val_loss"], newest.read_bytes(), read_history(job / METRICS).starts
            )
    return done


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The twelve jobs, of two ranks each, of an uninterrupted sweep."""
    cwd = tmp_path_factory.mktemp("uninterrupted")
    done = call(ranks_in_lockstep(*TWELVE, "run.name=sweep"), cwd, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout
    assert "sweep: 12 jobs, 0 already complete, 0 failed" in done.stdout
    jobs = finished(cwd / "outputs" / "sweep")
    assert len(jobs) == 12
    assert all(job.starts == 1 for job in jobs.values())
    return jobs


def kill_at_random(command: list[str], cwd: Path, generator: random.Random, n_jobs: int) -> None:
    """Start the sweep, and SIGKILL all its processes within a job after `n_finished` jobs."""
    sweep = cwd / "outputs" / "sweep"
    job = Job(command, cwd)
    deadline = time.monotonic() + LIMIT_S
    while len(finished(sweep)) < n_jobs:
        assert time.monotonic() < deadline, job.text()
        assert job.process.poll() is None, job.text()
        time.sleep(0.02)
    moment = time.monotonic() + generator.uniform(0, 1.5)
    # on a fast machine, the next job may end
    while time.monotonic() < moment and len(finished(sweep)) <= n_jobs:
        time.sleep(0.02)
    assert job.process.poll() is None, "the sweep ended before it was killed"
    job.kill_tree()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S * 2)
def test_twelve_jobs_killed_three_times(uninterrupted, tmp_path):
    """From one parent, against a sweep of ranks in lock-step; contract/test_sweeps.py kills
    both.
    """
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    generator = random.Random(seed)
    command = one_parent(*TWELVE, "run.name=sweep")
    sweep = tmp_path / "outputs" / "sweep"
    starts: dict[str, int] = {}
    for n_jobs in sorted(generator.sample(range(11), KILLS)):
        kill_at_random(command, tmp_path, generator, n_jobs)
        now = {name: job.starts for name, job in finished(sweep).items()}
        assert starts.items() <= now.items(), "a finished job ran again"
        starts = now
    last = call(command, tmp_path, timeout=LIMIT_S)
    assert last.returncode == 0, last.stdout
    assert f"sweep: 12 jobs, {len(starts)} already complete, 0 failed" in last.stdout
    jobs = finished(sweep)
    assert starts.items() <= {name: job.starts for name, job in jobs.items()}.items(), (
        "a finished job ran again"
    )
    assert {n: (j.loss, j.weights) for n, j in jobs.items()} == {
        n: (j.loss, j.weights) for n, j in uninterrupted.items()
    }


def test_an_edited_sweep_skips_finished_jobs(tmp_path):
    """Another value, a default that is now swept, another spelling: the two finished jobs are
    skipped.
    """
    overrides = [*SHORT, "run.name=sweep", "optimizer.lr=1e-3,2e-3"]
    assert call(single_process(*overrides), tmp_path).returncode == 0
    before = finished(tmp_path / "outputs" / "sweep")
    assert (
        sorted(before) == sorted(name for name in before if name.startswith("optimizer.lr=0.00"))
        and len(before) == 2
    )
    overrides = [
        *SHORT,
        "run.name=sweep",
        "optimizer.lr=0.004,0.002,0.0010",
        "model.dropout=0.0,0.1",
    ]
    done = call(single_process(*overrides), tmp_path)
    assert "sweep: 6 jobs, 2 already complete, 0 failed" in done.stdout, done.stdout
    after = finished(tmp_path / "outputs" / "sweep")
    assert len(after) == 6
    assert before.items() <= after.items()


def test_a_longer_sweep_continues_its_jobs(tmp_path):
    overrides = [*SHORT, "run.name=sweep", "run.seed=1,2"]
    assert call(single_process(*overrides), tmp_path).returncode == 0
    done = call(single_process(*overrides, "trainer.max_steps=8"), tmp_path)
    assert "sweep: 2 jobs, 0 already complete, 0 failed" in done.stdout, done.stdout
    assert done.stdout.count("resuming from the snapshot of step 6 of 8") == 2
    assert len(finished(tmp_path / "outputs" / "sweep")) == 2


def test_keys_outside_the_digest_still_distinguish_jobs(tmp_path):
    """Limits do not change the training, but a sweep may vary them."""
    done = call(single_process(*SHORT, "trainer.max_steps=2,4"), tmp_path)
    assert done.returncode == 0, done.stdout
    results = [
        json.loads(path.read_text())["step"]
        for path in (tmp_path / "outputs").glob("*/result.json")
    ]
    assert sorted(results) == [2, 4]
    # the same values in another spelling
    again = call(single_process(*SHORT, "trainer.max_steps=2.0,4e0"), tmp_path)
    assert "sweep: 2 jobs, 2 already complete, 0 failed" in again.stdout, again.stdout


def test_resume_never(tmp_path):
    """run.resume=never trains complete jobs again, in new directories, which the summary lists."""
    overrides = [*SHORT, "optimizer.lr=1e-3,2e-3", "trainer.max_steps=2"]
    assert call(single_process(*overrides), tmp_path).returncode == 0
    again = call(single_process(*overrides, "run.resume=never"), tmp_path)
    assert "sweep: 2 jobs, 0 already complete, 0 failed" in again.stdout, again.stdout
    runs = {path.parent.name for path in (tmp_path / "outputs").glob("*/result.json")}
    first = {name for name in runs if not name.endswith("-2")}
    assert runs == first | {f"{name}-2" for name in first} and len(first) == 2
    table = again.stdout[again.stdout.index("val loss  status") :]
    assert all(f"{name}-2" in table for name in first), table


def test_a_signal_after_the_last_step_ends_the_sweep(tmp_path):
    """The current job is complete nevertheless, and the next one does not start, or is preempted if
    the signal comes so late.
    """
    job = Job(single_process(*TINY, "run.name=sweep", "run.seed=1,2"), tmp_path)
    wait_for(lambda: "step 12: validation loss" in job.text(), what="the last evaluation")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.text()
    results = (tmp_path / "outputs" / "sweep").glob("run.seed=*/result.json")
    statuses = sorted(json.loads(result.read_text())["status"] for result in results)
    assert statuses in (["complete"], ["complete", "preempted"])


# The learning rate of the second of three jobs makes its loss non-finite after a step.
FAILING = [*SHORT, "run.name=sweep", "optimizer.lr=1e-3,1e30,2e-3"]


@pytest.mark.parametrize(
    "launch",
    [
        ranks_in_lockstep,
        *(pytest.param(way, marks=pytest.mark.slow) for way in (one_parent, single_process)),
    ],
)
def test_a_job_that_fails_does_not_stop_the_others(launch, tmp_path):
    done = call(launch(*FAILING), tmp_path, timeout=LIMIT_S)
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("training error: step ")]) == 1, (
        done.stdout
    )
    assert "sweep: 3 jobs, 0 already complete, 1 failed" in lines, done.stdout
    assert "job error: 1 of 3 failed: optimizer.lr=1e+30; rerun the same command to retry" in lines
    assert done.returncode == (1 if launch is ranks_in_lockstep else 2)  # torchrun's own code is 1
    assert len(finished(tmp_path / "outputs" / "sweep")) == 2


@pytest.mark.parametrize(
    "launch", [pytest.param(ranks_in_lockstep, marks=pytest.mark.slow), one_parent]
)
def test_a_preempted_sweep_saves_and_starts_no_other_job(launch, tmp_path):
    overrides = [
        *TINY,
        "trainer.max_steps=100000",
        "snapshot.every_steps=null",
        "run.name=sweep",
        "run.seed=1,2",
    ]
    job = Job(launch(*overrides), tmp_path)
    sweep = tmp_path / "outputs" / "sweep"
    wait_for(
        lambda: any(last_step(run) > 5 for run in sweep.glob("run.seed=1-*")), what="the first job"
    )
    job.process.send_signal(signal.SIGTERM)
    # torchrun's own code is 1
    assert job.wait() == (1 if launch is ranks_in_lockstep else 0), job.text()
    (run,) = sweep.glob("run.seed=*")
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "preempted"
    assert committed(run)[-1] == result["step"]


RETURNS = """
import os
from hydra.experimental.callback import Callback

class Print(Callback):
    def on_job_end(self, config, job_return, **kwargs):
        if config.hydra.mode.name == "MULTIRUN":  # not of a worker
            os.write(1, f"returned {job_return.return_value!r}\\n".encode())
"""


def returned(command: list[str], cwd: Path) -> tuple[str, list[float]]:
    """Run a sweep; return its output, and what its jobs return to Hydra."""
    (cwd / "printing.py").write_text(RETURNS)
    command = [*command, "+hydra.callbacks.print._target_=printing.Print"]
    done = call(command, cwd, PYTHONPATH=os.pathsep.join([str(cwd), str(ROOT)]))
    assert done.returncode == 0, done.stdout
    return done.stdout, [float(text) for text in re.findall(r"returned (\S+)", done.stdout)]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_tokenizers_are_ranked_by_bits_per_byte(workers, tmp_path):
    """Of letters of two bytes, the first almost certain: a loss per byte is lower than one per
    character.
    """
    letters = random.Random(0).choices("αβγδεζηθ", k=8000)
    (tmp_path / "greek.txt").write_text("".join(letters))
    settings = [word for word in SHORT if not word.startswith("data.truncate")]
    settings += [
        "data.path=greek.txt",
        "trainer.max_steps=40",
        "trainer.eval_every=40",
        "optimizer.lr=1e-2",
    ]
    command = single_process(
        *settings, f"ddp.nproc_per_node={workers}", "run.name=sweep", "data.tokenizer=byte,char"
    )
    text, values = returned(command, tmp_path)
    jobs = {
        path.parent.name.split("=")[1][:4]: path
        for path in (tmp_path / "outputs/sweep").glob("*/result.json")
    }
    byte, char = (json.loads(jobs[name].read_text()) for name in ("byte", "char"))
    assert byte["val_loss"] < char["val_loss"] and char["bits_per_byte"] < byte["bits_per_byte"]
    assert values == [byte["bits_per_byte"], char["bits_per_byte"]]
    assert (
        "the objective is bits per byte: losses per token of different tokenizers do not compare"
        in text
    )
    assert f"best: {jobs['char'].parent.relative_to(tmp_path)}" in text
    again, same = returned(command, tmp_path)
    assert same == values
    assert "sweep: 2 jobs, 2 already complete, 0 failed" in again
    assert again.count("already complete, bits per byte ") == 2


COUNT = """
import gc, logging, os, threading, time
import torch
from hydra.experimental.callback import Callback

class Count(Callback):
    def on_job_end(self, config, job_return, **kwargs):
        gc.collect()
        tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        handlers = len(logging.getLogger("mingpt_ddp").handlers)
        paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        files = [os.readlink(path) for path in paths if os.path.lexists(path)]
        runs = sum("outputs" in file and not file.endswith("sweep/.lock") for file in files)
        counts = [tensors, handlers, threading.active_count(), runs, len(files)]
        rank = os.environ.get("RANK", "0")
        line = " ".join(["left", rank, *map(str, counts)])
        os.write(1, f"{line}\\n".encode())  # one write: the other rank prints at the same time
        # Wait for the other rank: behind the last job rank 0's exit code has torchrun end it.
        counted = [f"counted-{config.hydra.job.num}-{r}" for r in range(int(os.environ.get("WORLD_SIZE", "1")))]
        open(counted[int(rank)], "w").close()
        while not all(map(os.path.exists, counted)):
            time.sleep(0.01)
"""  # noqa: E501


@pytest.mark.parametrize(
    "launch", [pytest.param(ranks_in_lockstep, marks=pytest.mark.slow), single_process]
)
def test_nothing_leaks_into_the_next_job(launch, tmp_path):
    """Tensors, log handlers, threads and open files do not accumulate, also after a job that
    fails.
    """
    (tmp_path / "counting.py").write_text(COUNT)
    overrides = [*SHORT, "run.name=sweep", "optimizer.lr=1e-3,1e30,2e-3,3e-3,4e-3"]
    overrides.append("+hydra.callbacks.count._target_=counting.Count")
    done = call(
        launch(*overrides), tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)])
    )
    for rank in "01" if launch is ranks_in_lockstep else "0":
        lines = [
            line.split()[2:]
            for line in done.stdout.splitlines()
            if line.startswith(f"left {rank} ")
        ]
        left = [[int(number) for number in line] for line in lines]
        assert len(left) == 5, done.stdout
        tensors, handlers, threads, runs, files = zip(*left, strict=True)
        assert tensors == handlers == runs == (0,) * 5, left
        # A connection or thread of torch may take a moment to close; a leak of one per job would be
        # three more.
        assert threads[-1] <= threads[1] + 1 and files[-1] <= files[1] + 2, left


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="torch.compile needs a C++ compiler",
)
@pytest.mark.slow
def test_a_compiled_job_after_an_eager_one_equals_a_single_run(tmp_path):
    """What torch caches in the first job of a process, without its compiler, does not affect the
    second.
    """
    overrides = [*TINY, "model.n_layer=1", "trainer.device=cpu", "trainer.max_steps=4"]
    sweep = call(
        single_process(*overrides, "trainer.compile=false,true", "run.name=sweep"),
        tmp_path,
        timeout=LIMIT_S,
    )
    assert sweep.returncode == 0, sweep.stdout
    jobs = {
        name.lower().split("-")[0]: job.weights
        for name, job in finished(tmp_path / "outputs" / "sweep").items()
    }
    single = {}
    for compiled in ("false", "true"):
        name = f"trainer.compile={compiled}"
        done = call(
            [*python_main(), *overrides, name, f"run.name=alone-{compiled}"],
            tmp_path,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout
        snapshot = tmp_path / "outputs" / f"alone-{compiled}" / "snapshots" / "step_00000004"
        single[name] = (snapshot / "model.safetensors").read_bytes()
    assert jobs == single


def test_two_sweeps_of_the_same_name_do_not_run_concurrently(tmp_path):
    overrides = [*TINY, "run.name=sweep", "run.seed=1,2", "trainer.max_steps=1000000"]
    first = Job(single_process(*overrides), tmp_path)
    lock = tmp_path / "outputs" / "sweep" / ".lock"
    while not (lock.exists() and lock.read_text()):
        assert first.process.poll() is None, first.text()
        time.sleep(0.05)
    second = call(single_process(*overrides), tmp_path)
    first.kill_tree()
    assert second.returncode == 2
    assert "\nrun error: outputs/sweep is locked by process" in f"\n{second.stdout}", second.stdout
