"""A script with its own training loop refuses command-line keys that it does not read."""

from __future__ import annotations

import sys

import pytest

from mingpt_ddp.config import own_loop
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.hints import known_keys
from mingpt_ddp.config.loaded_code import record_file
from mingpt_ddp.config.own_loop import KEYS_OF_MAIN_LOOP, refuse_unread_keys, refuse_unread_words
from mingpt_ddp.errors import ConfigError

SETTINGS = {
    "model": {"name": "tiny", "architecture": "gpt", "n_layer": 1, "n_head": 1, "n_embd": 8},
    "optimizer": {"name": "adamw", "lr": 3e-4},
    "data": {"path": "builtin:python_docs"},
    "trainer": {"max_epochs": None, "max_steps": 5},
    **{group: {} for group in ("run", "ddp", "snapshot", "tracker")},
}


def test_every_key_of_the_list_exists():
    assert {*KEYS_OF_MAIN_LOOP} <= {*known_keys()}


@pytest.mark.parametrize("key", KEYS_OF_MAIN_LOOP)
def test_a_key_that_the_script_does_not_read_is_refused(key, tmp_path):
    script = tmp_path / "train.py"
    record_file(script, b"EVERY = 10\n")
    with pytest.raises(
        ConfigError, match=f"{key} is a key for the training loop of main.py, and train.py does"
    ):
        refuse_unread_keys(["optimizer.lr", key], script)


def test_a_key_that_the_script_reads_is_not_refused(tmp_path):
    script = tmp_path / "train.py"
    record_file(script, b"def train(config):\n    return config.trainer.eval_every\n")
    refuse_unread_keys(["trainer.eval_every", "trainer.max_steps"], script)


@pytest.mark.parametrize("word", ["trainer.max_steps=50", "model=gpt_nano", "optimizer.lr=3e-3"])
def test_a_word_without_an_effect_is_refused(word, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", word])
    with pytest.raises(ConfigError, match=f"{word} has no effect, because train.py does not read"):
        refuse_unread_words(from_mapping(SETTINGS))


def test_a_script_may_have_words_of_its_own(monkeypatch):
    """It may give words a meaning of its own, or put keys into its settings itself."""
    words = ["--lr=5", "fast", "a=b", "trainer.max_steps=5", "trainer.max_epochs=null"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "optimizer.lr=3e-4"])
    refuse_unread_words(from_mapping(SETTINGS))


def test_resolve_has_read_the_words(monkeypatch):
    monkeypatch.setattr(own_loop, "_resolving", [])
    monkeypatch.setattr(sys, "argv", ["train.py", "trainer.max_steps=1,2"])
    own_loop.begin_to_resolve()
    refuse_unread_words(from_mapping(SETTINGS))
