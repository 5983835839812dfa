"""`python -m mingpt_ddp.snapshots`: list, verify, prune and export snapshots."""

from mingpt_ddp.cli.snapshots import main

main()
