"""Rebuild the command line of a job."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from mingpt_ddp.config.hydra_utils import config_flags
from mingpt_ddp.storage.run_dir import load_yaml
from mingpt_ddp.storage.storage import read_regular
from mingpt_ddp.sweeps.runs import Job, Value

NO_COMMAND = "there is no command line for it: its configuration cannot be read, and with it the run.name to continue"
LARGEST = 1 << 16  # bytes of a record of Hydra's
WITHOUT_PRESETS = ("~model", "~optimizer")  # their keys differ from preset to preset


def command_line(job: Job) -> str | None:
    """Return `python main.py key=value ...`, quoted for the shell and for Hydra; None where run.name is not known.

    It composes to the configuration of the job's last start, run.name included: it continues the job, or trains it
    again under another run.name. Where there is no main.py it is `python -m mingpt_ddp ...`.
    """
    if "run.name" not in job.config:  # the overrides alone may have the name of the sweep, which is another run
        return None
    overrides = _read_record(job.directory, "overrides")
    if isinstance(overrides, list) and all(isinstance(override, str) for override in overrides):
        words = [*_flags(job.directory), *overrides]
    else:
        words = [*WITHOUT_PRESETS, *(f"++{key}={hydra_value(value)}" for key, value in job.config.items())]
    name = job.config["run.name"]
    if isinstance(name, str) and "/" in name:  # a job of a sweep, whose overrides have the name of the sweep
        words = [word for word in words if not re.match(r"\+{0,2}run\.name=", word)]
        words.append(f"run.name={hydra_value(name)}")
    program = ["main.py"] if Path("main.py").exists() else ["-m", "mingpt_ddp"]
    return shlex.join(["python", *program, *words])


def _read_record(directory: Path, name: str) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return load_yaml(read_regular(directory / ".hydra" / f"{name}.yaml", LARGEST))


def _flags(directory: Path) -> list[str]:
    """Return --config-name, --config-path and --config-dir as the job was started with."""
    with contextlib.suppress(KeyError, TypeError):
        return config_flags(_read_record(directory, "hydra")["hydra"])
    return []


def hydra_value(value: Value) -> str:
    """Write the value so that Hydra's grammar of overrides reads it back."""
    if isinstance(value, list):
        return f"[{','.join(map(hydra_value, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    without_interpolation = re.sub(r"(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", value)
    return QuotedString(without_interpolation, Quote.double).with_quotes()
