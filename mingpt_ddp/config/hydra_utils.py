"""What Hydra composed, and what it says when it cannot: the command line, a sweep's job, errors in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mingpt_ddp.config.config import Config, from_mapping, plain, suggest
from mingpt_ddp.config.registry import attribute_errors_to_user_code, run_code
from mingpt_ddp.config.validation import did_you_mean

# Hydra's plugins that presets use, and the extras of setup.cfg that install them.
PLUGINS = {"optuna": "sweep", "submitit_slurm": "slurm", "submitit_local": "slurm", "ray": "ray"}


def config_directory() -> Path:
    """conf/ of the checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


VALUED = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")  # a value may follow as a word


def reorder_argv(words: list[str]) -> list[str]:
    """A command line with `key=value` behind all else, in whatever order it was typed: Hydra's parser needs it so."""
    before = ["", *words]
    moved = [i for i, word in enumerate(words) if re.match(r"[^-][^=]*=", word) and before[i] not in VALUED]
    flags = [word for i, word in enumerate(words) if i not in moved]
    if flags and flags[-1] in ("--info", "-i"):  # which would take the word behind it for a value
        flags[-1] = "--info=all"
    return flags + [words[i] for i in moved]


def to_config(cfg: DictConfig, hydra: Any) -> Config:
    """The configuration of a run, after running the user's own code that it names.

    Args:
        hydra: Hydra's own part of what it composed.

    Raises:
        ConfigError: anything that cannot work, as one line.
    """
    # The directories in which Hydra looks for YAML files.
    directories = [Path(s.path).absolute() for s in hydra.runtime.config_sources if s.schema == "file"]
    with attribute_errors_to_user_code():
        return from_mapping(run_code(plain(cfg), directories))


def is_multirun() -> bool:
    """Whether this is a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def job_number() -> int:
    """Counts the jobs of a sweep from 0; in lock-step all ranks do the same job at the same time."""
    return int(HydraConfig.get().job.num) if is_multirun() else 0


def key_of(word: str) -> str:
    """The key of an override: of `+model.n_layer=2` it is model.n_layer."""
    return word.partition("=")[0].lstrip("+~")


def swept_overrides() -> dict[str, str]:
    """The overrides of this job that differ from job to job, by key; `sweep.Start` says which do not."""
    hydra = HydraConfig.get()
    constant = set(hydra.job.config.override_dirname.exclude_keys)
    words = [word for word in hydra.overrides.task if key_of(word) not in constant]
    return {key_of(word): word.partition("=")[2] for word in words}


def job_label() -> str:
    return ", ".join("=".join(pair) for pair in swept_overrides().items()) or "the only job"


def worker_overrides() -> list[str]:
    """The command line that composes the configuration of this job once more, without a sweep around it."""
    hydra = HydraConfig.get()
    mine = ("hydra.mode", "hydra.sweep", "hydra.launcher", "hydra.job.config.override_dirname")
    kept = [word for word in hydra.overrides.hydra if not key_of(word).replace("/", ".").startswith(mine)]
    words = [f"--config-name={hydra.job.config_name}"]
    for source in hydra.runtime.config_sources:
        if source.provider == "main" and source.path != str(config_directory()):
            words.append(f"--config-path={source.path}")
        if source.provider == "command-line":
            words.append(f"--config-dir={source.path}")
    return [*words, *hydra.overrides.task, *kept, "hydra.mode=RUN"]


def hydra_artifacts(cfg: DictConfig) -> dict[str, str]:
    """What goes to the run's `.hydra/`, by file name."""
    hydra_config: Any = HydraConfig.instance().cfg
    return {
        "config.yaml": OmegaConf.to_yaml(cfg),
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.masked_copy(hydra_config, ["hydra"])),
        "overrides.yaml": OmegaConf.to_yaml(hydra_config.hydra.overrides.task),
    }


def explain(error: Exception) -> str:
    """Hydra's own errors as one line, with the key that was probably meant and without what may be a password."""
    text = str(error)
    plugin = re.search(r"Could not find '(hydra/(?:sweeper|launcher)/(\w+))'", text)
    if plugin and plugin[2] in PLUGINS:
        return f"{plugin[1]} is not installed; pip install 'mingpt_ddp[{PLUGINS[plugin[2]]}]'"
    override = re.search(r"Could not override '([^']+)'", text)
    if override:
        key = override[1].split("@")[0]
        return f"{key} is not a key{_suggest(key, error.__cause__)}"
    several = re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'(?: requires|\n)", text)
    if several:
        return f"{several[1]} has several values: add -m for a sweep, or write key=[a,b] for a list"
    if isinstance(error, OverrideParseException):
        text = f"cannot read {error.override!r}, quote special characters twice as in 'key=\"a=b\"': {text}"
    elif not isinstance(error, (HydraException, OmegaConfBaseException)):
        text = f"the command line or a configuration file cannot be understood ({type(error).__name__}: {text})"
    text = re.sub(r"^In '[^']*': |Config search path:.*|See https://hydra.cc.*", "", text, flags=re.DOTALL)
    return " ".join(re.sub(r"//[^/\s]*@", "//...", text).split())[:400]


def _suggest(key: str, cause: BaseException | None) -> str:
    """What was meant, among the keys of the chosen YAML file if it is one of those: they may be a user's own."""
    group, _, name = key.rpartition(".")
    node = getattr(cause, "parent_node", None)
    meant = did_you_mean(name, map(str, node)) if group and isinstance(node, DictConfig) else None
    return f"; did you mean {group}.{meant}?" if meant else suggest(key)
