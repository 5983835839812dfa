"""This version resumes run directories that the first version with format 2 has written.

Files in tests/data/format2 are never changed or renamed. If a test fails here, users would lose
their runs.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from make_format2 import DATA, MORE_STEPS, RUNS, STEPS, configuration, hashes, train

from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.metrics.jsonl import METRICS, read_history
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.format import MANIFEST, MODEL, STATE, encode_manifest
from mingpt_ddp.snapshots.manager import RunState, SnapshotManager
from mingpt_ddp.snapshots.read.load_model import load_model
from mingpt_ddp.snapshots.state_dict import model_state, optimizer_state
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.run_directory import read_result, recorded_config
from mingpt_ddp.tasks import build_task
from mingpt_ddp.training.saves.resume import check_state, restore
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.trainable import build_trainable

OPTIMIZER = "optimizer.safetensors"
pytestmark = pytest.mark.usefixtures("one_thread")

NEWEST = Path("run", "snapshots", f"step_{STEPS:08d}")


@pytest.fixture(params=sorted(path.name for path in DATA.iterdir()))
def name(request, tmp_path, monkeypatch) -> str:
    """Copy a recorded directory to the working directory. Return its name."""
    shutil.copytree(DATA / request.param, tmp_path / "cwd")
    monkeypatch.chdir(tmp_path / "cwd")
    return request.param


@pytest.fixture
def expected(name) -> dict:
    return json.loads((DATA / name / "expected.json").read_text())


def contents() -> dict[str, bytes]:
    """Return the contents of all files in the working directory, except the text cache, by path."""
    return {
        str(p): p.read_bytes() for p in Path().rglob("*") if p.is_file() and p.parts[0] != "cache"
    }


def test_the_sample_is_complete_and_small():
    assert {path.name for path in DATA.iterdir()} == RUNS.keys()
    assert sum(path.stat().st_size for path in DATA.rglob("*")) < 200_000


def test_the_tensors_are_the_recorded_ones(name, expected):
    snapshot = SnapshotStore("run/snapshots").read(STEPS)
    assert hashes(snapshot.model) == expected["model"]
    assert hashes(snapshot.optimizer) == expected["optimizer"]
    assert snapshot.state["train_state"]["step"] == STEPS
    SnapshotStore("run/snapshots").verify(STEPS)


def test_saving_again_gives_the_same_bytes(name):
    """The snapshot is restored into a model and an optimizer with other initial values."""
    config = configuration(name, MORE_STEPS)
    runtime = Runtime(config, DistEnv())
    task = build_task(config, runtime.group)
    manager = SnapshotManager(config, runtime, SnapshotStore("run/snapshots"), Path("run"))
    snapshot = manager.load_latest(partial(check_state, task=task))
    trainable = build_trainable(runtime, task)
    model = trainable.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    state = restore(snapshot, trainable, runtime.scaler)
    assert asdict(state) == asdict(TrainState()) | snapshot.state["train_state"]
    assert state.step == STEPS and state.saved_at > 0
    again = SnapshotManager(config, runtime, SnapshotStore("again"), Path("again"))
    tensors = {
        "model": model_state(model),
        "optimizer": optimizer_state(model, trainable.optimizer),
    }
    again.save(RunState(STEPS, snapshot.state, tensors, None))
    again.wait()
    for file in (MODEL, OPTIMIZER):
        assert Path("again", NEWEST.name, file).read_bytes() == (NEWEST / file).read_bytes(), file


def test_training_resumes(name, expected):
    """On any CPU, the losses are within 1e-4 of the recorded ones."""
    assert read_result(Path("run"))["step"] == STEPS
    assert recorded_config(Path("run"))["trainer"]["max_steps"] == STEPS
    before = read_history(Path("run", METRICS))
    assert before.series("train_loss") == [
        (n, expected["train_loss"][str(n)]) for n in range(1, STEPS + 1)
    ]
    losses = train(name, MORE_STEPS)
    assert losses == pytest.approx(expected["train_loss"], abs=1e-4)
    assert [row["step"] for row in read_history(Path("run", METRICS)).rows][-1] == MORE_STEPS
    assert read_result(Path("run"))["status"] == "complete"


def test_additions_of_a_later_version_are_ignored(name, expected):
    """It may add a key in state.json, a field in manifest.json, or a file."""
    store = SnapshotStore("run/snapshots")
    state = json.loads((NEWEST / STATE).read_text()) | {"added_later": [1, {"a": None}]}
    state["train_state"]["added_later"] = 0.5
    added = {STATE: json.dumps(state).encode(), "added_later.json": b"{}"}
    files = store.files(STEPS) | store.write_files(STEPS, added)
    store.write_files(STEPS, {MANIFEST: encode_manifest(STEPS, files, added_later="9.9")})
    store.verify(STEPS)
    assert train(name, MORE_STEPS) == pytest.approx(expected["train_loss"], abs=1e-4)


def test_recorded_keys_of_an_earlier_version_are_ignored(name, expected, caplog):
    """One log line names the keys that are ignored, because they no longer exist."""
    store = SnapshotStore("run/snapshots")
    state = json.loads((NEWEST / STATE).read_text())
    state["config"]["trainer"]["removed"] = 1
    state["config"]["model"]["removed"] = None
    files = store.files(STEPS)
    files |= store.write_files(STEPS, {STATE: json.dumps(state).encode()})
    store.write_files(STEPS, {MANIFEST: encode_manifest(STEPS, files)})
    with caplog.at_level("INFO"):
        assert train(name, MORE_STEPS) == pytest.approx(expected["train_loss"], abs=1e-4)
    assert (
        "the recorded configuration has keys that this version does not know, and ignores: "
        in caplog.text
    )
    assert "model.removed" in caplog.text and "trainer.removed" in caplog.text
    load_model("run")


def test_loading_only_the_model(name, expected):
    model, tokenizer = load_model("run")
    assert hashes(model_state(model)) == expected["model"]
    text = Path("text.txt").read_text()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_run_of_format_1_is_refused_before_anything_is_written(name):
    values = json.loads((NEWEST / MANIFEST).read_text())
    old = {"format": 1, "step": values["step"], "files": values["files"]}
    (NEWEST / MANIFEST).write_text(json.dumps(old, indent=1))
    before = contents()
    with pytest.raises(
        SnapshotError,
        match=r"step 4 was written by an earlier version, in format 1; start again with",
    ):
        train(name, MORE_STEPS)
    assert contents() == before
