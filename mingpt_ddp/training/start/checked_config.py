"""The configuration of a run, with all that can be checked before its process does anything."""

from dataclasses import replace

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.launch.slots import visible_gpus
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.trackers.sending import check_installed
from mingpt_ddp.storage.urls import check_urls


def checked_config(cfg: DictConfig) -> Config:
    """Return the configuration that Hydra has composed, typed, with the number of workers.

    Raises:
        ConfigError, CodeError: a key, a value or a user's file is invalid.
    """
    config = hydra_utils.to_config(cfg, HydraConfig.get(), HydraConfig.get().overrides.task)
    if config.ddp.nproc_per_node == "gpu":
        config = replace(config, ddp=replace(config.ddp, nproc_per_node=_count_gpus()))
    check_urls(config)
    check_installed(config.tracker)
    return config


def _count_gpus() -> int:
    count = len(visible_gpus())
    if count == 0:
        raise ConfigError(
            "ddp.nproc_per_node=gpu, but torch sees no GPU here; give a number of workers"
        )
    return count
