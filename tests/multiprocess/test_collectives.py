"""Collectives return the same values, and raise the same errors, on every rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import DataError, RunError, UserError
from mingpt_ddp.metrics.meters import Meter
from multiprocess.ranks import configure, run_ranks

WORLD = 3
VALUES = [None, "ä€😀" * 50, {"list": [1, 2.5, True], "of": "rank 2"}]  # of a different length on every rank


def tensors() -> dict[str, torch.Tensor]:
    grid = torch.arange(6).view(2, 3)
    return {
        "float": torch.tensor([1.5, -0.1]),
        "transposed": grid.float().T,  # not contiguous
        "int": grid * 2**40,
        "half": torch.tensor([0.1, 3.0], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(7.25, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }


def is_preserved(received: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {
        name: received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)
        for name, tensor in tensors().items()
    }


def call_on_rank_zero(runtime: Runtime, error: Exception | None, worker: int = 0, per_node: bool = False) -> list[str]:
    """Call `run_on_rank_zero`; return its value, or the class and message of its error."""

    def work() -> str:
        if error and runtime.group.rank == worker:
            raise error
        return f"done on rank {runtime.group.rank}"

    try:
        return ["value", runtime.group.run_on_rank_zero(work, per_node)]
    except UserError as caught:
        return [type(caught).__name__, str(caught)]


def call_collectives(config: dict[str, Any]) -> dict[str, Any]:
    """Call everything that is tested below, on one rank; return the results by key."""
    runtime = Runtime(from_mapping(config), read_env())
    rank = runtime.group.rank
    observed: dict[str, Any] = {
        "identity": [rank, runtime.group.world_size, runtime.group.is_rank_zero],
        "all_gather": runtime.group.all_gather(VALUES[rank]),
        "all_reduce": runtime.group.all_reduce(torch.tensor([rank + 1.0, 10.0**rank])).tolist(),
        "broadcast": is_preserved(runtime.group.broadcast_tensors(tensors() if rank == 0 else None)),
        "rank_zero": call_on_rank_zero(runtime, None),
        "data error": call_on_rank_zero(runtime, DataError("no text\nat  all")),
        "run error": call_on_rank_zero(runtime, RunError("busy")),
        "nodes": call_on_rank_zero(runtime, None, per_node=True),
    }
    if rank == 2:  # from here on as the first rank of a second node
        object.__setattr__(runtime.group.env, "local_rank", 0)
    observed["node error"] = call_on_rank_zero(runtime, DataError("node 2 has no disk"), worker=2, per_node=True)
    meter = Meter(runtime, 1, "tokens")
    for loss in (1.0, 2.0):
        meter.record({"loss": torch.tensor(loss * (rank + 1))}, torch.tensor(0.0), 0.0)
    state = meter.state()
    resumed = Meter(runtime, 1, "tokens")
    resumed.load_state(*state)
    observed["meter"] = [state[0]["loss"], state[1], meter.read()["train/loss"], resumed.read()["train/loss"]]
    if rank == 1:
        runtime.group.report_failure("out of memory")
    observed["failure"] = runtime.group.reported_failure(wait_s=10)
    runtime.group.report_failure("lost another rank")
    observed["failure later"] = runtime.group.reported_failure(wait_s=10)
    runtime.close()
    return observed


@pytest.fixture(scope="module")
def observed(tmp_path_factory) -> dict[str, list[Any]]:
    """Results by key, then by rank."""
    results = run_ranks(WORLD, call_collectives, tmp_path_factory.mktemp("ranks"), config=configure())
    return {key: [result[key] for result in results] for key in results[0]}


def test_rank_world_size_and_rank_zero(observed):
    assert observed["identity"] == [[0, WORLD, True], [1, WORLD, False], [2, WORLD, False]]


def test_all_gather_returns_every_value_on_every_rank(observed):
    assert observed["all_gather"] == [VALUES] * WORLD


def test_all_reduce_sums_element_wise_on_every_rank(observed):
    assert observed["all_reduce"] == [[6.0, 111.0]] * WORLD


def test_broadcast_preserves_names_dtypes_and_bits(observed):
    assert observed["broadcast"] == [dict.fromkeys(tensors(), True)] * WORLD


def test_run_on_rank_zero_returns_its_value_on_every_rank(observed):
    assert observed["rank_zero"] == [["value", "done on rank 0"]] * WORLD


def test_an_error_on_rank_zero_is_raised_on_every_rank(observed):
    assert observed["data error"] == [["DataError", "data error: no text at all"]] * WORLD
    assert observed["run error"] == [["RunError", "run error: busy"]] * WORLD


def test_an_error_on_another_node_is_raised_on_every_rank(observed):
    assert observed["nodes"] == [["value", "done on rank 0"]] * WORLD
    assert observed["node error"] == [["DataError", "data error: node 2 has no disk"]] * WORLD


def test_a_meter_sums_over_all_ranks(observed):
    """Losses 1 + 2 + 3 and 2 + 4 + 6: a sum of 18 over 2 steps, also after a snapshot."""
    assert observed["meter"] == [[18.0, 2, 9.0, 9.0]] * WORLD


def test_every_rank_reports_the_first_failure(observed):
    assert observed["failure"] == observed["failure later"] == ["rank 1: out of memory"] * WORLD


def successive_jobs(config: dict[str, Any], jobs: int) -> list[float]:
    sums = []
    for job in range(jobs):
        runtime = Runtime(from_mapping(config), read_env(), job)
        sums.append(float(runtime.group.all_reduce(torch.tensor(runtime.group.rank + 10.0 * job))))
        runtime.close()
        del runtime
    return sums


def test_successive_jobs_of_a_sweep(tmp_path):
    """In the same processes, with a process group per job, at the address in the environment."""
    results = run_ranks(WORLD, successive_jobs, tmp_path, config=configure(), jobs=5)
    assert results == [[3.0, 33.0, 63.0, 93.0, 123.0]] * WORLD


def one_process(config: dict[str, Any]) -> dict[str, Any]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    runtime = Runtime(from_mapping(config), read_env())
    observed = {
        "all_gather": runtime.group.all_gather("x"),
        "all_reduce": runtime.group.all_reduce(torch.tensor([2.0])).tolist(),
        "broadcast": is_preserved(runtime.group.broadcast_tensors(tensors())),
        "rank_zero": call_on_rank_zero(runtime, None),
        "error": call_on_rank_zero(runtime, DataError("no text")),
        "group": torch.distributed.is_initialized(),
    }
    runtime.close()
    return observed


def test_collectives_in_one_process_are_the_identity(tmp_path):
    assert run_ranks(1, one_process, tmp_path, config=configure()) == [
        {
            "all_gather": ["x"],
            "all_reduce": [2.0],
            "broadcast": dict.fromkeys(tensors(), True),
            "rank_zero": ["value", "done on rank 0"],
            "error": ["DataError", "data error: no text"],
            "group": False,
        }
    ]
