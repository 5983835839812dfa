"""The text of a run, as its snapshots record it: the hash of the text and its format."""

import contextlib
import logging
from collections.abc import Container
from dataclasses import replace
from typing import Any, get_args

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.components import DataConfig, TextFormat
from mingpt_ddp.config.recorded import with_data_format
from mingpt_ddp.data.dataset import RecordedText
from mingpt_ddp.errors import ConfigError, SnapshotError
from mingpt_ddp.tasks.task import recorded_sha256

log = logging.getLogger(__name__)


def recorded_text(state: Any) -> RecordedText | None:
    """Return the text in the state of a snapshot. Return None for weights without a text.

    Args:
        state: The untrusted state.json.

    Raises:
        SnapshotError: This version does not know the text's format.
    """
    try:
        data_format = state["text"].get("format", "text")
        if data_format in get_args(TextFormat):
            return RecordedText(recorded_sha256(state), data_format)
    except (AttributeError, LookupError, TypeError):
        return None
    raise SnapshotError(
        f"the snapshot has a text of format {str(data_format)[:100]!r}, which this version "
        "does not know; resume it with the version that has saved it"
    )


def with_recorded_format(config: Config, state: Any, command_line_keys: Container[str]) -> Config:
    """Return the configuration with the `data.format` that the run has used so far.

    Args:
        state: The untrusted state.json of the snapshot to resume. None if there is none.
        command_line_keys: Keys that the user has set on the command line.

    Raises:
        ConfigError: The command line names a format that differs from the recorded one.
    """
    if state is None or not isinstance(config.data, DataConfig):
        return config
    data_format: Any = None
    used_format = "text"  # data.format of the run, or the format that auto chose
    with contextlib.suppress(LookupError, TypeError):  # a damaged state is refused later
        data_format = with_data_format(state["config"])["data"]["format"]
        used_format = state["text"].get("format", "text")
    if data_format not in get_args(TextFormat):
        data_format = "text"
    if data_format != "auto":
        used_format = data_format
    if "data.format" in command_line_keys and data_format != config.data.format:
        if config.data.format not in ("auto", used_format):
            raise ConfigError(
                f"data.format={config.data.format}: the run has read its texts with "
                f"data.format={used_format} so far; leave the key out, or choose another run.name"
            )
        log.info("the run continues with data.format=%s, as in its earlier starts", data_format)
    return replace(config, data=replace(config.data, format=data_format))
