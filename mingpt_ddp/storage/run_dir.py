"""The run directory: its name, its owner, the record of how it was started, its result."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import time
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import IO, Any

import yaml

from mingpt_ddp.config.config import Config
from mingpt_ddp.errors import RunError, StorageUnavailableError
from mingpt_ddp.storage.lease import Lease
from mingpt_ddp.storage.storage import Storage, atomic_write, read_regular

log = logging.getLogger(__name__)

LOCK_WAIT_S = 10.0  # the dead of the last attempt may need a moment to be gone
RESULT = "result.json"
HALF_WRITTEN = (".config*.partial", ".result.json.*.partial", "..lease-*.partial", ".hydra/.*.partial")
LARGEST_RECORD = 1 << 16  # bytes of result.json and config.yaml
MAX_YAML_DEPTH = 50  # levels of lists and mappings
YAMLLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast


class RunStatus(str, Enum):
    """How a run ended, as `status` in result.json."""

    COMPLETE = "complete"  # it has reached its limits
    PREEMPTED = "preempted"  # a signal stopped it: the same command resumes it
    PRUNED = "pruned"  # a job of a sweep, stopped because it did worse than others


def run_directory(config: Config) -> Path:
    """Where this run lives: a function of the configuration alone."""
    return Path(config.run.root) / config.run_name()


def with_run_name(config: Config, name: str) -> Config:
    return replace(config, run=replace(config.run, name=name))


def next_free_name(config: Config) -> str:
    """The first of the run's name, `name-2`, `name-3` ... that no directory has yet."""
    first = candidate = run_directory(config)
    number = 1
    while candidate.exists():
        number += 1
        candidate = first.with_name(f"{first.name}-{number}")
    return candidate.relative_to(config.run.root).as_posix()


class RunDirectory:
    """The directory, held by an advisory lock for as long as this process lives. Rank 0's business alone."""

    def __init__(self, path: Path, wait_s: float = LOCK_WAIT_S) -> None:
        """Create it where needed and become its owner.

        Raises:
            RunError: another process group owns it, or it cannot be written.
        """
        self.path = path
        self._lock = acquire_lock(path, wait_s)
        for pattern in HALF_WRITTEN:  # by an owner who was killed
            for left in path.glob(pattern):
                left.unlink(missing_ok=True)
        self._others: list[IO[str]] = []
        self.leases: dict[str, Lease] = {}  # on snapshots in object stores, by URL

    def lock_snapshots(self, place: Storage) -> None:
        """Own a place outside the run directory, that other runs could use as well.

        Raises:
            RunError: another process group owns it, or it cannot be written.
        """
        if place.local and self.path.absolute() not in (path := Path(place.root)).parents:
            self._others.append(_open_lock(path, "the snapshots' directory", "place for them"))
            _acquire(self._others[-1], path, time.monotonic())
        elif place.shared:
            record = self.path / f".lease-{hashlib.sha256(place.url.encode()).hexdigest()[:8]}"
            try:  # the last owner of this directory is dead: the directory is ours
                dead = record.read_text() if record.exists() else None
                self.leases[place.url] = Lease(place, dead)
                atomic_write(record, self.leases[place.url].id.encode())
            except OSError as error:
                raise StorageUnavailableError(f"cannot use {place.url}: {error}") from error

    def last_log_time(self) -> float:
        """When the last attempt wrote to its log, in seconds since 1970; 0 if there was none."""
        try:
            return (self.path / "main.rank0.log").stat().st_mtime
        except OSError:
            return 0.0

    def release(self) -> None:
        for lock in (self._lock, *self._others):
            lock.close()
        for lease in self.leases.values():
            lease.release()

    def record_start(self, config: dict[str, Any], hydra_files: dict[str, str]) -> None:
        """Keep the configuration of the first start, and of each later start that differs from the one before."""
        for name, content in hydra_files.items():
            _record(self.path / ".hydra" / name, content)
        previous = recorded_config(self.path)
        if previous is None:
            _record(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))
            return
        changes = difference(previous, config)
        if changes:
            log.info("the configuration differs from the last start: %s", "; ".join(changes))
            number = max([1, *_later_configs(self.path)]) + 1
            _record(self.path / f"config.{number}.yaml", yaml.safe_dump(config, sort_keys=False))

    def clear_result(self) -> None:
        """The run goes on: how it once ended is no longer true."""
        try:
            (self.path / RESULT).unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"cannot remove {self.path / RESULT}: {error.strerror}") from error

    def write_result(self, result: dict[str, Any]) -> None:
        _record(self.path / RESULT, json.dumps(result, indent=2) + "\n")


