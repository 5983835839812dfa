"""docs/configuration.md and --help agree with the schema of the configuration."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
from launching import ROOT, call, python_main

from mingpt_ddp.config.keys.schema import GROUPS

spec = importlib.util.spec_from_file_location(
    "config_reference", ROOT / "scripts" / "config_reference.py"
)
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


@pytest.mark.parametrize("path", reference.FILES, ids=lambda path: path.name)
def test_files_are_up_to_date(path):
    assert path.read_text() == reference.FILES[path](), "run: python scripts/config_reference.py"


def test_help_has_every_key_with_unit_default_and_meaning(tmp_path):
    lines = call([*python_main(), "experiment=demo", "--help"], tmp_path).stdout.splitlines()
    for group, (_, classes) in GROUPS.items():
        for field in (field for cls in classes.values() for field in dataclasses.fields(cls)):
            (line, *_) = [line for line in lines if line.startswith(f"  {group}.{field.name}=")]
            assert field.metadata["description"] in line or len(classes) > 1
    assert (
        "  trainer.log_every=10                   Interval between log lines. "
        "(steps: whole number >= 1)"
    ) in lines
    assert (
        "  optimizer.betas=[0.9, 0.99]            Decay per step of the first and the second "
        "moment. (list of 2: number >= 0, < 1)"
    ) in lines
    assert (
        "  model      gpt2 gpt_micro gpt_mini gpt_nano modern_micro modern_mini modern_nano"
    ) in lines
