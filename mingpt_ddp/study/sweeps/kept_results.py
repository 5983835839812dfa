"""Check that results of complete jobs still count: that text and code have not changed."""

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

# Keys of the group `data` that choose windows of the text, but do not change the text itself.
WINDOW_KEYS = ("block_size", "stride")


@dataclass
class KeptResults:
    """Checks the results of a sweep's complete jobs, on rank zero."""

    _reported: set[str] = field(default_factory=set)  # changed files already named in the log
    # SHA-256 of each text by its settings, which are encoded as JSON.
    _texts: dict[str, str] = field(default_factory=dict)

    def check(self, directory: Path, config: Config) -> None:
        """Check that the result of a complete job still counts. Log each edited user file once.

        Args:
            config: Configuration of this job, or of any other job of the sweep.

        Raises:
            ChangedTextError: The text has changed since the job was trained.
            DataError: The text cannot be read.
        """
        result = read_result(directory)
        self._check_text(directory, result, _data_of(directory, config.data))
        changed = changed_files(recorded_code(result))
        new = [name for name in changed if name not in self._reported]
        self._reported |= {*new}
        if new and config.run.accept_code:
            log.info(
                "run.accept_code=true: results of complete jobs count, although %s",
                _changed_phrase(new),
            )
        elif new:
            log.warning(
                '%s since complete jobs were trained: the table marks their results as "old code"; '
                "set run.resume=never or a new run.name to train these jobs again, or "
                "run.accept_code=true to accept their results",
                _changed_phrase(new),
            )

    def _check_text(self, directory: Path, result: dict[str, Any], data: Any) -> None:
        recorded = result.get("data")
        before = recorded.get("sha256") if isinstance(recorded, dict) else None
        if not isinstance(data, DataConfig) or not isinstance(before, str):
            return
        now = self._sha256_of(data)
        if now != before:
            raise ChangedTextError(
                f"{data.source} is not the text that {directory} was trained on (SHA-256 "
                f"{now:.12} now, {before:.12} before); restore the text, or train on the new text "
                "with run.resume=never or a new run.name"
            )

    def _sha256_of(self, data: DataConfig) -> str:
        # Import this only here, because it takes long and few commands need it.
        from mingpt_ddp.data.prepare import sha256_of_text

        keys = {key: value for key, value in asdict(data).items() if key not in WINDOW_KEYS}
        settings = json.dumps(keys, sort_keys=True, default=str)
        if settings not in self._texts:
            self._texts[settings] = sha256_of_text(data)
        return self._texts[settings]


def _data_of(directory: Path, data: Any) -> Any:
    """Return the `data` settings of a job as recorded, or the given ones if there is no record."""
    recorded = (recorded_config(directory) or {}).get("data")
    if not isinstance(data, DataConfig) or not isinstance(recorded, dict):
        return data
    known = {each.name for each in fields(data)} - {"cache_dir", "verify"}
    return replace(data, **{key: value for key, value in recorded.items() if key in known})


def _changed_phrase(names: Collection[str]) -> str:
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} changed"
