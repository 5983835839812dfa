"""The run directory: lock it, and read and write the configurations and the result in it."""

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from mingpt_ddp.config.config import LIMITS, Config, flatten
from mingpt_ddp.config.job import Job, RunStatus
from mingpt_ddp.config.recorded import without_unknown
from mingpt_ddp.errors import ConfigError, RunError, StorageUnavailableError, reason
from mingpt_ddp.storage.lease import Lease
from mingpt_ddp.storage.lock import LOCK, LOCK_WAIT_S, acquire_lock, is_lock_of
from mingpt_ddp.storage.remote.remote import RemoteStorage
from mingpt_ddp.storage.storage import Storage, atomic_write, read_regular
from mingpt_ddp.storage.yaml_and_json import dump_json, dump_yaml, load_yaml, read_json, read_yaml

RESULT = "result.json"
SCRIPT = "script.py"  # copy of a user's script whose own loop trains the run
SCRIPT_RECORD = "script.json"  # file name of the script, and its command-line arguments
MAIN_LOOP = "mingpt_ddp's main.py"  # name of the package's own loop in error messages
# One start may record null as the name of the run, and another start the name itself. That is not
# a change of the configuration.
KEYS_NOT_COMPARED = ("run.name",)
# Files in the directory of a sweep: its settings, and the jobs that have failed.
SWEEP = "sweep.json"
FAILURES = "failures.jsonl"
JOURNAL = "study.journal"  # Optuna's journal, in the directory of a search
STUDY_ATTRIBUTE = "mingpt_ddp"  # attribute of Optuna's study: the settings that all trials share
# Files that an atomic write leaves behind if the process is killed.
PARTIAL_FILES = (
    ".config*.partial",
    ".code*.partial",
    ".script.*.partial",
    ".result.json.*.partial",
    ".samples.jsonl.*.partial",
    ".tokenizer.json.*.partial",
    "..*.partial",
    ".hydra/.*.partial",
)
# Rank zero writes a file with this prefix and 32 hexadecimal digits. The ranks that see it share a
# storage with rank zero.
PROBE_PREFIX = "probe-"
PROBE_PATTERNS = (PROBE_PREFIX + 32 * "[0-9a-f]", f".{PROBE_PREFIX}*.partial")
# Files and directories that a run writes into. A symbolic link in their place could lead to any
# file.
WRITTEN_INTO = (
    ".hydra",
    "main.rank*.log",
    "metrics.jsonl",
    "samples.jsonl",
    "snapshots.jsonl",
    "tensorboard",
    "tensorboard/*",
    "wandb",
)
WRITTEN_INTO_BY_SWEEP = ("multirun.yaml", FAILURES)  # files that a sweep writes into
# Exceptions that an untrusted record may cause if it does not have the form that a run writes.
INVALID_RECORD_ERRORS = (KeyError, TypeError, ValueError, ArithmeticError, AttributeError)
MAX_LEASE_BYTES = 100  # size limit of the file that records the id of a lease


def next_free_name(job: Job) -> str:
    """Return the first of `name`, `name-2`, `name-3` ... that has no directory yet."""
    first = job.directory
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    free = next(path for path in itertools.chain([first], numbered) if not path.exists())
    return free.relative_to(job.config.run.root).as_posix()


def refuse_links(entries: Iterable[Path], patterns: Iterable[str]) -> None:
    """Refuse a symbolic link in the place of a file or directory that is written into.

    Args:
        entries: Paths of the existing files and directories.
        patterns: Patterns of the names that are written into.

    Raises:
        RunError: There is such a link. The message names it.
    """
    for entry in entries:
        if entry.is_symlink() and any(map(entry.match, patterns)):
            raise RunError(f"{entry} is a symbolic link, which a run does not follow; remove it")


