"""The ledger of a run: a file with the hashes of all snapshots, including deleted ones.

`snapshots.jsonl` in the run directory has a line for each committed snapshot:

    {"step": 100, "settings": "2c2620...", "model": "9f86d0...", "optimizer": "60303a..."}

A line also has the hashes `ema` and `hooks`, if the snapshot has tensors of these kinds. A hash is
the SHA-256 of the names, types, shapes and SHA-256s of all tensors of one kind. It does not depend
on the number of ranks. If each rank holds rows of the weights (fsdp, hsdp), the ledger has no
lines.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import LIMITS, may_change_results
from mingpt_ddp.errors import reason
from mingpt_ddp.snapshots.format import REQUIRED_KINDS, TENSOR_KINDS, directory_name, step_of
from mingpt_ddp.snapshots.hashes import HashByKind
from mingpt_ddp.storage.lines import append_line, read_lines

log = logging.getLogger(__name__)

LEDGER = "snapshots.jsonl"
MAX_BYTES = 1 << 26  # size limit of the file, enough for 268,000 snapshots
# Keys that the digest of settings leaves out. Either the `environment` in state.json records their
# effect, or they cannot change between the starts of a run.
NOT_IN_SETTINGS = (
    "ddp.strategy",
    "ddp.backend",
    "ddp.nproc_per_node",
    "ddp.tensor_parallel",
    "ddp.comm_hook",
    "run.resume",
    "run.init_sha256",
)
SHA256 = re.compile("[0-9a-f]{64}")


def digest_settings(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all settings in a state.json that can change the results of a step.

    Even a change of the last bit of a result counts.
    """
    config: dict[str, dict[str, Any]] = {}
    for group, values in state.get("config", {}).items():
        config[group] = {}
        for key, value in values.items():
            name = f"{group}.{key}"
            if name not in NOT_IN_SETTINGS and may_change_results(name, value):
                config[group][key] = value
    settings: dict[str, Any] = {
        "config": config,
        "environment": state.get("environment"),
        "micro_batch_size": state.get("micro_batch_size"),
    }
    # Without optimizer.schedule_steps, the schedules last as long as the run. The length of the run
    # then changes the results of each step.
    if config.get("optimizer", {}).get("schedule_steps") is None:
        limits = {key: state.get("config", {}).get("trainer", {}).get(key) for key in LIMITS}
        # With a time limit, the number of steps is not known at the start.
        settings["steps"] = limits if limits["max_minutes"] else state.get("steps")
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Record:
    """A line of the ledger."""

    step: int
    settings_digest: str  # returned by `digest_settings`
    hashes: HashByKind


class Ledger:
    """Writes and reads the ledger in a run directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LEDGER
        self._has_failed = False

    def append(self, step: int, hashes: HashByKind, settings_digest: str) -> None:
        """Add the hashes of a snapshot.

        If they cannot be written, training goes on. Only the first failure logs a warning.
        """
        if not hashes:
            return
        record = {"step": step, "settings": settings_digest, **hashes}
        try:
            append_line(self.path, json.dumps(record).encode() + b"\n", MAX_BYTES)
        except OSError as error:
            if not self._has_failed:
                log.warning("cannot write %s: %s", self.path, reason(error))
            self._has_failed = True

    def read(self) -> dict[int, Record]:
        """Return the newest record of each step. Invalid lines are skipped."""
        records = {}
        try:
            for line in read_lines(self.path, MAX_BYTES):
                if record := _parse(line):
                    records[record.step] = record
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("some hashes of snapshots cannot be read: %s", error)
        return records


def _parse(line: bytes) -> Record | None:
    """Parse an untrusted line of the ledger. Return None if it is invalid."""
    with contextlib.suppress(LookupError, TypeError, ValueError, RecursionError):
        values = json.loads(line)
        hashes = {kind: values[kind] for kind in TENSOR_KINDS if kind in (*REQUIRED_KINDS, *values)}
        settings_digest = values["settings"]
        are_digests = all(map(SHA256.fullmatch, [*hashes.values(), settings_digest]))
        step = values["step"]
        if are_digests and type(step) is int and step_of(directory_name(step)) == step:
            return Record(step, settings_digest, hashes)
    return None
