"""Check `replay RUN steps=N`: it confirms a run, and finds damage that the manifest hides."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launching import PATIENCE_S, TINY, WITH_DIGITS, call, committed, python_main, wait_for
from runs import succeed, tool, write_files
from snapshot_helpers import edit_state, flip_bit
from user_code_page import page_files

LEDGER = "snapshots.jsonl"
SETTINGS = [
    *TINY,
    "trainer.max_steps=20",
    "trainer.eval_every=10",
    "trainer.ema=0.9",
    "model.dropout=0.1",
    "snapshot.every_steps=5",
    "snapshot.keep_best=false",
]
CANONICAL = ["ddp.reduction=canonical", "trainer.micro_batch_size=2", "trainer.batch_size=12"]


def train(cwd: Path, *words: str) -> Path:
    succeed([*python_main(), *SETTINGS, *words, "run.name=run"], cwd)
    return cwd / "outputs" / "run"


def replay(cwd: Path, *words: str) -> tuple[int, str]:
    """Replay a run. Return the exit code and the last line of the output."""
    command = tool("replay", "outputs/run", *words)
    done = call(command, cwd)
    return done.returncode, done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Train a run with canonical reduction on two ranks. Return its working directory."""
    cwd = tmp_path_factory.mktemp("recorded")
    train(cwd, *CANONICAL, "ddp.nproc_per_node=2")
    return cwd


@pytest.fixture
def copied(recorded, tmp_path) -> Path:
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    return tmp_path


def ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / LEDGER).read_text().splitlines()]