class RunDirectory:
    """A run directory that this process has locked. Only rank zero creates this object."""

    def __init__(self, path: Path, wait_s: float = LOCK_WAIT_S) -> None:
        """Create the directory if it does not exist, and lock it with flock.

        Delete the partial files of an earlier owner that was killed.

        Args:
            wait_s: Time to wait for another process to unlock the directory.

        Raises:
            RunError: Another process has locked the directory, it is not writable, it belongs to a
                sweep, or it has a symbolic link where a run writes.
        """
        self.path = path
        found = [*path.glob("*"), *path.glob("tensorboard/*")] if os.path.isdir(path) else []
        if path / SWEEP in found:
            raise RunError(f"{path} is the directory of a sweep; choose another run.name")
        refuse_links(found, WRITTEN_INTO)
        self.leases: dict[str, Lease] = {}  # leases on the snapshots in object stores, by URL
        self._locks: dict[Path, IO[str]] = {}  # open lock files, by directory
        # The directories, locks and records of leases that this process has created. Each comes
        # before its parent directory. They are deleted again if the start is refused.
        self._created: list[Path] = []
        try:
            self._lock(path, wait_s)
        except RunError:
            self.release()
            raise
        _delete_files(path, PARTIAL_FILES)

    def _lock(self, path: Path, wait_s: float, **names: str) -> None:
        paths = (path / LOCK, path, *path.parents)
        self._created[:0] = [each for each in paths if not os.path.lexists(each)]
        self._locks[path] = acquire_lock(path, wait_s, **names)

    def lock_snapshots(self, storage: Storage) -> None:
        """Lock the location of the snapshots with flock, or with a lease on an object store.

        A lease is a lock whose owner must send heartbeats.

        A location in the run directory is locked already. The probes of an earlier owner that was
        killed are deleted.

        Raises:
            RunError: Another process has locked the location, or it is not writable.
            StorageUnavailableError: The storage does not respond.
        """
        if storage.has_flock:
            path = Path(storage.root)
            if not path.is_relative_to(self.path.absolute()):
                self._lock(path, 0, what="the snapshot directory", key="snapshot.path")
            _delete_files(path, PROBE_PATTERNS)
        elif isinstance(storage, RemoteStorage) and storage.needs_lease:
            self._acquire_lease(storage)

    def _acquire_lease(self, storage: RemoteStorage) -> None:
        """Acquire the lease on an object store, and record its id in the run directory."""
        digest = hashlib.sha256(storage.url.encode()).hexdigest()
        record = self.path / f".lease-{digest[:8]}"
        try:
            # This process holds the lock of the run directory. An owner that recorded its id here
            # is therefore dead.
            dead_owner = None
            if record.exists():
                dead_owner = read_regular(record, MAX_LEASE_BYTES).decode(errors="replace")
            else:
                self._created.insert(0, record)
            lease = Lease(storage, dead_owner)
            self.leases[storage.url] = lease
            atomic_write(record, lease.id.encode())
        except OSError as error:
            raise StorageUnavailableError(f"cannot use {storage.url}: {error}") from error

    def check(self) -> None:
        """Check that the locked directories are still there.

        If one was deleted, another process may have created it again and locked it.

        Raises:
            RunError: A directory was deleted or moved. The message names it.
        """
        for path, lock in self._locks.items():
            if not is_lock_of(path, lock):
                raise RunError(
                    f"{path} was deleted or moved during the run, which ends here and writes "
                    "nothing more; run the same command again to start from what is there now"
                )

    def release(self) -> None:
        """Release all locks and leases.

        If the start was refused, delete the files that this process has created.
        """
        for lease in self.leases.values():
            lease.release()
        for path in self._created:
            lock = self._locks.get(path.parent)
            with contextlib.suppress(OSError):
                if path.is_dir():
                    path.rmdir()  # fails if the directory is not empty
                elif path.name != LOCK or (lock and is_lock_of(path.parent, lock)):
                    path.unlink()
        for lock in self._locks.values():
            lock.close()

    def record_start(
        self,
        config: dict[str, Any],
        hydra_files: Mapping[str, str],
        files: dict[str, bytes] | None = None,
        private: dict[str, bytes] | None = None,
    ) -> None:
        """Record the configuration of this start, and other files.

        The first start writes config.yaml. A later start writes config.<n>.yaml, but only if its
        configuration differs from the last one.

        Args:
            config: The configuration.
            hydra_files: The contents of the files in .hydra, by file name.
            files: The contents of other files, by file name.
            private: The contents of files that only this user may read, by file name.
        """
        self._created.clear()
        for name, content in (files or {}).items():
            _write(self.path / name, content)
        for name, content in (private or {}).items():
            _write(self.path / name, content, 0o600)
        for name, text in hydra_files.items():
            _write(self.path / ".hydra" / name, text.encode())
        encoded = dump_yaml(config).encode()
        previous = recorded_config(self.path)
        if previous is None:
            _write(self.path / "config.yaml", encoded)
        elif difference(previous, config, KEYS_NOT_COMPARED):
            number = max([1, *_config_numbers(self.path)]) + 1
            _write(self.path / f"config.{number}.yaml", encoded)

    def clear_result(self) -> None:
        """Delete result.json when the run continues, because it is no longer the result."""
        try:
            (self.path / RESULT).unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"cannot remove {self.path / RESULT}: {reason(error)}") from error

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json."""
        self.check()
        _write(self.path / RESULT, dump_json(result, indent=2))


def check_record(config: dict[str, Any], hydra_files: Mapping[str, str]) -> None:
    """Check that a configuration can be read again after `record_start` has written it.

    Args:
        config: The configuration.
        hydra_files: The contents of the files in .hydra, by file name.

    Raises:
        ConfigError: The configuration is too large for its readers.
    """
    try:
        dump_yaml(config)
        for content in hydra_files.values():
            load_yaml(content)
    except ValueError as error:
        raise ConfigError(
            f"the recorded configuration could not be read again: {error}; shorten it, for example "
            "by naming a directory instead of each file in it"
        ) from error


def script_files(script: Path, words: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of the files that record a script with its own loop, by file name.

    Args:
        script: Path of the script. In an interactive session there is no such file, so only its
            name is recorded.
        words: The command-line arguments of the script.
    """
    files = {SCRIPT_RECORD: dump_json({"name": script.name, "words": [*words]})}
    with contextlib.suppress(OSError):
        files[SCRIPT] = script.read_bytes()
    return files


