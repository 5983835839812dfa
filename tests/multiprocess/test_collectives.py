"""What ranks tell each other: the same answer everywhere, and the same error."""

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
OWN = [None, "ä€😀" * 50, {"list": [1, 2.5, True], "of": "rank 2"}]  # of another length on every rank


def tensors() -> dict[str, torch.Tensor]:
    grid = torch.arange(6).view(2, 3)
    return {
        "float": torch.tensor([1.5, -0.1]),
        "turned": grid.float().T,  # not contiguous
        "whole": grid * 2**40,
        "half": torch.tensor([0.1, 3.0], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(7.25, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }


def same(received: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {
        name: received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)
        for name, tensor in tensors().items()
    }


def attempt_first(runtime: Runtime, error: Exception | None, worker: int = 0, per_node: bool = False) -> list[str]:
    """The class and the message of the error that `first` raises here."""

    def work() -> str:
        if error and runtime.group.rank == worker:
            raise error
        return f"done on rank {runtime.group.rank}"

    try:
        return ["value", runtime.group.run_on_rank_zero(work, per_node)]
    except UserError as caught:
        return [type(caught).__name__, str(caught)]


def converse(config: dict[str, Any]) -> dict[str, Any]:
    """Everything that the tests below look at, on one rank."""
    runtime = Runtime(from_mapping(config), read_env())
    rank = runtime.group.rank
    found: dict[str, Any] = {
        "place": [rank, runtime.group.world_size, runtime.group.is_rank_zero],
        "gather": runtime.group.all_gather(OWN[rank]),
        "sum": runtime.group.all_reduce(torch.tensor([rank + 1.0, 10.0**rank])).tolist(),
        "broadcast": same(runtime.group.broadcast_tensors(tensors() if rank == 0 else None)),
        "first": attempt_first(runtime, None),
        "data error": attempt_first(runtime, DataError("no text\nat  all")),
        "run error": attempt_first(runtime, RunError("busy")),
        "nodes": attempt_first(runtime, None, per_node=True),
    }
    if rank == 2:  # now as the first rank of a second node
        object.__setattr__(runtime.group.env, "local_rank", 0)
    found["node error"] = attempt_first(runtime, DataError("node 2 has no disk"), worker=2, per_node=True)
    meter = Meter(runtime, tokens_per_step=1)
    for loss in (1.0, 2.0):
        meter.record(torch.tensor(loss * (rank + 1)), torch.tensor(0.0), 0.0)
    state = meter.state()
    resumed = Meter(runtime, tokens_per_step=1)
    resumed.load_state(*state)
    found["meter"] = [*state, meter.read()["train/loss"], resumed.read()["train/loss"]]
    if rank == 1:
        runtime.group.report_failure("out of memory")
    found["failure"] = runtime.group.reported_failure(wait_s=10)
    runtime.group.report_failure("lost another rank")
    found["failure later"] = runtime.group.reported_failure(wait_s=10)
    runtime.close()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[Any]]:
    """For each thing that was tried, what every rank saw."""
    results = run_ranks(WORLD, converse, tmp_path_factory.mktemp("ranks"), config=configure())
    return {what: [result[what] for result in results] for what in results[0]}


def test_every_rank_knows_its_place(found):
    assert found["place"] == [[0, WORLD, True], [1, WORLD, False], [2, WORLD, False]]


def test_gather_hands_every_value_to_every_rank(found):
    assert found["gather"] == [OWN] * WORLD


def test_sum_is_element_wise_and_the_same_everywhere(found):
    assert found["sum"] == [[6.0, 111.0]] * WORLD


def test_broadcast_keeps_names_types_and_every_bit(found):
    assert found["broadcast"] == [dict.fromkeys(tensors(), True)] * WORLD


def test_first_works_on_rank_0_and_tells_all(found):
    assert found["first"] == [["value", "done on rank 0"]] * WORLD


def test_an_error_on_rank_0_is_the_same_error_on_all(found):
    assert found["data error"] == [["DataError", "data error: no text at all"]] * WORLD
    assert found["run error"] == [["RunError", "run error: busy"]] * WORLD


def test_an_error_on_another_node_is_the_same_error_on_all(found):
    assert found["nodes"] == [["value", "done on rank 0"]] * WORLD
    assert found["node error"] == [["DataError", "data error: node 2 has no disk"]] * WORLD


def test_a_meter_adds_up_the_shares_of_all_ranks(found):
    """Steps with the shares 1 + 2 + 3 and 2 + 4 + 6: their sum 18 over 2 steps, also after a snapshot."""
    assert found["meter"] == [[18.0, 2, 9.0, 9.0]] * WORLD


def test_the_first_failure_is_what_everybody_quotes(found):
    assert found["failure"] == found["failure later"] == ["rank 1: out of memory"] * WORLD


def successive_jobs(config: dict[str, Any], jobs: int) -> list[float]:
    sums = []
    for job in range(jobs):
        runtime = Runtime(from_mapping(config), read_env(), job)
        sums.append(float(runtime.group.all_reduce(torch.tensor(runtime.group.rank + 10.0 * job))))
        runtime.close()
        del runtime
    return sums


def test_the_jobs_of_a_sweep_follow_each_other(tmp_path):
    """In the same processes, with a process group for each job, at the address that the environment names."""
    results = run_ranks(WORLD, successive_jobs, tmp_path, config=configure(), jobs=5)
    assert results == [[3.0, 33.0, 63.0, 93.0, 123.0]] * WORLD


def one_process(config: dict[str, Any]) -> dict[str, Any]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    runtime = Runtime(from_mapping(config), read_env())
    found = {
        "gather": runtime.group.all_gather("x"),
        "sum": runtime.group.all_reduce(torch.tensor([2.0])).tolist(),
        "broadcast": same(runtime.group.broadcast_tensors(tensors())),
        "first": attempt_first(runtime, None),
        "error": attempt_first(runtime, DataError("no text")),
        "group": torch.distributed.is_initialized(),
    }
    runtime.close()
    return found


def test_in_one_process_everything_is_the_identity(tmp_path):
    assert run_ranks(1, one_process, tmp_path, config=configure()) == [
        {
            "gather": ["x"],
            "sum": [2.0],
            "broadcast": dict.fromkeys(tensors(), True),
            "first": ["value", "done on rank 0"],
            "error": ["DataError", "data error: no text"],
            "group": False,
        }
    ]
