"""Run git commands that only read a checkout."""

import os
import subprocess
import threading
import time
from pathlib import Path

MAX_PATCH_BYTES = 1_000_000
# Run no program that a checkout configures. Do not lock, fetch or ask for anything.
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
ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "none", "EMPTY": ""}
# Held while git starts, so that this process does not fork meanwhile. A forked process would keep
# git's pipes open as long as it lives, and reading git's output would not end before.
STARTING = threading.Lock()
os.register_at_fork(
    before=STARTING.acquire, after_in_parent=STARTING.release, after_in_child=STARTING.release
)


def git(root: Path, deadline: float, *words: str) -> bytes:
    """Run a git command and return its output.

    Raises:
        TimeoutExpired: The command takes too long.
        OSError, CalledProcessError: The command fails.
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
    if process.returncode not in (0, 1):  # 1 means that there are differences
        raise subprocess.CalledProcessError(process.returncode, "git")
    return output


def no_filters(root: Path, deadline: float) -> list[str]:
    """Return options that disable all filters that are configured for a checkout.

    This raises the same exceptions as `git`.
    """
    options = []
    names = git(root, deadline, "config", "--list", "--name-only", "-z")
    for key in os.fsdecode(names).split("\0"):
        if key.startswith("filter."):
            options += ["--config-env", f"{key}=EMPTY"]  # works even if the key contains "="
    return options
