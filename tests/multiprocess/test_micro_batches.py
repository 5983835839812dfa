"""Hooks measure the gradients of each micro-batch, however gradients are computed and averaged."""

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

STEPS, MICRO_BATCHES = 3, 5  # of two ranks, the second has one micro-batch less


class Compared:
    """A hook that compares the mean over the micro-batches with the averaged gradients."""

    differences: list[float] = []  # noqa: RUF012

    def micro_batch(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: gradient.flatten()[:99] for name, gradient in gradients.items()}

    def __call__(
        self, step: int, gradients: dict[str, Tensor], micro_batches: dict[str, Tensor]
    ) -> None:
        assert gradients.keys() == micro_batches.keys()
        for name, gradient in gradients.items():
            if len(micro_batches[name]) == MICRO_BATCHES:  # the trial before the run has fewer
                mean = micro_batches[name].mean(dim=0)
                difference = (mean - gradient.flatten()[:99]).norm() / gradient.norm()
                self.differences.append(float(difference))

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing, since there is no state."""


def clip(step: int, gradients: dict[str, Tensor]) -> None:
    """Clamp the gradients, or the rows of them that this rank holds."""
    for gradient in gradients.values():
        gradient.clamp_(-1e-3, 1e-3)


class Clipping(Compared):
    """A hook that also clamps the gradients."""

    def __call__(self, step: int, gradients: dict[str, Tensor], micro_batches: Any) -> None:
        super().__call__(step, gradients, micro_batches)
        clip(step, gradients)


# The last word of a run's name selects its hook.
HOOKS = {"measured": Compared, "clip": clip, "clipping": Clipping}


def train(configs: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Train each run with the hook that its name selects, if any.

    Return for each run the largest difference that its hook has found, and a hash of all saved
    tensors except the hook's.
    """
    compiling.BACKEND = "aot_eager"  # like inductor, but generates no code
    results = []
    for job, values in enumerate(configs):
        torch.compiler.reset()
        hook = HOOKS.get(values["run"]["name"].rpartition("_")[2])
        Compared.differences.clear()
        BUILDERS["action"].clear()
        if hook is not None:
            BUILDERS["action"]["gradients mine.hook"] = hook
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
        assert bool(Compared.differences) == isinstance(hook, type)
        results.append((max(Compared.differences, default=0.0), digest.hexdigest()))
    return results


# For each way to compute and average gradients: overrides, and the largest relative difference.
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


def configs_of(directory: Path, runs: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return the configurations of short runs, by name."""
    small = [f"run.root={directory}", f"data.cache_dir={directory / 'cache'}", "model.n_layer=1"]
    small += ["trainer.batch_size=10", "trainer.micro_batch_size=2", f"trainer.max_steps={STEPS}"]
    small += ["trainer.eval_every=null", "trainer.sample_every=null", "model.dropout=0.1"]
    return [configure(*TINY, *small, f"run.name={n}", *words) for n, words in runs.items()]


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (1, ["compiled", "fp16"]),
        (2, [way for way in WAYS if way != "hsdp"]),
        pytest.param(4, ["hsdp"], marks=pytest.mark.slow),
    ],
)
def test_measuring_changes_no_bits_and_the_mean_is_the_averaged_gradient(ranks, ways, tmp_path):
    names = {name: WAYS[way][0] for way in ways for name in (way, f"{way}_measured")}
    configs = configs_of(tmp_path, names)
    results = run_ranks(ranks, train, tmp_path / "ranks", configs=configs)
    for i, way in enumerate(ways):
        for rank in range(ranks):
            (_, plain), (difference, measured) = results[rank][2 * i : 2 * i + 2]
            assert measured == plain, way
            assert difference < WAYS[way][1], way


def test_changes_that_a_hook_makes_to_gradients_reach_the_rows_of_each_rank(tmp_path):
    fsdp = ["ddp.strategy=fsdp"]
    configs = configs_of(tmp_path, {"plain": fsdp, "by_clip": fsdp, "by_clipping": fsdp})
    for result in run_ranks(2, train, tmp_path / "ranks", configs=configs):
        plain, by_function, by_class = (digest for _, digest in result)
        assert by_class == by_function != plain
