"""What the evaluate command makes of the configurations in snapshots.

What it refuses leaves nothing behind.
"""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from multiprocess.ranks import configure
from snapshot_helpers import filled

from mingpt_ddp.cli.commands.evaluate import EvaluateConfig, _run_config, evaluate
from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import from_mapping, to_plain
from mingpt_ddp.errors import DataError, SnapshotError


def state(*overrides: str) -> dict[str, Any]:
    """Return the part of a snapshot's state with a configuration."""
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return {"config": from_mapping(to_plain(compose("config", [*overrides]))).to_dict()}


def test_every_run_is_measured_on_the_split_of_the_first():
    first = state(
        "data.path=a.txt", "data.train_split=0.8", "data.truncate=0.5", "data.tokenizer=bpe"
    )
    own = state(
        "data.path=moved.txt", "data.tokenizer=byte", "data.block_size=7", "model=gpt_micro"
    )
    config = _run_config(EvaluateConfig(["a", "b"]), "b", own, first)
    data = config.data
    assert (data.path, data.train_split, data.truncate) == ("a.txt", 0.8, 0.5)
    assert (data.tokenizer, data.vocab_size, data.block_size, config.model.name) == (
        "byte",
        None,
        7,
        "gpt_micro",
    )
    other = _run_config(EvaluateConfig(["a", "b"], data_path="other.txt"), "b", own, first)
    assert (other.data.path, other.data.truncate, other.data.tokenizer) == (
        "other.txt",
        1.0,
        "byte",
    )


def test_all_of_the_split_is_measured():
    own = state("trainer.eval_steps=1")
    assert _run_config(EvaluateConfig(["a"]), "a", own).trainer.eval_steps is None


def test_runs_of_different_tasks_are_refused():
    digits = configure("experiment=digits_convnet")
    with pytest.raises(
        SnapshotError,
        match=r"of b cannot be evaluated: task\.name=classification does not compare with",
    ):
        _run_config(EvaluateConfig(["a", "b"]), "b", {"config": digits}, state())
    own = state()
    del own["config"]["task"]  # of a run of an earlier version
    assert _run_config(EvaluateConfig(["a", "b"]), "b", own, state()).task.name == "language_model"


def test_runs_of_other_data_are_refused():
    own = state() | {"text": {"sha256": "1"}}
    other = state() | {"text": {"sha256": "2"}}
    with pytest.raises(SnapshotError, match="it has other data than a; measure it alone, or all"):
        _run_config(EvaluateConfig(["a", "b"]), "b", other, own)
    _run_config(EvaluateConfig(["a", "b"]), "b", own, own)
    _run_config(EvaluateConfig(["a", "b"], data_path="other.txt"), "b", other, own)


@pytest.mark.parametrize(
    "first", [None, {}, {"data": 1}, {"data": {"path": 1}, "task": 7}, {"task": {}}], ids=str
)
def test_a_hostile_first_state_is_refused_in_one_line(first):
    with pytest.raises(SnapshotError, match="the snapshot of b cannot be evaluated") as error:
        _run_config(EvaluateConfig(["a", "b"]), "b", state(), {"config": first})
    assert "\n" not in str(error.value)


def test_a_text_with_other_characters_leaves_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    filled(str(tmp_path / "run"), 8)
    (tmp_path / "other.txt").write_text("xyz" * 100)
    with pytest.raises(DataError, match="the model does not know 'x', 'y', 'z'"):
        evaluate(
            EvaluateConfig(
                [str(tmp_path / "run")], data_path=str(tmp_path / "other.txt"), device="cpu"
            )
        )
    assert not (tmp_path / "cache").exists()
