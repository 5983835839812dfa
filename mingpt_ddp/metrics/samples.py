"""Write and read the generated texts of a run: `samples.jsonl` has a line for each text.

A line is `{"step": 50, "text": "..."}`.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from mingpt_ddp.storage.lines import append_line, read_lines
from mingpt_ddp.storage.storage import atomic_write

SAMPLES = "samples.jsonl"
MAX_BYTES = 1 << 28  # size limit of the file


def append_sample(directory: Path, step: int, text: str) -> None:
    """Append a generated text. If the disk is full, the text is lost and training continues."""
    with contextlib.suppress(OSError):
        append_line(directory / SAMPLES, _line(step, text), MAX_BYTES)


def drop_samples_after(directory: Path, step: int) -> None:
    """Delete the texts of the steps after `step`, because the run trains these steps again."""
    with contextlib.suppress(OSError):
        samples = list(read_samples(directory))
        kept = [_line(at_step, text) for at_step, text in samples if at_step <= step]
        if len(kept) < len(samples):
            atomic_write(directory / SAMPLES, b"".join(kept))


def read_samples(directory: Path) -> Iterator[tuple[int, str]]:
    """Yield the step and the text of each sample. Skip lines that a kill has cut off.

    Raises:
        OSError: The file cannot be read, is not a regular file, or exceeds a limit.
    """
    for line in read_lines(directory / SAMPLES, MAX_BYTES):
        with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
            sample = json.loads(line)
            if type(sample["step"]) is int:
                yield sample["step"], str(sample["text"])


def _line(step: int, text: str) -> bytes:
    return json.dumps({"step": step, "text": text}).encode() + b"\n"
