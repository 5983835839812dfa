"""Anomalies are detected by all ranks, attributed to the right rank, and skipped or rolled back."""

from __future__ import annotations

import functools
import hashlib
import json
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from launching import TINY, committed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.distributed import runtime as runtime_module
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.jsonl import METRICS, read_history
from mingpt_ddp.models import GPT
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import read_env
from mingpt_ddp.training import train_step
from mingpt_ddp.training.run import train_run
from mingpt_ddp.training.start import stages
from multiprocess.ranks import configure, run_ranks

SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    "trainer.micro_batch_size=3",
    "trainer.max_steps=14",
    "trainer.eval_every=null",
    "snapshot.keep_last=100",
    "snapshot.keep_best=false",
]

# For each name: overrides, and the kind and steps of an anomaly in micro-batch 1. With two ranks,
# this micro-batch runs on rank 1.
JOBS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "uninterrupted": ([], {}),
    "stop": ([], {"kind": "loss", "steps": [6]}),
    "gradient": ([], {"kind": "gradient", "steps": [6]}),
    "once": ([], {"kind": "loss", "steps": [6], "once": True}),
    "skip": (["trainer.on_nonfinite=skip"], {"kind": "loss", "steps": [6]}),
    "skip gradient": (["trainer.on_nonfinite=skip"], {"kind": "gradient", "steps": [6]}),
    "rollback": (["trainer.on_nonfinite=rollback"], {"kind": "loss", "steps": [6]}),
    "rollback without a snapshot": (
        ["trainer.on_nonfinite=rollback"],
        {"kind": "loss", "steps": [2]},
    ),
    "spike": (
        ["trainer.on_nonfinite=skip", "trainer.spike_factor=3"],
        {"kind": "spike", "steps": [6]},
    ),
    "skip, all bad": (
        ["trainer.on_nonfinite=skip", "trainer.max_steps=30"],
        {"kind": "loss", "steps": [*range(6, 31)]},
    ),
    "skip, ten bad": (
        ["trainer.on_nonfinite=skip", "trainer.max_steps=20"],
        {"kind": "loss", "steps": [*range(4, 14), *range(15, 20)]},
    ),
    "rollback, all bad": (
        ["trainer.on_nonfinite=rollback", "trainer.max_steps=22"],
        {"kind": "loss", "steps": [*range(6, 23)]},
    ),
}


def inject_anomaly(kind: str, steps: list[int], once: bool = False) -> None:
    """Patch GPT.forward to inject an anomaly into micro-batch 1 of these steps."""
    at = {"step": 0, "micro": 0}
    step_forward, forward = train_step.TrainStep.forward, GPT.forward

    def record_position(self, step, micro, measure=None):
        at.update(step=step, micro=micro.index)
        return step_forward(self, step, micro)

    def forward_with_anomaly(self, x, y=None):
        loss = forward(self, x, y)
        if not self.training or at["micro"] != 1 or at["step"] not in steps:
            return loss
        if once:
            steps.remove(at["step"])
        if kind == "loss":
            return loss * torch.nan
        if kind == "spike":
            return loss * 50
        parameter = next(
            p for name, p in self.named_parameters() if name == anomalous_parameter(self)
        )
        return loss + (parameter.sum() * 0).sqrt()  # adds 0, but its gradient is 0 times infinity

    train_step.TrainStep.forward, GPT.forward = record_position, forward_with_anomaly


def anomalous_parameter(model: GPT) -> str:
    return [name for name, p in model.named_parameters() if p.ndim > 1][-2]


def digest(model: torch.nn.Module) -> str:
    values = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def train_all(
    configs: dict[str, dict[str, Any]], anomalies: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Train one run after another.

    Return for each run its error, or the digest of this rank's final weights.
    """
    # The watchdog would keep the store of a failed run open, but the next run needs its port.
    runtime_module.Watchdog = lambda *args: types.SimpleNamespace(start=lambda: None)
    originals = train_step.TrainStep.forward, GPT.forward
    build, models = stages.build_trainable, []

    def keep_model(*args):
        trainable = build(*args)
        models.append(trainable.model)
        return trainable

    stages.build_trainable = keep_model
    outcomes: dict[str, Any] = {}
    for job, (name, values) in enumerate(configs.items()):
        if anomalies[name]:
            inject_anomaly(**anomalies[name])
        config = from_mapping(values)
        logs.to_console(read_env())
        runtime = Runtime(config, read_env(), job)
        try:
            train_run(Job(config), runtime)
            outcomes[name] = {"weights": digest(models[-1])}
        except Exception as error:
            outcomes[name] = {"error": f"{type(error).__name__}: {error}"}
        runtime.close()
        del runtime
        train_step.TrainStep.forward, GPT.forward = originals
    return {**outcomes, "parameter": anomalous_parameter(models[-1])}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains all runs on a number of ranks.

    It returns the outcomes of the runs by rank, and the directory of the runs.
    """
    top = tmp_path_factory.mktemp("anomaly")

    @functools.cache
    def start(ranks: int) -> tuple[list[dict[str, Any]], Path]:
        root = top / f"ranks{ranks}"
        configs = {
            n: configure(*SETTINGS, *o, f"run.root={root}", f"run.name={slug(n)}")
            for n, (o, _) in JOBS.items()
        }
        anomalies = {name: what for name, (_, what) in JOBS.items()}
        return run_ranks(
            ranks, train_all, root / "ranks", configs=configs, anomalies=anomalies
        ), root

    return start


def slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "_")


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 2])
def ranks(request) -> int:
    return request.param


