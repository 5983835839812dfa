"""Run git commands that only read a checkout, without trusting its configuration."""

import os
import subprocess
import threading
import time
from pathlib import Path

MAX_PATCH_BYTES = 1_000_000
# With these options, git takes no locks, starts no pager, and runs no program that the checkout
# configures.
OPTIONS = (
    "--no-optional-locks",
    "--no-pager",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    f"core.bigFileThreshold={MAX_PATCH_BYTES}",  # do not compare large files line by line
)
# With these variables, git does not ask for a password or fetch anything. EMPTY is used by
# `no_filters`.
ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "none", "EMPTY": ""}
# Held while git starts, so that this process does not fork at the same time. A forked process would
# inherit the pipe to git, and reading the output of git would not end before that process ends.
STARTING = threading.Lock()
os.register_at_fork(
    before=STARTING.acquire, after_in_parent=STARTING.release, after_in_child=STARTING.release
)


def git(root: Path, deadline: float, *words: str) -> bytes:
    """Run a git command and return its output.

    Args:
        root: The root of the checkout.
        deadline: The time.monotonic() at which the command is killed.

    Raises:
        TimeoutExpired: The command does not end before the deadline.
        OSError, CalledProcessError: git is missing, or the command fails.
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
    # git diff may return 1 if there are differences.
    if process.returncode not in (0, 1):
        raise subprocess.CalledProcessError(process.returncode, "git")
    return output


def no_filters(root: Path, deadline: float) -> list[str]:
    """Return options for git that disable all filters in the configuration of a checkout.

    A filter is a program that git would run on the content of files. This raises the same
    exceptions as `git`.
    """
    options = []
    names = git(root, deadline, "config", "--list", "--name-only", "-z")
    for key in os.fsdecode(names).split("\0"):
        if key.startswith("filter."):
            # --config-env works even if the key contains "=".
            options += ["--config-env", f"{key}=EMPTY"]
    return options
