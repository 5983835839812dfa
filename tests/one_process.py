"""Run train commands that end before they train, one after another in one process.

A new process for each command would take seconds to import torch.

    python tests/one_process.py

reads one case from each line, as JSON. It answers with one line: the exit code, and the files that
were in the working directory when the command called os._exit. `reset` undoes the changes that a
command makes to its process.
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
TIMEOUT_S = 120  # if a case takes longer, SIGALRM ends this process
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ExitError(SystemExit):
    """Raised in place of os._exit, so that no later code of the command runs."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        sys.stdout.flush()
        self.listing = os.listdir()


def leave(code: int) -> NoReturn:
    raise ExitError(code)


def reset(environ: dict[str, str]) -> None:
    """Undo the changes that a command makes to its process."""
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
    """Import what the first command needs, and replace what would end or slow this process."""
    import torch
    from hydra import compose, initialize_config_dir
    from hydra._internal.hydra import Hydra

    import mingpt_ddp.training.run  # noqa: F401
    from mingpt_ddp.cli.commands import train as train_command
    from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory

    os._exit = leave
    train_command.start_server = lambda: None  # no case gets as far as starting its workers
    Hydra.get_mode = lambda *args, **kwargs: None  # it composes the whole configuration once more
    torch.use_deterministic_algorithms(False)  # the first call imports modules
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        compose("config", ["optimizer.lr=1"])
    gc.freeze()


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run a command from its entry point until it calls os._exit."""
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
