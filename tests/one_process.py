"""Run train commands one after another in one process: the composition of each, without a process.

    python tests/one_process.py

reads a case a line, as JSON, and answers each with a line: the exit code, and what stood in the
working directory when the command called os._exit. For commands that end before they train.
`reset` undoes what a command changes in its process.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120  # of a case, after which SIGALRM ends this process
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ExitError(SystemExit):
    """The command has called os._exit: what follows would not have run."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        sys.stdout.flush()
        self.listing = os.listdir()


def leave(code: int) -> NoReturn:
    raise ExitError(code)


def reset(environ: dict[str, str]) -> None:
    """Undo what a command changes in its process."""
    import fsspec
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    fsspec.filesystem("memory").store.clear()
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    for logger in (logging.getLogger("mingpt_ddp"), logging.root):  # Hydra logs to the latter
        for handler in [*logger.handlers]:
            logger.removeHandler(handler)
    logging.root.setLevel(logging.WARNING)
    gc.collect()


def prepare() -> None:
    """Import what the first command would, and replace what would end or slow this process."""
    import torch
    from hydra import compose, initialize_config_dir
    from hydra._internal.hydra import Hydra

    import mingpt_ddp.training.run  # noqa: F401
    from mingpt_ddp.cli.commands import train as train_command
    from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory

    os._exit = leave
    train_command.start_server = lambda: None  # no case comes to start its workers
    Hydra.get_mode = lambda *args, **kwargs: None  # composes everything, once more
    torch.use_deterministic_algorithms(False)  # imports what the first call needs
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        compose("config", ["optimizer.lr=1"])
    gc.freeze()


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run a command from its entry point to os._exit."""
    from mingpt_ddp.cli.commands import train as train_command

    os.chdir(case["cwd"])
    os.environ.update(case["env"])
    output = os.open(case["output"], os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    sys.argv = ["main.py", *case["args"]]
    signal.alarm(TIMEOUT_S)
    try:
        train_command.main()
        raise AssertionError("the command returned")
    except ExitError as exit:
        answer = {"code": exit.code, "listing": exit.listing}
    except BaseException:
        traceback.print_exc()
        answer = {"code": 1, "listing": os.listdir()}
    signal.alarm(0)
    sys.stdout.flush()
    return answer


def main() -> None:
    sys.path[0] = str(ROOT)
    answers = os.fdopen(os.dup(1), "w")
    environ = dict(os.environ)
    prepare()
    for line in sys.stdin:
        reset(environ)
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
