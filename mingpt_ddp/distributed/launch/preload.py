"""Imported by the fork server before it forks workers (fork_server.py)."""

import gc

from mingpt_ddp.process.parent_watch import die_with_parent

die_with_parent()
gc.set_threshold(20_000)  # the following imports then take two thirds of the time
