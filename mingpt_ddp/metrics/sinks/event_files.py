"""Read the untrusted TensorBoard event files of one rank: scalars and texts, each step once."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingpt_ddp.storage.storage import read_regular

MAX_SIZE = 1 << 28  # bytes of a file
MAX_EVENTS = 2_000_000  # of a rank
MAX_TEXT = 10_000  # bytes of a text that are kept


@dataclass
class RankEvents:
    """What one rank has logged, by tag and step; a step repeated after a restart counts once."""

    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    texts: dict[str, dict[int, str]] = field(default_factory=dict)

    def purge(self, step: int) -> None:
        """Drop what was logged from this step on."""
        for scalars in self.scalars.values():
            _drop_from(step, scalars)
        for texts in self.texts.values():
            _drop_from(step, texts)


def _drop_from(step: int, by_step: dict[int, Any]) -> None:
    for at in [at for at in by_step if at >= step]:
        del by_step[at]


def read_events(directory: Path) -> RankEvents:
    """Read the event files of a rank; ignore a partial record at the end of a file.

    Raises:
        ValueError: a file is damaged, or there are more than MAX_EVENTS.
        OSError: a file cannot be read, is not a regular file, or is too large.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    events = RankEvents()
    count = 0
    for path in sorted(directory.glob("*tfevents*")):
        content = read_regular(path, MAX_SIZE)
        position = 0
        # a record: length, its CRC, event, its CRC
        while position + 16 <= len(content) and count < MAX_EVENTS:
            begin = position + 12
            (length,) = struct.unpack_from("<Q", content, position)
            position = begin + length + 4
            if position > len(content):
                break
            try:
                event = Event.FromString(content[begin : begin + length])
            except DecodeError as error:
                raise ValueError(f"{path} is damaged") from error
            count += 1
            if event.session_log.status == SessionLog.START:
                events.purge(event.step)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    events.scalars.setdefault(value.tag, {})[event.step] = value.simple_value
                elif value.tensor.string_val:
                    tag = value.tag.removesuffix("/text_summary")
                    text = value.tensor.string_val[0][:MAX_TEXT].decode(errors="replace")
                    events.texts.setdefault(tag, {})[event.step] = text
        if count == MAX_EVENTS:
            raise ValueError(f"{directory} has more than {MAX_EVENTS:,} events")
    return events
