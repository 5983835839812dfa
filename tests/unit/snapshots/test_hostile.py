"""A hostile snapshot runs no code, writes only in its directory, and uses bounded memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from tasks import text_task

from mingpt_ddp.cli.commands import sample as sample_module
from mingpt_ddp.cli.commands.export import ExportConfig, export
from mingpt_ddp.cli.commands.sample import SampleConfig, sample
from mingpt_ddp.cli.commands.snapshots import inspect, verify_step
from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import build_group, from_mapping, to_plain
from mingpt_ddp.errors import SnapshotError, printable
from mingpt_ddp.models import build_model
from mingpt_ddp.snapshots.format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_STATE_BYTES,
    MODEL,
    STATE,
    CorruptSnapshotError,
    directory_name,
    encode_manifest,
    load_json,
)
from mingpt_ddp.snapshots.read.load import load
from mingpt_ddp.snapshots.staging_buffer import encode
from mingpt_ddp.snapshots.state_dict import model_state
from mingpt_ddp.snapshots.tensor_index import decode
from mingpt_ddp.snapshots.write.retention import prune
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.training.saves.resume import check_state

OPTIMIZER = "optimizer.safetensors"
ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = "\n abc\x1b]0;x\x07\x9b"
LIMIT = 6 << 30  # bytes of address space, including what torch uses
PEAK = 1500  # MiB of resident memory, of which torch uses a few hundred


@pytest.fixture(scope="module")
def valid_files() -> dict[str, bytes]:
    """Return the files of a valid snapshot, without its manifest."""
    overrides = [
        "model=gpt_nano",
        "model.n_layer=2",
        "model.n_embd=12",
        "data.block_size=8",
        "trainer.device=cpu",
    ]
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        config = from_mapping(to_plain(compose("config", overrides)))
    torch.manual_seed(0)
    model = build_model(config.model, len(VOCABULARY), config.data.block_size)
    state = {"config": config.to_dict(), "vocabulary": VOCABULARY, "train_state": {"step": 8}}
    return {
        MODEL: bytes(encode(model_state(model))),
        OPTIMIZER: bytes(encode({"w:step": torch.tensor(8.0)})),
        STATE: json.dumps(state).encode(),
    }


def write_snapshot(
    parent: Path, files: dict[str, bytes], manifest: bytes | None = None, step: int = 8
) -> str:
    """Write the files with the given manifest, or a matching one. Return the snapshot's path."""
    directory = parent / directory_name(step)
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    listed = {
        n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()
    }
    (directory / MANIFEST).write_bytes(
        encode_manifest(step, listed) if manifest is None else manifest
    )
    return str(directory)


def with_config(valid_files: dict[str, bytes], group: str, **values: object) -> dict[str, bytes]:
    """Return the files with these values in the recorded configuration."""
    state = json.loads(valid_files[STATE])
    state["config"][group].update(values)
    return {**valid_files, STATE: json.dumps(state).encode()}


def refusal(url: str) -> str:
    """Return the error message when sampling from this snapshot."""
    with pytest.raises(SnapshotError) as error:
        sample(SampleConfig(url, max_new_tokens=1), "a")
    return str(error.value)


LIMITED = f"""
import json, os, resource, sys
import mingpt_ddp.inference.generate
from mingpt_ddp.cli.commands.sample import SampleConfig, sample
from mingpt_ddp.errors import UserError

def sample_each(urls):
    resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
    for url in urls:
        try:
            sample(SampleConfig(url, max_new_tokens=1), "a")
            print("accepted")
        except UserError as error:
            print(error)

for line in sys.stdin:
    if (child := os.fork()) == 0:
        sample_each(json.loads(line))
        # ru_maxrss would include the peak of the parent process before the fork.
        status = open("/proc/self/status").read()
        print("peak", int(status.partition("VmHWM:")[2].split()[0]) // 1024, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print("end", flush=True)
"""


