"""The plan of a configuration agrees with numbers worked out by hand, and lists doubtful settings.

Planning writes nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from multiprocess.ranks import configure

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.study.planning.doubts import find_doubts
from mingpt_ddp.study.planning.plan import make_plan
from mingpt_ddp.training.length import RunLength

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = ["model=gpt_nano", "data.path=a.txt", "trainer.precision=fp32", "optimizer.warmup_steps=5"]
TOY = ["experiment=toy", "ddp.nproc_per_node=2"]


def configuration(*overrides: str) -> Config:
    return from_mapping(configure(*overrides))


def test_a_language_model(cwd):
    words = ["trainer.max_epochs=2", "trainer.eval_every=25", "snapshot.every_steps=10"]
    plan = make_plan(Job(configuration(*TEXT, *words)))
    width, length, layers, vocabulary = 48, 64, 3, 8
    parameters = (vocabulary + length) * width + layers * (12 * width**2 + 2 * width) + width
    flops = 6 * (parameters - length * width) + 12 * layers * width * length
    steps = 2 * ((36_000 - length) // length // 12)
    assert steps == 92
    assert plan["model"]["parameters"] == parameters
    assert plan["model"]["flops_per_item"] == flops
    assert plan["model"]["flops"] == flops * steps * 12 * length
    assert plan["length"] == {
        "steps": steps,
        "epochs": 2.0,
        "items": steps * 12 * length,
        "unit": "tokens",
        "limits": {"max_epochs": steps},
    }
    tensors = 3 + layers * 6  # for each, AdamW has a step count of 4 bytes
    [row] = plan["strategies"].values()
    assert row["weights_bytes"] == 4 * parameters
    saves = plan["snapshots"]
    assert saves["bytes"] == 12 * parameters + 4 * tensors
    assert saves["kept_bytes"] == 3 * saves["bytes"] and saves["free_bytes"] > 0
    times = plan["measured"]
    assert times["evaluations"] == 4
    assert times["training_s"] == pytest.approx(steps * times["step_s"])
    assert times["total_s"] == pytest.approx(times["training_s"] + times["evaluations_s"])
    assert times["items_per_s"] == pytest.approx(12 * length / times["step_s"])
    assert times["peak_bytes"] > row["peak_bytes"]
    assert times["mfu"] is None, "no vendor states the rate of a CPU"
    assert [path.name for path in cwd.iterdir()] == ["a.txt"]


def test_a_user_model():
    plan = make_plan(Job(configuration(*TOY)))
    parameters = 10 * 10 + 10 + 10 * 5 + 5
    assert plan["model"] == {
        "name": "toy",
        "parameters": parameters,
        "flops_per_item": None,
        "flops": None,
        "items_per_parameter": 2048 * 10 / parameters,
    }
    row = plan["strategies"]["ddp"]
    assert row["peak_bytes"] is row["activations_bytes"] is None
    assert row["weights_bytes"] == row["gradients_bytes"] == 4 * parameters
    assert plan["batch"]["ranks"] == 2
    averaged = make_plan(Job(configuration(*TOY, "trainer.ema=0.99")))
    sizes = [each["strategies"]["ddp"]["average_bytes"] for each in (plan, averaged)]
    assert sizes == [0, 4 * parameters]
    saves = [each["snapshots"]["bytes"] for each in (plan, averaged)]
    assert saves[1] - saves[0] == 4 * parameters


def test_other_world_sizes():
    plan = make_plan(Job(configuration(*TOY, "trainer.batch_size=12", "ddp.nproc_per_node=3")))
    keys = ("ranks", "batch_size", "micro_batch_size", "micro_batches_per_rank", "idle")
    rows = [tuple(row[key] for key in keys) for row in plan["world_sizes"]]
    assert rows == [
        (1, 12, 12, 1, 0),
        (2, 12, 6, 1, 0),
        (4, 12, 3, 1, 0),
        (8, 12, 1, 2, 0.25),
    ]


def test_a_batch_per_rank_and_its_learning_rate():
    batch = ["+trainer.batch_size_per_rank=16", "optimizer.lr=0.02", "optimizer.lr_scaling=sqrt"]
    plan = make_plan(Job(configuration(*TOY, *batch, "optimizer.reference_batch_size=16")))
    rows = {row["ranks"]: (row["batch_size"], row["lr"]) for row in plan["world_sizes"]}
    assert rows == {n: (16 * n, pytest.approx(0.02 * n**0.5)) for n in (1, 2, 4, 8)}
    assert plan["batch"]["batch_size"] == 32 and plan["length"]["steps"] == 10 * 2048 // 32


def test_numbers_of_ranks_that_do_not_work_are_named():
    rows = make_plan(Job(configuration(*TOY, "trainer.micro_batch_size=8")))["world_sizes"]
    assert "error" not in rows[2] and "micro-batches of 8 occupies 4 of 8 ranks" in rows[3]["error"]
    with pytest.raises(ConfigError, match="in micro-batches of 32 occupies 1 of 2 ranks"):
        make_plan(Job(configuration(*TOY, "trainer.micro_batch_size=32")))
    with pytest.raises(ConfigError, match="needs at least 4 ranks"):
        make_plan(Job(configuration(*TOY, "ddp.strategy=hsdp")))


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], 3),
        (["snapshot.keep_every=100", "snapshot.keep_best=false"], 8),
        (["snapshot.path=memory://runs"], 3),
    ],
)
def test_snapshots_that_stay(overrides, kept):
    saves = make_plan(Job(configuration(*TOY, *overrides)))["snapshots"]
    assert saves["kept"] == kept
    assert (saves["free_bytes"] is None) == ("snapshot.path=memory://runs" in overrides)


# Doubtful settings

SOUND: dict[str, dict[str, Any]] = {
    "model": {"parameters": 1000},
    "length": {"steps": 1000, "epochs": 4.0, "items": 4000, "unit": "tokens"},
    "batch": {"lr": 1e-3, "idle": 0.0, "micro_batches": 8, "copies": 4},
    "snapshots": {"kept_bytes": 10, "free_bytes": 20},
    "measured": {"peak_bytes": 10, "evaluations": 4, "evaluations_s": 1.0, "training_s": 2.0},
}


def doubts(overrides: list[str], change: dict[str, dict[str, Any]]) -> list[str]:
    plan = {**copy.deepcopy(SOUND), "memory_bytes": 2 << 30}
    for name, values in change.items():
        plan[name] |= values
    config = configuration(
        "model=gpt_nano", "trainer.max_epochs=null", "trainer.max_steps=1000", *overrides
    )
    plan["length"]["limits"] = RunLength(config, 125).limits
    return find_doubts(config, plan, cores=4)


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        ([], {}),
        (["trainer.max_steps=null", "trainer.max_epochs=4"], {}),
        (["model.dropout=0.1"], {"model": {"parameters": 10**6}, "length": {"epochs": 40.0}}),
        ([], {"model": {"parameters": 10**6}}),
        (["optimizer=muon"], {"batch": {"lr": 0.04}}),
        (["trainer.device=cpu", "ddp.nproc_per_node=4"], {}),
        ([], {"snapshots": {"free_bytes": None}}),
        ([], {"measured": {"evaluations": 1, "evaluations_s": 9.0}}),
    ],
)
def test_a_sound_configuration(overrides, change):
    assert doubts(overrides, change) == []


@pytest.mark.parametrize(
    ("overrides", "change", "message"),
    [
        (["optimizer.warmup_steps=1001"], {}, "the warm-up takes 1001 of 1000 steps"),
        (
            ["trainer.max_epochs=9"],
            {},
            "trainer.max_steps=1000 ends the run before trainer.max_epochs=9",
        ),
        (
            ["trainer.max_steps=2000", "trainer.max_epochs=9"],
            {},
            "trainer.max_epochs=9 ends the run at step 1125",
        ),
        (
            [],
            {"model": {"parameters": 10**6}, "length": {"epochs": 40.0, "items": 40_000}},
            "1,000,000 parameters see 1,000 tokens 40 times",
        ),
        (["trainer.eval_every=1001"], {}, "trainer.eval_every=1001 is beyond the last step"),
        ([], {"batch": {"lr": 0.1}}, "is 0.1, but 1e-05 to 0.01 is usual for adamw; check"),
        (["optimizer=muon"], {"batch": {"lr": 1e-4}}, "0.002 to 0.3 is usual for muon"),
        ([], {"batch": {"idle": 0.25}}, "8 micro-batches on 4 ranks leave the ranks idle for 25%"),
        (
            [],
            {"measured": {"peak_bytes": 3 << 30}},
            "each rank needs 3.0 GiB of memory but has 2.0 GiB",
        ),
        (
            [],
            {"snapshots": {"kept_bytes": 3 << 30, "free_bytes": 1 << 30}},
            "snapshots need 3.0 GiB, but the disk has 1.0 GiB free",
        ),
        ([], {"measured": {"evaluations_s": 9.0}}, "longer than training (2 s); raise trainer"),
        (
            ["trainer.device=cpu", "ddp.nproc_per_node=5"],
            {},
            "ddp.nproc_per_node=5 is more than the 4 cores",
        ),
    ],
)
def test_doubtful_settings_are_named(overrides, change, message):
    [doubt] = doubts(overrides, change)
    assert doubt.startswith(message) or message in doubt
    assert ";" in doubt, "it says what to do"
