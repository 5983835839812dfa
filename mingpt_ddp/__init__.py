"""Train a small GPT: Hydra configuration, DDP, snapshots that survive SIGKILL."""

import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # `python -m` is still resolving its module, and most modules here are not commands
    from mingpt_ddp.cli import refuse_other_modules

    refuse_other_modules()