def _record(path: Path, content: str) -> None:
    try:
        atomic_write(path, content.encode())
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; mend this and run again") from error


def read_result(directory: Path) -> dict[str, Any]:
    """How the run in this directory ended the last time; empty where it did not, or without a word."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        result = json.loads(read_regular(directory / RESULT, LARGEST_RECORD))
        return result if isinstance(result, dict) else {}
    return {}


def _later_configs(directory: Path) -> list[int]:
    numbers = (re.fullmatch(r"config\.(\d+)\.yaml", path.name) for path in directory.glob("config.*.yaml"))
    return sorted(int(number[1]) for number in numbers if number)


def recorded_config(directory: Path) -> dict[str, Any] | None:
    """The newest record that can be read of how the run was configured."""
    names = [f"config.{number}.yaml" for number in reversed(_later_configs(directory))]
    for name in [*names, "config.yaml"]:
        with contextlib.suppress(OSError, ValueError):
            config = load_yaml(read_regular(directory / name, LARGEST_RECORD))
            if isinstance(config, dict) and all(isinstance(group, dict) for group in config.values()):
                return config
    return None


def load_yaml(text: str | bytes) -> Any:
    """Parse one YAML document of untrusted content; the caller limits its length.

    Raises:
        ValueError: it is not YAML, or has tags that name objects, aliases (a few expand to gigabytes) or deep nesting.
    """
    try:
        depth = 0
        for event in yaml.parse(text, Loader=YAMLLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > MAX_YAML_DEPTH:
                raise ValueError("it has aliases or is nested too deeply")
        return YAMLLoader(text).get_single_data()
    except Exception as error:  # from the scanner, or from the constructor of any type
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def acquire_lock(directory: Path, wait_s: float = LOCK_WAIT_S) -> IO[str]:
    """Create a directory below run.root where needed and own it for as long as the file returned is open.

    Raises:
        RunError: another process owns it, or it cannot be written.
    """
    lock = _open_lock(directory, "the run directory", "run.root")
    _acquire(lock, directory, time.monotonic() + wait_s)
    return lock


def _open_lock(path: Path, what: str, key: str) -> IO[str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Not what a link leads to: that may be anybody's.
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        return open(descriptor, "a+")
    except OSError as error:
        raise RunError(f"cannot write to {what} {path}: {error.strerror}; choose another {key}") from error


def _acquire(lock: IO[str], path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                lock.seek(0)
                owner = lock.read().strip() or "another process"
                raise RunError(
                    f"{path} belongs to {owner}, which is still running; wait for it, or choose another run.name"
                ) from error
            time.sleep(0.1)
    with contextlib.suppress(OSError):  # a disk that is full will be told of by what matters
        os.truncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`group.key: old -> new` for every value that differs."""
    before, after = _flat(old), _flat(new)
    keys = [*before, *(k for k in after if k not in before)]
    pairs = [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
    return [f"{key}: {_shown(old)} -> {_shown(new)}" for key, old, new in pairs]


def _shown(value: Any) -> str:
    """As the command line takes it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return {f"{group}.{key}": value for group, keys in values.items() for key, value in keys.items()}
