"""Run the program's commands in forks of a process that has already imported torch.

A short command would spend most of its time on this import. Everything else is as in a new process:
arguments, directory, environment, output, exit code and signals. torchrun's agent is forked too,
and so are its workers if they run one of these commands. `launching.UnforkedJob` starts new
processes instead.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
import importlib.util
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
    "torch.utils.tensorboard",
    "torch.distributed.run",
]
# The compiler, which DistributedDataParallel imports. Where triton is installed, the compiler loads
# it too, and an interpreter that has loaded triton prints "nanobind: leaked" when it ends.
if importlib.util.find_spec("triton") is None:
    PRELOADED += ["torch._dynamo", "torch._inductor.config"]
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
# In place of the path of an output: write to a pipe whose reader has ended.
UNREAD = "unread"
# Environment variables that Python or torch reads only when it is loaded.
READ_ONCE = "MKL_|ATEN_|TORCH(?!ELASTIC)|PYTHON|PYTORCH"
# Name of the process from which an agent's workers are forked.
TEMPLATE = "template"
# The template ignores these signals, which it receives because it is in the agent's process group.
IGNORED = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
# The handlers of the ignored signals, which the workers get back.
DISPOSITIONS: dict[signal.Signals, Any] = {}


class ForkServer:
    """A client of a process that forks one command at a time, and ends when this process ends."""

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
            separate: Return standard error in `stderr`, not in `stdout`.
            outputs: Other destinations of "stdout" and "stderr": a path or UNREAD.

        Raises:
            subprocess.TimeoutExpired: The command took too long and was killed.
        """
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            files = [
                f"/proc/{os.getpid()}/fd/{file.fileno()}"
                for file in (output, errors if separate else output)
            ]
            files = [outputs.get("stdout", files[0]), outputs.get("stderr", files[1])]
            child = self._fork(command, cwd, env, files)
            is_done = True
            # The command may have ended just now, and the server has waited for it.
            with contextlib.suppress(ProcessLookupError):
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
            # The child's parent has exited, so this process has adopted the child.
            self._answer()
        return Child(command, child)

    def _fork(
        self,
        command: list[str],
        cwd: Path,
        env: dict[str, str],
        files: list[str],
        orphan: bool = False,
    ) -> int:
        """Ask the server to fork a command. Return its process id."""
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
    """A Popen object for a child process that `subprocess` has not started."""

    def __init__(self, args: list[str], pid: int) -> None:
        self.args, self.pid, self.returncode = args, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of descendants whose own parent exits inside this block."""
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(SUBREAPER, 0)


@functools.cache
def server_for(imported: tuple[tuple[str, str], ...]) -> ForkServer:
    """Start the fork server of this test process for an environment, or return the running one.

    Args:
        imported: The variables that Python and torch read only when they are loaded.
    """
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", **dict(imported)}
    command = [sys.executable, __file__]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
    )
    assert process.stdin and process.stdout
    return ForkServer(process.stdin, process.stdout)


def directories_of(env: dict[str, str]) -> list[str]:
    """Return the directories on PYTHONPATH without the checkout."""
    directories = env.get("PYTHONPATH", str(ROOT)).split(os.pathsep)
    return [directory for directory in directories if directory not in ("", str(ROOT))]


def server_of(command: list[str], env: dict[str, str]) -> ForkServer | None:
    """Return the server that can fork a command. None if the command is not the program's."""
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
    """Run a command to completion. The program's own commands are forked.

    Args:
        separate: Return standard error in `stderr`, not in `stdout`.
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
    """Start a command in its own session. The program's own commands are forked."""
    output.touch()
    if server := server_of(command, env):
        return server.start(command, cwd, env, [str(output)] * 2)
    return start_new_process(command, cwd, env, output)


def start_new_process(
    command: list[str], cwd: Path, env: dict[str, str], output: Path
) -> subprocess.Popen[Any]:
    """Start a command in its own session, in a new process."""
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
    # Keep the garbage collector off the objects so far, so that forks share their memory.
    gc.freeze()
    serve()


def fit_for_tests() -> None:
    """Shorten the final sample of runs in this process, and let them wait for slow saves.

    Generating the usual sample takes as long as training, so runs generate a tenth of it. A run
    postpones a save if the previous one has taken more than a second, so without the second
    change the saved steps would depend on the load of the machine.
    """
    from mingpt_ddp.snapshots import manager
    from mingpt_ddp.tasks import language_model

    language_model.SAMPLE_CHARACTERS = 40
    manager.QUICK_SAVE_S = 15.0


def find_plugins() -> None:
    """Compose a configuration, so that Hydra loads its plug-ins and its grammar.

    This takes half a second, which the forked commands save.
    """
    from hydra import compose, initialize_config_dir

    from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory

    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        compose("config", ["optimizer.lr=1"])


def serve() -> None:
    """Read one request from each line and fork a process for it.

    Print the process id of the child, then its exit code. A child that is to be an orphan is forked
    by a parent that exits at once: then the exit code is the parent's.
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
    """Fork a child and print its process id. Continue in the child once this process has exited."""
    parent = os.getpid()
    if pid := os.fork():
        print(pid, flush=True)
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.001)


def run(request: dict[str, Any]) -> None:
    """Turn this process into the requested command and run it."""
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
    # The server's standard error may be a file, and a fork would share its position.
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
        # runpy would warn about a module that is already loaded.
        sys.modules.pop(f"{argv[1]}.__main__", None)
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")


def set_threads(env: dict[str, str]) -> None:
    """Set torch's threads to the number that OMP_NUM_THREADS in `env` would give on loading."""
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
    """Let torchrun's agent, which this process becomes, fork its workers.

    They are forked from another process, the template, because it has no threads.
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
    """Fork a copy of this process that serves it as a fork server, and ends when it ends."""
    requests, answers = os.pipe(), os.pipe()
    if os.fork():
        os.close(requests[0])
        os.close(answers[1])
        return ForkServer(open(requests[1], "w"), open(answers[0]))
    # Only the agent may hold this end, so that the template reads the end of file when it ends.
    os.close(requests[1])
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
    """Start the fork server of the workers by forking this process, which saves its imports."""
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
    # These descriptors are replaced, not closed: in a process with a store, a fork closes the
    # numbers that libuv used for its pipes.
    for other in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *passed}:
        os.dup2(null, other)
    util.spawnv_passfds = exec_passing
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()
    sys.path[0] = ""
    try:
        # A new context, since this process may run a sweep, which the fork must not see.
        contextvars.Context().run(exec, args[-1])
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
