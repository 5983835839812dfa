"""Write the TensorBoard event files of one rank: scalars, texts, and the HParams tab."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.errors import reason

log = logging.getLogger(__name__)


class TensorBoardLogger:
    """Write event files. Each value is flushed, so that a kill does not lose it.

    The first value imports TensorBoard, which takes 0.2 seconds, and creates the first file. If a
    write fails, for example because the disk is full, training continues without TensorBoard.
    """

    def __init__(self, directory: Path, is_enabled: bool = True) -> None:
        self._directory = directory
        self._is_off = not is_enabled
        self._writer: Any = None  # a SummaryWriter

    def start(self, step: int, world_size: int) -> None:
        """Begin an attempt, which is one start of the run, after `step`.

        TensorBoard then hides later steps of earlier attempts.
        """
        self._purge_step = step + 1

    def rollback(self, step: int) -> None:
        """Go back to `step` within an attempt. The next values go to a new event file."""
        self.close()
        self._purge_step = step + 1

    def open(self) -> None:
        """Create the event file."""
        self.log(0, {})

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write scalars by tag."""

        def write(writer: Any) -> None:
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)

        self._write(write)

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Write a text. It is indented, because Markdown would reflow its lines otherwise."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._write(lambda writer: writer.add_text(tag, indented, step))

    def complete(self, step: int, config: Config) -> None:
        """Write the settings of the run and the name of the objective for the HParams tab.

        SummaryWriter.add_hparams would log the value of the objective a second time.
        """
        settings = {}
        for key, value in flatten(config.to_dict()).items():
            is_scalar = isinstance(value, (bool, int, float, str))
            settings[key] = value if is_scalar else str(value)

        def write(writer: Any) -> None:
            from torch.utils.tensorboard.summary import hparams

            for summary in hparams(settings, {"val/loss": 0.0}):
                writer.file_writer.add_summary(summary)

        self._write(write)

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None

    def _write(self, write: Callable[[Any], None]) -> None:
        if self._is_off:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
            write(self._writer)
            self._writer.flush()
        except OSError as error:
            self._is_off = True
            message = "cannot write %s, training continues without it: %s"
            log.warning(message, self._directory, reason(error))
