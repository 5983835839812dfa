"""Write the model of a snapshot to a new directory, in a form that other programs read."""

import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from mingpt_ddp.cli.arguments import echo
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import RunError
from mingpt_ddp.snapshots.load import Step
from mingpt_ddp.storage.storage import atomic_write, sync_directory


@dataclass(frozen=True)
class ExportConfig:
    url: str
    to: str  # a local directory that does not exist yet
    step: Step = "newest"
    format: Literal["safetensors", "torch", "hf"] = "safetensors"
    license: str | None = None

    def __post_init__(self) -> None:
        check(
            self.license is None or _is_license(self.license),
            f"license={self.license} must be an identifier in lower case, as in apache-2.0 or mit",
        )
        is_local = bool(self.to.strip()) and "://" not in self.to
        check(is_local, f"to={self.to} must be a new local directory")


def _is_license(text: str) -> bool:
    """Return whether a text is an identifier, and one that YAML reads as text, unlike `no`."""
    is_identifier = re.fullmatch(r"[a-z][a-z0-9.-]{1,49}", text)
    return bool(is_identifier) and type(yaml.safe_load(text)) is str


def export(config: ExportConfig) -> int:
    """Write the weights and their description to a new directory, atomically."""
    # torch takes a second to import: only after the keys are validated.
    from mingpt_ddp.snapshots.export import export_files

    target = Path(config.to)
    check(not os.path.lexists(target), f"to={config.to} already exists; name a new directory")
    step, files = export_files(config.url, config.step, config.format, config.to, config.license)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        for name, content in files.items():
            atomic_write(partial / name, content)
        os.rename(partial, target)
        sync_directory(target.parent)
    except OSError as error:
        raise RunError(f"cannot write to {config.to}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    echo(f"step {step} is in {target}: {', '.join(files)}")
    return 0
