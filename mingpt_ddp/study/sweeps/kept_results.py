"""Decide if the result of a complete job still counts: it must have the same text and code."""

import json
import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.errors import ChangedTextError
from mingpt_ddp.storage.code_identity import changed_files, recorded_code
from mingpt_ddp.storage.run_directory import read_result, recorded_config

log = logging.getLogger(__name__)

# Keys of the group `data` that do not change the text.
OF_WINDOWS = ("block_size", "stride")


@dataclass
class KeptResults:
    """Checks the results of a sweep's complete jobs, on rank zero."""

    _named: set[str] = field(default_factory=set)  # changed files that the log has named
    # SHA-256 of each text, by its settings as JSON.
    _texts: dict[str, str] = field(default_factory=dict)

    def check(self, directory: Path, config: Config) -> None:
        """Check the result of a complete job. Say once that a user's file has been edited.

        Args:
            config: The configuration of the job, or of another job of the sweep.

        Raises:
            ChangedTextError: The text has changed.
            DataError: It cannot be read.
        """
        result = read_result(directory)
        self._check_text(directory, result, _data_of(directory, config.data))
        changed = changed_files(recorded_code(result))
        new = [name for name in changed if name not in self._named]
        self._named |= {*new}
        if new and config.run.accept_code:
            log.info(
                "run.accept_code=true: results of complete jobs count, although %s",
                _have_changed(new),
            )
        elif new:
            log.warning(
                "%s since complete jobs were trained: the table marks these results as of old "
                "code; run.resume=never or another run.name trains them again, "
                "run.accept_code=true takes them as they are",
                _have_changed(new),
            )

    def _check_text(self, directory: Path, result: dict[str, Any], data: Any) -> None:
        recorded = result.get("data")
        then = recorded.get("sha256") if isinstance(recorded, dict) else None
        if not isinstance(data, DataConfig) or not isinstance(then, str):
            return
        now = self._sha256_of(data)
        if now != then:
            raise ChangedTextError(
                f"{data.source} is not the text that {directory} was trained on (SHA-256 "
                f"{now:.12} now, {then:.12} then); restore it, or train on it as it is now with "
                "run.resume=never or another run.name"
            )

    def _sha256_of(self, data: DataConfig) -> str:
        # This import takes long, and few commands need it.
        from mingpt_ddp.data.prepare import sha256_of_text

        keys = {key: value for key, value in asdict(data).items() if key not in OF_WINDOWS}
        name = json.dumps(keys, sort_keys=True, default=str)
        if name not in self._texts:
            self._texts[name] = sha256_of_text(data)
        return self._texts[name]


def _data_of(directory: Path, data: Any) -> Any:
    """Return the group `data` of a job, from its recorded configuration if there is one."""
    recorded = (recorded_config(directory) or {}).get("data")
    if not isinstance(data, DataConfig) or not isinstance(recorded, dict):
        return data
    known = {each.name for each in fields(data)} - {"cache_dir", "verify"}
    return replace(data, **{key: value for key, value in recorded.items() if key in known})


def _have_changed(names: Collection[str]) -> str:
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} changed"
