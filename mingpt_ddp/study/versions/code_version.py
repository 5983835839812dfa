"""Find a version of the code (a commit, a branch or a directory), and train with it."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mingpt_ddp.config.compose.hydra_utils import FLAGS_WITH_VALUE, hydra_value
from mingpt_ddp.config.validation import check
from mingpt_ddp.data.download import user_cache
from mingpt_ddp.distributed.launch.fork_server import import_path
from mingpt_ddp.errors import RunError, UserError
from mingpt_ddp.process.linux import die_with_parent
from mingpt_ddp.storage.code_identity import (
    PACKAGE,
    TOO_LARGE,
    Code,
    hash_file,
    read_checkout,
    read_code,
    root_of,
)
from mingpt_ddp.storage.git import git, no_filters
from mingpt_ddp.storage.lock import acquire_lock
from mingpt_ddp.study.results.formats import cut
from mingpt_ddp.study.versions import version_job

# Time limit for git, which may have to write all files of a commit.
GIT_TIMEOUT_S = 600.0
LIST_BRANCHES = ("for-each-ref", "--count=20", "--format=%(refname:short)", "refs/heads")
PRESET_FLAGS = FLAGS_WITH_VALUE[:4]  # flags whose value is a directory of presets


@dataclass(frozen=True)
class Version:
    """A version of the code, and the command-line arguments with which it trains."""

    name: str  # name from the command line
    directory: Path  # contains the package, or only files of the user
    arguments: list[str]
    code: Code
    has_package: bool  # False if this version trains with the package of this process

    def check_unchanged(self) -> None:
        """Check that the version's Python files have not changed since the start of the comparison.

        Raises:
            RunError: Some files have changed. The message names them.
        """
        files = _relocate(self.arguments, self.directory, self.directory)[1]
        before = self.code.record
        now = _current_code(self.directory, files, self.has_package).record
        changed = {name for name, _ in {*before["files"].items()} ^ {*now["files"].items()}}
        if now["package"]["sha256"] != before["package"]["sha256"]:
            changed.add(PACKAGE.name)
        if changed:
            names = cut(", ".join(sorted(changed)), 200)
            raise RunError(
                f"version {self.name} has changed since the start ({names}); if you go on editing, "
                "compare commits, or a copy of the directory"
            )

    def compose(self) -> str:
        """Return the configuration that this version composes from its arguments, as YAML.

        Raises:
            UserError: Hydra refuses the arguments, or Python imports the package from elsewhere.
        """
        command = [*self._command, "--cfg", "job"]
        done = subprocess.run(
            command,
            env=self._environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise self._error("".join(lines[-1:]), done.returncode)
        return done.stdout

    def train(self, overrides: list[str]) -> None:
        """Train a job of this version, and print nothing.

        Args:
            overrides: Overrides of this job, added to the arguments of the version.

        Raises:
            UserError: The training has failed.
        """
        with subprocess.Popen(
            [*self._command, *overrides],
            env=self._environment,
            # Ctrl-C does not reach a new session. The handler below forwards it once.
            start_new_session=True,
            preexec_fn=die_with_parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        ) as process:
            try:
                errors = process.communicate()[1]
            except BaseException:
                process.send_signal(signal.SIGINT)  # the process saves a snapshot, then ends
                process.communicate()
                raise
        if process.returncode != 0:
            # Other versions of the package report their error in their last line.
            raise self._error(errors.strip().rpartition("\n")[2], process.returncode)

    def _error(self, last: str, code: int) -> UserError:
        """Make the error of a process of this version from the last line that it has printed."""
        error = UserError(last or f"error: the process ended with exit code {code}")
        error.kind = f"version {self.name}"
        return error

    @property
    def _command(self) -> list[str]:
        return [sys.executable, version_job.__file__, str(self.directory), *self.arguments]

    @property
    def _environment(self) -> dict[str, str]:
        other_paths = os.environ.get("PYTHONPATH", "") if self.has_package else import_path()
        path = os.pathsep.join(filter(None, [str(self.directory), other_paths]))
        return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def find_commit(name: str) -> str:
    """Return the hash of the commit that a name stands for, or "" if it stands for a directory.

    Raises:
        ConfigError: The name is neither a commit of this checkout nor a directory.
    """
    root = root_of(Path.cwd())
    why = ""
    if root:
        ask_git = functools.partial(git, root, time.monotonic() + GIT_TIMEOUT_S)
        words = ("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        try:
            if commit := ask_git(*words).decode().strip():
                return commit
        except (OSError, subprocess.SubprocessError, ValueError) as error:  # no git, for instance
            why = f": {error}"
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            branches = ask_git(*LIST_BRANCHES).decode().split()
            why = f"; there are {', '.join(['HEAD', *branches])}"
    where = root or "the current checkout (there is none)"
    check(
        os.path.isdir(name), f"{name} is neither a commit or branch of {where} nor a directory{why}"
    )
    return ""


def find_version(name: str, commit: str, arguments: list[str]) -> Version:
    """Find a version by its name. Check out a commit into the user's cache directory.

    Args:
        commit: The result of `find_commit` for this name.
        arguments: Command-line arguments of the training. Paths of code in them lead to the
            checkout in the current directory, and are changed to lead to the version.

    Raises:
        ConfigError: The version has no code to compare, or its uncommitted changes are too large
            to be recorded.
    """
    here = Path.cwd()
    root = root_of(here)
    directory = Path(name).resolve()
    if root and commit:
        directory = _worktree(root, commit)
        here = root
    arguments, files = _relocate(arguments, here, directory)
    has_package = (directory / PACKAGE.name / "__init__.py").is_file()
    missing = f"no package {PACKAGE.name}, and no Python file that --config-dir or code= leads to"
    relative = [argument for argument in arguments if ".code=" in argument]
    if relative:
        missing += f"; {relative[0]} needs the --config-dir=DIR to which it is relative"
    else:
        missing += "; name a checkout of the package, or your own code"
    check(has_package or files, f"{name} has {missing}")
    code = _current_code(directory, files, has_package)
    is_kept = code.record["patch"] != TOO_LARGE
    check(is_kept, f"{name} has {TOO_LARGE}; commit them")
    return Version(name, directory, arguments, code, has_package)


def _current_code(directory: Path, files: list[Path], has_package: bool) -> Code:
    """Read the present code of a version."""
    # The keys are relative paths, so that the same files in another directory are the same code.
    hashes = {os.path.relpath(file, directory): hash_file(file) for file in files}
    package = directory / PACKAGE.name if has_package else None
    return read_code(hashes, [file.parent for file in files], package)


def _worktree(root: Path, commit: str) -> Path:
    """Check out a commit into the user's cache, unless it is already there and unchanged.

    Return the directory with its files.
    """
    cache = user_cache() / "versions"
    directory = cache / commit
    with acquire_lock(cache, GIT_TIMEOUT_S, what="the cache directory", key="XDG_CACHE_HOME"):
        try:
            if read_checkout(directory, commit).commit == commit:
                return directory
        except (OSError, subprocess.SubprocessError):
            pass  # there is no such directory yet, or the checkout it belongs to is gone
        shutil.rmtree(directory, ignore_errors=True)
        deadline = time.monotonic() + GIT_TIMEOUT_S
        # Force twice, because a killed git may have left a lock for a worktree that does not exist.
        words = ("worktree", "add", "--force", "--force", "--detach", str(directory), commit)
        try:
            git(root, deadline, *no_filters(root, deadline), *words)
        except (OSError, subprocess.SubprocessError) as error:
            raise RunError(
                f"git cannot write the files of {commit} to {directory}; "
                "free disk space, or set XDG_CACHE_HOME to another directory"
            ) from error
    return directory


def _relocate(arguments: list[str], here: Path, directory: Path) -> tuple[list[str], list[Path]]:
    """Replace paths of code below `here` with the same paths below another directory.

    Returns:
        The arguments with the new paths, and the Python files to which these paths lead.

    Raises:
        ConfigError: A directory of presets does not exist below the other directory.
    """
    moved = []
    files = list[Path]()
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        key, equals, value = (
            ("", "", argument) if previous in PRESET_FLAGS else argument.partition("=")
        )
        name = value.strip("\"'")
        is_code = key.endswith(".code") and os.path.isabs(name)
        if not (is_code or (key in PRESET_FLAGS and equals) or previous in PRESET_FLAGS):
            moved.append(argument)
            continue
        path = Path.cwd() / name
        for candidate in (path.resolve(), path):  # the unresolved path comes last and wins
            if candidate.is_relative_to(here):
                path = directory / candidate.relative_to(here)
        check(is_code or path.is_dir(), f"{argument} leads to {path}, which is not a directory")
        files += [path] if is_code else sorted(path.glob("**/*.py"))
        moved.append(f"{key}{equals}{hydra_value(str(path)) if is_code else path}")
    return moved, [file for file in files if file.is_file()]
