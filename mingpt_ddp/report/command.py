"""The command line that trains a job's configuration once more."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
from pathlib import Path

from mingpt_ddp.config import OPTIMIZERS
from mingpt_ddp.report.runs import UNREADABLE, Job, parse
from mingpt_ddp.report.values import Listed, Value


def command_line(job: Job) -> str:
    """`python main.py key=value ...`, quoted for the shell and for Hydra.

    It composes to the configuration of the job's last start. Only run.name is another where the job is one of a sweep:
    that names the directory of all jobs.
    """
    recorded = _recorded(job.directory / ".hydra")
    flags, words = recorded if recorded is not None else ([], _every_key(job))
    name = job.config.get("run.name")
    if isinstance(name, str) and job.directory.name != name:
        words = [word for word in words if not re.match(r"\+{0,2}run\.name=", word)]
        tail = re.search(r"-([0-9a-f]{8})$", job.directory.name)
        digest = tail[1] if tail else hashlib.sha256(job.name.encode(errors="replace")).hexdigest()[:8]
        words.append(f"run.name={hydra_value(f'{name[:120]}-best-{digest}')}")
    return shlex.join(["python", "main.py", *flags, *words])


def _recorded(directory: Path) -> tuple[list[str], list[str]] | None:
    """Flags and overrides of the last start, as Hydra has recorded them; None where there is no record."""
    try:
        words = parse(directory / "overrides.yaml")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return None
    except UNREADABLE:
        return None
    with contextlib.suppress(*UNREADABLE, KeyError, TypeError):
        sources = parse(directory / "hydra.yaml")["hydra"]["runtime"]["config_sources"]
        added = [str(source["path"]) for source in sources if source["provider"] == "command-line"]
        return [word for path in added for word in ("--config-dir", path)], words
    return [], words


def _every_key(job: Job) -> list[str]:
    """For a job without a record of its command line: all that it was configured with."""
    optimizer = job.config.get("optimizer.name")
    chosen = [f"optimizer={optimizer}"] if optimizer in OPTIMIZERS else []
    return [*chosen, *(f"++{key}={hydra_value(value)}" for key, value in job.config.items() if "." in key)]


def hydra_value(value: Value) -> str:
    """The value as Hydra's grammar of overrides reads it back."""
    if not isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Listed):
        return f"[{','.join(map(hydra_value, json.loads(value)))}]"
    word = re.fullmatch(r"[A-Za-z_/][A-Za-z0-9_./:-]*", value)
    if word and value.lower() not in ("null", "true", "false", "nan", "inf"):
        return value
    text = re.sub(r"(\\*)(\$\{)", lambda match: f"{match[1] * 2}\\{match[2]}", value)  # no interpolation
    text = re.sub(r"(\\*)'", lambda match: f"{match[1] * 2}\\'", text)
    return "'" + re.sub(r"(\\+)$", lambda match: match[1] * 2, text) + "'"
