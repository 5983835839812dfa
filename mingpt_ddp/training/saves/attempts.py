"""What a run has lost with its earlier attempts, and what that says about its next snapshot.

The train state in a snapshot has the times up to that snapshot. What an attempt without a snapshot
of its own has cost stands in `attempt.json` of the run directory, written when it begins to train.
All times are in seconds.
"""

import math
import time

from mingpt_ddp.distributed.env import DistEnv, launcher_id
from mingpt_ddp.storage.run_directory import Attempt, RunDirectory
from mingpt_ddp.training.train_state import TrainState

FIRST_SHARE = 0.25  # of what the last attempt trained without a snapshot, until the next has one


def count_attempt(state: TrainState, last: Attempt, began_at: float, env: DistEnv) -> float:
    """Add to the train state this start, and what the last attempt has lost.

    Args:
        state: of the newest snapshot, or a new one.
        last: the last attempt; of an unknown one nothing is counted.
        began_at: time.monotonic() when this attempt began.

    Returns:
        The seconds of training after which this attempt should have a snapshot at the latest.
    """
    startup_s = time.monotonic() - began_at
    now = time.time()
    since = state.saved_at
    has_saved = last.began <= state.saved_at
    if not has_saved:  # the newest snapshot is older, or there is none
        since = last.began
        state.wasted_seconds = last.wasted_seconds
    is_restart = last.launcher != "" and last.launcher == launcher_id(env)
    # a launcher has been waiting or starting processes all the time
    ended = now - startup_s if is_restart else last.ended
    has_saved_all = last.result_step == state.step
    lost_s = 0.0 if has_saved_all or last.began == 0 else max(0.0, ended - since)
    state.wasted_seconds += lost_s + startup_s
    if not last.has_died:
        return math.inf
    state.failures = max(state.failures, last.failures) + 1
    return math.inf if has_saved else FIRST_SHARE * lost_s


def record_attempt(owner: RunDirectory, state: TrainState, env: DistEnv) -> None:
    """Record what the next attempt needs if this one dies before it has a snapshot."""
    owner.write_attempt(
        Attempt(time.time(), state.wasted_seconds, state.failures, launcher_id(env))
    )
