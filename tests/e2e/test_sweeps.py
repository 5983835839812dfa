"""Check sweeps that are edited, made longer, preempted, or have the name of another sweep.

The contract tests check kills and failing jobs.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
from launching import ROOT, TINY, Job, call, committed, last_step, python_main, torchrun, wait_for
from runs import fail, read_history, read_result, recorded_config, succeed, train, weights

SHORT = [
    *TINY,
    "trainer.max_steps=6",
    "trainer.eval_every=3",
    "snapshot.every_steps=2",
    "trainer.log_every=1",
]


def ranks_in_lockstep(*overrides: str) -> list[str]:
    return [*torchrun(2), "-m", *overrides]


def one_parent(*overrides: str) -> list[str]:
    return [*python_main(), "-m", "ddp.nproc_per_node=2", *overrides]


def single_process(*overrides: str) -> list[str]:
    return [*python_main(), "-m", *overrides]


def finished(sweep: Path) -> dict[str, tuple[float, bytes, int]]:
    """Return the loss, weights and number of starts of each complete job by directory name."""
    done = {}
    for path in sweep.glob("*/result.json"):
        job, result = path.parent, read_result(path.parent)
        if result["status"] == "complete":
            found = (result["val_loss"], weights(job, result["step"]), read_history(job).starts)
            done[job.name] = found
    return done


def test_an_edited_and_a_longer_sweep(tmp_path):
    """The edit adds a value and a swept default, and spells other values differently.

    The two finished jobs are skipped. With more steps, they continue.
    """
    sweep = tmp_path / "outputs" / "sweep"
    two = [*SHORT, "run.name=sweep", "optimizer.lr=1e-3,2e-3"]
    succeed(single_process(*two), tmp_path)
    before = finished(sweep)
    assert len(before) == 2 and all(name.startswith("optimizer.lr=0.00") for name in before)
    values = ["optimizer.lr=0.004,0.002,0.0010", "model.dropout=0.0,0.1"]
    text = succeed(single_process(*SHORT, "run.name=sweep", *values), tmp_path)
    assert "sweep: 6 jobs, 2 already complete, 0 failed" in text
    after = finished(sweep)
    assert len(after) == 6 and before.items() <= after.items()
    text = succeed(single_process(*two, "trainer.max_steps=8"), tmp_path)
    assert "sweep: 2 jobs, 0 already complete, 0 failed" in text
    assert text.count("resuming from the snapshot of step 6 of 8") == 2
    assert len(finished(sweep)) == 6


def test_keys_outside_the_digest_still_distinguish_jobs(tmp_path):
    """Limits do not change the training, but a sweep may vary them."""
    succeed(single_process(*SHORT, "trainer.max_steps=2,4"), tmp_path)
    runs = [path.parent for path in (tmp_path / "outputs").glob("*/result.json")]
    assert sorted(read_result(run)["step"] for run in runs) == [2, 4]
    # The values are the same, but spelled differently.
    text = succeed(single_process(*SHORT, "trainer.max_steps=2.0,4e0"), tmp_path)
    assert "sweep: 2 jobs, 2 already complete, 0 failed" in text


def test_resume_never(tmp_path):
    """run.resume=never trains complete jobs again, in new directories, which the summary lists."""
    overrides = [*SHORT, "optimizer.lr=1e-3,2e-3", "trainer.max_steps=2"]
    succeed(single_process(*overrides), tmp_path)
    text = succeed(single_process(*overrides, "run.resume=never"), tmp_path)
    assert "sweep: 2 jobs, 0 already complete, 0 failed" in text
    runs = {path.parent.name for path in (tmp_path / "outputs").glob("*/result.json")}
    first = {name for name in runs if not name.endswith("-2")}
    assert runs == first | {f"{name}-2" for name in first} and len(first) == 2
    table = text[text.index("val loss  status") :]
    assert all(f"{name}-2" in table for name in first), table


def test_a_signal_after_the_last_step_ends_the_sweep(tmp_path):
    """The current job still completes, and the next job does not start.

    If the signal comes too late for that, the next job is preempted.
    """
    job = Job(single_process(*TINY, "run.name=sweep", "run.seed=1,2"), tmp_path)
    wait_for(lambda: "step 12: validation loss" in job.text(), what="the last evaluation")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.text()
    results = (tmp_path / "outputs" / "sweep").glob("run.seed=*/result.json")
    statuses = sorted(read_result(path.parent)["status"] for path in results)
    assert statuses in (["complete"], ["complete", "preempted"])


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
    # torchrun exits with 1 whatever its workers' codes are.
    assert job.wait() == (1 if launch is ranks_in_lockstep else 0), job.text()
    (run,) = sweep.glob("run.seed=*")
    result = read_result(run)
    assert result["status"] == "preempted"
    assert committed(run)[-1] == result["step"]


RETURNS = """
import os
from hydra.experimental.callback import Callback

class Print(Callback):
    def on_job_end(self, config, job_return, **kwargs):
        if config.hydra.mode.name == "MULTIRUN":  # a worker of a job has another mode
            os.write(1, f"returned {job_return.return_value!r}\\n".encode())
