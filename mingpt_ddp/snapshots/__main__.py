"""`python -m mingpt_ddp.snapshots`: list, verify, prune and export snapshots."""

from mingpt_ddp.cli.snapshots_command import main

main()
