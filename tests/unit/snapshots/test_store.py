"""A snapshot is either complete or does not exist.

If the newest snapshot is damaged, the previous one is used.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from snapshot_helpers import commit, small_snapshot

import mingpt_ddp
from mingpt_ddp.cli.commands.snapshots import verify_step
from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.snapshots import format as format_module
from mingpt_ddp.snapshots.format import (
    MANIFEST,
    MIN_SHARD_BYTES,
    MODEL,
    STATE,
    CorruptSnapshotError,
    Snapshot,
    decode_manifest,
    directory_name,
    encode_manifest,
    step_of,
)
from mingpt_ddp.snapshots.write.retention import prune
from mingpt_ddp.snapshots.write.shard_plan import share_tensors
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.storage import Storage
from mingpt_ddp.storage.urls import open_storage

OPTIMIZER = "optimizer.safetensors"
FILES = [MODEL, OPTIMIZER, STATE, MANIFEST]


@pytest.fixture
def warnings():
    """The messages logged by the package at level WARNING and above."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("mingpt_ddp")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


def files_of(store: SnapshotStore, step: int) -> dict[str, bytes]:
    directory = open_storage(f"{store.url}/{directory_name(step)}")
    return {name: directory.read(name) for name in directory.list()}


# Write, read, find


def test_a_commit_is_recorded_just_before_it_if_all_files_are_complete(store):
    """A kill between the two then leaves no snapshot without its line in the ledger."""
    recorded = []
    record = lambda: recorded.append(store.is_committed(4))  # noqa: E731
    files = store.write_files(4, {MODEL: b"weights"})
    with pytest.raises(OSError, match="is missing"):
        store.commit(4, [{**files, OPTIMIZER: {"bytes": 1, "sha256": "0" * 64}}], record)
    assert recorded == []
    store.commit(4, [files], record)
    assert recorded == [False] and store.is_committed(4)


def test_write_and_read(store):
    """The directory has exactly four files. The same content gives the same bytes."""
    commit(store, small_snapshot(7))
    first = files_of(store, 7)
    commit(store, small_snapshot(7))
    assert store.storage.list() == ["step_00000007"]
    assert sorted(first) == sorted(FILES)
    assert files_of(store, 7) == first
    found = store.read(7)
    assert found.step == 7
    assert same(found.model, small_snapshot(7).model)
    assert same(found.optimizer, small_snapshot(7).optimizer)
    assert found.state == small_snapshot(7).state


def test_the_newest_is_found(store, warnings):
    assert store.read_latest() is None
    for step in (3, 10, 9):
        commit(store, small_snapshot(step))
    assert store.steps() == [3, 9, 10]
    assert store.read_latest().step == 10
    assert warnings == []


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_00000007", 7),
        ("step_123456789", 123456789),
        ("step_7", None),
        ("step_00000007.tmp", None),
        ("old_step_00000007", None),
        ("step_0000000x", None),
    ],
)
def test_directory_names(name, step):
    assert step_of(name) == step


def test_steps_sort_by_number_beyond_eight_digits(store):
    for step in (99_999_999, 100_000_000):
        commit(store, small_snapshot(step))
    assert store.read_latest().step == 100_000_000


def test_other_names_are_ignored(store):
    store.storage.write("notes.txt", b"x")
    commit(store, small_snapshot(7))
    prune(store, 1, None, 7)
    assert store.storage.list() == ["notes.txt", "step_00000007"]


# Failed deletions


