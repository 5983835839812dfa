"""A version of the code, named as a commit, a branch or a directory: where it is, what it runs."""

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
from mingpt_ddp.linux import die_with_parent
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

GIT_S = 600.0  # in which git writes the files of a commit
BRANCHES = ("for-each-ref", "--count=20", "--format=%(refname:short)", "refs/heads")
PRESETS = FLAGS_WITH_VALUE[:4]  # before a directory of presets


@dataclass(frozen=True)
class Version:
    """A version of the code, and the words that it trains with."""

    name: str  # as typed
    directory: Path  # that holds the package, or a user's files
    words: list[str]
    code: Code
    has_package: bool  # otherwise it trains with that of this process

    def check_unchanged(self) -> None:
        """Check that its Python files are those that are compared.

        Raises:
            RunError: some have changed since.
        """
        files = _move(self.words, self.directory, self.directory)[1]
        before = self.code.record
        now = _read(self.directory, files, self.has_package).record
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
        """Return its whole configuration as text.

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
        """Train with more words, and print nothing.

        Raises:
            UserError: it has failed.
        """
        with subprocess.Popen(
            [*self._command, *words],
            env=self._environment,
            start_new_session=True,  # Ctrl-C arrives once, from here
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
                process.send_signal(signal.SIGINT)  # saves
                process.communicate()
                raise
        if process.returncode != 0:
            # Another version of the package tells its error in its last line only.
            raise self._error(errors.strip().rpartition("\n")[2], process.returncode)

    def _error(self, last: str, code: int) -> UserError:
        """Return the error of a process of this version: its last line, of any kind."""
        error = UserError(last or f"error: it ended with exit code {code}")
        error.kind = f"version {self.name}"
        return error

    @property
    def _command(self) -> list[str]:
        return [sys.executable, version_job.__file__, str(self.directory), *self.words]

    @property
    def _environment(self) -> dict[str, str]:
        behind = os.environ.get("PYTHONPATH", "") if self.has_package else import_path()
        path = os.pathsep.join(filter(None, [str(self.directory), behind]))
        return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def find_commit(name: str) -> str:
    """Return the commit of the checkout here that a name means; "": it means a directory.

    Raises:
        ConfigError: it means neither.
    """
    root = root_of(Path.cwd())
    why = ""
    if root:
        ask = functools.partial(git, root, time.monotonic() + GIT_S)
        words = ("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        try:
            if commit := ask(*words).decode().strip():
                return commit
        except (OSError, subprocess.SubprocessError, ValueError) as error:  # e.g. it has no git
            why = f": {error}"
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            branches = ask(*BRANCHES).decode().split()
            why = f"; there are {', '.join(['HEAD', *branches])}"
    where = root or "a checkout here"
    check(os.path.isdir(name), f"{name} is no commit or branch of {where}, and no directory{why}")
    return ""


def find_version(name: str, commit: str, words: list[str]) -> Version:
    """Return a version; a commit is checked out into the user's cache directory.

    Args:
        commit: what `find_commit` returns for the name.
        words: of the command line, in which paths of code lead to this checkout.

    Raises:
        ConfigError: it has no code to compare, or too many changes to record.
    """
    here = Path.cwd()
    root = root_of(here)
    directory = Path(name).resolve()
    if root and commit:
        directory = _worktree(root, commit)
        here = root
    words, files = _move(words, here, directory)
    has_package = (directory / PACKAGE.name / "__init__.py").is_file()
    what = f"no package {PACKAGE.name}, and no Python file that --config-dir or code= leads to"
    relative = [word for word in words if ".code=" in word]
    if relative:
        what += f"; {relative[0]} needs the --config-dir=DIR that it is relative to"
    check(has_package or files, f"{name} has {what}")
    code = _read(directory, files, has_package)
    is_kept = code.record["patch"] != TOO_LARGE
    check(is_kept, f"the changes in {name} are {TOO_LARGE}; commit them")
    return Version(name, directory, words, code, has_package)


def _read(directory: Path, files: list[Path], has_package: bool) -> Code:
    """Return the code of a version as it is now."""
    # The keys are paths within the version, so that the same files elsewhere are the same code.
    hashes = {os.path.relpath(file, directory): hash_file(file) for file in files}
    package = directory / PACKAGE.name if has_package else None
    return read_code(hashes, [file.parent for file in files], package)


def _worktree(root: Path, commit: str) -> Path:
    """Return a directory with the files of a commit, in the user's cache; reuse it if unchanged."""
    cache = user_cache() / "versions"
    directory = cache / commit
    with acquire_lock(cache, GIT_S, what="the cache directory", key="XDG_CACHE_HOME"):
        try:
            if read_checkout(directory, commit).commit == commit:
                return directory
        except (OSError, subprocess.SubprocessError):
            pass  # there is none yet, or its checkout is gone
        shutil.rmtree(directory, ignore_errors=True)
        deadline = time.monotonic() + GIT_S
        # Twice: a killed git leaves its lock on a worktree that is not there.
        words = ("worktree", "add", "--force", "--force", "--detach", str(directory), commit)
        try:
            git(root, deadline, *no_filters(root, deadline), *words)
        except (OSError, subprocess.SubprocessError) as error:
            raise RunError(f"git cannot write the files of {commit} to {directory}") from error
    return directory


def _move(words: list[str], here: Path, directory: Path) -> tuple[list[str], list[Path]]:
    """Return the words with paths of code below `here` as those below another directory.

    Returns:
        The words, and the Python files there.

    Raises:
        ConfigError: a directory of presets is none.
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
        for found in (path.resolve(), path):  # as typed, or by a link
            if found.is_relative_to(here):
                path = directory / found.relative_to(here)
        check(is_code or path.is_dir(), f"{word} leads to {path}, which is no directory")
        files += [path] if is_code else sorted(path.glob("**/*.py"))
        moved.append(f"{key}{equals}{hydra_value(str(path)) if is_code else path}")
    return moved, [file for file in files if file.is_file()]