@pytest.fixture(scope="module")
def sample_limited() -> Iterator[Callable[..., list[str]]]:
    """Return a function that samples from URLs. It returns the line printed for each.

    Each call runs in a fork with limited memory, and checks its peak memory.
    """
    command = [sys.executable, "-c", LIMITED]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **pipes)

    def call(*urls: str) -> list[str]:
        print(json.dumps(urls), file=process.stdin, flush=True)
        *lines, peak = iter(lambda: process.stdout.readline().rstrip("\n"), "end")
        name, megabytes = peak.split()
        assert name == "peak", peak
        assert int(megabytes) < PEAK
        return lines

    yield call
    process.stdin.close()
    process.wait()


def test_a_valid_snapshot_is_accepted(tmp_path, valid_files):
    url = write_snapshot(tmp_path, valid_files)
    assert verify_step(SnapshotStore(str(tmp_path)), 8) is None
    assert sample(SampleConfig(url, max_new_tokens=3), "a")[0].startswith("a")


# Names


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "model.pkl",
        "a/b",
        "",
        ".",
        "..",
        "model-00001-of-00002.safetensors",
    ],
)
def test_a_manifest_with_other_names_is_refused(name, tmp_path, valid_files):
    listed = {name if n == MODEL else n: {"bytes": 1, "sha256": "0" * 64} for n in valid_files}
    write_snapshot(tmp_path, valid_files, encode_manifest(8, listed))
    store = SnapshotStore(str(tmp_path))
    with pytest.raises(CorruptSnapshotError, match="does not describe"):
        store.read(8)
    assert "does not describe" in str(verify_step(store, 8))
    assert inspect(store, 8).status == "damaged"


@pytest.mark.parametrize(
    "name", ["../../victim", "a/b.json", ".json", "a", "model.pkl", "state.pkl", "manifest.json"]
)
def test_a_name_of_a_later_version_is_neither_a_path_nor_reserved(name, tmp_path, valid_files):
    listed = {n: {"bytes": 1, "sha256": "0" * 64} for n in [*valid_files, name]}
    write_snapshot(tmp_path, valid_files, encode_manifest(8, listed))
    with pytest.raises(CorruptSnapshotError, match="does not describe"):
        SnapshotStore(str(tmp_path)).read(8)


# Code


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("name", [MODEL, STATE, "model.pkl", "pytorch_model.bin"])
def test_a_pickle_is_never_run(name, tmp_path, valid_files):
    bomb = pickle.dumps(Bomb(str(tmp_path / "ran")))
    url = write_snapshot(
        tmp_path / "a", {**valid_files, name: bomb} if name in valid_files else valid_files
    )
    (Path(url) / name).write_bytes(bomb)
    if name in valid_files:
        assert "cannot be parsed" in refusal(url)
    else:  # files of this name are not read
        assert sample(SampleConfig(url, max_new_tokens=1), "a")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [RAN]]",
        "run: {name: null}\nsnapshot: {path: 'reference::RAN'}",
        "a: &a {x: 1}\nrun: {name: null}\nsnapshot: {path: *a}",
    ],
)
def test_paths_in_a_config_yaml_are_not_followed(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text.replace("RAN", str(tmp_path / "ran")))
    with pytest.raises(SnapshotError, match="there is no whole snapshot"):
        load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


# JSON


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_numbers_that_json_does_not_allow(number, tmp_path, valid_files):
    state = valid_files[STATE].replace(b'"step": 8', b'"step": ' + number)
    assert "cannot be parsed" in refusal(write_snapshot(tmp_path, {**valid_files, STATE: state}))
    with pytest.raises(ValueError, match=f"^{number.decode()} is not a JSON number$"):
        load_json(number)


