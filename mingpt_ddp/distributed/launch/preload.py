"""Imported by the fork server before it forks workers (fork_server.py)."""

import gc
import signal

from mingpt_ddp.distributed.exit import die_with_parent
from mingpt_ddp.distributed.launch.fork_server import BLOCKED_SIGNALS

# A scheduler may signal all processes of a job; only the launcher reacts and forwards it. Workers
# unblock signals.
signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
die_with_parent()
gc.set_threshold(20_000)  # the following imports then take two thirds of the time
