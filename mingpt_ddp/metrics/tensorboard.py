"""TensorBoard event files: scalars, texts, and the HParams tab."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from mingpt_ddp.config.config import Config, flatten

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HPARAMS = ".hparams"  # suffix of the event file of the HParams tab
OBJECTIVE = "val/loss"  # the tag that the HParams tab shows


class TensorBoardLogger:
    """Write event files. The first value creates the first file: importing TensorBoard takes 0.2 seconds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def start(self, step: int, world_size: int) -> None:
        """Begin an attempt after `step`; readers drop the points of later steps."""
        self._purge_step = step + 1

    def rollback(self, step: int) -> None:
        """Begin again after `step` within an attempt, in another event file."""
        if self._writer:
            self._writer.close()
            self._writer = None
            time.sleep(1.0)  # readers sort event files by name, which has a resolution of 1 s
        self._purge_step = step + 1

    def open(self) -> "SummaryWriter":
        """Return the writer; create the event file if none is open."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step: readers drop points of earlier attempts from that step on
            self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
        return self._writer

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tag, value in metrics.items():
            self.open().add_scalar(tag, value, step)

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Write a text, indented, because Markdown would reflow it."""
        self.open().add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def complete(self, step: int, config: Config) -> None:
        """Write the HParams tab, replacing that of an earlier end of the same run.

        SummaryWriter.add_hparams would name the run by its directory, and add a scalar with the metric at step 0.
        """
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for old in self._directory.glob(f"*{HPARAMS}"):
            old.unlink()
        values = flatten(config.to_dict())
        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in values.items()}
        experiment, _, end = hparams(plain, {OBJECTIVE: 0.0})  # writes the tag of the metric only
        with SummaryWriter(str(self._directory), filename_suffix=HPARAMS) as writer:
            for summary in (experiment, hparams_pb(plain, trial_id=config.run_name()), end):
                writer.file_writer.add_summary(summary)

    def flush(self) -> None:
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        if self._writer:
            self._writer.close()