@pytest.mark.parametrize("depth", [25, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deeply_nested_json(opening, closing, depth, tmp_path, valid_files):
    nested = opening * depth + b"1" + closing * depth
    with pytest.raises(ValueError, match=r"^it is nested too deeply$"):
        load_json(nested)
    assert "cannot be parsed" in refusal(
        write_snapshot(tmp_path / "a", {**valid_files, STATE: nested})
    )
    assert "manifest.json is damaged" in refusal(
        write_snapshot(tmp_path / "b", valid_files, nested)
    )


@pytest.mark.parametrize(
    "content", [b"[]", b"7", b"null", b'"text"', b"{}", b'{"config": {}, "vocabulary": "a"}']
)
def test_a_state_of_another_type(content, tmp_path, valid_files):
    message = refusal(write_snapshot(tmp_path, {**valid_files, STATE: content}))
    assert "has an invalid state" in message
    # The snapshot can be listed nevertheless.
    assert inspect(SnapshotStore(str(tmp_path)), 8).status == "whole"


@pytest.mark.parametrize("vocabulary", [["a" * 9] * 14, 7, None, {"a": 1}])
def test_a_vocabulary_that_is_not_text(vocabulary, tmp_path, valid_files):
    state = {**json.loads(valid_files[STATE]), "vocabulary": vocabulary}
    assert "has an invalid state" in refusal(
        write_snapshot(tmp_path, {**valid_files, STATE: json.dumps(state).encode()})
    )


# Tensors


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        (2**63).to_bytes(8, "little") + b"{}",
        (1 << 24).to_bytes(8, "little") + b"{}",
        header(b"{"),
        header(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
        header(b'{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'),
        header(b'{"w":{"dtype":"\\u001b[2J","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
        pickle.dumps({"w": 1}),
    ],
)
def test_forged_tensors_are_refused(content, tmp_path, valid_files):
    """test_pieces.py tests more headers."""
    with pytest.raises(ValueError):
        decode({MODEL: content})
    message = refusal(write_snapshot(tmp_path, {**valid_files, MODEL: content}))
    assert "cannot be parsed" in message
    assert printable(message) == message


def test_nonfinite_weights(tmp_path, valid_files):
    tensors = {
        name: torch.full_like(tensor, torch.nan)
        for name, tensor in decode({MODEL: valid_files[MODEL]}).items()
    }
    assert "cannot be used" in refusal(
        write_snapshot(tmp_path, {**valid_files, MODEL: bytes(encode(tensors))})
    )


def test_a_configuration_of_another_model_is_refused(tmp_path, valid_files):
    for i, values in enumerate([{"n_layer": 1}, {"n_layer": 3}, {"n_embd": 24}, {"bias": True}]):
        assert "not" in refusal(
            write_snapshot(tmp_path / str(i), with_config(valid_files, "model", **values))
        )
    for i, size in enumerate([9, 10**9, 2**62]):
        assert "do not fit" in refusal(
            write_snapshot(tmp_path / f"b{i}", with_config(valid_files, "data", block_size=size))
        )


# Memory


def modern_files(valid_files: dict[str, bytes], **values: object) -> dict[str, bytes]:
    """Return the files of a snapshot of the modern decoder, with these configuration values."""
    config = {
        "name": "modern",
        "architecture": "modern",
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 12,
        "dropout": 0.0,
    }
    model = build_model(build_group("model", config), len(VOCABULARY), 8)
    state = json.loads(valid_files[STATE])
    state["config"]["model"] = {**config, **values}
    return {
        **valid_files,
        MODEL: bytes(encode(model_state(model))),
        STATE: json.dumps(state).encode(),
    }


def test_no_config_value_makes_the_model_larger_than_its_tensors(
    tmp_path, valid_files, sample_limited
):
    forged = [
        with_config(valid_files, "model", n_layer=10**9),
        with_config(valid_files, "model", n_embd=12 * 10**8),
        modern_files(valid_files, n_embd=10_000),
        modern_files(valid_files, n_layer=1_000),
        with_config(valid_files, "data", block_size=10**12),
        with_config(valid_files, "model", name="x" * 10**7),
        {
            **valid_files,
            STATE: json.dumps(
                {**json.loads(valid_files[STATE]), "vocabulary": "a" * 10**7}
            ).encode(),
        },
    ]
    long_context = with_config(modern_files(valid_files), "data", block_size=10**30)
    urls = [write_snapshot(tmp_path / str(i), f) for i, f in enumerate([long_context, *forged])]
    accepted, *lines = sample_limited(*urls)
    assert accepted == "accepted"
    assert len(lines) == len(forged)
    assert all(
        line.startswith(
            ("snapshot error: the snapshot's ", "snapshot error: the snapshot has an invalid state")
        )
        and len(line) < 1000
        for line in lines
    ), lines


def sparse(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


def test_giant_files_are_not_read(tmp_path, valid_files, sample_limited):
    giant = 1 << 40  # size of a sparse file in bytes
    urls = [write_snapshot(tmp_path / str(i), valid_files) for i in range(5)]
    sparse(Path(urls[0]) / MANIFEST, giant)
    sparse(Path(urls[1]) / MODEL, giant)
    for url, name, size in (
        (urls[2], MODEL, giant),
        (urls[3], STATE, giant),
        (urls[4], STATE, MAX_STATE_BYTES + 1),
    ):
        sparse(Path(url) / name, size)
        listed = json.loads((Path(url) / MANIFEST).read_bytes())["files"]
        listed[name]["bytes"] = size
        (Path(url) / MANIFEST).write_bytes(encode_manifest(8, listed))
    (tmp_path / "run").mkdir()
    sparse(tmp_path / "run" / "config.yaml", giant)
    expected = [
        "is damaged",
        "wrong size",
        "larger than the memory",
        "does not describe",
        "does not describe",
        "no whole",
    ]
    for line, part in zip(sample_limited(*urls, str(tmp_path / "run")), expected, strict=True):
        assert part in line


@pytest.mark.parametrize(
    ("name", "begins"),
    [(MODEL, "with zeros"), (MODEL, "with ones"), (OPTIMIZER, "as written")],
)
def test_a_giant_file_is_not_read_to_its_end(name, begins, tmp_path, valid_files):
    """The manifest agrees with the size of the file, but the header does not."""
    url = write_snapshot(tmp_path, valid_files)
    if begins != "as written":
        (Path(url) / name).write_bytes(b"" if begins == "with zeros" else b"\xff" * 8)
    os.truncate(Path(url) / name, 1 << 40)
    listed = json.loads((Path(url) / MANIFEST).read_bytes())["files"]
    listed[name]["bytes"] = 1 << 40
    (Path(url) / MANIFEST).write_bytes(encode_manifest(8, listed))
    assert (
        str(verify_step(SnapshotStore(str(tmp_path)), 8))
        == f"{name} does not have the size that its header says"
    )


def test_json_of_many_small_values_is_limited(tmp_path, valid_files, sample_limited):
    """Parsed, a list of a million empty lists uses thirty times the memory of its text."""
    many = b"[" + b"[]," * (MAX_STATE_BYTES // 3 - 2) + b"[]]"
    assert MAX_MANIFEST_BYTES < len(many) <= MAX_STATE_BYTES
    urls = [
        write_snapshot(tmp_path / "a", {**valid_files, STATE: many}),
        write_snapshot(tmp_path / "b", valid_files, many),
    ]
    assert all(line.startswith("snapshot error: ") for line in sample_limited(*urls))


def test_code_that_a_snapshot_names_is_never_run(tmp_path, valid_files):
    """Sampling, exporting and resuming treat the name of the file only as data."""
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'was here')!r}, 'w')")
    for group, key in (("model", "architecture"), ("optimizer", "name"), ("data", "reader")):
        for i, values in enumerate(({"code": str(evil)}, {"code": str(evil), key: "evil"})):
            url = write_snapshot(
                tmp_path / f"{group}{i}", with_config(valid_files, group, **values)
            )
            with contextlib.suppress(SnapshotError):
                sample(SampleConfig(url, max_new_tokens=1), "a")
            export(ExportConfig(url, str(tmp_path / f"export {group}{i}")))
            state = load(url).state
            with pytest.raises(SnapshotError):
                check_state(
                    8, state, text_task(from_mapping(json.loads(valid_files[STATE])["config"]))
                )
    assert not (tmp_path / "was here").exists()


# Links and special files


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (MODEL, "/dev/zero"),
        (MODEL, "loop"),
        (MODEL, "nowhere"),
        (STATE, "/"),
        (STATE, "pipe"),
        (MANIFEST, "/dev/zero"),
        (MANIFEST, "pipe"),
    ],
)
def test_links_to_special_files_are_refused(name, target, tmp_path, valid_files):
    url = write_snapshot(tmp_path, valid_files)
    path = Path(url) / name
    path.unlink()
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(name if target == "loop" else target)
    assert "cannot be used" in refusal(url)
    store = SnapshotStore(str(tmp_path))
    assert verify_step(store, 8) is not None
    assert inspect(store, 8).status == ("unfinished" if name == MANIFEST else "damaged")


