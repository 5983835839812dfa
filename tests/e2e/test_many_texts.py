"""Train on many texts, and check that each command can read the long configuration."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from launching import TINY, python_main, with_code
from runs import fail, recorded_config, succeed

FILES = 250  # the names are long, since Hydra's time grows with the number of files
TRAIN = [*python_main(), "--config-dir=conf", "data=many", *TINY, "data.truncate=1.0"]


@pytest.fixture(scope="module")
def cwd(tmp_path_factory) -> Path:
    """Train a run, and resume it once. Return its working directory."""
    cwd = tmp_path_factory.mktemp("many")
    texts = cwd / f"a_collection_of_{'many_' * 40}texts"
    texts.mkdir()
    lines = ["defaults: [text_file, _self_]", "name: many", f"path: {texts}", "sources:"]
    for number in range(FILES):
        text = texts / f"the_text_{number:04d}.txt"
        text.write_text(f"{number} is a number, and this is a text about the number {number}.\n")
        lines.append(f"  - [{text}, 1.0]")
    preset = cwd / "conf" / "data" / "many.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("\n".join(lines))
    assert preset.stat().st_size > 1 << 16
    for steps in (4, 6):
        train(cwd, f"trainer.max_steps={steps}", "run.name=run")
    return cwd


def train(cwd: Path, *words: str) -> str:
    text = succeed([*TRAIN, *words], cwd)
    return str(text)


def module(cwd: Path, name: str, *words: str) -> str:
    command = [sys.executable, "-m", "mingpt_ddp", name, *words]
    text = succeed(command, cwd)
    return str(text)


def test_the_second_start_has_resumed_and_recorded_what_differs(cwd):
    run = cwd / "outputs" / "run"
    assert len(recorded_config(run)["data"]["sources"]) == FILES
    assert recorded_config(run)["trainer"]["max_steps"] == 6
    assert (run / "config.2.yaml").exists()
    assert "resuming from the snapshot of step 4 of 6" in (run / "main.rank0.log").read_text()
    log = (run / "main.rank0.log").read_text()
    assert re.search(r"trainer\.max_steps +4 +6$", log, re.MULTILINE)


def test_commands_can_use_the_snapshots(cwd):
    assert module(cwd, "sample", "outputs/run", "prompt=1", "max_new_tokens=5").startswith("1")
    assert '"loss"' in module(cwd, "evaluate", "outputs/run")
    module(cwd, "snapshots", "export", "outputs/run", "to=exported")
    assert (cwd / "exported" / "model.safetensors").exists()
    replayed = module(cwd, "replay", "outputs/run", "steps=2")
    assert "confirmed: steps 5 to 6" in replayed


def test_commands_can_use_the_run_directory(cwd):
    assert "after 6 steps" in module(cwd, "again", "outputs/run")
    [job] = json.loads(module(cwd, "report", "outputs/run", "format=json"))["groups"][0]["jobs"]
    assert job["status"] == "complete"
    report = module(cwd, "report", "outputs/run")
    assert "mingpt_ddp again outputs/run" in report and "cannot be read" not in report


def test_a_sweep_trains_nothing_twice(cwd):
    words = ["-m", "trainer.max_steps=4", "run.name=sweep", "optimizer.lr=1e-3,3e-3"]
    assert "2 jobs, 0 already complete" in train(cwd, *words)
    assert "2 jobs, 2 already complete" in train(cwd, *words)


def test_a_configuration_that_could_not_be_read_is_refused(cwd):
    """It is refused before anything is written.

    The limit is lower than usual, since Hydra would read a really long configuration for half a
    minute.
    """
    limit = f"from mingpt_ddp.storage import yaml_and_json as y\ny.MAX_YAML_EVENTS = {4 * FILES}\n"
    text = fail([*TRAIN, "run.name=refused"], cwd, PYTHONPATH=with_code(cwd / "site", limit))
    line = text.strip().splitlines()[-1]
    assert line.startswith("config error: the recorded configuration could not be read again")
    assert not (cwd / "outputs" / "refused").exists()
