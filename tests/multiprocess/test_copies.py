"""trainer.verify_every: a bit that flips in the memory of one rank is found, and undone."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TINY, committed
from snapshot_helpers import digests

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed import runtime as runtime_module
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.snapshots.write.async_writer import AsyncSave
from mingpt_ddp.training.run import train_run
from mingpt_ddp.training.train_step import TrainStep
from multiprocess.ranks import configure, run_ranks

EVERY = 5
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    "trainer.batch_size=12",
    "trainer.micro_batch_size=3",
    "trainer.max_steps=22",
    "trainer.eval_every=11",
    "trainer.ema=0.9",
    "trainer.on_nonfinite=rollback",
    f"trainer.verify_every={EVERY}",
    "snapshot.every_steps=4",
    "snapshot.keep_last=100",
    "tracker.tensorboard=false",
]
CANONICAL = ["ddp.reduction=canonical"]
SHORT = ["trainer.max_steps=12"]
HSDP = ["ddp.strategy=hsdp", *SHORT]
TENSOR_PARALLEL = ["ddp.tensor_parallel=2", "model.dropout=0", "model.n_head=2", *SHORT]
# Overrides, the number of ranks, and what flips on which rank after which step; "staged": in the
# snapshot of that step. The bit is a low one: no loss shows it.
CASES: dict[str, tuple[list[str], int, tuple[str, int, int] | None]] = {
    "undisturbed2": ([], 2, None),
    "undisturbed3": ([], 3, None),
    "undisturbed4": ([], 4, None),
    "weights2": ([], 2, ("weights", 1, 6)),
    "weights3": ([], 3, ("weights", 1, 6)),
    "weights4": ([], 4, ("weights", 3, 6)),
    "of_rank_zero3": ([], 3, ("weights", 0, 9)),
    "optimizer2": ([], 2, ("optimizer", 0, 6)),
    "optimizer3": ([], 3, ("optimizer", 2, 6)),
    "optimizer4": ([], 4, ("optimizer", 1, 9)),
    "ema3": ([], 3, ("ema", 1, 13)),
    "staged2": ([], 2, ("staged", 0, 8)),
    "staged3": ([], 3, ("staged", 0, 8)),
    "last_step3": ([], 3, ("weights", 2, 22)),
    "last_staged2": ([], 2, ("staged", 0, 22)),
    "before_a_snapshot3": ([], 3, ("weights", 2, 2)),
    "stop3": (["trainer.on_nonfinite=stop"], 3, ("weights", 2, 13)),
    "often3": ([], 3, ("weights", 2, -9)),  # again after each return
    "canonical3": (CANONICAL, 3, ("optimizer", 1, 6)),
    "hsdp4": (HSDP, 4, ("weights", 3, 6)),
    "undisturbed_hsdp4": (HSDP, 4, None),
    "tensor4": (TENSOR_PARALLEL, 4, ("weights", 3, 6)),
    "undisturbed_tensor4": (TENSOR_PARALLEL, 4, None),
    "zero1_staged3": (["ddp.strategy=zero1"], 3, ("staged", 1, 8)),
    "undisturbed_zero1_3": (["ddp.strategy=zero1"], 3, None),
}

SLOW = pytest.mark.slow
SLOW_CASES = ("undisturbed4", "weights4", "optimizer4")  # as on three ranks


def flip(tensor: torch.Tensor) -> None:
    """Flip a low bit of the middle element."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    words = local.view(torch.int32).flatten()
    words[len(words) // 2] ^= 4


def inject_flip(kind: str, rank: int, at: int) -> None:
    """Patch this process to flip a bit of one rank, once; or, if `at` is negative, every time."""
    repeats, at = at < 0, abs(at)
    pending = [at]
    update, stage = TrainStep.update, AsyncSave._stage

    def update_and_flip(self, step):
        lr = update(self, step)
        if step in pending and self.runtime.group.rank == rank:
            if not repeats:
                pending.clear()
            parameter = next(p for p in self.model.parameters() if p.dim() == 2)
            of_optimizer = self.optimizer.state[parameter]
            flip(
                {
                    "weights": parameter,
                    "optimizer": of_optimizer.get("exp_avg"),
                    "ema": self.average._averages[0],
                }[kind]
            )
        return lr

    def stage_and_flip(self):
        contents = stage(self)
        if self.step in pending and self.runtime.group.rank == rank:
            pending.clear()
            flip(max(next(iter(self.buffers.values())).tensors.values(), key=len))
        return contents

    if kind == "staged":
        AsyncSave._stage = stage_and_flip  # type: ignore[method-assign]
    else:
        TrainStep.update = update_and_flip  # type: ignore[method-assign]


def train_all(names: list[str], configs: list[dict[str, Any]]) -> dict[str, str]:
    """Train one run after the other; return the errors of this rank by name, "" for none."""
    # The watchdog would keep the store of a failed run open, whose port the next one needs.
    runtime_module.Watchdog = lambda *args: types.SimpleNamespace(start=lambda: None)
    originals = TrainStep.update, AsyncSave._stage
    errors = {}
    for job, (name, values) in enumerate(zip(names, configs, strict=True)):
        logs.to_console(read_env())  # closes the file of the run before
        config = from_mapping(values)
        runtime = Runtime(config, read_env(), job)
        if (injected := CASES[name][2]) is not None:
            inject_flip(*injected)
        errors[name] = ""
        try:
            train_run(config, runtime, {})
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
        TrainStep.update, AsyncSave._stage = originals  # type: ignore[method-assign]
        runtime.close()
        del runtime
    return errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return, for a run, the errors of each rank by run, and the root of the runs.

    All runs of its number of ranks are trained in turn, the slow ones by themselves.
    """
    top = tmp_path_factory.mktemp("copies")

    @functools.cache
    def train(ranks: int, is_slow: bool) -> tuple[list[dict[str, str]], Path]:
        root = top / f"ranks{ranks}-{is_slow}"
        cases = {}
        for name, (words, number, _) in CASES.items():
            if number == ranks and (name in SLOW_CASES) == is_slow:
                cases[name] = words
        configs = []
        for name, words in cases.items():
            configs.append(configure(*SETTINGS, *words, f"run.root={root}", f"run.name={name}"))
        errors = run_ranks(ranks, train_all, root / "ranks", names=[*cases], configs=configs)
        return errors, root

    return lambda name: train(CASES[name][1], name in SLOW_CASES)


def check(trained, name: str, undisturbed: str | None = None) -> str:
    """Check that a run ended as an undisturbed one; return its log."""
    ranks = CASES[name][1]
    errors, root = trained(name)
    assert [of_rank[name] for of_rank in errors] == [""] * ranks
    assert digests(root / name) == digests(root / (undisturbed or f"undisturbed{ranks}"))
    return (root / name / "main.rank0.log").read_text()


@pytest.mark.parametrize(
    "name", ["undisturbed2", "undisturbed3", pytest.param("undisturbed4", marks=SLOW)]
)
def test_equal_copies_are_not_reported(trained, name):
    assert "copy" not in check(trained, name)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("weights3", 1),
        pytest.param("weights4", 3, marks=SLOW),
        ("of_rank_zero3", 0),
        ("optimizer3", 2),
        ("ema3", 1),
    ],
)
def test_the_odd_one_of_three_is_named(trained, name, rank):
    log = check(trained, name)
    assert f"rank {rank} holds another copy than the others of " in log
    step = CASES[name][2][2]
    agreed = max(every * ((step - 1) // every) for every in (EVERY, 4))
    assert f"all copies were equal at step {agreed}" in log
    assert "went back to the snapshot of step" in log


@pytest.mark.parametrize("name", ["weights2", "optimizer2"])
def test_both_of_two_are_named(trained, name):
    assert "one of the ranks 0, 1 holds a damaged copy of " in check(trained, name)


@SLOW
def test_optimizer_state_on_four_ranks(trained):
    assert "rank 1 holds another copy than the others of optimizer " in check(trained, "optimizer4")


@pytest.mark.parametrize("name", ["staged2", "staged3", "last_staged2"])
def test_a_damaged_staged_copy_is_never_committed(trained, name):
    log = check(trained, name)
    step = CASES[name][2][2]
    assert "rank 0 staged a damaged copy of model token_embedding.weight, in the " in log
    assert f"snapshot of step {step}; all copies were equal at step " in log
    assert committed(trained(name)[1] / name) == [4, 8, 11, 12, 16, 20, 22]


def test_damage_in_the_last_step_is_undone(trained):
    assert "rank 2 holds another copy" in check(trained, "last_step3")


def test_damage_before_the_first_snapshot_ends_the_run(trained):
    errors, root = trained("before_a_snapshot3")
    assert len({of_rank["before_a_snapshot3"] for of_rank in errors}) == 1
    assert (
        "all copies were equal at step 0, and there is no snapshot yet"
        in errors[0]["before_a_snapshot3"]
    )
    assert committed(root / "before_a_snapshot3") == []


def test_stop(trained):
    errors, root = trained("stop3")
    assert [of_rank["stop3"] for of_rank in errors] == [errors[0]["stop3"]] * 3
    assert errors[0]["stop3"].startswith(
        "TrainingError: training error: rank 2 holds another copy than the others of "
    )
    assert errors[0]["stop3"].endswith("run again to continue from the last snapshot")
    assert committed(root / "stop3")[-1] == 12


def test_memory_that_is_damaged_again_and_again_ends_the_run(trained):
    errors, root = trained("often3")
    assert "it has happened repeatedly; test the memory" in errors[0]["often3"]
    log = (root / "often3" / "main.rank0.log").read_text()
    assert log.count("went back to the snapshot of step 8") == 3


def test_canonical(trained):
    assert "rank 1 holds another copy" in check(trained, "canonical3", "canonical3")


@pytest.mark.parametrize("name", ["hsdp", "tensor"])
def test_copies_of_parts_are_compared(trained, name):
    log = check(trained, f"{name}4", f"undisturbed_{name}4")
    assert "one of the ranks 1, 3 holds a damaged copy of " in log
    assert " of part 1" in log


def test_zero1_compares_what_it_staged(trained):
    log = check(trained, "zero1_staged3", "undisturbed_zero1_3")
    assert "compares little with ddp.strategy=zero1" in log
    assert "in the snapshot of step 8" in log
