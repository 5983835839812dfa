"""Check every command whose output cannot be written.

The disk is full, the reader has ended, or the stream is closed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import UNREAD, open_output, server_of
from launching import PATIENCE_S, ROOT, TINY, environment, python_main

SWEEP = ["-m", *TINY, "run.name=lr", "optimizer.lr=1e-3,1e-2"]
FULL_ERROR = "output error: cannot write to standard output: No space left on device; "
FULL_DISK = "/dev/full"
RUN = "outputs/job"
CLOSED_PIPE = 128 + signal.SIGPIPE
COMMANDS = {
    "train --help": ["mingpt_ddp", "--help"],
    "train --version": ["mingpt_ddp", "--version"],
    "train --cfg": ["mingpt_ddp", "--cfg", "job"],
    "train --info": ["mingpt_ddp", "--info", "config"],
    "train --hydra-help": ["mingpt_ddp", "--hydra-help"],
    "train --shell-completion": ["mingpt_ddp", "--shell-completion", "install=bash"],
    "sample": ["mingpt_ddp", "sample", RUN, "max_new_tokens=9", "device=cpu"],
    "evaluate": ["mingpt_ddp", "evaluate", RUN, "device=cpu"],
    "list": ["mingpt_ddp", "snapshots", "list", RUN],
    "verify": ["mingpt_ddp", "snapshots", "verify", RUN],
    "replay": ["mingpt_ddp", "replay", RUN, "steps=4"],
    "at": ["mingpt_ddp", "at", RUN, "step=6"],
    "prune": ["mingpt_ddp", "snapshots", "prune", RUN, "keep_last=9"],
    "export": ["mingpt_ddp", "snapshots", "export", RUN, "to=exported"],
    "report": ["mingpt_ddp", "report", RUN],
    "report format=json": ["mingpt_ddp", "report", RUN, "format=json"],
    "plan": ["mingpt_ddp", "plan", "model=gpt_nano", "vocab_size=9", "device=h100"],
    "plan --cfg": ["mingpt_ddp", "plan", "--cfg", "job"],
    "again --help": ["mingpt_ddp", "again", "--help"],
}


@pytest.fixture(scope="module")
def cwd(tmp_path_factory) -> Path:
    """Make a directory with a sweep of two jobs."""
    cwd = tmp_path_factory.mktemp("output")
    done = run([*python_main(), *SWEEP], cwd)
    assert done.returncode == 0, done.stderr
    (job,) = (cwd / "outputs/lr").glob("optimizer.lr=0.01-*")
    (cwd / "outputs/job").symlink_to(job)
    return cwd


def run(command: list[str], cwd: Path, **outputs: str) -> subprocess.CompletedProcess[str]:
    """Run a command with buffered outputs, as a user does. Slow commands are forked.

    Args:
        command: The command.
        cwd: The working directory.
        outputs: Other destinations of stdout and stderr, as in `ForkServer.run`.
    """
    env = environment(cwd, PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="")
    if server := server_of(command, env):
        return server.run(command, cwd, env, PATIENCE_S, separate=True, outputs=outputs)
    opened = {name: open_output(path) for name, path in outputs.items()}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **opened}
    try:
        return subprocess.run(command, cwd=cwd, env=env, text=True, timeout=PATIENCE_S, **streams)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def tool(name: str) -> list[str]:
    return [sys.executable, "-m", *COMMANDS[name]]


def test_results_are_on_standard_output_and_logs_on_standard_error(cwd):
    single = run([*python_main(), *TINY, "run.name=single"], cwd)
    assert (single.returncode, single.stdout) == (0, "")
    assert "step 12/12: loss " in single.stderr
    assert single.stderr.splitlines()[-1].startswith("done: validation loss ")
    sweep = run([*python_main(), *SWEEP], cwd)
    assert sweep.stdout.count("best: ") == 1 and "already complete" not in sweep.stdout
    assert sweep.stderr.count("already complete") == 3 and "best: " not in sweep.stderr
    evaluated = run(tool("evaluate"), cwd)
    assert {*json.loads(evaluated.stdout)} > {"split", "loss"} and "loss" not in evaluated.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_output_is_reported_in_one_line(name, cwd):
    done = run(tool(name), cwd, stdout=FULL_DISK)
    *before, last = done.stderr.splitlines()
    assert (done.returncode, last.startswith(FULL_ERROR)) == (2, True), done.stderr
    assert not [line for line in before if "rror" in line or "Traceback" in line]


@pytest.mark.parametrize(
    "name", ["train --help", "train --cfg", "sample", "verify", "report", "plan", "again --help"]
)
def test_a_reader_that_has_ended_is_not_an_error(name, cwd):
    done = run(tool(name), cwd, stdout=UNREAD)
    assert done.returncode == CLOSED_PIPE, done.stderr
    assert "rror" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("parallel", ["1", "2"])
def test_a_complete_sweep_whose_table_cannot_be_written(parallel, tmp_path):
    """The jobs are complete, so they do not run again."""
    command = [*python_main(), *SWEEP, f"sweep.parallel={parallel}"]
    first = run(command, tmp_path, stdout=FULL_DISK)
    *_, summary, last = first.stderr.splitlines()
    assert (first.returncode, last.startswith(FULL_ERROR)) == (2, True), first.stderr
    assert summary == "sweep: 2 jobs, 0 already complete, 0 failed"
    second = run(command, tmp_path)
    assert second.returncode == 0, second.stderr
    assert "sweep: 2 jobs, 2 already complete, 0 failed" in second.stderr
    assert "best:" in second.stdout


@pytest.mark.parametrize(("more", "code"), [((), 0), (("model.n_head=1,5",), 2)])
def test_a_sweep_without_a_reader_for_its_table_ends_normally(more, code, cwd):
    words = [*TINY, "run.name=read", "model.n_head=1,2"] if not more else [*TINY, "run.name=bad"]
    done = run([*python_main(), "-m", *words, *more], cwd, stdout=UNREAD)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stream", [FULL_DISK, UNREAD])
@pytest.mark.parametrize(("name", "code"), [("evaluate", 0), ("sample", 2)])
def test_unwritable_standard_error_does_not_change_the_exit_code(name, code, stream, cwd):
    command = tool(name)
    if code:
        command.append("temperature=-1")
    done = run(command, cwd, stderr=stream)
    assert (done.returncode, done.stdout == "") == (code, code != 0)


def test_an_error_without_standard_error_is_not_printed_as_a_result(cwd):
    command = " ".join([*tool("sample"), "temperature=-1", "2>&-"])
    done = run(["bash", "-c", command], cwd)
    assert (done.returncode, done.stdout) == (2, "")
