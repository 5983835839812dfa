"""Run the program's commands in forks of a process that has imported torch, which takes most of a
short command's time.

All else is as in a new process: arguments, directory, environment, output, exit code, signals.
torchrun's agent is forked too, and so are its workers that run one of these commands.
`launching.UnforkedJob` starts new processes only.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [str(ROOT / "main.py"), str(ROOT / "sample.py"), "mingpt_ddp", "torch.distributed.run"]
PRELOADED = [
    "mingpt_ddp.cli.train_job",
    "mingpt_ddp.training.run",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.utils.tensorboard",
    "torch.distributed.run",
]
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
UNREAD = "unread"  # instead of the path of an output: a pipe whose reader has ended
READ_ONCE = "MKL_|ATEN_|TORCH(?!ELASTIC)|PYTHON|PYTORCH"  # variables, by Python or torch
TEMPLATE = "template"  # the name of the process that an agent's workers are forked from
# by the template, as they are sent to the agent's group
IGNORED = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
DISPOSITIONS: dict[signal.Signals, Any] = {}  # of these, in the template


class ForkServer:
    """A process that forks one command at a time; it ends with this one."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers

    def run(
        self,
        command: list[str],
        cwd: Path,
        env: dict[str, str],
        timeout: float,
        separate: bool,
        outputs: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ...` to completion.

        Args:
            separate: standard error is not in `stdout`, but in `stderr`.
            outputs: what to write to instead: a path or UNREAD, by stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: the command has been killed.
        """
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            files = [
                f"/proc/{os.getpid()}/fd/{file.fileno()}"
                for file in (output, errors if separate else output)
            ]
            files = [outputs.get("stdout", files[0]), outputs.get("stderr", files[1])]
            child = self._fork(command, cwd, env, files)
            is_done = True
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the server knows it
                waiter = os.pidfd_open(child)
                is_done = bool(select.select([waiter], [], [], timeout)[0])
                os.close(waiter)
            if not is_done:
                os.killpg(child, signal.SIGKILL)
            code = self._answer()
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        if not is_done:
            raise subprocess.TimeoutExpired(command, timeout, *texts)
        return subprocess.CompletedProcess(command, code, *texts)

    def start(self, command: list[str], cwd: Path, env: dict[str, str], files: list[str]) -> Child:
        """Start `python ...` as a child of this process.

        Its two outputs are appended to `files`.
        """
        with adopting_orphans():
            child = self._fork(command, cwd, env, files, orphan=True)
            self._answer()  # its parent has exited: now this process is
        return Child(command, child)

    def _fork(
        self,
        command: list[str],
        cwd: Path,
        env: dict[str, str],
        files: list[str],
        orphan: bool = False,
    ) -> int:
        """Return the process id of the command."""
        request = {
            "argv": command[1:],
            "cwd": str(cwd),
            "env": env,
            "files": files,
            "orphan": orphan,
        }
        print(json.dumps(request), file=self._requests, flush=True)
        return self._answer()

    def _answer(self) -> int:
        return int(self._answers.readline())


class Child(subprocess.Popen[str]):
    """A child that `subprocess` has not started."""

    def __init__(self, args: list[str], pid: int) -> None:
        self.args, self.pid, self.returncode = args, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of the processes below this one whose parent exits meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(SUBREAPER, 0)


@functools.cache
def server_for(imported: tuple[tuple[str, str], ...]) -> ForkServer:
    """Return the server of this test process for an environment.

    Args:
        imported: the variables that Python or torch read when they are loaded.
    """
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", **dict(imported)}
    command = [sys.executable, __file__]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
    )
    assert process.stdin and process.stdout
    return ForkServer(process.stdin, process.stdout)


def directories_of(env: dict[str, str]) -> list[str]:
    """Return the directories on PYTHONPATH besides the checkout."""
    directories = env.get("PYTHONPATH", str(ROOT)).split(os.pathsep)
    return [directory for directory in directories if directory not in ("", str(ROOT))]


def server_of(command: list[str], env: dict[str, str]) -> ForkServer | None:
    """Return the server that can fork a command, if it is one of the program's."""
    name = command[2] if command[1:2] == ["-m"] else command[1]
    if command[0] != sys.executable or name not in COMMANDS:
        return None
    if not all(Path(directory, "sitecustomize.py").exists() for directory in directories_of(env)):
        return None
    imported = {key: value for key, value in env.items() if re.match(READ_ONCE, key)}
    imported.pop("PYTHONPATH", None)
    return server_for(tuple(sorted(imported.items())))


def run_command(
    command: list[str], cwd: Path, env: dict[str, str], timeout: float, separate: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command to completion, forked if it is one of the program's.

    Args:
        separate: standard error is not in `stdout`, but in `stderr`.
    """
    if server := server_of(command, env):
        return server.run(command, cwd, env, timeout, separate)
    errors = subprocess.PIPE if separate else subprocess.STDOUT
    streams: dict[str, int] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": errors,
    }
    return subprocess.run(command, cwd=cwd, env=env, text=True, timeout=timeout, **streams)


def start_command(
    command: list[str], cwd: Path, env: dict[str, str], output: Path
) -> subprocess.Popen[Any]:
    """Start a command in a session of its own, forked if it is one of the program's."""
    output.touch()
    if server := server_of(command, env):
        return server.start(command, cwd, env, [str(output)] * 2)
    return start_new_process(command, cwd, env, output)


def start_new_process(
    command: list[str], cwd: Path, env: dict[str, str], output: Path
) -> subprocess.Popen[Any]:
    """Start a command in a session of its own."""
    with open(output, "a") as out:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def main() -> None:
    sys.path[0] = str(ROOT)
    for name in PRELOADED:
        importlib.import_module(name)
    fit_for_tests()
    find_plugins()
    gc.freeze()  # the forks share this memory
    serve()


def fit_for_tests() -> None:
    """Have runs of this process end with a tenth of the usual sample, and wait for a save however
    slow the machine is.

    Generating a sample takes as long as training. And which steps are saved would depend on the
    load: a save that is due while another one has taken a second is postponed.
    """
    from mingpt_ddp.snapshots import manager
    from mingpt_ddp.tasks import language_model

    language_model.SAMPLE_CHARACTERS = 40
    manager.QUICK_SAVE_S = 15.0


def find_plugins() -> None:
    """Compose a configuration, so that Hydra has its plug-ins and its grammar.

    They take half a second.
    """
    from hydra import compose, initialize_config_dir

    from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory

    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        compose("config", ["optimizer.lr=1"])


def serve() -> None:
    """Read a request a line, fork, print the child's process id, then its exit code.

    An orphan's parent exits at once, and the exit code is the parent's.
    """
    for line in sys.stdin:
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            if request["orphan"]:
                make_orphan()
            run(request)
            sys.exit()  # like a new process, through the end of the interpreter
        if not request["orphan"]:
            print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def make_orphan() -> None:
    """Continue in a child of this process, whose id is printed, once this process has exited."""
    parent = os.getpid()
    if pid := os.fork():
        print(pid, flush=True)
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.001)


def run(request: dict[str, Any]) -> None:
    """Become the command."""
    from mingpt_ddp.process.interrupts import interrupt_commands

    os.setsid()
    Path("/proc/self/comm").write_text("python")
    for number, disposition in DISPOSITIONS.items():
        signal.signal(number, disposition)
    sys.stdin = sys.__stdin__
    os.chdir(request["cwd"])
    set_threads(request["env"])
    os.environ.clear()
    os.environ.update(request["env"])
    files = [open_output(path) for path in request["files"]]
    for target, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # of the server it may be a file, in which this one would seek
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    argv = request["argv"]
    sys.orig_argv = [sys.executable, *argv]
    tempfile.tempdir = None
    util.spawnv_passfds = spawn
    if argv[:2] == ["-m", "torch.distributed.run"]:
        fork_workers()
    for directory in directories_of(request["env"]):
        sys.path.insert(0, directory)
        importlib.import_module("sitecustomize")
    sys.argv = [argv[0], *argv[2:]] if argv[0] == "-m" else argv
    interrupt_commands()
    if argv[0] == "-m":
        sys.path[:0] = [request["cwd"], str(ROOT)]
        sys.modules.pop(f"{argv[1]}.__main__", None)  # preloaded, of which runpy would warn
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")


def set_threads(env: dict[str, str]) -> None:
    """Give torch the threads that it would have if it were loaded with another variable."""
    named = env.get("OMP_NUM_THREADS")
    if named != os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(named or len(os.sched_getaffinity(0))))


def open_output(path: str) -> int:
    if path != UNREAD:
        return os.open(path, os.O_WRONLY | os.O_APPEND)
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def fork_workers() -> None:
    """Make torchrun's agent, which this process becomes, fork its workers from a process that has
    no threads.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    template, agent, in_new_process = fork_template(), os.getpid(), SubprocessHandler._popen
    files = [f"/proc/{agent}/fd/{descriptor}" for descriptor in (1, 2)]

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        name = args[3] if args[2] == "-m" else args[2]
        if (
            args[:2] != (sys.executable, "-u")
            or name not in COMMANDS
            or handler._stdout
            or handler._stderr
        ):
            return in_new_process(handler, args, env)
        return template.start([*args[1:]], Path.cwd(), env, files)

    SubprocessHandler._popen = popen


def fork_template() -> ForkServer:
    """Fork a process like this one, which serves it and ends with it."""
    requests, answers = os.pipe(), os.pipe()
    if os.fork():
        os.close(requests[0])
        os.close(answers[1])
        return ForkServer(open(requests[1], "w"), open(answers[0]))
    os.close(requests[1])  # the template reads to the end of the file, which is that of the agent
    os.close(answers[0])
    os.dup2(answers[1], 1)
    sys.stdin = os.fdopen(requests[0])
    Path("/proc/self/comm").write_text(TEMPLATE)
    for number in IGNORED:
        DISPOSITIONS[number] = signal.signal(number, signal.SIG_IGN)
    serve()
    os._exit(0)


exec_passing = util.spawnv_passfds


def spawn(path: str, args: Sequence[str], passed: Sequence[int]) -> int:
    """Fork the fork server of the workers, which would import what this process has imported."""
    from hydra.core.global_hydra import GlobalHydra

    if "multiprocessing.forkserver" not in args[-1]:
        return exec_passing(path, args, passed)
    if pid := os.fork():
        return pid
    GlobalHydra.instance().clear()
    for number in signal.valid_signals() - {signal.SIGINT}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for other in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *passed}:  # not closed:
        # a fork closes the numbers that libuv had for pipes in a process with a store
        os.dup2(null, other)
    util.spawnv_passfds = exec_passing
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()
    sys.path[0] = ""
    try:
        contextvars.Context().run(exec, args[-1])  # without the sweep that this process runs
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
