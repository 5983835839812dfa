"""Generated texts in `samples.jsonl`; a restart sends those that were not sent."""

import contextlib
import json
from pathlib import Path

from mingpt_ddp.metrics.jsonl import MAX_SIZE, append_line
from mingpt_ddp.storage.storage import read_regular

NAME = "samples.jsonl"


def append_sample(directory: Path, step: int, text: str) -> None:
    """Append a text; a full disk costs the text, not the run."""
    with contextlib.suppress(OSError):
        append_line(directory / NAME, json.dumps({"step": step, "text": text}).encode() + b"\n")


def read_samples(directory: Path) -> dict[int, str]:
    """Return the last text of each step, without lines that a kill has truncated."""
    samples: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for line in read_regular(directory / NAME, MAX_SIZE).splitlines():
            with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
                record = json.loads(line)
                if type(record["step"]) is int:
                    samples[record["step"]] = str(record["text"])
    return samples
