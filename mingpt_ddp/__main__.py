"""`python -m mingpt_ddp` and `torchrun -m mingpt_ddp`: the same as main.py."""

from mingpt_ddp.cli.commands.train import main

main()
