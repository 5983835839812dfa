"""Write the model of a snapshot to a new directory, in a format that other programs read."""

import itertools
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import RunError, reason
from mingpt_ddp.process.interrupts import raise_interrupts
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.snapshots.format import MANIFEST, step_of
from mingpt_ddp.snapshots.read.load import Step
from mingpt_ddp.storage.storage import atomic_write, sync_directory


@dataclass(frozen=True)
class ExportConfig:
    """The keys of the command `export`. The usage in snapshots.py describes them."""

    url: str
    to: str  # a local directory that does not exist yet
    step: Step = "newest"
    format: Literal["safetensors", "hf"] = "safetensors"
    license: str | None = None

    def __post_init__(self) -> None:
        check(
            self.license is None or _is_license(self.license),
            f"license={self.license} must be an identifier in lower case, such as apache-2.0 or "
            "mit",
        )
        is_local = bool(self.to.strip()) and "://" not in self.to
        check(is_local, f"to={self.to} must be a new local directory")


def _is_license(text: str) -> bool:
    """Return True if a text is an identifier that YAML reads as text. YAML reads `no` as false."""
    is_identifier = re.fullmatch(r"[a-z][a-z0-9.-]{1,49}", text)
    return bool(is_identifier) and type(yaml.safe_load(text)) is str


def _is_among_snapshots(target: Path) -> bool:
    """Return True if a directory would be in a place where a run keeps its snapshots."""
    path = target.resolve()
    for child, parent in itertools.pairwise([path, *path.parents]):
        has_snapshot_name = child.name == "snapshots" or step_of(child.name) is not None
        belongs_to_run = has_snapshot_name and (parent / "config.yaml").exists()
        if belongs_to_run or any(parent.glob(f"step_*/{MANIFEST}")):
            return True
    return False


def export(config: ExportConfig) -> int:
    """Write the weights and their description to a new directory, atomically."""
    # torch takes a second to import, so import it only after the keys are validated.
    from mingpt_ddp.snapshots.exports.export_files import export_files

    target = Path(config.to)
    check(not os.path.lexists(target), f"to={config.to} already exists; name a new directory")
    check(
        not _is_among_snapshots(target),
        f"to={config.to} is among the snapshots of a run, and would look like one of them; name a "
        "directory elsewhere",
    )
    step, files = export_files(config.url, config.step, config.format, config.license)
    raise_interrupts()  # so that Ctrl-C deletes the unfinished export
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        for name, content in files.items():
            atomic_write(partial / name, content)
        os.rename(partial, target)
        sync_directory(target.parent)
    except OSError as error:
        raise RunError(f"cannot write to {config.to}: {reason(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    echo(f"step {step} is in {target}: {', '.join(files)}")
    return 0
