"""The model card of an export: what it must not tell."""

from __future__ import annotations

import yaml

from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.model_card import model_card


def test_the_commands_that_a_run_calls_are_not_published(tmp_path):
    """They may have the token of a server."""
    words = [
        "trainer.max_steps=5",
        "run.on_end='curl -H secret-1 x'",
        "++run.on_failure='curl secret-2'",
    ]
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(words))
    config = {"run": {"on_end": "curl -H secret-1 x", "on_failure": "curl secret-2", "seed": 7}}
    card = model_card(
        Snapshot(5, {}, {}, {"config": config}), str(tmp_path), "safetensors", "out"
    ).decode()
    assert "python -m mingpt_ddp trainer.max_steps=5\n" in card and "run.seed=7" in card
    assert "secret" not in card