def test_a_link_does_not_reveal_another_file(tmp_path, valid_files):
    (tmp_path / "secret").write_bytes(b"x" * len(valid_files[STATE]))
    url = write_snapshot(tmp_path, valid_files)
    (Path(url) / STATE).unlink()
    (Path(url) / STATE).symlink_to(tmp_path / "secret")
    message = refusal(url)
    assert "does not have the content" in message and "xx" not in message


def test_deleting_does_not_follow_links(tmp_path, valid_files):
    victim = Path(write_snapshot(tmp_path / "victim", valid_files))
    write_snapshot(tmp_path / "run", valid_files, step=9)
    (tmp_path / "run" / directory_name(8)).symlink_to(victim)
    inner = Path(write_snapshot(tmp_path / "run", valid_files, step=7))
    (inner / "more").symlink_to(victim)
    store = SnapshotStore(str(tmp_path / "run"))
    prune(store, keep_last=1, best=None, newest=9)
    assert store.steps() == [9]
    assert sorted(path.name for path in victim.iterdir()) == sorted([*valid_files, MANIFEST])
    (tmp_path / "run" / directory_name(9) / MANIFEST).unlink()
    (tmp_path / "run" / directory_name(9) / MANIFEST).symlink_to(victim / MANIFEST)
    store.clear(9)
    assert (victim / MANIFEST).exists()


