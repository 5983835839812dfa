"""Snapshots are found by a run directory, a directory of snapshots, or one snapshot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from snapshot_helpers import commit, small_snapshot

from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.snapshots.format import MANIFEST, STATE, Snapshot, directory_name
from mingpt_ddp.snapshots.read.load import find_steps, load, refuse_other_location
from mingpt_ddp.snapshots.write.store import SnapshotStore


@pytest.mark.parametrize("slash", ["", "/"])
def test_load_takes_a_run_its_snapshots_or_one_of_them(slash, store):
    for step in (4, 8):
        commit(store, small_snapshot(step))
    assert load(store.url.removesuffix("/snapshots") + slash).step == 8
    assert load(store.url + slash).step == 8
    assert load(f"{store.url}/step_00000004{slash}").step == 4


def test_load_of_a_relative_step(tmp_path, monkeypatch):
    commit(SnapshotStore(str(tmp_path)), small_snapshot(4))
    monkeypatch.chdir(tmp_path)
    assert load("step_00000004").step == 4
    assert load(".").step == 4


@pytest.mark.parametrize(
    ("name", "directory"),
    [(None, "text-gpt-01234567"), ("run", "run"), ("run", "run-2"), ("sweep/lr=1", "sweep/lr=1")],
)
def test_load_finds_snapshots_in_the_recorded_path(name, directory, tmp_path, monkeypatch):
    """The directory below the recorded path has as many parts as run.name has."""
    run = tmp_path / "outputs" / directory
    run.mkdir(parents=True)
    commit(SnapshotStore(f"{tmp_path}/elsewhere/{directory}"), small_snapshot(4))
    for path in (f"{tmp_path}/elsewhere", f"{tmp_path}/elsewhere/"):
        (run / "config.yaml").write_text(
            json.dumps({"run": {"name": name}, "snapshot": {"path": path}})
        )
        assert load(str(run)).step == 4
    monkeypatch.chdir(run)
    assert load(".").step == 4


@pytest.fixture
def moved(tmp_path):
    """Return a run directory, and the stores that its first and its second start used."""
    (tmp_path / "run").mkdir()
    for number, place in (("", "first"), (".2", "second")):
        config = {"run": {"name": "run"}, "snapshot": {"path": f"{tmp_path}/{place}"}}
        (tmp_path / "run" / f"config{number}.yaml").write_text(json.dumps(config))
    return tmp_path / "run", *(SnapshotStore(f"{tmp_path}/{p}/run") for p in ("first", "second"))


def test_the_configuration_of_the_last_start_counts(moved):
    run, first, second = moved
    commit(first, small_snapshot(8))
    with pytest.raises(SnapshotError, match="there is no whole snapshot"):
        load(str(run))
    commit(second, small_snapshot(4))
    assert load(str(run)).step == 4


def test_snapshots_of_the_last_start_are_not_left_behind(moved, tmp_path):
    """A start at a location without snapshots names the location that has a complete one."""
    run, _, second = moved
    new = SnapshotStore(f"{tmp_path}/third/run")
    for earlier in (second, SnapshotStore(f"{run}/snapshots")):
        refuse_other_location(new, run)
        commit(earlier, small_snapshot(8))
        refuse_other_location(earlier, run)
        with pytest.raises(SnapshotError) as error:
            refuse_other_location(new, run)
        assert str(error.value) == (
            f"snapshot error: the run has snapshots at {earlier.url}, but none at {new.url}; add "
            f"run.resume={earlier.url} to continue from them, or choose another run.name"
        )
        earlier.storage.delete(f"{directory_name(8)}/{MANIFEST}")


def with_best(step: int, best: object) -> Snapshot:
    return replace(small_snapshot(step), state={"train_state": {"best_step": best}})


def test_load_of_the_best(store, tmp_path):
    """The newest readable snapshot records the best step, also if a single snapshot is given."""
    for step, best in ((2, None), (4, 4), (6, 4), (8, 6)):
        commit(store, with_best(step, best))
    run = store.url.removesuffix("/snapshots")
    assert [load(run, step=step).step for step in ("newest", "best", 2, 4)] == [8, 6, 2, 4]
    store.storage.write(f"{directory_name(8)}/{MANIFEST}", b"{}")
    store.storage.delete(f"{directory_name(6)}/{MANIFEST}")
    assert load(run, step="best").step == 4
    assert load(f"{store.url}/step_00000004", step="best").step == 4
    with pytest.raises(
        SnapshotError,
        match=r"there is no snapshot with step=5 at .*; the newest one is from step 8",
    ):
        load(run, step=5)


def test_the_location_of_the_last_start_comes_before_older_snapshots(moved):
    """Until that location has snapshots, those in the run directory are used."""
    run, _, second = moved
    older = SnapshotStore(f"{run}/snapshots")
    commit(older, with_best(8, 8))
    assert [load(str(run), step=step).step for step in ("newest", "best", 8)] == [8, 8, 8]
    commit(second, with_best(6, 6))
    assert [load(str(run), step=step).step for step in ("newest", "best", 6)] == [6, 6, 6]
    with pytest.raises(SnapshotError, match="there is no snapshot with step=8"):
        load(str(run), step=8)


@pytest.mark.parametrize("best", [None, [4], 4.0, "4"])
def test_load_of_the_best_without_one(best, store):
    commit(store, with_best(4, best))
    with pytest.raises(
        SnapshotError,
        match=r"there is no snapshot with step=best at .*; the newest one is from step 4",
    ):
        load(store.url, step="best")


def test_load_without_a_snapshot(store):
    with pytest.raises(SnapshotError, match="there is no whole snapshot at"):
        load(store.url)
    with pytest.raises(SnapshotError, match="step_00000004 cannot be used: it was never finished"):
        load(f"{store.url}/step_00000004")


def test_the_error_says_if_the_path_does_not_exist_or_has_no_snapshots(tmp_path):
    for path, reason in ((tmp_path / "nowhere", ", which does not exist"), (tmp_path, "")):
        for find in (load, find_steps):
            with pytest.raises(
                SnapshotError, match=f"there (is|are) no .* at {path}{reason}; name a run directory"
            ):
                find(str(path))


def test_load_of_a_damaged_step_names_the_file(store):
    """If a step is requested, no other step is loaded instead."""
    commit(store, small_snapshot(2))
    commit(store, small_snapshot(4))
    store.storage.write(f"{directory_name(4)}/{STATE}", b"{}")
    with pytest.raises(SnapshotError, match=r"step_00000004 cannot be used: state.json"):
        load(f"{store.url}/step_00000004")


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_find_steps_lists_unfinished_snapshots_too(store, tmp_path):
    for step in (4, 8):
        commit(store, small_snapshot(step))
    store.storage.delete(f"{directory_name(8)}/{MANIFEST}")
    for url, steps in (
        (f"{tmp_path}/run/", [4, 8]),
        (store.url, [4, 8]),
        (f"{store.url}/step_00000008", [8]),
    ):
        found, listed = find_steps(url)
        assert (found.url, listed) == (store.url, steps)
    with pytest.raises(SnapshotError, match="there are no snapshots at"):
        find_steps(f"{store.url}/step_00000005")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("reference://x", "reference:// needs more than a URL; use a directory or an object store"),
        ("nosuch://x", "the protocol nosuch:// is unknown; check its spelling"),
    ],
)
def test_a_recorded_url_that_cannot_be_opened_gives_one_line(path, reason, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        json.dumps({"run": {"name": "run"}, "snapshot": {"path": path}})
    )
    with pytest.raises(SnapshotError) as error:
        load(str(run))
    assert str(error.value) == f"snapshot error: cannot list snapshots: URL={path}/run: {reason}"
