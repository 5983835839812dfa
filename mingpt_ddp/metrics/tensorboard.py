"""TensorBoard event files: scalars, texts, and the HParams tab."""

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.errors import reason
from mingpt_ddp.storage.run_dir import run_name

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)
P = ParamSpec("P")
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

    The first value creates the first file: importing TensorBoard takes 0.2 seconds.

    If a write fails, for example because the disk is full, training continues without it.
    """

    def __init__(self, directory: Path, is_enabled: bool = True) -> None:
        self._directory = directory
        self._is_off = not is_enabled
        self._writer: SummaryWriter | None = None

    def start(self, step: int, world_size: int) -> None:
        """Begin an attempt after `step`; readers drop the points of later steps."""
        self._purge_step = step + 1

    @_unless_failed
    def rollback(self, step: int) -> None:
        """Begin again after `step` within an attempt, in another event file."""
        if self._writer:
            self._writer.close()
            self._writer = None
            time.sleep(1.0)  # readers sort event files by name, which has a resolution of 1 s
        self._purge_step = step + 1

    @_unless_failed
    def open(self) -> None:
        """Create the event file."""
        self._open()

    def _open(self) -> "SummaryWriter":
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            earlier = [path.name for path in self._directory.glob("*tfevents*")]
            # purge_step: readers drop points of earlier attempts from that step on
            self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
            _rename_to_last(self._writer, earlier)
        return self._writer

    @_unless_failed
    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tag, value in metrics.items():
            self._open().add_scalar(tag, value, step)

    @_unless_failed
    def log_text(self, step: int, tag: str, text: str) -> None:
        """Write a text, indented, because Markdown would reflow it."""
        self._open().add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)

    @_unless_failed
    def complete(self, step: int, config: Config) -> None:
        """Write the HParams tab, replacing that of an earlier end of the same run.

        SummaryWriter.add_hparams would name the run by its directory, and add a scalar with the
        metric at step 0.
        """
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for old in self._directory.glob(f"*{HPARAMS}"):
            old.unlink()
        plain = {}
        for key, value in flatten(config.to_dict()).items():
            is_scalar = isinstance(value, (bool, int, float, str))
            plain[key] = value if is_scalar else str(value)
        experiment, _, end = hparams(plain, {OBJECTIVE: 0.0})  # writes the tag of the metric only
        begin = hparams_pb(plain, trial_id=run_name(config))
        with SummaryWriter(str(self._directory), filename_suffix=HPARAMS) as writer:
            for summary in (experiment, begin, end):
                writer.file_writer.add_summary(summary)

    @_unless_failed
    def flush(self) -> None:
        if self._writer:
            self._writer.flush()

    @_unless_failed
    def close(self) -> None:
        if self._writer:
            self._writer.close()


def _rename_to_last(writer: "SummaryWriter", earlier: Collection[str]) -> None:
    """Rename a new event file if its name does not sort after those of earlier attempts.

    Readers go through the files by name, which begins with the second that they were made in: after
    a clock was set back, they would drop the points of the attempt, or show steps twice. Another
    implementation of TensorBoard's files, without the attributes used here, keeps its names.
    """
    writer.flush()  # nothing is written meanwhile
    events = getattr(writer.file_writer, "event_writer", None)
    file = getattr(events, "_general_file_writer", None)
    if file is None or not hasattr(file, "filename"):
        return
    path = Path(os.fsdecode(file.filename))
    newest = max(earlier, default="")
    second = re.search(r"tfevents\.(\d+)", newest)
    if path.name > newest or second is None:
        return
    name = re.sub(r"(?<=tfevents\.)\d+", f"{int(second[1]) + 1:010d}", path.name)
    path.rename(path.with_name(name))
    file.filename = os.fsencode(path.with_name(name))  # by which it is opened for each write
