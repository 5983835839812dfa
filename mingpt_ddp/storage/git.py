"""Ask git about a checkout."""

import os
import subprocess
import threading
import time
from pathlib import Path

MAX_PATCH_BYTES = 1_000_000
# No program that a checkout configures is run, nothing is locked, fetched or asked.
OPTIONS = (
    "--no-optional-locks",
    "--no-pager",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    f"core.bigFileThreshold={MAX_PATCH_BYTES}",  # which are not compared line by line
)
ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "none", "EMPTY": ""}
# Held while git starts; a fork waits for it. Else the forked process, which may live as long as
# this one, could hold the pipes open whose end the start and the reader of the output wait for.
STARTING = threading.Lock()
os.register_at_fork(
    before=STARTING.acquire, after_in_parent=STARTING.release, after_in_child=STARTING.release
)


def git(root: Path, deadline: float, *words: str) -> bytes:
    """Return what git prints.

    Raises:
        TimeoutExpired: it takes too long.
        OSError, CalledProcessError: it fails.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    with STARTING:
        process = subprocess.Popen(
            ["git", *OPTIONS, *words],
            cwd=root,
            env=environment | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    with process:
        try:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    if process.returncode not in (0, 1):  # 1: there are differences
        raise subprocess.CalledProcessError(process.returncode, "git")
    return output


def no_filters(root: Path, deadline: float) -> list[str]:
    """Return options with which git runs no filter that is configured for a checkout.

    Raises as `git` does.
    """
    options = []
    names = git(root, deadline, "config", "--list", "--name-only", "-z")
    for key in os.fsdecode(names).split("\0"):
        if key.startswith("filter."):
            options += ["--config-env", f"{key}=EMPTY"]  # takes a key with "=" in it, too
    return options
