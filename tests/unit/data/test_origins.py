"""Origins tell for each window from which file, document and byte its tokens come."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.data.dataset import TextDataset
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.text import origins
from mingpt_ddp.data.text.origins import Origin, find_origins
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.weighted import WeightedLoader
from mingpt_ddp.errors import DataError
from tests.unit.data.reading import make_directory

LENGTH = 9


def window(encoded, config, start: int) -> str:
    return TextDataset(encoded, config).tokenizer.decode(
        encoded.memmap()[start : start + LENGTH].tolist()
    )


@pytest.mark.parametrize("summed", [2, 1 << 20])
@pytest.mark.parametrize("tokenizer", ["char", "byte"])
@pytest.mark.parametrize("form", ["files", "rows"])
def test_a_window_is_found_in_its_document(
    form, tokenizer, summed, settings, tmp_path, monkeypatch
):
    """A window begins at the byte of its first origin. Each document in it has an origin."""
    monkeypatch.setattr(origins, "TOKENS_PER_SUM", summed)
    texts = [f"größer {i} ".encode() * (i % 4 + 1) for i in range(40)]
    names = [f"{i:02}.txt" for i in range(40)]
    if form == "files":
        path = make_directory(tmp_path / "texts", dict(zip(names, texts, strict=True)))
    else:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"text": t.decode()}) + "\n" for t in texts))
    config = settings(path, tokenizer=tokenizer, end_token=True)
    encoded = prepare_all(config)[""]
    length = len(TextDataset(encoded, config).train)
    starts = np.arange(length - LENGTH)
    crossing = 0
    for start, found in zip(
        starts.tolist(), find_origins(encoded, TextCache(config), starts, LENGTH), strict=True
    ):
        rest = b""
        for origin in found:
            number = int(Path(origin.file).stem) if form == "files" else origin.document - 1
            assert origin.document == (0 if form == "files" else number + 1)
            rest += texts[number][origin.byte :]
        shown = window(encoded, config, start)
        if tokenizer == "char":  # a window of bytes may begin inside a character
            assert rest.decode().startswith(shown)
        crossing += len(found) > 1
    assert crossing


def test_token_files_have_offsets_in_the_file(settings, tmp_path):
    for name, first in (("a", 0), ("b", 50)):
        np.save(tmp_path / f"{name}.npy", np.arange(first, first + 50, dtype=np.uint16))
    config = settings(
        tmp_path, path=str(tmp_path / "*.npy"), format="tokens", vocab_size=100, tokenizer="char"
    )
    encoded = prepare_all(config)[""]
    [one, two] = find_origins(encoded, TextCache(config), np.array([3, 45]), LENGTH)
    header = (tmp_path / "a.npy").stat().st_size - 100
    first, second = (str(tmp_path / f"{name}.npy") for name in "ab")
    assert one == [Origin(first, 0, header + 6)]
    assert two == [Origin(first, 0, header + 90), Origin(second, 0, header)]


def test_the_starts_of_a_step_equal_those_of_its_batch(settings, tmp_path):
    """This includes windows that are drawn from several texts."""
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    paths[0].write_text("abcdefgh" * 50)
    paths[1].write_text("ijklmnop" * 50)
    config = settings(
        paths[0], path=None, sources=[(str(path), 1.0) for path in paths], stride=1, block_size=8
    )
    encoded = prepare_all(config)[""]
    dataset = TextDataset(encoded, config)
    loader = WeightedLoader(dataset.train, dataset.train_sizes, config, 6, seed=1)
    steps = loader.steps_per_epoch
    for step in (1, steps, steps + 1):
        [batch] = loader.get_batch(step, BatchPlan(6, 6, 1), 0)
        starts = loader.starts(step)
        assert [dataset.train[s : s + 8].tolist() for s in starts] == batch.batch[0].tolist()
        found = find_origins(encoded, TextCache(config), starts, LENGTH)
        for start, [origin] in zip(starts.tolist(), found, strict=True):
            content = Path(origin.file).read_text()[origin.byte :]
            assert content.startswith(window(encoded, config, start))


def test_a_deleted_cache_gives_one_line(settings, tmp_path):
    config = settings("a text of some length " * 20)
    encoded = prepare_all(config)[""]
    (Path(encoded.directory) / "meta.json").unlink()
    with pytest.raises(DataError, match="has been deleted; run again"):
        find_origins(encoded, TextCache(config), np.array([0]), LENGTH)
