"""Run the user's command at the end of a run, run.on_end, or after its failure, run.on_failure."""

import contextlib
import logging
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mingpt_ddp.config.keys.schema import RunConfig
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.storage.run_directory import RunStatus, read_result

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
FAILED = "failed"


@contextlib.contextmanager
def notifying(run: RunConfig, directory: Path, env: DistEnv) -> Iterator[None]:
    """Run the command of a run that ends in this context.

    After a failure only if no launcher could restart it.

    Args:
        directory: of the run.
    """
    before = _end(directory)
    try:
        yield
    except Exception:
        if env.is_standalone:
            notify(run, directory, FAILED)
        raise
    after = _end(directory)
    if after != before and after[0] in (RunStatus.COMPLETE, RunStatus.PRUNED):
        env.call_on_rank_zero(lambda: notify(run, directory, after[0]))


def _end(directory: Path) -> list[Any]:
    """Return what differs between two ends of the run."""
    result = read_result(directory)
    return [result.get(key) for key in ("status", "step", "val_loss")]


def notify(run: RunConfig, directory: Path, status: str) -> None:
    """Run the command for a status, without a shell; a failure of it is logged only."""
    key = "on_failure" if status == FAILED else "on_end"
    command = run.on_failure if status == FAILED else run.on_end
    if command is None:
        return
    loss = read_result(directory).get("val_loss", "")
    environ = {
        **os.environ,
        "MINGPT_DDP_RUN_DIR": str(directory.absolute()),
        "MINGPT_DDP_STATUS": status,
        "MINGPT_DDP_VAL_LOSS": str(loss),
    }
    try:
        subprocess.run(
            shlex.split(command),
            env=environ,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the command of run.%s failed: %s", key, error)
