"""`mingpt-ddp snapshots list`, `verify` and `prune`, on local directories and object stores."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tracemalloc
from pathlib import Path

import pytest
import torch
from snapshot_helpers import commit, filled, model_snapshot

from mingpt_ddp.snapshots.format import (
    MANIFEST,
    MODEL,
    Snapshot,
    decode_manifest,
    directory_name,
    encode_manifest,
)
from mingpt_ddp.snapshots.write.store import SnapshotStore


def flip_bit(store: SnapshotStore, step: int, name: str = MODEL) -> None:
    """Flip a bit at the end of a file of this snapshot."""
    path = f"{directory_name(step)}/{name}"
    content = store.storage.read(path)
    store.storage.write(path, content[:-1] + bytes([content[-1] ^ 1]))


def cells(out: str) -> dict[int, list[str]]:
    """Return the cells of each row of the table, by step."""
    return {int(row[0]): row[1:] for line in out.splitlines()[2:] if (row := line.split())}


# list


def test_list_shows_all_snapshots(run, call):
    store = filled(run, 4, 8, 12, 16)
    store.storage.delete(f"{directory_name(8)}/{MANIFEST}")
    store.storage.delete(f"{directory_name(12)}/{MODEL}")
    for url in (run, f"{run}/", f"{run}/snapshots"):
        code, out, err = call("list", url)
        assert (code, err) == (0, "")
        rows = cells(out)
        states = ["whole", "unfinished", "damaged", "whole"]
        assert [rows[step][0] for step in (4, 8, 12, 16)] == states
        assert rows[4][4:8] == ["3", "2.5000", "2.2500", "*"]
        assert rows[16][3:7] == ["4", "3", "2.5000", "2.2500"] and "*" not in rows[16]
        assert rows[16][-2].startswith("2001-09-0")
    assert list(cells(call("list", f"{run}/snapshots/step_00000016")[1])) == [16]


@pytest.mark.parametrize("run", ["file"], indirect=True)
def test_list_reads_no_tensors(run, call):
    """This file claims to have 8 TiB, so reading it would never end."""
    store = filled(run, 4)
    snapshot = Path(run, "snapshots", directory_name(4))
    files = decode_manifest((snapshot / MANIFEST).read_bytes(), 4)
    files[MODEL]["bytes"] = 1 << 43
    os.truncate(snapshot / MODEL, 1 << 43)
    store.storage.write(f"{directory_name(4)}/{MANIFEST}", encode_manifest(4, files))
    assert cells(call("list", run)[1])[4][0] == "whole"


def test_control_characters_are_not_printed(run, call):
    store = SnapshotStore(f"{run}/snapshots")
    honest = model_snapshot(4)
    forged = {
        "train_loss": "\x1b[2J",
        "val_loss": 10**400,
        "best_step": [4],
        "world_size": {},
        "saved_at": 1e14,
    }
    commit(store, Snapshot(4, honest.model, honest.optimizer, {"train_state": forged}))
    code, out, _ = call("list", run)
    assert code == 0 and "\x1b" not in out
    assert cells(out)[4][4:] == ["-", "-", "-", "-"]


@pytest.mark.parametrize(
    "command", [["list"], ["verify"], ["prune", "keep_last=1"], ["export", "to=x", "step=4"]]
)
def test_no_snapshots(command, run, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in (run, f"{run}/snapshots/step_00000004"):
        if command[0] == "prune" and "step_" in url:
            continue
        code, out, err = call(command[0], url, *command[1:])
        assert (code, out, err.count("\n")) == (2, "", 1)
        none = rf"there (are no|is no whole) snapshots? at {url}(, which does not exist)?;"
        unfinished = f"{url} cannot be used: it was never finished$"
        assert re.match(f"snapshot error: ({none}|{unfinished})", err)


# verify


def test_verify_reads_every_byte(run, call):
    store = filled(run, 4, 8)
    store.storage.write("step_00000009/state.json", b"{}")
    code, out, err = call("verify", run)
    assert (code, err) == (0, "")
    expected = [("4", "whole"), ("8", "whole"), ("9", "it was never finished")]
    assert out.splitlines() == [
        f"{run}/snapshots/step_0000000{step}: {word}" for step, word in expected
    ]
    flip_bit(store, 8)
    assert cells(call("list", run)[1])[8][0] == "whole"  # list checks sizes only
    code, out, err = call("verify", run)
    assert (
        code == 1 and "step_00000008: damaged: model.safetensors does not have the content" in out
    )
    assert call("verify", f"{run}/snapshots/step_00000004")[0] == 0
    assert call("verify", f"{run}/snapshots/step_00000008")[0] == 1


def test_verify_takes_little_memory(tmp_path, call):
    size = 1 << 26
    store = SnapshotStore(str(tmp_path))
    commit(store, Snapshot(4, {"w": torch.zeros(size, dtype=torch.uint8)}, {}, {}))
    tracemalloc.start()
    try:
        assert call("verify", tmp_path)[0] == 0
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()


# prune


def test_prune_keeps_the_last_and_the_best(run, call):
    store = filled(run, 2, 4, 6, 8)
    code, out, err = call("prune", run, "keep_last=1")
    assert (code, err) == (0, "")
    assert store.steps() == [4, 8]
    assert [line for line in out.splitlines() if line.startswith("deleting")] == [
        f"deleting {store.url}/step_0000000{step}" for step in (2, 6)
    ]
    assert call("prune", run, "keep_last=1", "keep_best=false")[0] == 0
    assert store.steps() == [8]


def test_prune_keeps_milestones(run, call):
    store = filled(run, 2, 3, 6, 8)
    assert call("prune", run, "keep_last=1", "keep_best=false", "keep_every=3")[0] == 0
    assert store.steps() == [3, 6, 8]


@pytest.mark.parametrize("run", ["file"], indirect=True)
@pytest.mark.parametrize("kind", ["path", "link"])
def test_other_directories_are_untouched_unless_named(kind, run, call, tmp_path):
    """A run directory may come from a stranger. Then neither the paths in its config.yaml nor the
    targets of its links are to be trusted.
    """
    victim = SnapshotStore(f"{tmp_path}/victim/run" if kind == "path" else f"{tmp_path}/victim")
    for step in (4, 8):
        commit(victim, model_snapshot(step))
    (tmp_path / "run").mkdir()
    if kind == "path":
        recorded = {"run": {"name": "run"}, "snapshot": {"path": f"{tmp_path}/victim"}}
        (tmp_path / "run" / "config.yaml").write_text(json.dumps(recorded))
    else:
        (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "victim")
    where = victim.url if kind == "path" else f"{run}/snapshots"
    commands = [["list"], ["verify"], ["prune", "keep_last=1", "keep_best=false"]]
    for name, *keys in commands:
        assert call(name, run, *keys) == (
            2,
            "",
            f"snapshot error: there are no snapshots at {run}; "
            f"the run saves them at {where}: name that URL\n",
        )
    commit(SnapshotStore(run), model_snapshot(2))
    for name, *keys in commands:
        code, out, err = call(name, run, *keys)
        assert (code, err) == (0, "") and victim.url not in out
        assert victim.steps() == [4, 8]
    for name, *keys in commands:
        code, out, err = call(name, where, *keys)
        assert (code, err) == (0, "") and where in out
    assert victim.steps() == [8]


def test_prune_never_deletes_the_newest_valid_snapshot(run, call):
    """A damaged snapshot does not count towards those to keep, even if its sizes are right."""
    store = filled(run, 2, 6, 8, 10)
    for step in (8, 10):
        flip_bit(store, step)
    assert call("prune", run, "keep_last=1", "keep_best=false")[0] == 0
    assert 6 in store.steps() and 2 not in store.steps()
    flip_bit(store, 6)
    before = store.steps()
    code, out, err = call("prune", run, "keep_last=1")
    assert (code, out) == (2, "") and "there is no whole snapshot" in err
    assert store.steps() == before


def test_a_refused_prune_leaves_no_lock(tmp_path, call):
    (tmp_path / "run" / "snapshots" / "step_00000004").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = call("prune", str(tmp_path / "run"), "keep_last=1")
    assert code == 2 and "prune has deleted nothing" in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("run", ["file"], indirect=True)
@pytest.mark.parametrize("below", ["", "/snapshots"])
def test_prune_refuses_while_the_run_is_running(below, run, call, tmp_path):
    store = filled(run, 4, 8)
    (tmp_path / "run" / "config.yaml").write_text("{}")
    with open(tmp_path / "run" / ".lock", "a+") as lock:
        lock.write("process 7 on there\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, err = call("prune", f"{run}{below}", "keep_last=1", "keep_best=false")
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert "is locked by process 7 on there, which is still running; wait until it ends" in err
        assert "run.name" not in err
        assert store.steps() == [4, 8]
    assert call("prune", f"{run}{below}", "keep_last=1", "keep_best=false")[0] == 0
    assert store.steps() == [8]


# Arguments


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["lst", "x"], "config error: lst is not a command; did you mean list?"),
        (["list"], "config error: url is missing; give it a value"),
        (["list", ""], "config error: url is empty; name a run directory"),
        (["list", "x", "keep_last=1"], "config error: keep_last is not a key"),
        (
            ["verify", "nosuch://x"],
            "config error: url=nosuch://x: the protocol nosuch:// is unknown",
        ),
        (["verify", "s3://a:b@c/d"], "config error: url contains credentials"),
        (["export", "nowhere", "to=s3://a:b@c/d"], "config error: to contains credentials"),
        (["list", "dir://x"], "config error: url=dir://x: dir:// needs more than a URL"),
        (["prune", "x"], "config error: keep_last is missing"),
        (
            ["prune", "x", "keep_last=0"],
            "config error: keep_last=0 must be greater than or equal to 1",
        ),
        (
            ["prune", "x", "keep_last=1", "keep_best=1"],
            "config error: keep_best=1 must be true or false",
        ),
        (
            ["prune", "x/step_00000004", "keep_last=1"],
            "config error: x/step_00000004 is a single snapshot",
        ),
        (["export", "x"], "config error: to is missing"),
        (["export", "x", "to=s3://b/c"], "config error: to=s3://b/c must be a new local directory"),
        (
            ["export", "x", "somewhere"],
            "config error: somewhere does not have the form key=value; the keys are to",
        ),
        (
            ["export", "x", "to=y", "step=last"],
            "config error: step='last' must be a whole number or 'newest' or 'best'",
        ),
        (
            ["export", "x", "to=y", "format=zip"],
            "config error: format='zip' must be 'safetensors' or 'hf'",
        ),
        (
            ["export", "x", "to=y", "format=torch"],
            "config error: format='torch' must be 'safetensors' or 'hf'",
        ),
        (
            ["export", "\x1b[2J", "to=y"],
            r"snapshot error: there is no whole snapshot at \x1b[2J, which does not",
        ),
    ],
)
def test_an_error_is_one_line(args, expected, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*args)
    assert (code, out) == (2, "")
    assert err.startswith(expected) and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
