"""The configuration of another Hydra application, as a job."""

from typing import Any

from omegaconf import DictConfig

from mingpt_ddp.config.compose.hydra_internals import full_key
from mingpt_ddp.config.compose.resolve import application_state
from mingpt_ddp.config.config import LATER_GROUPS, to_plain
from mingpt_ddp.config.hints import suggest
from mingpt_ddp.config.job import job_json
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.errors import ConfigError

OPTIONAL = {*LATER_GROUPS, "sweep"}  # which a recorded configuration may lack


def application_job(cfg: DictConfig, nproc: int | str | None = None) -> str:
    """Return the job of a composed configuration as JSON.

    The keys that the application's command line sets are among it: of two limits, one that is
    typed counts alone.

    Args:
        cfg: all of the application's configuration, whose other keys are its own, or the node that
            holds the groups and nothing else.
        nproc: replaces ddp.nproc_per_node; None: as the configuration says.

    Raises:
        ConfigError: a group is missing, the node has another key, or a value cannot be resolved.
    """
    node = full_key(cfg)
    for key in map(str, cfg if node else ()):
        if key not in GROUPS:
            raise ConfigError(f"{node}.{key} is not a key{suggest(key)}")
    values = _groups(cfg)
    if missing := [group for group in GROUPS if group not in {*values, *OPTIONAL}]:
        raise ConfigError(
            f"{node or 'the configuration'} has no group {', '.join(missing)}; compose mingpt_ddp, "
            "and give train the node that holds its groups (docs/python.md)"
        )
    if nproc is not None:
        values["ddp"]["nproc_per_node"] = nproc
    typed, directories = application_state()
    prefix = f"{node}." if node else ""
    own = {key.removeprefix(prefix) for key in typed if key.startswith(prefix)}
    return job_json(values, own, directories)


def _groups(cfg: DictConfig) -> dict[str, Any]:
    """Return the groups of a configuration as plain values."""
    groups = {}
    for group in GROUPS:
        if group in cfg and isinstance(cfg[group], DictConfig):
            groups[group] = to_plain(cfg[group])
    return groups
