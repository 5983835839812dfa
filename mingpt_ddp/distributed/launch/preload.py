"""Set up the fork server. It imports this module before all other modules (fork_server.py)."""

import gc

from mingpt_ddp.process.parent_watch import die_with_parent

die_with_parent()
gc.set_threshold(20_000)  # saves a third of the time of the following imports
