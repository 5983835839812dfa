"""Run the program's commands in forks of a process that has imported torch, which takes most of a short command's time.

All else is as in a new process: arguments, directory, environment, output, exit code. Tests that kill or signal a
command, or start it by torchrun, start new processes: `launching.Job`.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [str(ROOT / "main.py"), str(ROOT / "sample.py")]
COMMANDS += [
    f"mingpt_ddp.{name}" for name in ("sample", "evaluate", "snapshots", "report", "collectives", "again", "plan")
]
PRELOADED = ["mingpt_ddp.cli.train", "mingpt_ddp.training.run", "torch._dynamo", "torch._inductor.config"]


class ForkServer:
    """A process that forks one command at a time; it ends with this one."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )

    def run(
        self, command: list[str], cwd: Path, env: dict[str, str], timeout: float, separate: bool
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ...` to completion.

        Args:
            separate: standard error is not in `stdout`, but in `stderr`.

        Raises:
            subprocess.TimeoutExpired: the command has been killed.
        """
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (output, errors if separate else output)]
            request = {"argv": command[1:], "cwd": str(cwd), "env": env, "files": files}
            assert self._process.stdin and self._process.stdout
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            child = int(self._process.stdout.readline())
            waiter = os.pidfd_open(child)
            is_done = bool(select.select([waiter], [], [], timeout)[0])
            os.close(waiter)
            if not is_done:
                os.killpg(child, signal.SIGKILL)
            code = int(self._process.stdout.readline())
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        if not is_done:
            raise subprocess.TimeoutExpired(command, timeout, *texts)
        return subprocess.CompletedProcess(command, code, *texts)


@functools.cache
def server_for(imported: tuple[tuple[str, str], ...]) -> ForkServer:
    """Return the server of this test process for an environment.

    Args:
        imported: the variables that Python or torch read when they are loaded.
    """
    return ForkServer({**os.environ, **dict(imported)})


def run_command(
    command: list[str], cwd: Path, env: dict[str, str], timeout: float, separate: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command to completion, forked if it is one of the program's.

    Args:
        separate: standard error is not in `stdout`, but in `stderr`.
    """
    name = command[2] if command[1:2] == ["-m"] else command[1]
    if command[0] == sys.executable and name in COMMANDS and env.get("PYTHONPATH", str(ROOT)) == str(ROOT):
        imported = {key: value for key, value in env.items() if re.match("OMP_|MKL_|ATEN_|TORCH|PYTHON|PYTORCH", key)}
        imported.pop("PYTHONPATH", None)
        return server_for(tuple(sorted(imported.items()))).run(command, cwd, env, timeout, separate)
    errors = subprocess.PIPE if separate else subprocess.STDOUT
    streams: dict[str, int] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
    return subprocess.run(command, cwd=cwd, env=env, text=True, timeout=timeout, **streams)


def main() -> None:
    """Serve: read a request a line, fork, print the child's process id, then its exit code."""
    sys.path[0] = str(ROOT)
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            run(json.loads(line))
            return  # like a new process, through the end of the interpreter
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run(request: dict[str, Any]) -> None:
    """Become the command."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    files = [os.open(path, os.O_WRONLY | os.O_APPEND) for path in request["files"]]
    for target, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(descriptor, target)
    argv = request["argv"]
    sys.orig_argv = [sys.executable, *argv]
    tempfile.tempdir = None
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], request["cwd"]
        sys.path.insert(1, str(ROOT))
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
