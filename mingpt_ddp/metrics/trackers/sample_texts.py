"""Generated texts in `samples.jsonl`; a restart sends those that were not sent."""

import contextlib
import json
from pathlib import Path

from mingpt_ddp.storage.lines import append_line, read_lines

NAME = "samples.jsonl"
MAX_BYTES = 1 << 28


def append_sample(directory: Path, step: int, text: str) -> None:
    """Append a text; a full disk costs the text, not the run."""
    with contextlib.suppress(OSError):
        line = json.dumps({"step": step, "text": text}).encode() + b"\n"
        append_line(directory / NAME, line, MAX_BYTES)


def read_samples(directory: Path) -> dict[int, str]:
    """Return the last text of each step, without lines that a kill has truncated."""
    samples: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for line in read_lines(directory / NAME, MAX_BYTES):
            with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
                record = json.loads(line)
                if type(record["step"]) is int:
                    samples[record["step"]] = str(record["text"])
    return samples
