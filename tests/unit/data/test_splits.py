"""Texts of their own to validate and to test on."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mingpt_ddp.data.dataset import RecordedText, TextDataset
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.errors import ConfigError, DataError
from tests.unit.data.reading import prepare


def split_texts(encoded, config) -> list[str]:
    """Return what is decoded of the training, the validation and the test split."""
    data = TextDataset(encoded, config)
    return [data.tokenizer.decode(part.tolist()) for part in (data.train, data.val, data.test)]


@pytest.mark.parametrize("name", ["char", "byte", "bpe"])
def test_given_splits(name, settings, tmp_path):
    if name == "bpe":
        pytest.importorskip("tokenizers")
    (tmp_path / "val.txt").write_text("to validate")
    (tmp_path / "test.txt").write_text("zum Prüfen")
    paths = {"test": str(tmp_path / "test.txt"), "val": str(tmp_path / "val.txt")}
    config = settings("ab" * 50, tokenizer=name, truncate=0.5, split_paths=paths)
    encoded = prepare(config)
    assert split_texts(encoded, config) == ["ab" * 25, "to validate", "zum Prüfen"]
    assert prepare(config) == encoded  # from the cache
    of_test = replace(config, split_paths={"test": paths["test"]})
    assert split_texts(prepare(of_test), of_test) == ["ab" * 22 + "a", "babab", "zum Prüfen"]
    (tmp_path / "test.txt").write_text("zum Prüfer")
    changed = prepare(config)
    assert changed.sha256 != encoded.sha256 and changed.directory != encoded.directory


def test_a_share_too_small_for_a_token_is_refused(settings, tmp_path):
    config = settings("ab" * 50, tokenizer="byte", truncate=1e-9)
    given = replace(config, split_paths={"val": config.path})
    sources = replace(config, tokenizer="char", path=None, sources=[(config.path, 1.0)])
    for one in (config, given, sources):
        with pytest.raises(DataError, match=r"data.truncate=1e-09 leaves nothing to train on"):
            prepare(one)
    assert not [*(tmp_path / "cache").glob("*-*")]


def test_given_splits_of_several_sources(settings, tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 50)
    (tmp_path / "b.txt").write_text("bc" * 100)
    sources = [(str(tmp_path / "a.txt"), 1.0), (str(tmp_path / "b.txt"), 3.0)]
    config = settings("d" * 8, sources=sources)
    validated = replace(config, split_paths={"val": config.path})
    assert prepare(validated).parts == [[100, 200], [8], []]
    tested = replace(config, split_paths={"test": config.path})
    assert prepare(tested).parts == [[90, 180], [10, 20], [0, 0, 8]]
    assert prepare(tested).sha256 != prepare(validated).sha256


def test_mistakes_between_splits_and_further_texts(settings):
    config = settings("ab" * 50)
    with pytest.raises(ConfigError, match=r"data.split_paths.wiki: a split is val or test; .*val_"):
        replace(config, split_paths={"wiki": config.path})
    with pytest.raises(ConfigError, match=r"data.test_split=0.1 does not go with"):
        replace(config, train_split=0.8, test_split=0.1, split_paths={"val": config.path})
    named = replace(config, val_paths={"test": config.path})
    with pytest.raises(DataError, match=r"data.val_paths.test: .* data.split_paths; .* otherwise"):
        prepare_all(named)
    assert prepare_all(named, recorded=RecordedText("sha256")).keys() == {"", "test"}
    for content, message in (("", "is empty"), (b"\x89PNG\r\n\x1a\n", "looks like PNG")):
        settings(content)
        with pytest.raises(DataError, match=rf"data.split_paths.val=\S+ {message}"):
            prepare(replace(config, path="builtin:python_docs", split_paths={"val": config.path}))
    missing = settings("ab" * 50, split_paths={"val": "nowhere.txt"})
    with pytest.raises(DataError, match=r"data.split_paths.val=nowhere.txt: there is no such"):
        prepare(missing)


SHARDS = {
    "README.md": "what they are",
    "train-00000-of-00002.txt": "to be ",
    "train-00001-of-00002.txt": "or not " * 20,
    "validation-00000-of-00001.txt": "is the question",
    "test.txt": "he asked",
}


def shards(directory, files=SHARDS):
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    return directory


@pytest.mark.parametrize("form", ["directory", "zip", "glob", "nested"])
def test_names_of_files_say_their_splits(form, settings, tmp_path, log_lines):
    files = {f"data/{name}": text for name, text in SHARDS.items()} if form == "nested" else SHARDS
    path = shards(tmp_path / "shards", files)
    if form == "zip":
        path = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", path))
    config = settings(path / "*.*" if form == "glob" else path)
    [encoded] = prepare_all(config).values()
    expected = ["to be \n" + "or not " * 20 + "\n", "is the question\n", "he asked\n"]
    assert split_texts(encoded, config) == expected
    assert encoded.by_name
    lines = [line for line in log_lines if "(val): reads 1 file" in line]
    assert len(lines) == 1 and "validation-00000-of-00001.txt" in lines[0]
    recorded = RecordedText(encoded.sha256, by_name=True)
    assert prepare_all(config, recorded=recorded)[""] == encoded
    with pytest.raises(DataError, match=r"names say their splits; leave out data.test_split=0.05"):
        prepare(replace(config, test_split=0.05))
    # as a run of an earlier version, and if one asks for it
    whole = prepare(replace(config, split_paths={}))
    assert not whole.by_name and whole.parts == [] and whole.sha256 != encoded.sha256
    assert prepare_all(config, recorded=RecordedText(whole.sha256))[""] == whole
    assert prepare(replace(config, sha256=encoded.sha256)).directory == encoded.directory
    with pytest.raises(DataError, match=f"has SHA-256 {encoded.sha256}, not"):
        prepare(replace(config, sha256=whole.sha256))


def test_shares_of_shards_without_a_validation_split(settings, tmp_path):
    files = {"my_train_1.txt": "ab" * 50, "my_test_1.txt": "abab"}
    config = settings(shards(tmp_path / "shards", files), train_split=0.8)
    assert split_texts(prepare(config), config)[1:] == ["ab" * 10 + "\n", "abab\n"]


@pytest.mark.parametrize(
    "names",
    [
        ["train-1.txt", "train-2.txt"],
        ["train-1.txt", "test-1.txt", "other.txt"],
        ["validation-1.txt", "test-1.txt"],
        ["trains.txt", "tests.txt"],
        ["train.py", "test.py", "model.py"],
        ["1.md", "2.md", "scripts/train.sh", "scripts/test.sh"],  # most bytes
    ],
    ids=str,
)
def test_names_that_say_no_splits(names, settings, tmp_path, log_lines):
    config = settings(shards(tmp_path / "shards", dict.fromkeys(names, "to be")))
    assert prepare(config).parts == []
    held_out = [name for name in names if "test." in name or "test-" in name]
    warned = [line for line in log_lines if ": trains on" in line]
    assert len(warned) == bool(held_out)
    assert all(f"{held_out[0]!r}" in line and "data.split_paths={}" in line for line in warned)


@pytest.mark.parametrize(
    "names",
    [
        ["train.txt", "valid.txt", "test.txt"],
        ["a-TRAIN.txt", "a-Dev.txt", "a-Test.txt"],
        ["train/en/0.txt", "validation/en/0.txt", "test/en/0.txt"],
        ["train/stress-test.txt", "dev/0.txt", "test/bullet-train.txt"],
    ],
    ids=str,
)
def test_names_of_splits(names, settings, tmp_path):
    texts = ["to be\n", "or not\n", "that\n"]
    config = settings(shards(tmp_path / "a", dict(zip(names, texts, strict=True))))
    assert split_texts(prepare(config), config) == texts


def test_names_with_a_dot_and_directories_above_a_glob(settings, tmp_path, monkeypatch, log_lines):
    files = {"train-a.txt": "to be\n", "test-a.txt": "that\n", "README": "texts"}
    path = shards(tmp_path / ".cache/test", files)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(path, ".")
    monkeypatch.chdir(tmp_path)
    for source in ("a.tar", ".cache/test/*a*", "./.cache/./test/*"):
        config = replace(settings(path), path=source, train_split=0.5)
        assert split_texts(prepare(config), config) == ["to ", "be\n", "that\n"]
    left_out = [line for line in log_lines if "left out 1 without a split in the name" in line]
    assert len(left_out) == 2 and all("README'" in line for line in left_out)


def test_directories_say_the_splits_of_records_and_of_tokens(settings, tmp_path):
    lines = "".join(json.dumps({"text": f"to be {i}"}) + "\n" for i in range(9))
    config = settings(shards(tmp_path / "a", {"train/1.jsonl": lines, "val/1.jsonl": lines[:60]}))
    encoded = prepare(config)
    assert (encoded.form, [*map(len, split_texts(encoded, config))]) == ("jsonl", [72, 24, 0])
    (tmp_path / "b").mkdir()
    for name, count in (("fineweb_train_1.npy", 40), ("fineweb_val_0.npy", 7)):
        np.save(tmp_path / "b" / name, np.arange(count, dtype=np.uint16))
    tokens = replace(config, path=str(tmp_path / "b"), format="tokens", vocab_size=50)
    data = TextDataset(prepare(tokens), tokens)
    assert (len(data.train), len(data.val), len(data.test)) == (40, 7, 0)


def test_other_divisions_of_the_same_files_are_encoded_by_themselves(settings, tmp_path):
    for name in ("train-a", "val-b"):
        (tmp_path / "records").mkdir(exist_ok=True)
        rows = [json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(20)]
        (tmp_path / f"records/{name}.jsonl").write_text("".join(rows))
    a, b = (str(tmp_path / f"records/{name}.jsonl") for name in ("train-a", "val-b"))
    with tarfile.open(tmp_path / "records.tar", "w") as archive:
        archive.add(tmp_path / "records", "records")
    packed = str(tmp_path / "records.tar")
    directory = settings(tmp_path / "records", tokenizer="byte", split_paths={})
    sources = replace(directory, path=None, sources=[(a, 1.0), (b, 1.0)])
    by_name = replace(directory, path=packed, split_paths=None)
    given = replace(directory, path=packed, split_paths={"val": packed})
    for one, other in ((directory, sources), (by_name, given)):
        caches = [replace(other, cache_dir=str(tmp_path / f"new{len(one.path)}")), other]
        encoded = prepare(one)
        fresh, cached = map(prepare, caches)
        assert cached.sha256 == encoded.sha256 and cached.directory != encoded.directory
        assert cached.parts == fresh.parts != encoded.parts
