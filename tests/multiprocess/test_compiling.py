"""With torch.compile, a run never recompiles after its warm-up, and resumes exactly."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import TINY
from torch import nn

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed.device import compile as compiling
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.distributed.strategies.single import SingleStrategy
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import build_model
from mingpt_ddp.process.env import read_env
from mingpt_ddp.training.run import train_run
from multiprocess.ranks import Ranks, configure

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def train(configs: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """Train runs. Return the validation loss and the number of graphs of each.

    Recompiling after the warm-up is an error. The backend captures graphs like inductor, but
    generates no code, which would take half a minute.
    """
    from torch._dynamo.utils import counters

    compiling.BACKEND = "aot_eager"
    logging.getLogger("mingpt_ddp").setLevel(logging.INFO)
    warm_up = Strategy.warm_up

    def warm_up_then_forbid(self: Strategy, *arguments: Any) -> None:
        torch.compiler.set_stance("default")
        warm_up(self, *arguments)
        torch.compiler.set_stance("fail_on_recompile")

    Strategy.warm_up = warm_up_then_forbid
    results = []
    for job, values in enumerate(configs):
        counters.clear()
        config = from_mapping(values)
        runtime = Runtime(config, read_env(), job)
        loss = train_run(Job(config), runtime)["loss"]
        runtime.close()
        runtime.free_memory()
        results.append((loss, counters["stats"]["unique_graphs"]))
    return results


@pytest.mark.parametrize(
    ("world_size", "recomputed"), [(1, False), pytest.param(2, True, marks=pytest.mark.slow)]
)
def test_one_graph_and_exact_resumption(world_size, recomputed, tmp_path):
    """The run has dropout, gradient accumulation, a short last window to evaluate, and samples."""

    def settings(name: str, steps: int, *overrides: str) -> dict[str, Any]:
        paths = [f"run.root={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", f"run.name={name}"]
        intervals = ["trainer.eval_every=2", "trainer.sample_every=2", "optimizer.schedule_steps=6"]
        small = [
            "model.n_layer=1",
            "model.dropout=0.1",
            "trainer.micro_batch_size=3",
            f"trainer.max_steps={steps}",
        ]
        compiled = [f"trainer.activation_checkpointing={recomputed}", "trainer.compile=true"]
        return configure(*TINY, *intervals, *small, *compiled, *paths, *overrides)

    eager = settings("eager", 6, "trainer.compile=false", "trainer.activation_checkpointing=false")
    configs = [settings("whole", 6), settings("parts", 3), settings("parts", 6), eager]
    with Ranks(world_size, train, tmp_path / "ranks", configs=configs) as ranks:
        results = ranks.results()
    assert results[0] == results[-1]
    graphs = [graphs for _, graphs in results[0]]
    assert graphs == [1, 1, 1, 0]
    whole, _, parts, plain = (loss for loss, _ in results[0])
    assert whole == parts
    assert whole == pytest.approx(plain, abs=1e-4)
    files = [
        tmp_path / name / "snapshots" / "step_00000006" / "model.safetensors"
        for name in ("whole", "parts")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "compiled in" in (tmp_path / "whole" / "main.rank0.log").read_text()


def config(*overrides: str) -> Config:
    return from_mapping(configure(*overrides))


def test_auto_compiles_built_in_models_on_a_gpu(monkeypatch):
    monkeypatch.setattr(compiling, "_missing_requirement", lambda device: None)
    assert compiling.should_compile(config(), GPU)
    assert not compiling.should_compile(config(), CPU)
    assert compiling.should_compile(config("trainer.compile=true"), CPU)
    assert not compiling.should_compile(config("trainer.compile=false"), GPU)
    with pytest.raises(ConfigError, match="cuda_graphs needs a GPU"):
        compiling.should_compile(config("trainer.compile=cuda_graphs"), CPU)
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "is_custom_model", lambda model: model.architecture == "gpt")
        assert not compiling.should_compile(config(), GPU)
        assert compiling.should_compile(config("trainer.compile=true"), GPU)
    monkeypatch.setattr(compiling, "_missing_requirement", lambda device: "a compiler")
    assert not compiling.should_compile(config(), GPU)


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        ConfigError, match=r"trainer.compile=true needs a compiler \(g\+\+ or clang\+\+\)"
    ):
        compiling.should_compile(config("trainer.compile=true"), CPU)


def test_cuda_graphs_need_one_micro_batch_per_step():
    settings = config("trainer.compile=cuda_graphs", "trainer.batch_size=12")
    assert plan_batches(settings, 1).n_micro == 1
    with pytest.raises(ConfigError, match="makes 2 micro-batches of 6 sequences"):
        plan_batches(settings, 2)


def test_auto_uses_cuda_graphs_for_small_built_in_models_on_one_gpu(monkeypatch):
    def replays(*overrides: str, world_size: int = 1, model: nn.Module | None = None) -> bool:
        settings = config("trainer.batch_size=12", *overrides)
        built = model or build_model(settings.model, 65, settings.data.block_size)
        return compiling.replays_graphs(settings, built, plan_batches(settings, world_size))

    assert replays()
    assert not replays("trainer.compile=true")
    assert not replays("trainer.micro_batch_size=6")
    assert not replays(world_size=2)
    assert not replays("trainer.batch_size=2000000")
    assert not replays(model=nn.Linear(2, 2))
    assert replays("trainer.compile=cuda_graphs", model=nn.Linear(2, 2))
    monkeypatch.setattr(compiling, "is_user_defined", lambda kind, name: kind == "task")
    assert not replays()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_run_makes_the_compiler_deterministic(deterministic):
    from torch._inductor import config as inductor

    settings = config("trainer.compile=true", f"trainer.deterministic={deterministic}")
    group = SimpleNamespace(world_size=1)
    strategy = SingleStrategy(settings.ddp, settings.trainer, CPU, group, compiles=True)
    strategy.wrap(nn.Linear(1, 1))
    assert inductor.deterministic is deterministic


class Printing(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        print("no graph holds this" if x.sum().item() > 0 else "nor that")
        return (x - y).float().mean()


def test_a_graph_break_is_a_one_line_error():
    ones = torch.ones(2, 3)
    with pytest.raises(
        ConfigError,
        match=r"trainer.compile=true: torch cannot compile the model gpt; set it to false",
    ):
        compiling.check_compiles(
            Printing(), config("trainer.compile=true"), lambda model: model(ones, ones)
        )
    torch.compiler.reset()


@pytest.mark.parametrize("directory", [None, "/shared/compiled"])
def test_compiled_code_is_cached_for_each_kind_of_cpu(directory, monkeypatch):
    """torch's cache keys ignore vector instructions. Code for other instructions gives NaN."""
    variable = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(variable, directory or "")
    if directory is None:
        monkeypatch.delenv(variable)
    found = {}
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        for _ in range(2):  # for example, two jobs of a sweep
            compiling.compile_model(nn.Linear(2, 2), CPU, deterministic=False, graphs=False)
        found[capability] = os.environ[variable]
        base = found[capability].rpartition("/")[0]
        monkeypatch.setenv(variable, base)
    assert len(set(found.values())) == 2
    assert directory in (None, base)
    compiling.compile_model(nn.Linear(2, 2), GPU, deterministic=False, graphs=False)
    assert os.environ[variable] == base
