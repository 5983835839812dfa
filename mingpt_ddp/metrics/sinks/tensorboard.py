"""TensorBoard event files: scalars, texts, and the HParams tab."""

import functools
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.errors import reason
from mingpt_ddp.storage.run_directory import run_name

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

log = logging.getLogger(__name__)
P = ParamSpec("P")
VERSION = "brain.Event:2"  # of the format, in the first event of a file
HPARAMS = ".hparams"  # suffix of the event file of the HParams tab
OBJECTIVE = "val/loss"  # the tag that the HParams tab shows


def _unless_failed(
    write: Callable[Concatenate["TensorBoardLogger", P], None],
) -> Callable[Concatenate["TensorBoardLogger", P], None]:
    """Log the first OSError of a method as a warning; from then on, do not call it."""

    @functools.wraps(write)
    def call(self: "TensorBoardLogger", *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            if not self._is_off:
                write(self, *args, **kwargs)
        except OSError as error:
            self._is_off = True
            log.warning(
                "cannot write %s, training continues without it: %s",
                self._directory,
                reason(error),
            )

    return call


class TensorBoardLogger:
    """Write event files.

    The first value creates the first file: importing TensorBoard takes 0.2 seconds. The files are
    written by this thread, not by SummaryWriter's, so that what was logged is on disk.

    If a write fails, for example because the disk is full, training continues without it.
    """

    def __init__(self, directory: Path, is_enabled: bool = True) -> None:
        self._directory = directory
        self._is_off = not is_enabled
        self._file: RecordWriter | None = None

    def start(self, step: int, world_size: int) -> None:
        """Begin an attempt after `step`; readers drop the points of later steps."""
        self._purge_step = step + 1

    def rollback(self, step: int) -> None:
        """Begin again after `step` within an attempt, in another event file."""
        self.close()
        self._purge_step = step + 1

    def open(self) -> None:
        """Create the event file."""
        self.log(0, {})

    @_unless_failed
    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write scalars and texts by tag."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from torch.utils.tensorboard.summary import scalar, text

        if self._file is None:
            self._file = self._create()
            # readers drop points of earlier attempts from that step on
            begin = SessionLog(status=SessionLog.START)
            _append(self._file, step=self._purge_step, session_log=begin)
        for tag, value in values.items():
            summary = text(tag, value) if isinstance(value, str) else scalar(tag, value)
            _append(self._file, step=step, summary=summary)
        self._file.flush()

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Write a text, indented, because Markdown would reflow it."""
        self.log(step, {tag: "\n".join(f"    {line}" for line in text.splitlines())})

    @_unless_failed
    def complete(self, step: int, config: Config) -> None:
        """Write the HParams tab, replacing that of an earlier end of the same run.

        SummaryWriter.add_hparams would name the run by its directory, and add a scalar with the
        metric at step 0.
        """
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from torch.utils.tensorboard.summary import hparams

        for old in self._directory.glob(f"*{HPARAMS}"):
            old.unlink()
        plain = {}
        for key, value in flatten(config.to_dict()).items():
            is_scalar = isinstance(value, (bool, int, float, str))
            plain[key] = value if is_scalar else str(value)
        experiment, _, end = hparams(plain, {OBJECTIVE: 0.0})  # writes the tag of the metric only
        begin = hparams_pb(plain, trial_id=run_name(config))
        file = self._create(HPARAMS)
        for summary in (experiment, begin, end):
            _append(file, summary=summary)
        file.close()

    @_unless_failed
    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _create(self, suffix: str = "") -> "RecordWriter":
        """Create an event file whose name sorts after those of earlier attempts.

        Readers go through the files by name, which begins with the second that they were made in:
        after a clock was set back, they would drop the points of the attempt, or show steps twice.
        """
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        second = int(time.time())
        for path in self._directory.glob("*tfevents*"):
            if earlier := re.search(r"tfevents\.(\d+)", path.name):
                second = max(second, int(earlier[1]) + 1)
        name = f"events.out.tfevents.{second:010d}.{socket.gethostname()}{suffix}"
        file = RecordWriter(open(self._directory / name, "xb"))  # noqa: SIM115  closed by close()
        _append(file, file_version=VERSION)
        return file


def _append(file: "RecordWriter", **fields: Any) -> None:
    """Write an event with these fields of its protobuf message."""
    from tensorboard.compat.proto.event_pb2 import Event

    file.write(Event(wall_time=time.time(), **fields).SerializeToString())
