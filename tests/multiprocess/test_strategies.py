"""Every `ddp.strategy` takes the same steps on any number of ranks.

Each can resume from the snapshots of all others.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TINY
from torch import Tensor, nn

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.data import dataloader
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError, UserError
from mingpt_ddp.process.env import read_env
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.training import run as composition
from mingpt_ddp.training.start import stages
from multiprocess.ranks import configure, run_ranks, typed

TOLERANCE = 1e-5
STEPS = 12
# A step has four micro-batches, so one of three ranks has two of them. The loss falls by one in
# these steps.
SETTINGS = [
    *TINY,
    f"trainer.max_steps={STEPS}",
    "trainer.micro_batch_size=3",
    "optimizer.lr=1e-2",
    "optimizer.schedule_steps=12",
    "model.dropout=0.1",
    "trainer.sample_every=6",
    "snapshot.keep_last=9",
    "trainer.ema=0.5",
]
STRATEGIES = {
    1: ["auto"],
    2: ["ddp", "zero1", "fsdp"],
    3: ["ddp", "zero1", "fsdp"],
}
STRATEGIES[4] = ["hsdp"]
MUON = ["optimizer=muon", "optimizer.lr=1e-2", "optimizer.schedule_steps=12"]
NORMS = [
    "task=classification",
    "data=digits",
    "model=convnet",
    "ddp.sync_batchnorm=true",
    "trainer.batch_size=24",
    "trainer.micro_batch_size=null",
]


def settings(root: Path, name: str, *overrides: str) -> dict[str, Any]:
    return configure(*SETTINGS, f"run.root={root}", f"run.name={name}", *overrides)


def of_images(root: Path, name: str, *overrides: str) -> dict[str, Any]:
    text = ("model", "data", "trainer.batch_size", "trainer.micro", "trainer.sample")
    kept = [override for override in SETTINGS if not override.startswith(text)]
    return configure(*kept, *NORMS, f"run.root={root}", f"run.name={name}", *overrides)


def local_bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes


def train(configs: list[dict[str, Any]], nan_at: int | None = None) -> list[dict[str, Any]]:
    """Train one run after another.

    Return for each run its loss or error, and the size of this rank's state in bytes.
    """
    logging.getLogger("mingpt_ddp").setLevel(logging.INFO)
    build, built = stages.build_trainable, []
    stages.build_trainable = lambda *arguments: built.append(build(*arguments)) or built[-1]
    if nan_at is None:
        # An evaluation then has 13 batches. By default it would have 2, fewer than 3 ranks.
        dataloader.EVALUATION_BATCH_TOKENS = 5 * 16
    else:
        break_step(nan_at)
    results = []
    for job, values in enumerate(configs):
        config = typed(values)
        runtime = None
        try:
            runtime = Runtime(config, read_env(), job)
            loss = composition.train_run(Job(config), runtime)["loss"]
            model, optimizer = built[-1].model, built[-1].optimizer
            state = sum(local_bytes(t) for s in optimizer.state.values() for t in s.values())
            results.append(
                {"loss": loss, "state": state, "weights": sum(map(local_bytes, model.parameters()))}
            )
        except UserError as error:
            results.append({"error": str(error)})
        if runtime is not None:
            runtime.close()
        del runtime
        built.clear()
    return results


def break_step(step: int) -> None:
    """Make the loss of micro-batch 1 NaN in this step."""
    from mingpt_ddp.tasks.outputs import Outputs
    from mingpt_ddp.training.train_step import TrainStep

    forward = TrainStep.forward

    def broken(self, number, micro, measure=None):
        factor = torch.nan if (number, micro.index) == (step, 1) else 1.0
        outputs = forward(self, number, micro)
        return Outputs({name: loss * factor for name, loss in outputs.losses.items()}, {})

    TrainStep.forward = broken


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[int], dict[str, list[dict[str, Any]]]]:
    """Return a function that trains on a number of ranks and returns their results by strategy."""
    top = tmp_path_factory.mktemp("strategies")

    @functools.cache
    def start(world_size: int) -> dict[str, Any]:
        root = top / f"world{world_size}"
        names = STRATEGIES[world_size]
        configs = [settings(root, name, f"ddp.strategy={name}") for name in names]
        results = run_ranks(world_size, train, root / "ranks", configs=configs)
        return {
            "root": root,
            **{name: [rank[i] for rank in results] for i, name in enumerate(names)},
        }

    return start


@pytest.mark.parametrize(
    ("world_size", "name"), [(world, name) for world, names in STRATEGIES.items() for name in names]
)
def test_the_same_loss(trained, world_size, name):
    expected = trained(1)["auto"][0]["loss"]
    assert expected < 3.5, "nothing was trained"
    assert [rank["loss"] for rank in trained(world_size)[name]] == [
        pytest.approx(expected, abs=TOLERANCE)
    ] * world_size


@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_a_rank_holds_its_share_of_the_state(trained, name):
    whole, parts = trained(2)["ddp"][0], trained(2)[name]
    assert max(rank["state"] for rank in parts) < 0.6 * whole["state"]
    assert sum(rank["state"] for rank in parts) == pytest.approx(whole["state"], rel=0.01)
    if name == "fsdp":
        assert max(rank["weights"] for rank in parts) < 0.6 * whole["weights"]


@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_every_rank_writes_its_share(trained, name):
    snapshot = trained(2)["root"] / name / "snapshots" / f"step_{STEPS:08d}"
    sizes = [(snapshot / f"optimizer-0000{i}-of-00002.safetensors").stat().st_size for i in (1, 2)]
    assert max(sizes) < 0.6 * sum(sizes)
    whole = SnapshotStore(str(trained(2)["root"] / "ddp" / "snapshots")).read(STEPS)
    merged = SnapshotStore(str(snapshot.parent)).read(STEPS)
    for old, new in ((whole.model, merged.model), (whole.optimizer, merged.optimizer)):
        assert old.keys() == new.keys()
        for tensor in old:
            torch.testing.assert_close(new[tensor], old[tensor], rtol=1e-3, atol=1e-4)
    assert json.loads((snapshot / "state.json").read_text())["environment"]["strategy"] == name


@pytest.mark.parametrize(("world_size", "name"), [(2, "fsdp"), (4, "hsdp")])
def test_samples_during_training(trained, world_size, name):
    log = (trained(world_size)["root"] / name / "main.rank0.log").read_text()
    assert log.count("a sample:") == 2


CHAIN = [("ddp", 2), ("fsdp", 3), ("auto", 1), ("zero1", 2), ("hsdp", 4), ("zero1", 3), ("fsdp", 2)]


def test_snapshots_are_interchangeable(trained, tmp_path):
    """Each attempt takes two more steps, with another strategy than the attempt before."""
    for i, (name, world_size) in enumerate(CHAIN):
        steps = 2 * i + 2 if i + 1 < len(CHAIN) else STEPS
        config = settings(
            tmp_path, "run", f"ddp.strategy={name}", f"trainer.max_steps={min(steps, STEPS)}"
        )
        results = run_ranks(world_size, train, tmp_path / f"ranks{i}", configs=[config])
    assert results[0][0]["loss"] == pytest.approx(trained(1)["auto"][0]["loss"], abs=TOLERANCE)
    log = (tmp_path / "run" / "main.rank0.log").read_text()
    assert log.count("resuming from the snapshot") == len(CHAIN) - 2
    assert re.search(r"strategy +ddp +fsdp$", log, re.MULTILINE)


def digests(snapshot: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in snapshot.glob("*.safetensors")
    }


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (3, "fsdp"),
        (3, "zero1"),
        *(pytest.param(2, n, marks=pytest.mark.slow) for n in ("fsdp", "zero1")),
    ],
)
def test_exact_resumption(trained, world_size, name, tmp_path):
    parts = [
        settings(tmp_path, "run", f"ddp.strategy={name}", f"trainer.max_steps={n}")
        for n in (5, STEPS)
    ]
    run_ranks(world_size, train, tmp_path / "ranks", configs=parts)
    last = Path("snapshots", f"step_{STEPS:08d}")
    assert digests(tmp_path / "run" / last) == digests(trained(world_size)["root"] / name / last)


@pytest.mark.parametrize(
    ("policy", "world_size", "name"),
    [
        ("skip", 3, "fsdp"),
        ("rollback", 2, "zero1"),
        pytest.param("rollback", 3, "fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_loss_that_is_not_a_number(policy, world_size, name, tmp_path):
    """Only one rank finds it in its micro-batch, but all of them skip the step or restore their
    share.
    """
    config = settings(tmp_path, "run", f"ddp.strategy={name}", f"trainer.on_nonfinite={policy}")
    results = run_ranks(world_size, train, tmp_path / "ranks", configs=[config], nan_at=6)
    assert len({rank[0]["loss"] for rank in results}) == 1, (
        "or a rank without a batch of evaluation did not wait"
    )
    log = (tmp_path / "run" / "main.rank0.log").read_text()
    assert "step 6 has loss nan" in log
    assert "rank 1: the loss of micro-batch 1" in log
    assert ("rolled back to the snapshot of step 4" in log) == (policy == "rollback")


def test_batch_normalization_over_all_ranks(tmp_path):
    names = ["ddp", "zero1", "fsdp"]
    one = run_ranks(1, train, tmp_path / "one", configs=[of_images(tmp_path, "one")])
    configs = [of_images(tmp_path, name, f"ddp.strategy={name}") for name in names]
    half = [
        of_images(tmp_path, f"{n}16", f"ddp.strategy={n}", "trainer.precision=bf16")
        for n in ("ddp", "fsdp")
    ]
    results = run_ranks(2, train, tmp_path / "two", configs=[*configs, *half])
    for rank in results:
        assert [result["loss"] for result in rank[:3]] == [
            pytest.approx(one[0][0]["loss"], abs=TOLERANCE)
        ] * 3
        assert rank[3]["loss"] == pytest.approx(rank[4]["loss"], abs=1e-3)


def test_optimizers_and_precisions(tmp_path):
    """Muon's state is not divided under zero1. Steps whose fp16 loss scale overflows must be
    skipped by all ranks.
    """
    names = ["ddp", "zero1", "fsdp"]
    muon = [
        settings(tmp_path, f"muon {n}".replace(" ", "_"), *MUON, f"ddp.strategy={n}") for n in names
    ]
    fp16 = [
        settings(tmp_path, f"fp16_{n}", "trainer.precision=fp16", f"ddp.strategy={n}")
        for n in names
    ]
    for rank in run_ranks(2, train, tmp_path / "ranks", configs=[*muon, *fp16]):
        assert rank[1]["loss"] == pytest.approx(rank[0]["loss"], abs=TOLERANCE)
        assert rank[1]["state"] < 0.6 * rank[0]["state"]
        assert "ddp.strategy=zero1" in rank[2]["error"]
        assert rank[4]["loss"] == pytest.approx(rank[3]["loss"], abs=TOLERANCE)
        assert rank[5]["loss"] == pytest.approx(rank[3]["loss"], abs=1e-2)


def shard_odd_model() -> dict[str, Any]:
    """Shard a model and take a step.

    The model has fewer rows than ranks, tied weights, a frozen parameter and buffers.
    """
    config = from_mapping(configure("ddp.strategy=fsdp", "ddp.timeout_s=60"))
    runtime = Runtime(config, read_env())
    torch.manual_seed(0)
    model = nn.Module()
    model.a, model.b = nn.Linear(3, 2), nn.Linear(3, 2)
    model.b.weight = model.a.weight
    model.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    model.forward = lambda x: (model.a(x) + model.b(x)) * model.frozen
    model = runtime.strategy.prepare(model)
    optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    norm = runtime.strategy.total_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    rows = {name: len(p.to_local()) for name, p in model.named_parameters()}
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(
        ConfigError, match=r"cannot split the model: .*scalar.* use ddp.strategy=zero1"
    ):
        runtime.strategy.prepare(model)
    runtime.close()
    return {"rows": rows, "norm": float(norm)}


def test_fewer_rows_than_ranks(tmp_path):
    results = run_ranks(3, shard_odd_model, tmp_path)
    assert [rank["rows"]["a.weight"] for rank in results] == [1, 1, 0]
    assert [rank["norm"] for rank in results] == [pytest.approx((4 * 6 + 4) ** 0.5)] * 3


def see_own_files(values: dict[str, Any], root: str) -> str:
    """Train in a separate directory per rank, as on machines without a shared filesystem."""
    directory = Path(root, f"machine{read_env().rank}")
    directory.mkdir()
    os.chdir(directory)
    config = from_mapping(values)
    runtime = Runtime(config, read_env())
    try:
        composition.train_run(Job(config), runtime)
        return ""
    except UserError as error:
        return str(error)
    finally:
        runtime.close()


@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_storage_that_a_rank_cannot_reach_is_refused(name, tmp_path):
    config = settings(Path("outputs"), "run", f"ddp.strategy={name}")
    for message in run_ranks(
        2, see_own_files, tmp_path / "ranks", values=config, root=str(tmp_path)
    ):
        assert (
            f"ddp.strategy={name} needs snapshots that every rank can read, but rank 1" in message
        )


def take_steps(names: list[str], optimizers: list[str]) -> dict[str, list[float]]:
    """Take three steps with each strategy and optimizer.

    Return the weights, and the tensors of the optimizer state on this rank.
    """
    found = {}
    for job, (name, optimizer_name) in enumerate((n, o) for n in names for o in optimizers):
        runtime = Runtime(from_mapping(configure(f"ddp.strategy={name}")), read_env(), job)
        strategy = runtime.strategy
        torch.manual_seed(runtime.group.rank)  # rank zero's weights are used
        model = strategy.prepare(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
        optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.05)
        parallel = strategy.wrap(model)
        for step in range(3):
            torch.manual_seed(step)
            parallel(torch.randn(8, 4)).square().mean().backward()
            strategy.reduce_gradients(list(model.parameters()))
            strategy.total_norm([p.grad for p in model.parameters()])
            strategy.update(model, optimizer, runtime.scaler)
            optimizer.zero_grad()
        weights = strategy.on_whole_model(
            model,
            lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
            lambda whole: torch.cat(
                [t.flatten().float() for t in whole.state_dict().values()]
            ).tolist(),
        )
        states = sum(
            local_bytes(t)
            for s in optimizer.state.values()
            for t in s.values()
            if isinstance(t, Tensor)
        )
        found[f"{name} {optimizer_name}"] = [weights, states]
        runtime.close()
        del runtime, strategy, parallel
    return found


def test_optimizers_of_torch(tmp_path):
    """Adagrad, for example, has a state before its first step."""
    optimizers = ["Adagrad", "RMSprop", "NAdam", "Adamax"]
    results = run_ranks(
        2, take_steps, tmp_path, names=["ddp", "zero1", "fsdp"], optimizers=optimizers
    )
    for optimizer in optimizers:
        expected, whole = results[0][f"ddp {optimizer}"]
        for name in ("zero1", "fsdp"):
            assert results[0][f"{name} {optimizer}"][0] == pytest.approx(expected, abs=TOLERANCE), (
                name,
                optimizer,
            )
        for rank in results:
            assert rank[f"zero1 {optimizer}"][1] < 0.8 * whole
            assert rank[f"fsdp {optimizer}"][1] < 0.8 * whole
