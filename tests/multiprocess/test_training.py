"""An optimizer step does not depend on the world size or the micro-batch size."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from launching import TINY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data import dataloader
from mingpt_ddp.data.dataset import TextDataset
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models import build_model
from mingpt_ddp.process.env import read_env
from mingpt_ddp.tasks import build_task
from mingpt_ddp.training.evaluation.evaluator import Evaluator
from multiprocess.ranks import configure, run_ranks, train_in_turn

STEPS = 3
SGD = [
    "optimizer=sgd",
    "optimizer.lr=0.1",
    "optimizer.warmup_steps=0",
    "trainer.grad_norm_clip=null",
]
ADAMW = [
    "optimizer=adamw",
    "optimizer.lr=3e-3",
    "optimizer.warmup_steps=0",
    "trainer.grad_norm_clip=0.5",
]
# For each kind of run: overrides, and the world sizes that 12 sequences per step allow.
KINDS: dict[str, tuple[list[str], list[int]]] = {
    "sgd, dropout, micro 1": (
        [*SGD, "model.dropout=0.1", "trainer.micro_batch_size=1"],
        [1, 2, 3, 7],
    ),
    "adamw, dropout, micro 3": (
        [*ADAMW, "model.dropout=0.1", "trainer.micro_batch_size=3"],
        [1, 2, 3],
    ),
    **{
        f"sgd, micro {m}": ([*SGD, f"trainer.micro_batch_size={m}"], [1, 2, 3])
        for m in (1, 2, 3, 4)
    },
    "sgd, micro null": ([*SGD, "trainer.micro_batch_size=null"], [1, 2, 3, 7]),
}
PRECISIONS = ("fp32", "bf16", "fp16")


def settings(root: Path, *overrides: str) -> dict[str, Any]:
    cache = root.parent / "cache"
    short = [f"trainer.max_steps={STEPS}", "trainer.eval_every=null", "snapshot.every_steps=null"]
    return configure(*TINY, *short, *overrides, f"run.root={root}", f"data.cache_dir={cache}")


def slug(kind: str) -> str:
    return kind.replace(", ", "-").replace(" ", "_")


def train_all(configs: list[dict[str, Any]]) -> list[float]:
    """Train one run after another, as in a sweep.

    Return their validation losses, and the loss of an untrained model.
    """
    return [*train_in_turn(configs), untrained_loss(configs[0], len(configs))]


def untrained_loss(values: dict[str, Any], job: int) -> float:
    """Evaluate an untrained model. The batches are small, so that every rank evaluates several."""
    config = from_mapping(values)
    runtime = Runtime(config, read_env(), job)
    task = build_task(config, runtime.group)
    seed_everything(5)
    dataloader.EVALUATION_BATCH_TOKENS = 5 * config.data.block_size
    metrics = Evaluator(task, runtime).run(task.build_model(), "val")
    runtime.close()
    assert metrics is not None
    return metrics["loss"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains all kinds of runs on a number of ranks.

    It returns their validation losses by rank, and their root directory.
    """
    top = tmp_path_factory.mktemp("training")

    @functools.cache
    def start(world_size: int) -> dict[str, Any]:
        root = top / f"world{world_size}"
        kinds = [kind for kind, (_, worlds) in KINDS.items() if world_size in worlds]
        configs = [settings(root, *KINDS[kind][0], f"run.name={slug(kind)}") for kind in kinds]
        losses = run_ranks(world_size, train_all, root / "ranks", configs=configs)
        return {"losses": losses, "root": root}

    return start


def weights(root: Path, kind: str, step: int = STEPS) -> dict[str, Tensor]:
    return safetensors.torch.load_file(
        root / slug(kind) / "snapshots" / f"step_{step:08d}" / "model.safetensors"
    )


