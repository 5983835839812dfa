"""Helpers for Hydra: register the schema, run a task, read the command line, write overrides."""

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import main as hydra_main
from hydra import utils
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from mingpt_ddp import __version__
from mingpt_ddp.config.compose.hydra_internals import patched_argument_parser
from mingpt_ddp.config.config import default_values
from mingpt_ddp.config.hints import known_keys, suggest
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.errors import ConfigError, with_commands

# Hydra 1.4 has a list of the `_target_` values that a configuration may have. The list would refuse
# users' own callbacks. It would protect nobody, because presets may also name Python files to run.
UNCHECKED = getattr(utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
WHITELIST: dict[str, Any] = {} if UNCHECKED is None else {"execution_whitelist": UNCHECKED}
# Hydra 1.3 warns if version_base is missing, and Hydra 1.4 warns if it is given.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if UNCHECKED is None else {}
FLAGS_WITH_VALUE = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
SWITCHES = ("--help", "--hydra-help", "--version", "--resolve", "--run", "--multirun", "--info")
# Options with which Hydra prints a text instead of calling the task.
PRINTING_OPTIONS = ("--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
SWEEPER = "hydra_plugins.mingpt_ddp_sweeper.JobSweeper"
FLAGS = (
    *SWITCHES,
    "--cfg",
    "--package",
    "--shell-completion",
    "--experimental-rerun",
    *FLAGS_WITH_VALUE[::2],
)


@dataclass
class JobSweeperConf:
    """The keys of `hydra.sweeper`, as in Hydra's own sweeper. All other keys are in `sweep`."""

    _target_: str = SWEEPER
    params: dict[str, str] | None = field(default_factory=dict)


def _store_defaults() -> None:
    """Register the schema's defaults with Hydra, so that YAML files need not repeat them.

    conf/mingpt_ddp.yaml begins with `schema`, which has the defaults of all groups that have only
    one dataclass. Each preset of the other groups begins with the defaults of its own dataclass, as
    in `defaults: [/schema/model/gpt@_here_]`. Presets of data begin with the defaults of
    `data/text`. Without `@_here_`, the defaults would only reach groups at the top of a
    configuration.

    Users can register keys for the groups with several dataclasses. Hydra therefore accepts any key
    in these groups without a +. `from_mapping` refuses keys that nobody has registered.
    """
    store = ConfigStore.instance().store
    single: dict[str, Any] = {}
    for group, (keys, classes) in GROUPS.items():
        if not keys:
            single[group] = default_values(classes[None])
            continue
        single[group] = OmegaConf.create({}, flags={"struct": False})
        for name, cls in classes.items():
            node = default_values(cls)
            if name is not None:
                node[keys[0]] = name
            package = f"_global_.{group}"
            store(group=f"schema/{group}", name=name or "text", package=package, node=node)
    store(name="schema", node=single)
    store(group="hydra/sweeper", name="mingpt_ddp", node=JobSweeperConf)


_store_defaults()


def config_directory() -> Path:
    """Return the directory conf/ of the checkout, or its copy in an installed package."""
    package = Path(__file__).resolve().parents[2]
    installed = (package / "conf").resolve()  # in a checkout this is a link
    return installed if installed.is_dir() else package.parent / "conf"


def run_hydra(task: Callable[[DictConfig], Any]) -> str:
    """Compose the configuration and call `task` with it. With -m, call it for each job.

    Returns:
        The text that an option of Hydra such as --cfg prints instead. "" without such an option.

    Raises:
        Exception: An error of `task`, or an error of Hydra, which `explain` turns into one line.
    """
    run = hydra_main(str(config_directory()), "config", **VERSION_BASE, **WHITELIST)(task)
    if not {word.partition("=")[0] for word in sys.argv[1:]} & {*PRINTING_OPTIONS}:
        with patched_argument_parser():
            run()
        return ""
    with patched_argument_parser(), contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            run()
        except SystemExit as end:  # the exit code is 0 after --hydra-help
            if end.code:
                sys.stderr.write(printed.getvalue())
                raise
    return printed.getvalue().rstrip("\n")


def answer(argv: list[str]) -> str | None:
    """Return the text for --help or --version, or None if the command line starts a run."""
    if {"-h", "--help"} & {*argv}:
        return with_commands(Path(__file__).with_name("help.txt").read_text())
    return f"mingpt_ddp {__version__}" if "--version" in argv else None


def reorder_argv(argv: list[str]) -> list[str]:
    """Move overrides after all flags, as Hydra's parser requires."""
    flags: list[str] = []
    overrides: list[str] = []
    for previous, word in zip(["", *argv], argv, strict=False):
        if re.match(r"[^-][^=]*=", word) and previous not in FLAGS_WITH_VALUE:
            overrides.append(word)
        else:
            flags.append(word)
    # Without a value, --info would take the first override as its value.
    if flags and flags[-1] in ("--info", "-i"):
        flags[-1] = "--info=all"
    return flags + overrides


def check_options(argv: list[str]) -> None:
    """Check that Hydra has all options of a command line. Suggest a key instead of a wrong option.

    Raises:
        ConfigError: Hydra does not have an option. The message names the first such option.
    """
    for word, following in zip(argv, [*argv[1:], "-"], strict=False):
        name, _, value = word.partition("=")
        matching = [flag for flag in FLAGS if flag.startswith(name)]
        if not word.startswith("--") or name in matching or len(matching) == 1:
            continue
        key = name.lstrip("-").replace("-", "_")
        if key not in known_keys():
            raise ConfigError(f"{name} is not an option{suggest(key)}")
        if not value and not following.startswith("-"):
            value = following
        raise ConfigError(f"{name} is not an option; write {key}={value or 'VALUE'}")


def is_external(launcher: str) -> bool:
    """Return True if a launcher is not Hydra's own. Such a launcher starts processes for jobs."""
    return not launcher.startswith("hydra._internal.")


def key_of(override: str) -> str:
    """Return the key of an override: model.n_layer for `+model.n_layer=2`."""
    return override.partition("=")[0].lstrip("+~")


def key_of_group(key: str) -> str:
    """Shorten a key to group.key: model.part_settings for model.part_settings.window."""
    return ".".join(key.split(".")[:2])


def config_flags(hydra: Any) -> list[str]:
    """Rebuild the options --config-name, --config-path and --config-dir of a command line.

    Args:
        hydra: The `hydra` node of the configuration that the command line composed.
    """
    flags = []
    name = hydra["job"]["config_name"]
    if name != "config":
        flags.append(f"--config-name={name}")
    for source in hydra["runtime"]["config_sources"]:
        provider = source["provider"]
        path = Path(source["path"])
        if provider == "command-line":
            flags.append(f"--config-dir={path}")
        elif provider == "main" and path != config_directory() and os.path.isdir(path):
            # Unlike Path.is_dir, os.path.isdir never raises.
            flags.append(f"--config-path={path}")
    return flags


def hydra_value(value: Any) -> str:
    """Format a value as text that Hydra's override grammar parses to the same value."""
    if isinstance(value, list):
        return f"[{','.join(map(hydra_value, value))}]"
    # Hydra does not accept quoted keys.
    if isinstance(value, dict) and all(str(key).isidentifier() for key in value):
        pairs = [f"{key}:{hydra_value(each)}" for key, each in value.items()]
        return f"{{{','.join(pairs)}}}"
    if not isinstance(value, str):
        return json.dumps(value, default=str)  # str() formats a date in an edited file
    return QuotedString(literal(value), Quote.double).with_quotes()


def literal(text: str) -> str:
    """Escape interpolations, such as `${oc.env:HOME}`, which OmegaConf would replace."""
    return re.sub(r"(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", text)