# Terminals


def test_control_characters_are_escaped():
    raw = "".join(map(chr, range(0xA1)))
    shown = printable(raw)
    assert {c for c in shown if not c.isprintable()} == {"\n", "\t", "\xa0"}
    assert printable("\x1b[2J\x9b\x7f\r") == r"\x1b[2J\x9b\x7f\x0d"
    assert printable("ä€😀\n\t") == "ä€😀\n\t"


def sample_through(url: str, prompt: bytes, output: int, monkeypatch) -> int:
    """Call sample.py with a prompt from a pipe and this output. Return its exit code."""
    reading, writing = os.pipe()
    os.write(writing, prompt)
    os.close(writing)
    argv = ["sample.py", f"snapshot={url}", "prompt=-", "max_new_tokens=1"]
    with open(reading) as stdin, open(output, "w", closefd=False) as stdout:
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as left:
            sample_module.main()
    return left.value.code


def test_a_terminal_gets_no_escape_sequences(tmp_path, valid_files, monkeypatch):
    main, terminal = pty.openpty()
    url = write_snapshot(tmp_path, valid_files)
    assert sample_through(url, b"a\x1b]0;x\x07", terminal, monkeypatch) == 0
    shown = os.read(main, 1000)
    os.close(terminal)
    os.close(main)
    assert shown.startswith(rb"a\x1b]0;x\x07")
    assert b"\x1b" not in shown and b"\x07" not in shown


def test_a_pipe_gets_the_text_unchanged(tmp_path, valid_files, monkeypatch):
    reading, writing = os.pipe()
    url = write_snapshot(tmp_path, valid_files)
    assert sample_through(url, b"a\x1b]0;x\x07", writing, monkeypatch) == 0
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read().startswith(b"a\x1b]0;x\x07")


@pytest.mark.parametrize("key", ["\x1b[2J", "\x9b2J", "k" * 50_000])
def test_an_error_is_one_printable_line(key, tmp_path, valid_files, monkeypatch, capsys):
    url = write_snapshot(tmp_path, with_config(valid_files, "model", architecture=key))
    monkeypatch.setattr(sys, "argv", ["sample.py", f"snapshot={url}"])
    with pytest.raises(SystemExit) as left:
        sample_module.main()
    [line] = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert line.isprintable() and len(line) <= 1000


def test_a_surrogate_is_refused(tmp_path, valid_files, monkeypatch, capsys):
    """JSON may contain surrogates, which are not characters. We use one as the end of documents."""
    state = {**json.loads(valid_files[STATE]), "vocabulary": "\ud800" * len(VOCABULARY)}
    url = write_snapshot(tmp_path, {**valid_files, STATE: json.dumps(state).encode()})
    monkeypatch.setattr(sys, "argv", ["sample.py", f"snapshot={url}", "max_new_tokens=2"])
    with pytest.raises(SystemExit) as left:
        sample_module.main()
    assert left.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "the snapshot has an invalid state: " in line and line.isprintable()
