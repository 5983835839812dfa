"""Texts of their own to validate and to test on."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from mingpt_ddp.data.dataset import RecordedText, TextDataset
from mingpt_ddp.data.digests import digest_of
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
    for content, message in (("", "is empty"), (b"\x89PNG\r\n\x1a\n", "is not UTF-8")):
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


def words_to_type(error: pytest.ExceptionInfo, config):
    """Return the configuration that an error tells to type."""
    path, splits = re.findall(r"'data\.(?:path|split_paths)=(.*?)'(?= |,)", str(error.value))
    given = dict(re.findall(r'(\w+): "(.*?)"', splits))
    return replace(config, path=path.strip('"'), split_paths=given)


@pytest.mark.parametrize("name", ["interval-train.txt", "b.dev.txt", "constraints.txt"])
def test_no_globs_are_named_that_mix_or_lose_files(name, settings, tmp_path):
    """A name has the words of two splits, or another word for its split, or a word in a word."""
    shards(tmp_path / "texts", {each: each * 9 for each in ("a.train.txt", "a.val.txt", name)})
    config = settings(tmp_path / "texts")
    with pytest.raises(DataError, match=r"by globs in data.path and data.split_paths={val: GLOB}"):
        prepare(config)


def test_a_file_in_two_splits_is_noted(settings, tmp_path):
    shards(tmp_path / "texts", {"a.txt": "ab" * 50})
    config = settings(tmp_path / "texts" / "a.txt")
    config = replace(config, split_paths={"val": str(tmp_path / "texts" / "*.txt")})
    notes = prepare(config).notes
    assert any("have a file in common" in note and "a.txt" in note for note in notes), notes


@pytest.mark.parametrize("form", ["directory", "zip", "tar", "glob", "nested", "relative"])
def test_files_named_for_several_splits_are_refused(form, settings, tmp_path, monkeypatch):
    """With the words that read each split by itself, and those that read all as one text."""
    files = {f"data/{name}": text for name, text in SHARDS.items()} if form == "nested" else SHARDS
    path = shards(tmp_path / "shards", files)
    config = settings(path / "*.*" if form == "glob" else path)
    if form in ("zip", "tar"):
        packed = shutil.make_archive(str(tmp_path / "packed"), form, path)
        config = replace(config, path=f"{form}://**/*.txt::{packed}")
    if form == "relative":
        monkeypatch.chdir(tmp_path)
        config = replace(config, path="shards")
    with pytest.raises(
        DataError, match=r"named for several splits: .*; name each split, "
    ) as error:
        prepare(config)
    if form == "relative":
        assert "'data.path=\"shards/**/*train*\"' " in str(error.value)
    typed = words_to_type(error, config)
    encoded = prepare(typed)
    expected = ["to be \n" + "or not " * 20 + "\n", "is the question", "he asked"]
    assert [text.rstrip("\n") + "\n" for text in split_texts(encoded, typed)] == [
        text.rstrip("\n") + "\n" for text in expected
    ]
    whole = prepare(replace(config, split_paths={}))
    assert whole.parts == [] and whole.sha256 != encoded.sha256
    # A run that has read all of them as one text goes on.
    assert prepare_all(config, recorded=RecordedText(whole.sha256))[""].sha256 == whole.sha256


def test_a_run_whose_splits_were_named_by_files_goes_on_with_the_same_words(settings, tmp_path):
    """The SHA-256 that an earlier version has recorded is the one of the splits given by keys."""
    files = {"train-1.txt": "to be\n", "val-1.txt": "or not\n"}
    path = shards(tmp_path / "a", files)
    config = settings(path / "train*", split_paths={"val": str(path / "val*")})
    hashes = [sha256(text.encode()).hexdigest() for text in files.values()]
    recorded = digest_of([{"train": hashes[0]}, {"val": hashes[1]}])
    encoded = prepare_all(config, recorded=RecordedText(recorded))[""]
    assert encoded.sha256 == recorded
    assert split_texts(encoded, config) == ["to be\n", "or not\n", ""]


@pytest.mark.parametrize(
    ("names", "is_refused"),
    [
        (["train-1.txt", "train-2.txt"], False),
        (["trains.txt", "tests.txt"], False),
        (["test/1.py", "test/2.py", "model.py"], False),
        (["train-1.txt", "test-1.txt", "other.txt"], True),
        (["validation-1.txt", "test-1.txt"], True),
        (["train.py", "test.py", "test-a.py", "model.py"], True),
        (["a-TRAIN.txt", "a-Dev.txt", "a-Test.txt"], True),
        (["train/en/0.txt", "validation/en/0.txt", "validation/en/1.txt", "test/en/0.txt"], True),
        (["train/stress-test.txt", "dev/0.txt", "dev/a/1.txt", "test/bullet-train.txt"], True),
        (["fineweb_train_1.txt", "fineweb_train_2.txt", "fineweb_val_0.txt"], True),
    ],
    ids=str,
)
def test_names_of_splits(names, is_refused, settings, tmp_path):
    config = settings(shards(tmp_path / "shards", dict.fromkeys(names, "to be\n")))
    if not is_refused:
        assert prepare(config).parts == []
        return
    with pytest.raises(DataError, match="named for several splits") as error:
        prepare(config)
    if 'data.path="..."' in str(error.value):  # no file is named train
        return
    typed = words_to_type(error, config)
    data = TextDataset(prepare(typed), typed)
    held_out = sum(
        "train" not in name.split("/")[0].lower() for name in names if name != "model.py"
    )
    if "val" in typed.split_paths:
        assert len(data.val) + len(data.test) == held_out * len("to be\n")


def test_directories_name_the_splits_of_records_and_of_tokens(settings, tmp_path):
    lines = "".join(json.dumps({"text": f"to be {i}"}) + "\n" for i in range(9))
    config = settings(shards(tmp_path / "a", {"train/1.jsonl": lines, "val/1.jsonl": lines[:60]}))
    (tmp_path / "b").mkdir()
    for name, count in (("fineweb_train_1.npy", 40), ("fineweb_val_0.npy", 7)):
        np.save(tmp_path / "b" / name, np.arange(count, dtype=np.uint16))
    tokens = replace(config, path=str(tmp_path / "b"), format="tokens", vocab_size=50)
    for each in (config, tokens):
        with pytest.raises(DataError, match="named for several splits"):
            prepare(each)


def test_other_divisions_of_the_same_files_are_encoded_by_themselves(settings, tmp_path):
    for name in ("train-a", "val-b"):
        (tmp_path / "records").mkdir(exist_ok=True)
        rows = [json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(20)]
        (tmp_path / f"records/{name}.jsonl").write_text("".join(rows))
    a, b = (str(tmp_path / f"records/{name}.jsonl") for name in ("train-a", "val-b"))
    directory = settings(tmp_path / "records", tokenizer="byte", split_paths={})
    sources = replace(directory, path=None, sources=[(a, 1.0), (b, 1.0)])
    given = replace(directory, path=a, split_paths={"val": b})
    encoded = [prepare(config) for config in (directory, sources, given)]
    assert len({each.directory for each in encoded}) == 3
    assert encoded[0].sha256 == encoded[1].sha256 != encoded[2].sha256
    assert [len(each.parts[0]) for each in encoded] == [1, 2, 1]
