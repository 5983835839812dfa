"""Tensor parallelism: a GPT that is split over ranks has the results of a whole GPT.

They are losses, gradients and snapshots.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from launching import TINY
from torch import Tensor, nn

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import run_name
from mingpt_ddp.data.dataloader import TokenLoader, plan_batches
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.tensor_split import gather
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.inference.generate import SamplingParams, generate
from mingpt_ddp.process.env import read_env
from mingpt_ddp.snapshots.state_dict import model_state
from mingpt_ddp.storage.run_directory import read_result
from mingpt_ddp.tasks import build_task
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import build_trainable
from multiprocess.ranks import Ranks, configure, run_ranks, train_in_turn

MODEL = [
    *TINY,
    "model.n_head=4",
    "model.dropout=0.0",
    "trainer.batch_size=8",
    "trainer.micro_batch_size=4",
]
BIASED = [
    *MODEL,
    "model.bias=true",
    "trainer.activation_checkpointing=true",
    "trainer.grad_norm_clip=0.1",
]
SGD = [*MODEL, "optimizer=sgd", "optimizer.lr=0.1", "optimizer.warmup_steps=0"]


def settings(root: Path, *overrides: str) -> dict[str, Any]:
    return configure(
        *MODEL, *overrides, f"run.root={root}", f"data.cache_dir={root.parent / 'cache'}"
    )


def one_step(values: dict[str, Any]) -> dict[str, Any]:
    """Take a step. Return its loss and gradients, the new weights, logits, and a generated text."""
    config = from_mapping(values)
    runtime = Runtime(config, read_env())
    task = build_task(config, runtime.group)
    trainable = build_trainable(runtime, task)
    model = trainable.model
    if runtime.group.tensor_size > 1:
        assert any(hasattr(parameter, "to_local") for parameter in model.parameters())
    randomize(model)
    loader = task.train_loader(runtime.device)
    assert isinstance(loader, TokenLoader)
    plan = plan_batches(config, runtime.group.data_size)
    step = TrainStep(runtime, task, loader, plan, trainable)
    losses = step.passes(1)
    gradients = whole_gradients(model)
    grad_norm = step.clip()
    clipped = whole_gradients(model)
    step.update(1)
    loss = runtime.group.all_reduce(losses["loss"].clone())
    updated = {}
    for name, tensor in model_state(model).items():
        updated[name] = gather(name, tensor).flatten().tolist()
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        logits = model(tokens)
    text = torch.stack(list(generate(model, tokens, 20, SamplingParams(temperature=0))))
    runtime.close()
    numbers = {
        "loss": float(loss),
        "norm": float(grad_norm),
        "logits": logits.tolist(),
        "text": text.tolist(),
    }
    return {**numbers, "gradients": gradients, "clipped": clipped, "weights": updated}


def randomize(model: nn.Module) -> None:
    """Set all parameters to random values, also biases and norms.

    Every rank draws the values of the whole tensor.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "qkv" not in name and "up" not in name:
            seed_everything(name)
            with torch.no_grad():
                parameter.to_local().normal_() if hasattr(
                    parameter, "to_local"
                ) else parameter.normal_()