"""


def returned(command: list[str], cwd: Path) -> tuple[str, list[float]]:
    """Run a sweep. Return its output, and the value that each job returns to Hydra."""
    (cwd / "printing.py").write_text(RETURNS)
    command = [*command, "+hydra.callbacks.print._target_=printing.Print"]
    printed = succeed(command, cwd, PYTHONPATH=os.pathsep.join([str(cwd), str(ROOT)]))
    return printed, [float(text) for text in re.findall(r"returned (\S+)", printed)]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_tokenizers_are_ranked_by_bits_per_byte(workers, tmp_path):
    """The letters of the text have two bytes, and the first byte is easy to predict.

    So the loss per byte is lower than the loss per character, and the two cannot be compared.
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
        "the objective is bits per byte: losses per token of different tokenizers cannot be comp"
        in text
    )
    assert f"best: {jobs['char'].parent.relative_to(tmp_path)}" in text
    again, same = returned(command, tmp_path)
    assert same == values
    assert "sweep: 2 jobs, 2 already complete, 0 failed" in again
    assert again.count("already complete, bits per byte ") == 2


def test_values_in_pairs(tmp_path):
    """Two lists of values are paired, and each pair is combined with each value of a third list."""
    pairs = ["optimizer.lr=1e-3,2e-3", "model.n_embd=24,48"]
    words = [*SHORT, "sweep.zip=[optimizer.lr,model.n_embd]", *pairs, "run.seed=1,2"]
    command = single_process(*words, "run.name=sweep")
    assert "sweep: 4 jobs, 0 already complete, 0 failed" in succeed(command, tmp_path)
    trained = set()
    for path in (tmp_path / "outputs" / "sweep").glob("*/result.json"):
        config = recorded_config(path.parent)
        model, optimizer = config["model"], config["optimizer"]
        trained.add((optimizer["lr"], model["n_embd"], config["run"]["seed"]))
    assert trained == {(1e-3, 24, 1), (1e-3, 24, 2), (2e-3, 48, 1), (2e-3, 48, 2)}
    assert "sweep: 4 jobs, 4 already complete, 0 failed" in succeed(command, tmp_path)


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
        os.write(1, f"{line}\\n".encode())  # one write, since the other rank prints at the same time
        # Wait for the other rank. After the last job, torchrun ends it because of rank 0's exit code.
        counted = [f"counted-{config.hydra.job.num}-{r}" for r in range(int(os.environ.get("WORLD_SIZE", "1")))]
        open(counted[int(rank)], "w").close()
        while not all(map(os.path.exists, counted)):
            time.sleep(0.01)
"""  # noqa: E501


@pytest.mark.parametrize(
    "launch", [pytest.param(ranks_in_lockstep, marks=pytest.mark.slow), single_process]
)
def test_nothing_leaks_into_the_next_job(launch, tmp_path):
    """Tensors, log handlers, threads and open files do not accumulate, even after a failed job."""
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
        # A connection or thread of torch may take a moment to close. A leak of one per job would
        # add three.
        assert threads[-1] <= threads[1] + 1 and files[-1] <= files[1] + 2, left


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="torch.compile needs a C++ compiler",
)
@pytest.mark.slow
def test_a_compiled_job_after_an_eager_one_equals_a_single_run(tmp_path):
    """The first job of a process does not use torch's compiler. What torch caches in it does not
    affect the second job.
    """
    overrides = [*TINY, "model.n_layer=1", "trainer.device=cpu", "trainer.max_steps=4"]
    succeed(single_process(*overrides, "trainer.compile=false,true", "run.name=sweep"), tmp_path)
    jobs = {
        name.lower().split("-")[0]: found
        for name, (_, found, _) in finished(tmp_path / "outputs" / "sweep").items()
    }
    single = {}
    for compiled in ("false", "true"):
        name = f"trainer.compile={compiled}"
        single[name] = weights(train(tmp_path / compiled, *overrides, name), 4)
    assert jobs == single


def test_two_sweeps_of_the_same_name_do_not_run_concurrently(tmp_path):
    overrides = [*TINY, "run.name=sweep", "run.seed=1,2", "trainer.max_steps=1000000"]
    first = Job(single_process(*overrides), tmp_path)
    lock = tmp_path / "outputs" / "sweep" / ".lock"
    wait_for(lambda: lock.exists() and lock.read_text(), what="the lock of the first")
    text = fail(single_process(*overrides), tmp_path)
    assert first.process.poll() is None, first.text()
    first.kill_tree()
    assert "\nrun error: outputs/sweep is locked by process" in f"\n{text}", text


def test_an_invalid_combination_fails_the_sweep_of_another_sweeper(tmp_path):
    """Each value is valid by itself, together with the first values of the other keys."""
    sizes = ["model.n_embd=24,36", "model.n_head=6,8", "model.n_layer=1", "trainer.max_steps=1"]
    words = [*TINY, "hydra/sweeper=basic", "run.name=sweep", *sizes]
    *_, last = fail(single_process(*words), tmp_path).splitlines()
    assert last.startswith("job error: ") and "model.n_head=8" in last
    assert len([*tmp_path.glob("outputs/sweep/*/result.json")]) == 3
