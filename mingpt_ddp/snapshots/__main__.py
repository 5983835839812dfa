"""`python -m mingpt_ddp.snapshots`: list, verify, prune and export snapshots."""

from mingpt_ddp.cli.commands.snapshots import main

main()
