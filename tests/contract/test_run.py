"""Check a complete run: its directory, a second start, the snapshot tools, sampling and the report."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from .contract import (
    MAIN,
    REPORT,
    SAMPLE,
    SNAPSHOT_FILES,
    SNAPSHOTS,
    STEPS,
    call,
    check_not_trained_twice,
    committed,
    contains_value,
    digests,
    last_step,
    load_tensors,
    one_error_line,
    records,
    result,
    settings,
    succeed,
    tensorboard,
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def complete(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run on two ranks. Return its working directory; tests that change it use a copy."""
    cwd = tmp_path_factory.mktemp("complete")
    succeed([*MAIN, "ddp.nproc_per_node=2", *settings(text, snapshot__keep_last=3)], cwd)
    return cwd


@pytest.fixture
def complete_copy(complete: Path, tmp_path: Path) -> Path:
    shutil.copytree(complete, tmp_path / "cwd")
    return tmp_path / "cwd"


def test_the_run_directory(complete: Path) -> None:
    run = complete / "outputs" / "run"
    reported = result(run)
    assert {"wall_seconds", "epoch", "train_loss"} < set(reported)
    assert (reported["status"], reported["step"], reported["world_size"]) == ("complete", STEPS, 2)
    assert reported["tokens"] == STEPS * 24 * 64
    assert reported["bits_per_char"] == pytest.approx(reported["val_loss"] / math.log(2))
    assert reported["best_val_loss"] <= reported["val_loss"] < 2.5, "the model has not learned"
    for name in ("config.yaml", "main.rank0.log", "main.rank1.log"):
        assert (run / name).stat().st_size > 0, name
    assert {path.name for path in (run / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["n_embd"] == 48
    assert config["trainer"]["max_steps"] == STEPS
    assert [step for step, _ in records(run)] == list(range(1, STEPS + 1))
    for rank in (0, 1):
        assert [step for step, _ in tensorboard(run, rank)] == list(range(1, STEPS + 1))
    for step in committed(run):
        snapshot = run / "snapshots" / f"step_{step:08d}"
        assert {path.name for path in snapshot.iterdir()} == SNAPSHOT_FILES
        manifest = (snapshot / "manifest.json").read_text()
        json.loads(manifest)
        for name in SNAPSHOT_FILES - {"manifest.json"}:
            assert hashlib.sha256((snapshot / name).read_bytes()).hexdigest() in manifest, name
    assert committed(run)[-1] == STEPS


def test_run_again_and_with_a_larger_limit(complete_copy: Path, text: Path) -> None:
    """A complete run is not trained again, whatever the number of ranks. A larger limit resumes it."""
    run = complete_copy / "outputs" / "run"
    before, reported, steps = digests(run), result(run), records(run)
    output = succeed([*MAIN, *settings(text, snapshot__keep_last=3)], complete_copy)
    assert contains_value(output, reported["val_loss"]), "the result is not printed"
    assert records(run) == steps
    assert digests(run) == before
    for key in ("status", "step", "val_loss", "best_val_loss"):
        assert result(run)[key] == reported[key], key
    succeed([*MAIN, *settings(text, snapshot__keep_last=3, trainer__max_steps=STEPS + 4)], complete_copy)
    assert (result(run)["status"], result(run)["step"]) == ("complete", STEPS + 4)
    assert last_step(run) == STEPS + 4
    check_not_trained_twice(run, STEPS + 4)


def test_snapshot_tools(complete_copy: Path, tmp_path: Path) -> None:
    run = complete_copy / "outputs" / "run"
    steps = committed(run)
    assert len(steps) >= 3
    listed = succeed([*SNAPSHOTS, "list", str(run)], tmp_path)
    assert all(str(step) in listed.split() for step in steps), listed
    succeed([*SNAPSHOTS, "verify", str(run)], tmp_path)

    succeed([*SNAPSHOTS, "export", str(run), f"to={tmp_path / 'exported'}"], tmp_path)
    assert {"model.safetensors", "config.json"} <= {path.name for path in (tmp_path / "exported").iterdir()}
    json.loads((tmp_path / "exported" / "config.json").read_text())
    exported = load_tensors(tmp_path / "exported" / "model.safetensors")
    original = load_tensors(run / "snapshots" / f"step_{STEPS:08d}" / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(exported[name].equal(original[name]) for name in original)

    kept = digests(run)
    succeed([*SNAPSHOTS, "prune", str(run), "keep_last=2", "keep_best=false"], tmp_path)
    assert committed(run) == steps[-2:]
    assert digests(run) == kept

    damaged = run / "snapshots" / f"step_{steps[-2]:08d}" / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    assert call([*SNAPSHOTS, "verify", str(run)], tmp_path).returncode == 1
    succeed([*SNAPSHOTS, "verify", str(run / "snapshots" / f"step_{STEPS:08d}")], tmp_path)


def test_a_damaged_snapshot_is_never_resumed_from(complete_copy: Path, text: Path) -> None:
    """If the newest snapshot is damaged, the run resumes from the one before it and ends with the same bytes."""
    run = complete_copy / "outputs" / "run"
    before, steps = digests(run), committed(run)
    path = run / "snapshots" / f"step_{STEPS:08d}" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    succeed([*MAIN, "ddp.nproc_per_node=2", *settings(text, snapshot__keep_last=3)], complete_copy)
    check_not_trained_twice(run, steps[-2])
    assert digests(run) == before


@pytest.fixture(scope="module")
def sample(complete: Path) -> Callable[..., str]:
    """Return a function that runs sample.py with arguments and returns its standard output."""

    def run_sample(*args: str) -> str:
        options = ["max_new_tokens=120", "device=cpu", "precision=fp32", *args]
        return succeed([*SAMPLE, "snapshot=outputs/run", *options], complete)

    return run_sample


def test_sampling(sample: Callable[..., str]) -> None:
    """A sample is the prompt and the requested number of characters, which may exceed the context length.

    The same seed gives the same sample.
    """
    prompt = "prompt=the king"
    first = sample(prompt, "seed=1")
    assert first.startswith("the king")
    assert len(first) == len("the king") + 120 + len("\n")
    assert sample(prompt, "seed=1") == first
    assert sample(prompt, "seed=2") != first


@pytest.mark.parametrize("args", [["prompt=the k\u00efng"], ["prompt=the", "temprature=1"], ["prompt=the", "top_k=0"]])
def test_sampling_refuses(args: list[str], complete: Path) -> None:
    done = call([*SAMPLE, "snapshot=outputs/run", *args], complete)
    assert done.returncode == 2
    one_error_line(done.stdout)


def test_report(complete_copy: Path) -> None:
    output = succeed([*REPORT, "outputs/run"], complete_copy)
    assert contains_value(output, result(complete_copy / "outputs" / "run")["val_loss"])
    assert (complete_copy / "outputs" / "run" / "report.html").stat().st_size > 1000
