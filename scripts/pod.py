"""torchrun as the main process of a pod: the same options, but exit codes that say what should happen next.

    python scripts/pod.py [options of torchrun] main.py [key=value ...]

0: the run is complete. 1 or 2: it failed, and would fail again. 143: start it again, and it resumes from its last
snapshot. torchrun itself exits with 1 after any failure, and with 0 where the run stopped because another pod was
preempted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial

FAILURE, MISTAKE, AGAIN = 1, 2, 128 + signal.SIGTERM
TRY_AGAIN = 75  # EX_TEMPFAIL of a worker whose storage is unavailable
EXIT_S = 3  # for which an agent whose ranks have ended waits for other agents; torchrun waits 300 and ignores signals

# The kernel drops signals to PID 1 of a container until it has a handler; torch installs its own seconds later.
signal.signal(signal.SIGTERM, lambda *_: os._exit(AGAIN))


def main(words: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api
    from torch.distributed.run import parse_args, run

    args = parse_args(words)
    api.LocalElasticAgent = partial(api.LocalElasticAgent, exit_barrier_timeout=EXIT_S)
    try:
        run(args)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return {TRY_AGAIN: AGAIN, MISTAKE: MISTAKE}.get(code, FAILURE)
    except SignalException:
        return AGAIN
    except Exception as error:  # e.g. the other pods are gone
        print(f"error: {' '.join(f'{type(error).__name__}: {error}'.split())}", file=sys.stderr)
        return AGAIN
    return 0 if is_complete(args.training_script_args) else AGAIN


def is_complete(words: list[str]) -> bool:
    """Whether the run of this command line has reached its limits; run.root must be a volume that all pods share."""
    from hydra import compose, initialize_config_dir

    from mingpt_ddp.config.config import from_mapping, to_plain
    from mingpt_ddp.config.hydra_utils import config_directory
    from mingpt_ddp.storage.run_dir import run_directory

    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        config = from_mapping(to_plain(compose("config", words)))
    try:
        return json.loads((run_directory(config) / "result.json").read_text())["status"] == "complete"
    except (OSError, ValueError, KeyError):
        return False


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