def failing(url: str, calls: int) -> Storage:
    """Return a storage where `calls` writes or deletes succeed, and all later ones fail."""
    storage, left = open_storage(url), iter(range(calls))

    def limited(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            if next(left, None) is None:
                raise OSError("the connection broke")
            method(*args)

        return call

    for name in ("write", "delete"):
        setattr(storage, name, limited(getattr(storage, name)))
    return storage


@pytest.mark.parametrize("calls", range(2))
def test_a_partially_deleted_snapshot_does_not_exist(calls, store, warnings):
    for step in (1, 2):
        commit(store, small_snapshot(step))
    store.storage = failing(store.url, calls)
    with pytest.raises(OSError, match="connection"):
        prune(store, keep_last=1, best=None, newest=2)
    assert SnapshotStore(store.url).is_committed(1) == (calls == 0)
    assert SnapshotStore(store.url).read_latest().step == 2
    assert warnings == []


# Failed writes


# A commit deletes the old manifest and the old directory, then writes three files and the manifest.
@pytest.mark.parametrize("calls", range(6))
def test_a_failed_write_keeps_the_previous_snapshot(calls, store, warnings):
    commit(store, small_snapshot(4))
    store.storage = failing(store.url, calls)
    with pytest.raises(OSError, match="connection"):
        commit(store, small_snapshot(8))
    again = SnapshotStore(store.url)
    assert not again.is_committed(8)
    assert again.read_latest().step == 4
    assert warnings == []  # an unfinished snapshot causes no warning
    commit(again, small_snapshot(8))
    assert again.read_latest().step == 8
    assert sorted(files_of(again, 8)) == sorted(FILES)


@pytest.mark.parametrize("calls", range(6))
def test_a_failed_rewrite_never_mixes_old_and_new(calls, store):
    commit(store, small_snapshot(4))
    commit(store, small_snapshot(8))
    store.storage = failing(store.url, calls)
    other = small_snapshot(9)
    with pytest.raises(OSError, match="connection"):
        commit(store, Snapshot(8, other.model, other.optimizer, other.state))
    found = SnapshotStore(store.url).read_latest()
    assert found.step == (8 if calls == 0 else 4)
    assert same(found.model, small_snapshot(found.step).model)
    assert found.state == small_snapshot(found.step).state


# Damage


def truncated(data: bytes) -> bytes:
    return data[:-1]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [truncated, flipped])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_detected_and_the_previous_snapshot_is_used(name, damage, store, warnings):
    commit(store, small_snapshot(4))
    commit(store, small_snapshot(8))
    path = f"{directory_name(8)}/{name}"
    store.storage.write(path, damage(store.storage.read(path)))
    with pytest.raises(CorruptSnapshotError):
        store.read(8)
    found = store.read_latest()
    assert found.step == 4 and same(found.model, small_snapshot(4).model)
    assert len(warnings) == 1
    assert "\n" not in warnings[0]
    assert warnings[0].startswith(f"damaged snapshot {store.url}/step_00000008 is ignored: ")
    # A flipped digit in a manifest may be reported as damage of another file.
    assert name in warnings[0] or name == MANIFEST


def rewrite_manifest(store: SnapshotStore, /, **values: object) -> None:
    """Change values in the manifest of step 8, with a matching SHA-256 of the manifest itself."""
    path = f"{directory_name(8)}/{MANIFEST}"
    changed = {**json.loads(store.storage.read(path)), **values}
    changed.pop("sha256")
    digest = hashlib.sha256(json.dumps(changed, indent=1).encode()).hexdigest()
    store.storage.write(path, json.dumps({**changed, "sha256": digest}, indent=1).encode())


@pytest.mark.parametrize(
    "values",
    [
        {"step": 4},
        {"format": "2"},
        {"format": 1},
        {"format": None},
        {"files": {}},
        {"files": None},
        {"files": []},
        {"files": {MODEL: 1, OPTIMIZER: 1, STATE: 1}},
        {"files": {key: {"bytes": 1, "sha256": None} for key in (MODEL, OPTIMIZER, STATE)}},
        {"files": {key: {"bytes": "1", "sha256": "0"} for key in (MODEL, OPTIMIZER, STATE)}},
        {"files": {key: {"bytes": 1 << 25, "sha256": "0"} for key in (MODEL, OPTIMIZER, STATE)}},
    ],
)
def test_a_manifest_that_describes_something_else(values, store, warnings):
    commit(store, small_snapshot(4))
    commit(store, small_snapshot(8))
    rewrite_manifest(store, **values)
    assert store.read_latest().step == 4
    (warning,) = warnings
    assert re.search(r"manifest.json (is damaged|does not describe step 8 in format 2)$", warning)


