"""The configuration of local workers: their parent composes it once and passes it to all of them.

Hydra's own entry point composes twice, which would take a third of the time of a restart.
"""

import copy
from collections.abc import Callable
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict


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
    """Set Hydra's state in a worker as its parent composed it, and call `task`."""
    HydraConfig.instance().set_config(composed)
    cfg = copy.deepcopy(composed)
    with open_dict(cfg):
        del cfg["hydra"]
    task(cfg)
