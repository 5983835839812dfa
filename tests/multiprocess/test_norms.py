"""The norms per layer are those of the whole model, however the ranks share it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import TINY

from multiprocess.ranks import configure, run_ranks, train_in_turn

STEPS = [
    "trainer.max_steps=6",
    "trainer.norms_every=3",
    "trainer.eval_every=null",
    "snapshot.every_steps=null",
]
STRATEGIES = {name: f"ddp.strategy={name}" for name in ("ddp", "zero1", "fsdp")} | {
    "tensor": "ddp.tensor_parallel=2"
}


def norms(run: Path) -> dict[int, dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        r["step"]: {k: v for k, v in r.items() if k != "step"}
        for r in records
        if "norms_weights_blocks.0" in r
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("norms")
    common = [
        *TINY,
        *STEPS,
        "model.n_head=2",
        f"run.root={root}",
        f"data.cache_dir={root / 'cache'}",
    ]
    configs = [configure(*common, word, f"run.name={name}") for name, word in STRATEGIES.items()]
    run_ranks(1, train_in_turn, root / "one", configs=[configure(*common, "run.name=single")])
    run_ranks(2, train_in_turn, root / "two", configs=configs)
    return root


@pytest.mark.parametrize("name", STRATEGIES)
def test_norms_do_not_depend_on_the_strategy(name, root):
    expected, found = norms(root / "single"), norms(root / name)
    assert [*expected] == [*found] == [3, 6]
    for step, values in expected.items():
        layers = {
            key.removeprefix("norms_weights_") for key in values if key.startswith("norms_weights_")
        }
        assert {"blocks.0", "blocks.1", "token_embedding"} <= layers
        assert len(values) == 3 * len(layers)
        assert all(value > 0 for value in values.values())
        assert found[step] == pytest.approx(values, rel=1e-3)