def whole_gradients(model: nn.Module) -> dict[str, list[float]]:
    return {name: gather(name, p.grad).flatten().tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", [SGD, BIASED], ids=["sgd", "adamw, biases, checkpointing"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
def test_a_step_equals_a_step_of_the_whole_model(ranks, size, options, tmp_path):
    whole = one_step(settings(tmp_path / "a", *options))
    split = settings(tmp_path / "a", *options, f"ddp.tensor_parallel={size}")
    for result in run_ranks(ranks, one_step, tmp_path / "many", values=split):
        assert result["loss"] == pytest.approx(whole["loss"], abs=1e-5)
        assert result["norm"] == pytest.approx(whole["norm"], rel=1e-5)
        np.testing.assert_allclose(result["logits"], whole["logits"], atol=1e-5)
        assert result["text"] == whole["text"]
        for kind in ("gradients", "clipped", "weights"):
            assert result[kind].keys() == whole[kind].keys()
            for name, values in whole[kind].items():
                np.testing.assert_allclose(
                    result[kind][name], values, rtol=1e-4, atol=1e-6, err_msg=f"{kind} {name}"
                )
                assert np.any(values), name


def tensors(root: Path, name: str, step: int = 20) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in (root / name / "snapshots" / f"step_{step:08d}").glob("*.safetensors"):
        loaded = safetensors.torch.load_file(path)
        found.update({f"{path.stem}/{key}": tensor for key, tensor in loaded.items()})
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Train runs of 20 steps and return their directory.

    One is on a single rank, one is split, and others are split in the first or second half only.
    """
    root = tmp_path_factory.mktemp("tensor") / "outputs"

    def config(name: str, steps: int = 20, size: int = 1) -> dict[str, Any]:
        options = [
            f"trainer.max_steps={steps}",
            "optimizer.schedule_steps=20",
            "trainer.eval_every=20",
            f"run.name={name}",
            f"ddp.tensor_parallel={size}",
            "snapshot.every_steps=10",
            "trainer.eval_steps=4",
            "trainer.ema=0.5",
        ]
        return settings(root, *options)

    train_in_turn([config("whole"), config("whole-then-split", 10)])
    two = [
        config("split", 20, 2),
        config("split-then-whole", 10, 2),
        config("whole-then-split", 20, 2),
        config("parts", 10, 2),
        config("parts", 20, 2),
    ]
    for world_size, configs in ((2, two), (4, [config("four", 20, 2)])):
        with Ranks(
            world_size, train_in_turn, root.parent / f"ranks{world_size}", configs=configs
        ) as ranks:
            ranks.results()
    train_in_turn([config("split-then-whole", 20)])
    return root


def loss(root: Path, name: str) -> float:
    return float(read_result(root / name)["val_loss"])


@pytest.mark.parametrize("name", ["split", "four", "split-then-whole", "whole-then-split"])
def test_a_run_is_the_same_split_or_whole(runs, name):
    """A snapshot may be saved by a split run and resumed whole, or the other way round."""
    assert loss(runs, name) == pytest.approx(loss(runs, "whole"), abs=1e-5)
    count = read_result(runs / name)["parameters"]
    assert count == read_result(runs / "whole")["parameters"], "those of all ranks"
    whole, split = tensors(runs, "whole"), tensors(runs, name)
    assert {key: tensor.shape for key, tensor in split.items()} == {
        key: tensor.shape for key, tensor in whole.items()
    }
    for key, tensor in whole.items():
        torch.testing.assert_close(split[key], tensor, rtol=1e-4, atol=1e-4, msg=key)


def test_a_split_run_resumes_bit_for_bit(runs):
    whole, parts = tensors(runs, "split"), tensors(runs, "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_the_training_loss_counts_each_copy_once(runs):
    def series(name: str) -> list[float]:
        rows = map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
        return [row["train_loss"] for row in rows if "train_loss" in row]

    assert len(series("whole")) == 20
    assert series("whole")[-1] < series("whole")[0] - 0.1, "nothing was learned"
    assert series("four") == pytest.approx(series("whole"), abs=1e-5)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["model=modern_nano", "model.dropout=0.0"],
            "=2 needs model.architecture=gpt; otherwise set ddp.tensor_parallel=1",
        ),
        (["model.dropout=0.1"], "=2 needs model.dropout=0, because"),
        (
            ["model.dropout=0.0", "optimizer=muon"],
            "=2 needs another optimizer, such as optimizer=adamw, because muon needs",
        ),
        (
            ["model.dropout=0.0", "trainer.precision=fp16"],
            "=2 needs trainer.precision=fp32 or bf16, because",
        ),
        (["model.dropout=0.0", "model.n_head=3"], "=2 must divide model.n_head=3"),
        (["model.dropout=0.0"], "=2 must divide the number of ranks, 1"),
        (["ddp.comm_hook=fp16"], "=2 needs ddp.comm_hook=none"),
        (["model.dropout=0.0", "trainer.compile=true"], "=1"),
        (["ddp.backend=mpi"], "=2 does not work with ddp.backend=mpi"),
    ],
)
def test_models_and_keys_that_cannot_be_split_are_refused(overrides, reason):
    with pytest.raises(ConfigError, match=f"ddp.tensor_parallel{reason}"):
        Runtime(
            from_mapping(
                configure("model=gpt_nano", "model.n_head=4", "ddp.tensor_parallel=2", *overrides)
            ),
            read_env(),
        )


def test_the_key_does_not_change_the_run_name():
    one, two = (from_mapping(configure(f"ddp.tensor_parallel={n}")) for n in (1, 2))
    assert run_name(one) == run_name(two)
