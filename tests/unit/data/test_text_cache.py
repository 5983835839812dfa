"""The cache of encoded texts, shared by processes that may be refused, killed or slow."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from launching import wait_for

from mingpt_ddp.data.text import text_cache
from mingpt_ddp.data.text.text_cache import LOCK, TextCache
from mingpt_ddp.errors import DataError
from mingpt_ddp.storage import lock
from tests.unit.data.reading import prepare

TEXT = "to be or not to be\n" * 20


def files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*"))


@pytest.fixture
def config(settings, tmp_path):
    return settings(TEXT, cache_dir=str(tmp_path / "new" / "cache"))


@pytest.mark.parametrize("text", [TEXT, ""])
def test_discarding_a_new_cache_leaves_no_files(text, config, settings, tmp_path):
    """One text is encoded, and the other is refused."""
    config = settings(text, cache_dir=config.cache_dir)
    before = files(tmp_path)
    cache = TextCache(config)
    if text:
        prepare(config, cache=cache)
        assert len(files(tmp_path)) > len(before)
    else:
        with pytest.raises(DataError, match="is empty"):
            prepare(config, cache=cache)
    cache.discard()
    assert files(tmp_path) == before


def test_discarding_keeps_the_entries_of_an_existing_cache(config, settings):
    kept = prepare(config)
    before = files(Path(config.cache_dir))
    cache = TextCache(config)
    prepare(config, cache=cache)  # finds the existing entry
    prepare(replace(config, tokenizer="byte"), cache=cache)
    cache.discard()
    assert files(Path(config.cache_dir)) == before
    assert prepare(config) == kept


def test_discarding_keeps_the_entries_of_another_process(config, settings):
    cache = TextCache(config)
    prepare(config, cache=cache)
    other = Path(prepare(settings(TEXT + "!", cache_dir=config.cache_dir)).directory)
    cache.discard()
    names = ("", "/meta.json", "/sources.bin", "/tokens.bin")
    assert files(other.parent) == [LOCK, *(f"{other.name}{name}" for name in names)]


def test_discarding_keeps_a_text_that_took_long_to_encode(config, monkeypatch):
    monkeypatch.setattr(text_cache, "KEPT_SECONDS", 0.0)
    cache = TextCache(config)
    encoded = prepare(config, cache=cache)
    cache.discard()
    assert Path(encoded.directory).is_dir()


def test_a_lock_that_another_process_has_deleted_is_taken_again(config, monkeypatch):
    """A process that waits for a deleted lock file must not encode while another has a new one."""
    cache, deleted = TextCache(config), []
    flock = fcntl.flock

    def discarded_meanwhile(lock, operation):
        if not deleted:
            (cache.root / LOCK).unlink()
        deleted.append(lock.fileno())
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", discarded_meanwhile)
    with cache.locked():
        assert len(deleted) == 2
        assert os.path.samestat(os.fstat(deleted[1]), os.stat(cache.root / LOCK))


def test_starts_without_locks_do_not_disturb_each_other(config, monkeypatch):
    """File locks may not work between nodes."""

    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with ThreadPoolExecutor() as pool:
        outcomes = [*pool.map(prepare, [config] * 4)]
    assert outcomes == [prepare(config)] * 4
    [directory] = [path for path in Path(config.cache_dir).iterdir() if path.is_dir()]
    assert str(directory) == outcomes[0].directory


def test_the_directory_of_a_faster_node_stays(config):
    """The ranks of that node may already be reading its files."""
    directory = Path(prepare(config).directory)
    before = os.stat(directory / "tokens.bin")
    cache = TextCache(config)
    entry = cache.find(directory)
    with cache.adding(directory, entry.text.sha256) as slower:
        cache.write(entry, slower)
    assert os.path.samestat(os.stat(directory / "tokens.bin"), before)


def test_partial_files_of_a_killed_process_are_deleted_after_a_day(config, settings):
    prepare(config)
    left, new = (Path(config.cache_dir) / f".partial-{name}" for name in ("left", "new"))
    for path in (left, new):
        path.mkdir()
    os.utime(left, (0, 0))
    prepare(settings(TEXT + "!", cache_dir=config.cache_dir))
    assert not left.exists() and new.exists()


def test_waiting_for_another_process_is_logged_after_a_while(config, monkeypatch, caplog):
    monkeypatch.setattr(lock, "LONG_WAIT_S", 0.01)
    caplog.set_level("INFO")
    cache = TextCache(config)
    with cache.locked():
        waiter = threading.Thread(target=prepare, args=(config,))
        waiter.start()
        wait_for(lambda: caplog.messages, what="the line")
    waiter.join()
    assert caplog.messages[:1] == [
        f"waiting for another process that encodes a text in data.cache_dir={cache.root}"
    ]