SHARDS = ["model-0000{}-of-00002.safetensors", "optimizer-0000{}-of-00002.safetensors"]


@pytest.mark.parametrize("ema", [[], ["ema-0000{}-of-00002.safetensors"]])
def test_a_manifest_lists_all_shards_of_every_kind(ema):
    names = [STATE, *(name.format(shard) for name in SHARDS + ema for shard in (1, 2))]
    files = {name: {"bytes": 1, "sha256": "0"} for name in names}
    assert decode_manifest(encode_manifest(8, files), 8) == files
    hooks = {"hooks.safetensors": files[STATE]}
    assert decode_manifest(encode_manifest(8, files | hooks), 8) == files | hooks
    with pytest.raises(CorruptSnapshotError):  # the state of hooks is never sharded
        shard = {"hooks-00001-of-00002.safetensors": files[STATE]}
        decode_manifest(encode_manifest(8, files | shard), 8)
    for missing in names:
        with pytest.raises(CorruptSnapshotError):
            decode_manifest(
                encode_manifest(8, {name: files[name] for name in names if name != missing}), 8
            )


def test_tensors_are_assigned_to_the_least_loaded_writer():
    """There are at most as many shards as have the minimum size: 3 for 3.5 times that size."""
    sizes = {"a": 1.5, "b": 1.0, "c": 0.75, "d": 0.25}
    named = {
        name: torch.empty(int(size * MIN_SHARD_BYTES), dtype=torch.uint8)
        for name, size in sizes.items()
    }
    shares = share_tensors({"model": named, "optimizer": {}}, range(10, 17))
    assert shares.ranks == {"model": range(10, 13), "optimizer": range(10, 13)}
    assert [shares.writer("model", name) for name in named] == [10, 11, 12, 12]
    counts = [len(share_tensors({"model": named}, range(n)).ranks["model"]) for n in (1, 2, 3, 4)]
    assert counts == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("writers", "size", "expected"),
    [
        (1, 17, [["ema", "model", "optimizer"]]),
        (2, 17, [["ema", "model"], ["optimizer"]]),
        # Rank zero also writes the state and the manifest, so it has the smaller share.
        (2, 12, [["optimizer"], ["ema", "model"]]),
        (3, 17, [["model"], ["ema"], ["optimizer"]]),
        (8, 17, [["model"], ["ema"], ["optimizer"]]),
    ],
)
def test_writers_of_small_snapshots_share_the_kinds(writers, size, expected):
    tensors = {"model": weights_of(8), "optimizer": weights_of(size), "ema": weights_of(8)}
    by_rank: list[list[str]] = [[] for _ in range(writers)]
    for kind, [rank] in share_tensors(tensors, range(writers)).ranks.items():
        by_rank[rank].append(kind)
    assert [sorted(kinds) for kinds in by_rank if kinds] == expected


def weights_of(size: int) -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(size)}


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"format": 2}'])
def test_an_invalid_manifest(text, store, warnings):
    commit(store, small_snapshot(4))
    commit(store, small_snapshot(8))
    store.storage.write(f"{directory_name(8)}/{MANIFEST}", text.encode())
    assert store.read_latest().step == 4
    (warning,) = warnings
    assert warning.endswith("manifest.json is damaged")


def test_all_snapshots_are_damaged(store, warnings):
    """Starting at step 1 would overwrite snapshots that might be repairable."""
    for step in (4, 8):
        commit(store, small_snapshot(step))
        store.storage.write(f"{directory_name(step)}/{MODEL}", b"")
    with pytest.raises(SnapshotError, match=r"all snapshots at .* are damaged; move them away"):
        store.read_latest()
    assert len(warnings) == 2


def test_a_newer_format_is_not_reported_as_damage(store):
    commit(store, small_snapshot(4))
    commit(store, small_snapshot(8))
    rewrite_manifest(store, format=3)
    for look in (store.read_latest, store.newest_state):
        with pytest.raises(
            SnapshotError,
            match="step 8 was written by a newer version, in format 3; upgrade mingpt_ddp",
        ):
            look()


