"""ddp.reduction=canonical: model and optimizer have the same SHA-256 on any number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import TINY
from snapshot_helpers import digests

from mingpt_ddp.torch_internals import cpu_is_fast_at_bf16
from multiprocess.ranks import configure, run_ranks, train_in_turn

STEPS = 6
CANONICAL = ["ddp.reduction=canonical", "trainer.micro_batch_size=2", "model.dropout=0.1"]
MODERN = ["model=modern_nano", "optimizer=muon", "model.n_head=4", "model.n_embd=128"]
KINDS = {
    "gpt": [],
    "modern": MODERN,
    "zero1": ["ddp.strategy=zero1"],
    "zero1, modern": [*MODERN, "ddp.strategy=zero1"],
    "gloo": ["ddp.backend=gloo"],
    "ema, accumulation, checkpointing": [
        "trainer.micro_batch_size=1",
        "trainer.ema=0.9",
        "trainer.activation_checkpointing=true",
    ],
    "spikes": ["trainer.spike_factor=1.5", "trainer.on_nonfinite=skip", "optimizer.lr=0.3"],
    "convnet": [
        "task=classification",
        "data=digits",
        "model=convnet",
        "model.norm=group",
        "data.shift=1",
        "optimizer=sgd",
        "trainer.batch_size=12",
    ],
    "smoothing": ["task.label_smoothing=0.1"],
    "bf16": ["trainer.precision=bf16"],
    "fp16": ["trainer.precision=fp16"],
}


def slug(kind: str) -> str:
    return kind.replace(", ", "-")


def settings(root: Path, kind: str, steps: int = STEPS) -> dict[str, Any]:
    text = [] if kind == "convnet" else [*TINY, f"data.cache_dir={root.parent / 'cache'}"]
    limits = ["trainer.max_epochs=null", f"trainer.max_steps={steps}", "snapshot.every_steps=null"]
    reports = ["trainer.eval_every=3", "trainer.log_every=1"]
    where = [f"run.root={root}", f"run.name={slug(kind)}"]
    return configure(*text, *CANONICAL, *limits, *reports, *KINDS[kind], *where)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[int], Path]:
    """Return a function that trains all kinds of runs on some ranks. It returns their folder."""
    top = tmp_path_factory.mktemp("canonical")

    @functools.cache
    def train(ranks: int) -> Path:
        root = top / f"ranks{ranks}"
        configs = [settings(root, kind) for kind in KINDS]
        run_ranks(ranks, train_in_turn, root / "ranks", configs=configs)
        return root

    return train


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_on_any_number_of_ranks(trained, kind, ranks):
    if kind == "bf16" and not cpu_is_fast_at_bf16():
        pytest.skip("bf16 is emulated here")
    expected = digests(trained(1) / slug(kind))
    assert "'val_loss'" in expected["logged"]
    assert digests(trained(ranks) / slug(kind)) == expected


def test_the_fast_reduction_gives_other_bits(tmp_path):
    """This shows that the comparison above can fail."""
    found = []
    for ranks in (1, 3):
        root = tmp_path / f"ranks{ranks}"
        config = settings(root, "gpt")
        config["ddp"]["reduction"] = "fast"
        run_ranks(ranks, train_in_turn, root / "ranks", configs=[config])
        found.append(digests(root / "gpt")["model"])
    assert found[0] != found[1]
