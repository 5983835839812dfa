"""Validation and test splits: cut off the text, or given as files of their own."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from hashlib import sha256

import pytest

from mingpt_ddp.data.dataset import RecordedText, TextDataset
from mingpt_ddp.data.digests import digest_of
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.errors import ConfigError, DataError
from tests.unit.data.reading import prepare


def split_texts(encoded, config) -> list[str]:
    """Return the decoded training, validation and test split."""
    data = TextDataset(encoded, config)
    return [data.tokenizer.decode(part.tolist()) for part in (data.train, data.val, data.test)]


NAMES = ["char", "byte", "bpe"]


@pytest.mark.parametrize("end_token", [False, True])
def test_every_tokenizer_sees_the_same_validation_text(end_token, settings, tmp_path):
    """The split is by characters. The end of a document counts as one."""
    pytest.importorskip("tokenizers")
    lines = [f"{i} größer als {i - 1}, sagt sie.\n" for i in range(200)]
    shards(
        tmp_path / "lines",
        {f"{i // 20:02}.txt": "".join(lines[i : i + 20]) for i in range(0, 200, 20)},
    )
    decoded = []
    for name in NAMES:
        config = settings(tmp_path / "lines", tokenizer=name, end_token=end_token)
        config = replace(config, test_split=0.05, truncate=0.75)
        encoded = prepare(config)
        decoded.append(split_texts(encoded, config))
        assert prepare(config) == encoded  # from the cache
    assert decoded[0] == decoded[1] == decoded[2]
    content = "".join(lines)
    kept = int((len(content) + 10 * end_token) * 0.75)
    assert content[:kept].startswith("".join(decoded[0]))
    assert kept - len("".join(decoded[0])) == 7 * end_token


@pytest.mark.parametrize("name", NAMES)
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


def test_several_sources_share_a_vocabulary(settings, tmp_path):
    """Splits are cut off each source, or given. A further validation text shares it too."""
    for name, text in (("a", "ab" * 50), ("b", "bc" * 100), ("mixed", "abcabc")):
        (tmp_path / f"{name}.txt").write_text(text)
    sources = [(str(tmp_path / "a.txt"), 1.0), (str(tmp_path / "b.txt"), 3.0)]
    config = settings("d" * 8, sources=sources, val_paths={"mixed": str(tmp_path / "mixed.txt")})
    encoded = prepare_all(config)
    assert encoded[""].tokenizer == encoded["mixed"].tokenizer == {"vocabulary": "abc"}
    assert encoded[""].parts == [[90, 180], [10, 20], [0, 0]] and encoded["mixed"].length == 6
    (tmp_path / "mixed.txt").write_text("abcd")
    with pytest.raises(DataError, match=r"data.val_paths.mixed: the model does not know 'd'"):
        prepare_all(config)
    validated = prepare(replace(config, split_paths={"val": config.path}))
    tested = prepare(replace(config, split_paths={"test": config.path}))
    assert validated.parts == [[100, 200], [8], []]
    assert tested.parts == [[90, 180], [10, 20], [0, 0, 8]]
    assert tested.sha256 != validated.sha256


def test_mistakes_between_splits_and_further_texts(settings):
    config = settings("ab" * 50)
    with pytest.raises(ConfigError, match=r"wiki: the split must be val or test; .*val_"):
        replace(config, split_paths={"wiki": config.path})
    with pytest.raises(ConfigError, match=r"data.test_split=0.1 cannot be combined with"):
        replace(config, train_split=0.8, test_split=0.1, split_paths={"val": config.path})
    named = replace(config, val_paths={"test": config.path})
    with pytest.raises(DataError, match=r"data.val_paths.test has .* data.split_paths; to"):
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


def with_advised_words(error: pytest.ExceptionInfo, config):
    """Return the configuration with the words that the error message suggests."""
    path, splits = re.findall(r"'data\.(?:path|split_paths)=(.*?)'(?= |,)", str(error.value))
    given = dict(re.findall(r'(\w+): "(.*?)"', splits))
    return replace(config, path=path.strip('"'), split_paths=given)


@pytest.mark.parametrize("name", ["interval-train.txt", "b.dev.txt", "constraints.txt"])
def test_no_globs_are_named_that_mix_or_lose_files(name, settings, tmp_path):
    """A name fits two splits, uses another word for its split, or has it inside a longer word."""
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
    """The error has the words that read each split separately, and those for one joined text."""
    files = {f"data/{name}": text for name, text in SHARDS.items()} if form == "nested" else SHARDS
    path = shards(tmp_path / "shards", files)
    config = settings(path / "*.*" if form == "glob" else path)
    if form in ("zip", "tar"):
        packed = shutil.make_archive(str(tmp_path / "packed"), form, path)
        config = replace(config, path=f"{form}://**/*.txt::{packed}")
    words = "name each split, "
    if form == "relative":
        monkeypatch.chdir(tmp_path)
        config = replace(config, path="shards")
        words = (
            re.escape("name each split, ") + ".*" + re.escape("'data.path=\"shards/**/*train*\"' ")
        )
    with pytest.raises(DataError, match=rf"named for several splits: .*; {words}") as error:
        prepare(config)
    typed = with_advised_words(error, config)
    encoded = prepare(typed)
    found = [text.rstrip("\n") for text in split_texts(encoded, typed)]
    assert found == ["to be \n" + "or not " * 20, "is the question", "he asked"]
    whole = prepare(replace(config, split_paths={}))
    assert whole.parts == [] and whole.sha256 != encoded.sha256
    # A run that has read all of them as one text continues.
    assert prepare_all(config, recorded=RecordedText(whole.sha256))[""].sha256 == whole.sha256


def test_a_run_from_a_version_that_split_by_file_names_can_continue(settings, tmp_path):
    """Its recorded SHA-256 equals that of the same splits given by keys."""
    files = {"train-1.txt": "to be\n", "val-1.txt": "or not\n"}
    path = shards(tmp_path / "a", files)
    config = settings(path / "train*", split_paths={"val": str(path / "val*")})
    hashes = [sha256(text.encode()).hexdigest() for text in files.values()]
    recorded = digest_of([{"train": hashes[0]}, {"val": hashes[1]}])
    encoded = prepare_all(config, recorded=RecordedText(recorded))[""]
    assert encoded.sha256 == recorded
    assert split_texts(encoded, config) == ["to be\n", "or not\n", ""]


@pytest.mark.parametrize(
    ("names", "held_out"),
    [
        ("train-1.txt train-2.txt", None),
        ("trains.txt tests.txt", None),
        ("test/1.py test/2.py model.py", None),
        ("train-1.txt test-1.txt other.txt", 0),
        ("validation-1.txt test-1.txt", 0),  # no training file
        ("train.py test.py test-a.py model.py", 0),
        ("a-TRAIN.txt a-Dev.txt a-Test.txt", 2),
        ("train/en/0.txt validation/en/0.txt validation/en/1.txt test/en/0.txt", 3),
        ("train/stress-test.txt dev/0.txt dev/a/1.txt test/bullet-train.txt", 3),
        ("fineweb_train_1.txt fineweb_train_2.txt fineweb_val_0.txt", 1),
    ],
)
def test_names_of_splits(names, held_out, settings, tmp_path):
    """The advised words hold out this many files. 0: no advice; None: no split is recognized."""
    config = settings(shards(tmp_path / "shards", dict.fromkeys(names.split(), "to be\n")))
    if held_out is None:
        assert prepare(config).parts == []
        return
    with pytest.raises(DataError, match="named for several splits") as error:
        prepare(config)
    if held_out:
        typed = with_advised_words(error, config)
        data = TextDataset(prepare(typed), typed)
        assert len(data.val) + len(data.test) == held_out * len("to be\n")


def test_each_way_to_split_the_same_files_is_encoded_separately(settings, tmp_path):
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
