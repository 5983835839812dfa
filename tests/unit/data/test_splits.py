"""Texts of their own to validate and to test on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mingpt_ddp.data.dataset import RecordedText, TextDataset
from mingpt_ddp.data.prepare import prepare, prepare_all
from mingpt_ddp.errors import ConfigError, DataError


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
