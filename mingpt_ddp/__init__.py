"""Train a small GPT seriously: Hydra configuration, DDP, snapshots that survive kill -9."""

import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # only while `python -m` looks for a module; most of this package's are not commands
    from mingpt_ddp.cli import refuse_other_modules

    refuse_other_modules()
