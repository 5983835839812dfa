"""The configuration of local workers: their parent composes it once and passes it to all of them.

Hydra's own entry point composes twice, which would take a third of the time of a restart.
"""

from collections.abc import Callable
from typing import Any, cast

from hydra import compose
from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig

from mingpt_ddp.config.compose.hydra_internals import Callbacks
from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, WHITELIST


def compose_for_workers(overrides: list[str]) -> DictConfig:
    """Compose the configuration of a single run, with its `hydra` node.

    Hydra's state has the search path: call this while a job or a sweep runs.

    Args:
        overrides: of `hydra_utils.worker_overrides`; its flags are those of this process.
    """
    words = [word for word in overrides if not word.startswith("--")]
    name = HydraConfig.get().job.config_name
    return compose(name, words, return_hydra_config=True)


def run_composed(task: Callable[[DictConfig], Any], composed: DictConfig) -> None:
    """Run `task` in a worker as `Hydra.run` does, without composing again.

    Plugins, resolvers, callbacks, `hydra.job.env_set` and the output directory are those of Hydra.
    Its version base and its whitelist of `_target_`s are set by `hydra.main`, which takes a
    composed configuration too.

    Raises:
        Exception: of `task`.
    """

    def run(config: DictConfig) -> None:
        Plugins.instance()
        setup_globals()
        callbacks = Callbacks(config)
        name = config.hydra.job.config_name
        callbacks.on_run_start(config=config, config_name=name)
        # run_job does not use the loader; it takes the whitelist from the context alone
        context = HydraContext(cast(Any, None), callbacks, **WHITELIST)
        job = run_job(
            hydra_context=context,
            task_function=task,
            config=config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
        )
        callbacks.on_run_end(config=config, config_name=name, job_return=job)
        _ = job.return_value  # raises the error of the task

    hydra_main(**VERSION_BASE, **WHITELIST)(run)(composed)