def write_manifest_of_format_1(store: SnapshotStore, step: int) -> bytes:
    """Replace the manifest of a snapshot by one of format 1."""
    path = f"{directory_name(step)}/{MANIFEST}"
    files = json.loads(store.storage.read(path))["files"]
    store.storage.write(
        path, json.dumps({"format": 1, "step": step, "files": files}, indent=1).encode()
    )
    return store.storage.read(path)


def test_an_older_format_is_refused_in_one_line(store):
    commit(store, small_snapshot(8))
    write_manifest_of_format_1(store, 8)
    for look in (
        store.read_latest,
        store.newest_state,
        lambda: store.verify(8),
        lambda: store.read_metadata(8),
    ):
        with pytest.raises(SnapshotError) as refused:
            look()
        assert str(refused.value) == (
            "snapshot error: the snapshot of step 8 was written by an earlier version, in "
            "format 1; start again with "
            "run.resume=never, or finish the run with that version"
        )


def test_if_the_newest_snapshot_is_damaged_the_format_of_the_one_before_counts(store):
    assert not store.newest_state()
    commit(store, small_snapshot(8))
    store.storage.write(f"{directory_name(8)}/{MANIFEST}", b"")
    assert not store.newest_state()
    commit(store, small_snapshot(4))
    assert store.newest_state()
    write_manifest_of_format_1(store, 4)
    with pytest.raises(SnapshotError, match="in format 1"):
        store.newest_state()


def test_fields_and_files_that_a_later_version_adds_are_ignored(store):
    """They are not read, but `verify` checks every byte of them."""
    commit(store, small_snapshot(8))
    files = store.files(8) | store.write_files(
        8, {"loader.json": b"{}", "moments.safetensors": b"later"}
    )
    rewrite_manifest(store, files=files, written_by={"version": "9.9"})
    assert store.newest_state()
    assert same(store.read(8).model, small_snapshot(8).model)
    store.verify(8)
    store.storage.write(f"{directory_name(8)}/moments.safetensors", b"Later")
    assert store.read(8).step == 8
    with pytest.raises(
        CorruptSnapshotError, match=r"moments\.safetensors does not have the content"
    ):
        store.verify(8)
    path = f"{directory_name(8)}/{MANIFEST}"
    store.storage.write(path, store.storage.read(path).replace(b"9.9", b"9.8"))
    with pytest.raises(CorruptSnapshotError):
        store.read(8)


# Any single damage to the bytes of a snapshot. Each shard of a snapshot is a separate file.

Bytes = dict[str, bytes]  # by file name


def bytes_of(directory: Path, step: int, parts: int, seed: int) -> Bytes:
    """Write a snapshot as `parts` ranks do. Return its files."""
    generator = torch.Generator().manual_seed(seed)
    named = {f"w{i}": torch.randn(4, generator=generator) for i in range(4)}
    moments = {f"{name}:exp_avg": tensor * 2 for name, tensor in named.items()}
    state = {"train_state": {"step": step}, "seed": seed}
    commit(SnapshotStore(str(directory)), Snapshot(step, named, moments, state), parts)
    files = {
        path.name: path.read_bytes()
        for path in sorted((directory / directory_name(step)).iterdir())
    }
    assert len(files) == 2 * parts + 2
    return files


