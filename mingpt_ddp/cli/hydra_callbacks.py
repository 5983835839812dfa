"""The callback that Hydra calls before training.

It checks the configuration. With -m, it also starts the sweep.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.compose.hydra_keys import check_hydra_keys
from mingpt_ddp.config.job import EndsProcess
from mingpt_ddp.errors import ConfigError, UserError
from mingpt_ddp.process.env import read_env
from mingpt_ddp.process.root_cause import failed

if TYPE_CHECKING:
    from mingpt_ddp.study.sweeps.sweep import Sweep

# Hydra's callbacks cannot pass a value to the sweeper, or to the code that runs after Hydra. The
# sweep is therefore stored here.
_started: "list[Sweep]" = []


def started_sweep() -> "Sweep | None":
    """Return the sweep that this process has started, if any."""
    return _started[-1] if _started else None


class Preflight(Callback):
    """Hydra's callback that checks a run or a sweep before anything is written."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with leave_hydra_on_error():
            check_hydra_keys(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # A single run does not need the modules of sweeps.
        from mingpt_ddp.study.sweeps.preflight import start_sweep

        with leave_hydra_on_error():
            check_hydra_keys(config)
            _started.append(start_sweep(config, read_env()))


@contextlib.contextmanager
def leave_hydra_on_error() -> Iterator[None]:
    """Turn an exception into EndsProcess, which Hydra does not catch.

    Hydra would log any other exception of a callback as a warning and continue. It would print its
    own lines about any other exception of a task.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError):
            error = ConfigError(explain(error))
        raise EndsProcess(failed(error)) from None