def max_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def initial(trained) -> dict[str, Tensor]:
    """Return the initial weights, which all these runs share."""
    config = from_mapping(settings(trained(1)["root"]))
    corpus = TextDataset(prepare_all(config.data)[""], config.data)
    seed_everything(config.run.seed)
    return build_model(
        config.model, corpus.tokenizer.vocab_size, config.data.block_size
    ).state_dict()


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [(kind, world) for kind in list(KINDS)[:2] for world in KINDS[kind][1] if world > 1],
)
def test_the_same_steps_on_any_number_of_ranks(trained, initial, kind, world_size):
    """This holds with dropout, since it is drawn for each micro-batch and not for each rank."""
    one, many = weights(trained(1)["root"], kind), weights(trained(world_size)["root"], kind)
    assert max_difference(one, initial) > 1e-3, "nothing was trained"
    for name in one:
        torch.testing.assert_close(
            many[name], one[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sgd, micro 1", "sgd, micro 2", "sgd, micro 3", "sgd, micro 4"])
def test_the_same_steps_for_every_micro_batch_size(trained, initial, kind, world_size):
    """Without dropout, accumulated gradients equal those of the whole batch."""
    whole = weights(trained(1)["root"], "sgd, micro null")
    split = weights(trained(world_size)["root"], kind)
    assert max_difference(whole, initial) > 1e-3, "nothing was trained"
    for name in whole:
        torch.testing.assert_close(
            split[name], whole[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_without_a_micro_batch_size_every_number_of_ranks_works(trained, world_size):
    state = (
        trained(world_size)["root"]
        / slug("sgd, micro null")
        / "snapshots"
        / f"step_{STEPS:08d}"
        / "state.json"
    )
    assert (
        json.loads(state.read_text())["micro_batch_size"] == {1: 12, 2: 6, 3: 4, 7: 1}[world_size]
    )
    kind = "sgd, micro null"
    assert (
        max_difference(
            weights(trained(1)["root"], kind), weights(trained(world_size)["root"], kind)
        )
        < 1e-5
    )


def test_dropout_is_active(trained):
    root = trained(1)["root"]
    assert (
        max_difference(weights(root, "sgd, dropout, micro 1"), weights(root, "sgd, micro 1")) > 1e-3
    )


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_the_validation_loss_is_the_same_on_any_number_of_ranks(trained, world_size):
    """It is the same on all ranks. For equal weights, it agrees to the last digits."""
    by_rank = trained(world_size)["losses"]
    assert by_rank == [by_rank[0]] * world_size
    assert by_rank[0][-1] == pytest.approx(trained(1)["losses"][0][-1], rel=1e-9)
    trained_losses = dict(
        zip([k for k in KINDS if world_size in KINDS[k][1]], by_rank[0], strict=False)
    )
    alone = dict(zip(KINDS, trained(1)["losses"][0], strict=False))
    for kind, loss in trained_losses.items():
        assert loss == pytest.approx(alone[kind], rel=1e-5), kind


# Lower precisions


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Train 60 steps on two ranks in each of three precisions. Return the runs' directory."""
    root = tmp_path_factory.mktemp("precision") / "outputs"
    options = [
        "trainer.max_steps=60",
        "optimizer.lr=1e-2",
        "optimizer.warmup_steps=5",
        "trainer.micro_batch_size=3",
    ]
    configs = [
        settings(root, *options, f"trainer.precision={p}", f"run.name={p}") for p in PRECISIONS
    ]
    run_ranks(2, train_all, root.parent / "ranks", configs=configs)
    return root


def logged(run_directory: Path, tag: str) -> list[float]:
    events = EventAccumulator(
        str(run_directory / "tensorboard" / "rank0"), size_guidance={"scalars": 0}
    )
    events.Reload()
    return [event.value for event in events.Scalars(tag)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_learns(runs, precision):
    losses = logged(runs / precision, "train/loss")
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 0.7
    assert losses[-1] == pytest.approx(logged(runs / "fp32", "train/loss")[-1], abs=0.1)
    weight = safetensors.torch.load_file(
        runs / precision / "snapshots" / "step_00000060" / "model.safetensors"
    )
    assert {tensor.dtype for tensor in weight.values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_lower_precision_is_used(runs, precision):
    assert logged(runs / precision, "train/loss") != logged(runs / "fp32", "train/loss")


def test_gradients_are_unscaled_before_they_are_measured_and_clipped(runs):
    """The norm for the log and for clipping is as in fp32, and not 65,536 times as large."""
    norms, expected = (
        logged(runs / "fp16", "train/grad_norm"),
        logged(runs / "fp32", "train/grad_norm"),
    )
    ratios = np.array(norms) / np.array(expected)
    assert 0.8 < float(np.median(ratios)) < 1.25


def test_the_gradient_scale_is_in_the_snapshot(runs):
    """Otherwise a resumed run would start with the initial scale, and skip its first steps."""
    states = {
        precision: json.loads(
            (runs / precision / "snapshots" / "step_00000060" / "state.json").read_text()
        )
        for precision in PRECISIONS
    }
    assert states["fp16"]["scaler"]["scale"] >= 1
    assert 0 < states["fp16"]["scaler"]["_growth_tracker"] <= 60
    assert states["fp32"]["scaler"] == states["bf16"]["scaler"] == {}
