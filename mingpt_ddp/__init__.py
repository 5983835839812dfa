"""Train a small GPT with PyTorch DDP and Hydra. Snapshots survive SIGKILL."""

__version__ = "0.1.0"

from mingpt_ddp.cli import begin

begin()

from mingpt_ddp.cli.api import LoadedRun, history, load, one_line_errors, rows, sweep, train  # noqa: E402
from mingpt_ddp.cli.api_at import at  # noqa: E402

__all__ = [
    "LoadedRun",
    "at",
    "history",
    "load",
    "one_line_errors",
    "rows",
    "sweep",
    "train",
]
