"""Imported by the server that forks the workers, before it forks them (fork_server.py)."""

import signal

from mingpt_ddp.distributed.exit import die_with_parent
from mingpt_ddp.distributed.fork_server import BLOCKED_SIGNALS

# A scheduler may send a signal to all processes of a job: the launcher forwards it, and the workers unblock it.
signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
die_with_parent()