def hash_of(file: Path) -> str:
    """Hash the tensors of a file as docs/fault-tolerance.md describes."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    lines = []
    for name, tensor in json.loads(content[8:begin]).items():
        first, last = tensor["data_offsets"]
        digest = hashlib.sha256(content[begin + first : begin + last]).hexdigest()
        lines.append(f"{name} {tensor['dtype']} {tensor['shape']} {digest}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def test_the_ledger_outlives_the_snapshots(recorded):
    """The ledger has the hashes of all tensors that the ranks saved."""
    run = recorded / "outputs" / "run"
    lines = {line["step"]: line for line in ledger(run)}
    assert [*lines] == [5, 10, 15, 20]
    assert committed(run) == [15, 20]
    for step in (15, 20):
        for kind in ("model", "optimizer", "ema"):
            file = run / "snapshots" / f"step_{step:08d}" / f"{kind}.safetensors"
            assert lines[step][kind] == hash_of(file)


@pytest.mark.parametrize(
    ("steps", "ranks", "confirmed"), [(5, 3, "steps 16 to 20"), (15, 1, "steps 1 to 15")]
)
def test_a_replay_on_other_ranks_confirms_a_run(recorded, steps, ranks, confirmed):
    code, line = replay(recorded, f"steps={steps}", f"nproc_per_node={ranks}")
    assert line == (
        f"confirmed: {confirmed}, repeated with ddp.nproc_per_node={ranks}, give the recorded "
        "model, optimizer, ema"
    )
    assert code == 0


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_is_found_although_the_manifest_matches(copied, file):
    run = copied / "outputs" / "run"
    flip_bit(run / "snapshots" / "step_00000020", file)
    succeed(tool("snapshots", "verify", "outputs/run"), copied)  # the manifest matches the damage
    code, line = replay(copied, "steps=5")
    kind = file.removesuffix(".safetensors")
    assert line.startswith(f"refuted: the snapshot of step 20 holds another {kind}: SHA-256 ")
    assert code == 1


def test_the_lines_of_deleted_snapshots_count(copied):
    run = copied / "outputs" / "run"
    lines = ledger(run)
    lines[1]["model"] = lines[1]["optimizer"]
    (run / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, line = replay(copied, "steps=15")
    assert line.startswith("refuted: step 10, repeated from step 0, gives another model: ")
    assert code == 1, line


def test_a_replay_prints_its_steps_and_the_verdict(copied):
    """The losses of the replay are from other evaluations than those of the run."""
    (copied / "outputs" / "run" / LEDGER).unlink()
    command = tool("replay", "outputs/run", "steps=5")
    *steps, verdict = call(command, copied).stdout.strip().splitlines()
    assert steps
    assert all(line.startswith("step ") for line in steps), steps
    assert verdict.endswith(f"of the snapshot (there is no {LEDGER})")


def test_a_terminated_replay_leaves_no_files(copied):
    scratch = copied / "scratch"
    scratch.mkdir()
    command = tool("replay", "outputs/run", "steps=5")
    process = subprocess.Popen(command, cwd=copied, env={**os.environ, "TMPDIR": str(scratch)})
    lock = "mingpt_ddp-replay-*/replay/.lock"
    wait_for(lambda: [*scratch.glob(lock)] or process.poll() is not None, what="the replay")
    assert process.poll() is None
    process.terminate()
    assert process.wait(PATIENCE_S) == 130
    assert not list(scratch.glob("mingpt_ddp-*"))


def test_a_flipped_bit_is_found_without_the_ledger(copied):
    run = copied / "outputs" / "run"
    (run / LEDGER).unlink()
    flip_bit(run / "snapshots" / "step_00000020")
    code, line = replay(copied, "steps=5")
    assert line.startswith("refuted: step 20, repeated from step 15, gives another model: ")
    assert code == 1


def test_a_bit_that_flipped_while_a_run_trained_is_found_at_its_step(tmp_path):
    """Training continued from the flipped bit, so all files agree with each other."""
    run = train(tmp_path, *CANONICAL, "trainer.max_steps=10", "optimizer.schedule_steps=20")
    # The flip of a lower bit could be rounded away.
    flip_bit(run / "snapshots" / "step_00000010", bit=20)
    train(tmp_path, *CANONICAL, "optimizer.schedule_steps=20")
    assert [line["step"] for line in ledger(run)] == [5, 10, 15, 20]
    code, line = replay(tmp_path, "steps=20")
    assert line.startswith("refuted: step 15, repeated from step 0, gives another model: ")
    assert code == 1


def test_a_fast_run_is_repeated_on_as_many_ranks(tmp_path):
    train(tmp_path, "ddp.nproc_per_node=2", "ddp.strategy=zero1", "trainer.max_epochs=1")
    code, line = replay(tmp_path, "steps=5", "nproc_per_node=1")
    assert "the run had 2 ranks" in line and "set nproc_per_node=2" in line
    assert code == 2
    code, line = replay(tmp_path, "steps=5")
    assert line.startswith("confirmed: steps 16 to 20, repeated with ddp.nproc_per_node=2")
    code, line = replay(tmp_path, "steps=7")
    assert line.endswith(
        "no interval of 7 steps begins at a snapshot or at the start of the run, ends at a "
        "snapshot, and has the same settings throughout; set steps=5 (16 to 20) or "
        "steps=20 (1 to 20) or steps=15 (1 to 15)"
    )
    assert code == 2


def test_a_replay_needs_the_users_preset_again(tmp_path):
    write_files(tmp_path, page_files())
    preset = ["--config-dir=my_project", "model=lstm"]
    settings = [word for word in SETTINGS if not word.startswith("model")]
    succeed([*python_main(), *preset, *settings, "run.name=run"], tmp_path)
    code, line = replay(tmp_path, "steps=5")
    assert "model.architecture=lstm needs your own code; add the preset" in line
    assert code == 2
    code, line = replay(tmp_path, "steps=5", f"words={shlex.join(preset)}")
    assert line.startswith("confirmed: steps 16 to 20")


def test_steps_with_other_settings_are_not_mixed(tmp_path):
    """A longer run has another schedule, which its first steps did not use."""
    train(tmp_path, *CANONICAL, "trainer.max_steps=10")
    train(tmp_path, *CANONICAL)
    code, line = replay(tmp_path, "steps=20")
    assert line.endswith("has the same settings throughout; set steps=5 (16 to 20)")
    assert code == 2
    assert replay(tmp_path, "steps=5")[0] == 0


def test_an_optimizer_without_state_and_a_model_with_running_statistics(tmp_path):
    words = [
        WITH_DIGITS,
        "task=classification",
        "data=digits",
        "model=convnet",
        "optimizer=sgd",
        "optimizer.momentum=0",
        "optimizer.nesterov=false",
        "trainer.max_epochs=null",
        "trainer.max_steps=4",
        "snapshot.every_steps=2",
        "trainer.batch_size=12",
        "run.name=run",
    ]
    succeed([*python_main(), *words], tmp_path)
    preset = f"words='{WITH_DIGITS}' task=classification model=convnet data=digits"
    code, line = replay(tmp_path, "steps=2", preset)
    assert line.startswith("confirmed: steps 3 to 4")
    assert code == 0


def test_shards_of_tensors_are_compared(tmp_path):
    run = train(tmp_path, "ddp.strategy=fsdp", "ddp.nproc_per_node=2")
    assert not (run / LEDGER).exists()
    code, line = replay(tmp_path, "steps=5")
    assert line.startswith("confirmed: steps 16 to 20")
    flip_bit(run / "snapshots" / "step_00000020", "model-00002-of-00002.safetensors")
    code, line = replay(tmp_path, "steps=5")
    assert line.startswith("refuted: step 20, repeated from step 15, gives another model: ")
    assert code == 1


def test_a_difference_on_another_machine_is_undecided(copied):
    run = copied / "outputs" / "run"
    flip_bit(run / "snapshots" / "step_00000020")
    (run / LEDGER).unlink()
    for snapshot in (run / "snapshots").iterdir():
        code = {"files": {"gone.py": "0"}, "package": {"sha256": "0" * 64}}
        edit_state(snapshot, environment={"torch": "1.0"}, code=code)
    code, line = replay(copied, "steps=5")
    assert line.startswith("undecided: step 20, repeated from step 15, gives another model: ")
    assert "this does not prove damage, because torch was 1.0 and is 2." in line
    assert "; the code differs: gone.py, mingpt_ddp at " in line and "instead of 0000" in line
    assert code == 3
