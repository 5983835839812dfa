"""Turn the configuration of another Hydra application into a job."""

from typing import Any

from omegaconf import DictConfig

from mingpt_ddp.config.compose.hydra_internals import full_key
from mingpt_ddp.config.compose.resolve import application_state
from mingpt_ddp.config.config import GROUPS_ADDED_LATER, to_plain
from mingpt_ddp.config.hints import suggest
from mingpt_ddp.config.job import job_json
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.errors import ConfigError

OPTIONAL_GROUPS = {*GROUPS_ADDED_LATER, "sweep"}  # groups that a recorded configuration may lack


def application_job(cfg: DictConfig, nproc: int | str | None = None) -> str:
    """Return the job of a composed configuration as JSON.

    The job also records the keys that the application's command line has set. A limit from the
    command line, such as trainer.max_steps, replaces all other limits.

    Args:
        cfg: The whole configuration of the application, which may contain other keys. Or the node
            that holds this package's groups and nothing else.
        nproc: Replaces ddp.nproc_per_node. None keeps the configured value.

    Raises:
        ConfigError: A group is missing, the node has a key that is not a group, or a value cannot
            be resolved.
    """
    node = full_key(cfg)
    for key in map(str, cfg if node else ()):
        if key not in GROUPS:
            raise ConfigError(f"{node}.{key} is not a key{suggest(key)}")
    values = _groups(cfg)
    if missing := [group for group in GROUPS if group not in {*values, *OPTIONAL_GROUPS}]:
        raise ConfigError(
            f"{node or 'the configuration'} does not have the group {', '.join(missing)}; compose "
            "the configuration mingpt_ddp, and pass the node with its groups to train "
            "(docs/python.md)"
        )
    if nproc is not None:
        values["ddp"]["nproc_per_node"] = nproc
    application_keys, directories = application_state()
    prefix = f"{node}." if node else ""
    command_line_keys = {
        key.removeprefix(prefix) for key in application_keys if key.startswith(prefix)
    }
    return job_json(values, command_line_keys, directories)


def _groups(cfg: DictConfig) -> dict[str, Any]:
    """Return the groups of a configuration as plain values."""
    groups = {}
    for group in GROUPS:
        if group in cfg and isinstance(cfg[group], DictConfig):
            groups[group] = to_plain(cfg[group])
    return groups
