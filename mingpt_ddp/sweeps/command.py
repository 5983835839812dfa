"""The command line that trains a job's configuration once more."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path

from mingpt_ddp.config.hydra_utils import config_directory
from mingpt_ddp.sweeps.runs import UNREADABLE, Job, parse
from mingpt_ddp.sweeps.values import Listed, Value

NO_COMMAND = "there is no command line for it: its configuration cannot be read, nor the run.name that continues it"


def command_line(job: Job) -> str | None:
    """`python main.py key=value ...`, quoted for the shell and for Hydra; None where nothing tells the run's name.

    `python -m mingpt_ddp ...` where there is no main.py.

    It composes to the configuration of the job's last start, with its run.name: it continues the job, or, with another
    run.name behind it, trains it anew.
    """
    if "run.name" not in job.config:  # the words alone may have the name of the sweep, or none: that is another run
        return None
    recorded = _recorded(job.directory / ".hydra")
    flags, words = recorded if recorded is not None else ([], _every_key(job))
    name = job.config["run.name"]
    if isinstance(name, str) and "/" in name:  # a job of a sweep, whose command line has the name of the sweep
        words = [word for word in words if not re.match(r"\+{0,2}run\.name=", word)]
        words.append(f"run.name={hydra_value(name)}")
    program = ["main.py"] if Path("main.py").exists() else ["-m", "mingpt_ddp"]
    return shlex.join(["python", *program, *flags, *words])


def _recorded(directory: Path) -> tuple[list[str], list[str]] | None:
    """Flags and overrides of the last start, as Hydra has recorded them; None where there is no record."""
    try:
        words = parse(directory / "overrides.yaml")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return None
    except UNREADABLE:
        return None
    flags: list[str] = []
    with contextlib.suppress(*UNREADABLE, KeyError, TypeError, AttributeError):
        hydra = parse(directory / "hydra.yaml")["hydra"]
        flags = _flags(hydra["runtime"]["config_sources"], hydra.get("job", {}).get("config_name"))
    return flags, words


def _flags(sources: list[dict[str, str]], name: str | None) -> list[str]:
    """Which YAML files the command line chose to compose from, where they are not those of the program."""
    flags = [f"--config-name={name}"] if name not in (None, "config") else []
    for source in sources:
        path = source["path"]
        if source["provider"] == "main" and Path(path) != config_directory() and Path(path).is_dir():
            flags.append(f"--config-path={path}")
        if source["provider"] == "command-line":
            flags.append(f"--config-dir={path}")
    return flags


def _every_key(job: Job) -> list[str]:
    """For a job without a record of its command line: all that it was configured with."""
    presets = [_preset("model", "architecture", job), _preset("optimizer", "name", job)]
    keys = (f"++{key}={hydra_value(value)}" for key, value in job.config.items() if "." in key)
    return [*filter(None, presets), *keys]


def _preset(group: str, selector: str, job: Job) -> str | None:
    """`group=preset` for one of ours that has the same keys, or None."""
    for path in sorted((config_directory() / group).glob("*.yaml")):
        if parse(path)[selector] == job.config.get(f"{group}.{selector}"):
            return f"{group}={path.stem}"
    return None


def hydra_value(value: Value) -> str:
    """The value as Hydra's grammar of overrides reads it back."""
    if not isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Listed):
        return f"[{','.join(map(hydra_value, json.loads(value)))}]"
    word = re.fullmatch(r"[A-Za-z_/][A-Za-z0-9_./:-]*", value)
    if word and value.lower() not in ("null", "true", "false", "nan", "inf"):
        return value
    quote = "'" if '"' in value else '"'
    for special in (re.escape("${"), quote):  # no interpolation, no end of the text
        value = re.sub(rf"(\\*)({special})", lambda match: f"{match[1] * 2}\\{match[2]}", value)
    return quote + re.sub(r"(\\+)$", lambda match: match[1] * 2, value) + quote
