"""Hooks that measure each micro-batch, with every way to compute and to average gradients."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TINY
from torch import Tensor

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.distributed.device import compile as compiling
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process.env import read_env
from mingpt_ddp.training.run import train_run
from multiprocess.ranks import configure, run_ranks

STEPS, MICRO_BATCHES = 3, 5  # on two ranks the second has one less


class Compared:
    """Compare the mean of what is measured with the averaged gradients, in the order of names."""

    differences: list[float] = []  # noqa: RUF012

    def micro_batch(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: gradient.flatten()[:99] for name, gradient in gradients.items()}

    def __call__(
        self, step: int, gradients: dict[str, Tensor], micro_batches: dict[str, Tensor]
    ) -> None:
        assert gradients.keys() == micro_batches.keys()
        for name, gradient in gradients.items():
            if len(micro_batches[name]) == MICRO_BATCHES:  # fewer in the trial before the run
                mean = micro_batches[name].mean(dim=0)
                difference = (mean - gradient.flatten()[:99]).norm() / gradient.norm()
                self.differences.append(float(difference))

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """There is nothing to load."""


def train(configs: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Train each run without and with the hook.

    Return the largest difference of the hook, and a hash of all tensors but the hook's, of each.
    """
    compiling.BACKEND = "aot_eager"  # as inductor, but generates no code
    results = []
    for job, values in enumerate(configs):
        torch.compiler.reset()
        is_measured = values["run"]["name"].endswith("measured")
        Compared.differences.clear()
        BUILDERS["action"].clear()
        if is_measured:
            BUILDERS["action"]["gradients mine.Compared"] = Compared
        config = from_mapping(values)
        runtime = Runtime(config, read_env(), job)
        train_run(Job(config), runtime)
        runtime.close()
        runtime.free_memory()
        digest = hashlib.sha256()
        [snapshot] = Path(config.run.root, config.run.name).glob(f"snapshots/step_{STEPS:08}")
        for path in sorted(snapshot.glob("*.safetensors")):
            if not path.name.startswith("hooks"):
                digest.update(path.read_bytes())
        assert bool(Compared.differences) == is_measured
        results.append((max(Compared.differences, default=0.0), digest.hexdigest()))
    return results


WAYS = {
    "compiled": (["trainer.compile=true"], 1e-5),
    "recomputed": (["trainer.activation_checkpointing=true"], 1e-5),
    "static": (["ddp.static_graph=true", "ddp.gradient_as_bucket_view=true"], 1e-5),
    "unused": (["ddp.find_unused_parameters=true"], 1e-5),
    "rounded": (["ddp.comm_hook=bf16"], 1e-1),
    "fp16": (["trainer.precision=fp16"], 1e-5),
    "bf16": (["trainer.precision=bf16"], 1e-5),
    "fsdp": (["ddp.strategy=fsdp"], 1e-5),
    "fsdp_bf16": (["ddp.strategy=fsdp", "trainer.precision=bf16"], 1e-1),
    "hsdp": (["ddp.strategy=hsdp"], 1e-5),
}


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (1, ["compiled", "fp16"]),
        (2, [way for way in WAYS if way != "hsdp"]),
        pytest.param(4, ["hsdp"], marks=pytest.mark.slow),
    ],
)
def test_the_run_keeps_its_bits_and_the_mean_is_the_averaged_gradient(ranks, ways, tmp_path):
    configs = []
    for way in ways:
        for name in (way, f"{way}_measured"):
            paths = [f"run.root={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}"]
            size = ["model.n_layer=1", "trainer.batch_size=10", "trainer.micro_batch_size=2"]
            limits = [f"trainer.max_steps={STEPS}", "trainer.eval_every=null"]
            words = [*TINY, *paths, *size, *limits, f"run.name={name}", *WAYS[way][0]]
            configs.append(configure(*words, "trainer.sample_every=null", "model.dropout=0.1"))
    results = run_ranks(ranks, train, tmp_path / "ranks", configs=configs)
    for i, way in enumerate(ways):
        for rank in range(ranks):
            (_, plain), (difference, measured) = results[rank][2 * i : 2 * i + 2]
            assert measured == plain, way
            assert difference < WAYS[way][1], way