def error_on_all_ranks(trained, ranks: int, name: str) -> str:
    """Return the error of a run. It must be the same on all ranks."""
    reported = [outcomes[name].get("error") for outcomes in trained(ranks)[0]]
    assert reported == [reported[0]] * ranks
    assert reported[0] is not None, "the run did not fail"
    return reported[0]


def weights(trained, ranks: int, name: str, step: int = 14) -> dict[str, torch.Tensor]:
    file = trained(ranks)[1] / slug(name) / "snapshots" / f"step_{step:08d}" / "model.safetensors"
    return safetensors.torch.load_file(file)


def log_of(trained, ranks: int, name: str) -> str:
    return (trained(ranks)[1] / slug(name) / "main.rank0.log").read_text()


def check_equal_on_all_ranks(trained, ranks: int, name: str) -> None:
    outcomes = [outcomes[name] for outcomes in trained(ranks)[0]]
    assert outcomes == [outcomes[0]] * ranks
    assert "weights" in outcomes[0], outcomes


def max_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def curve(trained, ranks: int, name: str) -> dict[int, float]:
    directory = trained(ranks)[1] / slug(name) / "tensorboard" / "rank0"
    events = (
        EventAccumulator(str(directory), size_guidance={"scalars": 0})
        .Reload()
        .Scalars("train/loss")
    )
    steps = [event.step for event in events]
    assert steps == sorted(set(steps)), "a step is duplicated"
    return {event.step: event.value for event in events}


def test_a_nonfinite_loss_stops_all_ranks(trained, ranks):
    error = error_on_all_ranks(trained, ranks, "stop")
    assert error.startswith(
        "TrainingError: training error: step 6 has loss nan and gradient norm nan "
    )
    assert f"(rank {ranks - 1}: the loss of micro-batch 1)" in error
    assert committed(trained(ranks)[1] / "stop") == [4]
    assert (
        max_difference(
            weights(trained, ranks, "stop", 4), weights(trained, ranks, "uninterrupted", 4)
        )
        == 0
    )


def test_a_nonfinite_gradient_is_attributed_to_its_parameter(trained, ranks):
    error, parameter = (
        error_on_all_ranks(trained, ranks, "gradient"),
        trained(ranks)[0][0]["parameter"],
    )
    assert "gradient norm nan" in error
    assert "loss nan" not in error
    assert f"(rank {ranks - 1}: the gradient of {parameter} in micro-batch 1)" in error
    assert committed(trained(ranks)[1] / "gradient") == [4]


def test_an_anomaly_that_does_not_recur_is_attributed_to_the_hardware(trained, ranks):
    error = error_on_all_ranks(trained, ranks, "once")
    assert "step 6 has loss nan" in error
    assert "suspect the hardware" in error


@pytest.mark.parametrize(
    "name", ["skip", "skip gradient", "spike", "rollback", "rollback without a snapshot"]
)
def test_a_skipped_step_keeps_all_ranks_equal(trained, name):
    for ranks in (1, 2):
        check_equal_on_all_ranks(trained, ranks, name)
    assert max_difference(weights(trained, 1, name), weights(trained, 2, name)) < 1e-6
    assert max_difference(weights(trained, 1, name), weights(trained, 1, "uninterrupted")) > 1e-5, (
        "the step was taken"
    )
    assert all(tensor.isfinite().all() for tensor in weights(trained, 2, name).values())


def test_skip_and_rollback_give_the_same_weights(trained, ranks):
    """Rolling back and repeating the steps before the anomaly is equivalent to skipping it."""
    for name in ("skip gradient", "spike", "rollback"):
        assert (
            max_difference(weights(trained, ranks, name), weights(trained, ranks, "skip")) == 0
        ), name


def test_rollback(trained, ranks):
    log = log_of(trained, ranks, "rollback")
    assert "rolled back to the snapshot of step 4, to skip step 6" in log
    assert "step 6 is skipped after the rollback" in log
    state = trained(ranks)[1] / "rollback" / "snapshots" / "step_00000008" / "state.json"
    assert json.loads(state.read_text())["train_state"]["skipped_steps"] == [6]
    assert "step 2 has loss nan" in (log := log_of(trained, ranks, "rollback without a snapshot"))
    assert "and is skipped" in log


@pytest.mark.parametrize("name", ["skip", "rollback"])
def test_the_curve_has_every_step_once(trained, ranks, name):
    """The exception is the skipped step. It has no loss, rather than a loss of 0."""
    points = curve(trained, ranks, name)
    assert [step for step in range(1, 15) if step not in points] in ([], [6])
    assert 0.0 not in points.values()
    uninterrupted = curve(trained, ranks, "uninterrupted")
    assert all(points[step] == uninterrupted[step] for step in range(1, 6))
    history = read_history(trained(ranks)[1] / name / METRICS)
    assert history.series("train_loss") == [
        (step, pytest.approx(value)) for step, value in points.items()
    ]
    assert (history.faults, history.rollbacks) == (0, int(name == "rollback"))


def test_a_finite_loss_spike_is_skipped(trained, ranks):
    assert "more than 3 times the average of" in log_of(trained, ranks, "spike")


def test_more_than_ten_anomalies_in_a_row_stop_the_run(trained, ranks):
    error = error_on_all_ranks(trained, ranks, "skip, all bad")
    assert "step 16 has loss nan" in error
    assert "like the 10 steps before it" in error
    assert committed(trained(ranks)[1] / "skip-all_bad")[-1] < 16
    check_equal_on_all_ranks(trained, ranks, "skip, ten bad")


def test_more_than_ten_anomalies_in_a_row_stop_a_run_under_rollback(trained, ranks):
    error = error_on_all_ranks(trained, ranks, "rollback, all bad")
    assert "step 16 has loss nan" in error