def recorded_script(directory: Path) -> tuple[str, list[str]] | None:
    """Return the name of the script whose own loop trained a run, and its arguments.

    Return None if the loop of main.py trained the run.
    """
    record = read_json(directory / SCRIPT_RECORD)
    if not record:
        return None
    words = record.get("words")
    return str(record.get("name")), [*map(str, words)] if isinstance(words, list) else []


def refuse_other_loop(directory: Path, script: Path | None = None) -> None:
    """Refuse to continue a run with another training loop than the one that has trained it so far.

    Loops are compared by the file names of their scripts. If the script was only edited, it still
    counts as the same loop.

    Args:
        script: The user's script whose own loop is to train the run. None for the loop of main.py.

    Raises:
        ConfigError: Another loop has trained the run. The message names both loops.
    """
    before = recorded_script(directory)
    if before is None and (script is None or recorded_config(directory) is None):
        return
    loop_before = before[0] if before else MAIN_LOOP
    loop_now = script.name if script else MAIN_LOOP
    if loop_before == loop_now:
        return
    again = f"run {loop_before} again ({directory / SCRIPT} is a copy of it), or " if before else ""
    raise ConfigError(
        f"{directory} was trained by the loop of {loop_before}, not by the loop of {loop_now}; "
        f"{again}choose another run.name"
    )


def _delete_files(directory: Path, patterns: tuple[str, ...]) -> None:
    """Delete the files that a killed owner has left. A file that cannot be deleted does no harm."""
    for pattern in patterns:
        for path in directory.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def _write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file of the run atomically. Raise a RunError if that fails."""
    try:
        atomic_write(path, content, mode)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {reason(error)}; fix this and run the same command again"
        ) from error


def read_result(directory: Path) -> dict[str, Any]:
    """Return the untrusted result of the run in a directory, or {} if it cannot be read."""
    return read_json(directory / RESULT)


def has_ended(result: dict[str, Any], recorded: dict[str, Any], config: Config) -> bool:
    """Return True if a run has nothing left to do: it was pruned, or it is complete.

    A complete run continues if `config` raises the limit that ended it.

    Args:
        result: The untrusted result.json of the run.
        recorded: The untrusted configuration of the last start.
        config: The configuration of this start.
    """
    try:
        if result["status"] == RunStatus.PRUNED:  # larger limits do not continue a pruned job
            return True
        if result["status"] != RunStatus.COMPLETE:
            return False
        keys = [*LIMITS]
        if result.get("stopped_early"):
            keys.append("patience")
        for key in keys:
            old = recorded["trainer"].get(key)  # max_minutes is missing in the record of older runs
            new = getattr(config.trainer, key)
            # A limit that was null did not end the run. Any other limit may have ended it.
            if old is not None and (new is None or new > old):
                return False
    except INVALID_RECORD_ERRORS:
        return False
    return True


def _config_numbers(directory: Path) -> list[int]:
    """Return the numbers <n> of the files config.<n>.yaml in a directory, sorted."""
    numbers = []
    for path in directory.glob("config.*.yaml"):
        match = re.fullmatch(r"config\.(\d+)\.yaml", path.name)
        if match:
            numbers.append(int(match[1]))
    return sorted(numbers)


def recorded_config(directory: Path) -> dict[str, Any] | None:
    """Return the untrusted configuration of the last start of a run.

    It is read from the newest configuration file that can be read. Return None if there is none.
    """
    names = [f"config.{number}.yaml" for number in reversed(_config_numbers(directory))]
    for name in [*names, "config.yaml"]:
        with contextlib.suppress(OSError, ValueError):
            config = read_yaml(directory / name)
            if isinstance(config, dict) and _has_only_groups(config):
                return without_unknown(config)
    return None


def _has_only_groups(config: dict[str, Any]) -> bool:
    """Return True if every value of a configuration is a group of keys."""
    return all(isinstance(group, dict) for group in config.values())


def difference(
    old: dict[str, Any], new: dict[str, Any], ignored: tuple[str, ...] = ()
) -> list[str]:
    """Describe each difference between two configurations, as `group.key: old -> new`.

    Args:
        ignored: Keys that are not compared.
    """
    rows = changed_values(flatten(old), flatten(new), ignored)
    return [f"{key}: {before} -> {after}" for key, before, after in rows]


def changed_values(
    old: dict[str, Any], new: dict[str, Any], ignored: tuple[str, ...] = ()
) -> list[tuple[str, str, str]]:
    """Return the key, the old value and the new value of each difference between configurations.

    The values are returned as text.

    Args:
        old: Values by dotted key.
        new: Values by dotted key.
        ignored: Keys that are not compared.
    """
    keys = [key for key in old | new if key not in ignored]
    changed = [key for key in keys if old.get(key) != new.get(key)]
    return [(key, _format(old.get(key)), _format(new.get(key))) for key in changed]


def _format(value: Any) -> str:
    """Format a value as it would be written in an override on the command line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
