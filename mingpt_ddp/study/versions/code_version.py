"""A version of the code (a commit, a branch or a directory), and how to train with it."""

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

GIT_TIMEOUT_S = 600.0  # time limit for git to write the files of a commit
BRANCHES = ("for-each-ref", "--count=20", "--format=%(refname:short)", "refs/heads")
PRESETS = FLAGS_WITH_VALUE[:4]  # flags whose value is a directory of presets


@dataclass(frozen=True)
class Version:
    """A version of the code, and the words that it trains with."""

    name: str  # as typed
    directory: Path  # holds the package, or only files of the user
    words: list[str]
    code: Code
    has_package: bool  # False if it trains with the package of this process

    def check_unchanged(self) -> None:
        """Check that its Python files have not changed since the start of the comparison.

        Raises:
            RunError: Some have changed.
        """
        files = _relocate(self.words, self.directory, self.directory)[1]
        before = self.code.record
        now = _current_code(self.directory, files, self.has_package).record
        changed = {name for name, _ in {*before["files"].items()} ^ {*now["files"].items()}}
        if now["package"]["sha256"] != before["package"]["sha256"]:
            changed.add(PACKAGE.name)
        if changed:
            names = cut(", ".join(sorted(changed)), 200)
            raise RunError(
                f"version {self.name} has changed since the start ({names}); compare commits, or a "
                "copy, if you go on editing"
            )

    def compose(self) -> str:
        """Return the configuration that it composes, as the text of a YAML file.

        Raises:
            UserError: Hydra refuses the words, or it imports the code of another directory.
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

    def train(self, words: list[str]) -> None:
        """Train with these additional words. Print nothing.

        Raises:
            UserError: The training has failed.
        """
        with subprocess.Popen(
            [*self._command, *words],
            env=self._environment,
            start_new_session=True,  # so that Ctrl-C arrives only once, sent from here
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
        """Return the error of a process of this version, with the last line that it printed."""
        error = UserError(last or f"error: it ended with exit code {code}")
        error.kind = f"version {self.name}"
        return error

    @property
    def _command(self) -> list[str]:
        return [sys.executable, version_job.__file__, str(self.directory), *self.words]

    @property
    def _environment(self) -> dict[str, str]:
        other_paths = os.environ.get("PYTHONPATH", "") if self.has_package else import_path()
        path = os.pathsep.join(filter(None, [str(self.directory), other_paths]))
        return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def find_commit(name: str) -> str:
    """Return the commit that a name means in this checkout, or "" if it means a directory.

    Raises:
        ConfigError: The name means neither.
    """
    root = root_of(Path.cwd())
    why = ""
    if root:
        ask_git = functools.partial(git, root, time.monotonic() + GIT_TIMEOUT_S)
        words = ("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        try:
            if commit := ask_git(*words).decode().strip():
                return commit
        except (OSError, subprocess.SubprocessError, ValueError) as error:  # e.g. it has no git
            why = f": {error}"
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            branches = ask_git(*BRANCHES).decode().split()
            why = f"; there are {', '.join(['HEAD', *branches])}"
    where = root or "a checkout here"
    check(
        os.path.isdir(name), f"{name} is neither a commit or branch of {where} nor a directory{why}"
    )
    return ""


def find_version(name: str, commit: str, words: list[str]) -> Version:
    """Return a version by its name. Check out a commit into the user's cache directory.

    Args:
        commit: The result of `find_commit` for the name.
        words: Words from the command line, with paths of code in this checkout.

    Raises:
        ConfigError: The version has no code to compare, or too many changes to record.
    """
    here = Path.cwd()
    root = root_of(here)
    directory = Path(name).resolve()
    if root and commit:
        directory = _worktree(root, commit)
        here = root
    words, files = _relocate(words, here, directory)
    has_package = (directory / PACKAGE.name / "__init__.py").is_file()
    what = f"no package {PACKAGE.name}, and no Python file that --config-dir or code= leads to"
    relative = [word for word in words if ".code=" in word]
    if relative:
        what += f"; {relative[0]} needs the --config-dir=DIR that it is relative to"
    check(has_package or files, f"{name} has {what}")
    code = _current_code(directory, files, has_package)
    is_kept = code.record["patch"] != TOO_LARGE
    check(is_kept, f"the changes in {name} are {TOO_LARGE}; commit them")
    return Version(name, directory, words, code, has_package)


def _current_code(directory: Path, files: list[Path], has_package: bool) -> Code:
    """Return the code of a version as it is now."""
    # The keys are paths within the version, so that the same files elsewhere are the same code.
    hashes = {os.path.relpath(file, directory): hash_file(file) for file in files}
    package = directory / PACKAGE.name if has_package else None
    return read_code(hashes, [file.parent for file in files], package)


def _worktree(root: Path, commit: str) -> Path:
    """Return a directory with the files of a commit, in the user's cache; reuse it if unchanged."""
    cache = user_cache() / "versions"
    directory = cache / commit
    with acquire_lock(cache, GIT_TIMEOUT_S, what="the cache directory", key="XDG_CACHE_HOME"):
        try:
            if read_checkout(directory, commit).commit == commit:
                return directory
        except (OSError, subprocess.SubprocessError):
            pass  # there is none yet, or its checkout is gone
        shutil.rmtree(directory, ignore_errors=True)
        deadline = time.monotonic() + GIT_TIMEOUT_S
        # Force twice, because a killed git may leave a lock on a worktree that does not exist.
        words = ("worktree", "add", "--force", "--force", "--detach", str(directory), commit)
        try:
            git(root, deadline, *no_filters(root, deadline), *words)
        except (OSError, subprocess.SubprocessError) as error:
            raise RunError(f"git cannot write the files of {commit} to {directory}") from error
    return directory


def _relocate(words: list[str], here: Path, directory: Path) -> tuple[list[str], list[Path]]:
    """Replace paths of code below `here` by the same paths below another directory.

    Returns:
        The words with the new paths, and the Python files to which these lead.

    Raises:
        ConfigError: A directory of presets does not exist there.
    """
    moved = []
    files = list[Path]()
    for previous, word in zip(["", *words], words, strict=False):
        key, equals, value = ("", "", word) if previous in PRESETS else word.partition("=")
        name = value.strip("\"'")
        is_code = key.endswith(".code") and os.path.isabs(name)
        if not (is_code or (key in PRESETS and equals) or previous in PRESETS):
            moved.append(word)
            continue
        path = Path.cwd() / name
        for candidate in (path.resolve(), path):  # the path as typed comes last and wins
            if candidate.is_relative_to(here):
                path = directory / candidate.relative_to(here)
        check(is_code or path.is_dir(), f"{word} leads to {path}, which is no directory")
        files += [path] if is_code else sorted(path.glob("**/*.py"))
        moved.append(f"{key}{equals}{hydra_value(str(path)) if is_code else path}")
    return moved, [file for file in files if file.is_file()]