@pytest.fixture(scope="module", params=[1, 3])
def snapshots(request, tmp_path_factory):
    """Write steps 4 and 8, and step 8 of another run. Return the directory and their files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_module, "MIN_SHARD_BYTES", 1)
        directory, other = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("other")
        old, new = (bytes_of(directory, step, request.param, seed=step) for step in (4, 8))
        return directory, old, new, bytes_of(other, 8, request.param, seed=99)


def damaged_somehow(data: st.DataObject, new: Bytes, old: Bytes, foreign: Bytes) -> Bytes:
    """Return the files of `new` after one is changed or deleted, or two are swapped."""
    files = dict(new)
    name = data.draw(st.sampled_from(sorted(new)), "file")
    content = new[name]
    what = data.draw(
        st.sampled_from(["flip", "cut", "append", "delete", "swap", "older", "foreign"]), "damage"
    )
    if what == "flip":
        bit = data.draw(st.integers(0, 8 * len(content) - 1), "bit")
        files[name] = (
            content[: bit // 8]
            + bytes([content[bit // 8] ^ 1 << bit % 8])
            + content[bit // 8 + 1 :]
        )
    elif what == "cut":
        files[name] = content[: data.draw(st.integers(0, len(content) - 1), "at")]
    elif what == "append":
        files[name] = content + data.draw(
            st.binary(min_size=1, max_size=20) | st.sampled_from([b"\n", b" "])
        )
    elif what == "delete":
        del files[name]
    elif what == "swap":
        other = data.draw(st.sampled_from(sorted(set(new) - {name})), "other")
        files[name], files[other] = files[other], files[name]
    else:
        files[name] = (old if what == "older" else foreign)[name]
    assume(files != new)
    return files


def lay(directory: Path, files: Bytes) -> None:
    """Make `directory` contain exactly these files."""
    for path in directory.iterdir():
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        if not (directory / name).exists() or (directory / name).read_bytes() != content:
            (directory / name).write_bytes(content)


def assert_noticed(directory: Path) -> None:
    """Check that the snapshot of step 8 is refused, and step 4 is used instead."""
    store = SnapshotStore(str(directory))
    with pytest.raises(CorruptSnapshotError):
        store.read(8)
    assert verify_step(store, 8) is not None
    found = SnapshotStore(str(directory)).read_latest()
    assert found.step == 4


@given(data=st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_single_damage_is_noticed(snapshots, data):
    directory, old, new, foreign = snapshots
    lay(directory / directory_name(8), damaged_somehow(data, new, old, foreign))
    try:
        assert_noticed(directory)
    finally:
        lay(directory / directory_name(8), new)
    assert SnapshotStore(str(directory)).read(8).step == 8
    assert verify_step(SnapshotStore(str(directory)), 8) is None


# Nothing is ever unpickled

PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNPICKLING = {"torch.load", "torch.save", "np.load", "yaml.load", "yaml.unsafe_load"}


def unpickling(node: ast.AST) -> bool:
    """Return True if a node imports a pickler, or calls a function that unpickles or runs text."""
    match node:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            modules = [alias.name for alias in names] + [getattr(node, "module", None) or ""]
            return not {name.split(".")[0] for name in modules}.isdisjoint(PICKLERS)
        case ast.Attribute(value=ast.Name(id=module), attr=attr) if (
            f"{module}.{attr}" in UNPICKLING
        ):
            return True
        case ast.Attribute(attr=attr):
            return attr.endswith(("_object", "_object_list"))
        case ast.Call(func=ast.Name(id=name)):
            return name in ("eval", "exec")
        case ast.keyword(arg="allow_pickle"):
            return True
    return False


def test_the_package_cannot_unpickle():
    """It does not use pickle, torch.load, numpy pickles, collectives of objects, or eval."""
    package = Path(mingpt_ddp.__file__).parent
    found = [
        f"{path.relative_to(package)}: {ast.unparse(node)[:60]}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if unpickling(node)
    ]
    [of_a_file_that_the_command_names] = found
    assert of_a_file_that_the_command_names.startswith("config/builders.py: exec(")


@pytest.mark.parametrize(
    "name, limit", [(STATE, "MAX_STATE_BYTES"), (MANIFEST, "MAX_MANIFEST_BYTES")]
)
def test_a_snapshot_that_could_not_be_read_is_not_committed(tmp_path, monkeypatch, name, limit):
    store = SnapshotStore(str(tmp_path))
    commit(store, small_snapshot(4))
    size = store.size(4, name)
    monkeypatch.setattr(format_module, limit, size)
    commit(store, small_snapshot(5))
    assert store.read(5).step == 5
    monkeypatch.setattr(format_module, limit, size - 1)
    with pytest.raises(OSError, match=rf"it has {size:,} bytes, but at most {size - 1:,} can be"):
        commit(store, small_snapshot(6))
    assert not store.is_committed(6)
