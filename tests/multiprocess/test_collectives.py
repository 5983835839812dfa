"""Collectives return the same values, and raise the same errors, on every rank."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.distributed.group.json_collectives import FIRST_PART_BYTES
from mingpt_ddp.distributed.group.process_group import PREPARING, STARTING
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.watchdog import BLOCKED_S
from mingpt_ddp.errors import DataError, RunError, TrainingError, UserError
from mingpt_ddp.process.env import read_env
from mingpt_ddp.tasks import build_task
from multiprocess.ranks import configure, run_ranks

WORLD = 3
# Each rank has a value of another length.
VALUES = [None, "ä€😀" * 50, {"list": [1, 2.5, True], "of": "rank 2"}]
LONG = "ä€😀" * 40_000  # 360 kB
# JSON just below, at and above the size of one message, and a long value among short ones.
LENGTHS = [["x" * (FIRST_PART_BYTES - 3 + n) for n in range(WORLD)], ["", "long" * 999, 7]]


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
        "large": torch.arange(300_000.0),  # sent in a separate message
    }


def is_preserved(received: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {
        name: received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)
        for name, tensor in tensors().items()
    }


def outcome_of(call: Callable[[], Any]) -> list[Any]:
    """Return the value of a collective, or the class, message, errno and cause of its error."""
    try:
        return ["value", call()]
    except (UserError, OSError) as caught:
        cause = caught.__cause__ and str(caught.__cause__)
        return [type(caught).__name__, str(caught), getattr(caught, "errno", None), cause]


def call_on_rank_zero(
    runtime: Runtime, error: Exception | None, worker: int = 0, per_node: bool = False
) -> list[str]:
    """Call `run_on_rank_zero` or `run_on_each_node`.

    Return the value, or the class and the message of the error.
    """

    def work() -> str:
        if error and runtime.group.rank == worker:
            raise error
        return f"done on rank {runtime.group.rank}"

    call = runtime.group.run_on_each_node if per_node else runtime.group.run_on_rank_zero
    return outcome_of(lambda: call(work))[:2]


def name_nodes(runtime: Runtime, size: int) -> list[Any]:
    """Run a function on the first rank of each node, with a different value on each. Return the
    outcome.
    """
    name = f"node {runtime.group.rank}" + "." * size
    return outcome_of(lambda: runtime.group.run_on_each_node(lambda: name))[:2]


def prepare_longer_than_the_timeout(runtime: Runtime) -> list[Any]:
    """Prepare for longer than a collective may take. Return the result and the activity afterwards.

    The result includes the activity while preparing.
    """
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2))

    def work() -> list[Any]:
        time.sleep(1)
        return [runtime.group.rank, runtime.group.heartbeat["activity"]]

    done = runtime.group.prepare_on_each_node(work, "reading data.path=a.txt")
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=60))
    return [*done, runtime.group.heartbeat["activity"]]


def decide(runtime: Runtime) -> dict[str, list[Any]]:
    """Let rank zero decide in several situations. Return the outcome of each, by its name."""
    group = runtime.group

    def fail(at: int, error: Exception) -> str:
        if group.rank >= at:
            raise error
        return "fine"

    def refuse(values: list[Any]) -> Any:
        raise TrainingError(f"{len(values)} values: {sorted(set(values))}")

    def fill(values: list[Any]) -> Any:
        raise OSError(errno.ENOSPC, "no space is left")

    full = OSError(errno.ENOSPC, f"rank {group.rank} is full")
    gone = RunError(f"of rank {group.rank}")
    values = ["x" * 10 ** (2 * group.rank + 1), group.rank]  # 100 kB on rank 2
    calls: dict[str, Callable[[], Any]] = {
        "values": lambda: group.decide_on_rank_zero(
            lambda: values, lambda all_values: [(len(x), rank) for x, rank in all_values]
        ),
        "user error": lambda: group.decide_on_rank_zero(lambda: fail(1, gone), refuse),
        "refused": lambda: group.decide_on_rank_zero(lambda: fail(3, gone), refuse),
        "full": lambda: group.snapshot_collectives.decide_on_rank_zero(
            lambda: fail(1, full), refuse
        ),
        "full on rank 0": lambda: group.snapshot_collectives.decide_on_rank_zero(
            lambda: fail(3, full), fill
        ),
        "crash": lambda: group.snapshot_collectives.run_on_rank_zero(
            lambda: fail(0, ZeroDivisionError("by zero"))
        ),
        "afterwards": lambda: group.snapshot_collectives.run_on_rank_zero(lambda: "done"),
    }
    return {name: outcome_of(call) for name, call in calls.items()}


def heartbeat_while_blocked(runtime: Runtime) -> list[dict[str, Any]]:
    """Let all ranks wait for rank 1. Return the heartbeats meanwhile and afterwards."""
    group, beats = runtime.group, []
    store = group.store
    assert store is not None
    group.set_activity("evaluating")

    def watch() -> None:
        while not group.heartbeat["waiting"]:
            time.sleep(0.01)
        beats.append(group.heartbeat)
        store.set(f"blocked/{group.rank}", "")

    if group.rank == 1:
        store.wait(["blocked/0", "blocked/2"], timedelta(seconds=10))
        beats.append(group.heartbeat)
        group.barrier()
    else:
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        group.barrier()
        watcher.join()
    return [*beats, group.heartbeat]


def gather_in_two_threads(runtime: Runtime) -> dict[str, Any]:
    """Gather values in a snapshot thread and in the training thread.

    On rank zero the snapshot thread begins. On the other ranks the training thread does.
    """
    group, values = runtime.group, {}

    def save() -> None:
        values["snapshot"] = group.snapshot_collectives.decide_on_rank_zero(
            lambda: "snapshot", lambda all: all
        )

    def train() -> None:
        values["training"] = group.all_gather("training")
        values["rank zero"] = group.run_on_rank_zero(lambda: "rank zero")

    thread = threading.Thread(target=save)
    if group.is_rank_zero:
        thread.start()
        time.sleep(0.2)
        train()
    else:
        train()
        thread.start()
    thread.join()
    return values


def call_collectives(config: dict[str, Any]) -> dict[str, Any]:
    """Call all collectives that are tested below on this rank. Return the results by key."""
    runtime = Runtime(from_mapping(config), read_env())
    rank = runtime.group.rank
    observed: dict[str, Any] = {
        "identity": [rank, runtime.group.world_size, runtime.group.is_rank_zero],
        "heartbeat": [runtime.group.heartbeat, heartbeat_while_blocked(runtime)],
        "get_or_set": runtime.group.get_or_set("name", lambda: f"of rank {rank}"),
        "threads": gather_in_two_threads(runtime),
        "async": runtime.group.all_gather_async(torch.tensor([rank, 10 * rank]))().tolist(),
        "all_gather": runtime.group.all_gather(VALUES[rank]),
        "lengths": [runtime.group.all_gather(values[rank]) for values in LENGTHS],
        "decided": decide(runtime),
        "agree": [
            runtime.group.all_agree({"a": 1, "b": [2]} if rank else {"b": [2], "a": 1}),
            runtime.group.all_agree({"a": rank == 1}),
        ],
        "long": hashlib.sha256(runtime.group.run_on_rank_zero(lambda: LONG).encode()).hexdigest(),
        "all_reduce": runtime.group.all_reduce(torch.tensor([rank + 1.0, 10.0**rank])).tolist(),
        "broadcast": is_preserved(
            runtime.group.broadcast_tensors(tensors() if rank == 0 else None)
        ),
        "rank_zero": call_on_rank_zero(runtime, None),
        "data error": call_on_rank_zero(runtime, DataError("no text\nat  all")),
        "run error": call_on_rank_zero(runtime, RunError("busy")),
        "nodes": call_on_rank_zero(runtime, None, per_node=True),
        "prepared": prepare_longer_than_the_timeout(runtime),
    }
    if rank == 2:  # From here on, this is the first rank of a second node.
        object.__setattr__(runtime.group.env, "local_rank", 0)
    observed["node error"] = call_on_rank_zero(
        runtime, DataError("node 2 has no disk"), worker=2, per_node=True
    )
    observed["different nodes"] = [name_nodes(runtime, size) for size in (0, 1000)]
    if rank == 1:
        runtime.group.failures.record("out of memory")
    observed["failure"] = vars(runtime.group.failures.first(wait_s=10))
    runtime.group.failures.record("lost another rank")
    observed["failure later"] = vars(runtime.group.failures.first(wait_s=10))
    runtime.close()
    return observed


@pytest.fixture(scope="module")
def observed(tmp_path_factory) -> dict[str, list[Any]]:
    """Return the results of call_collectives by key, then by rank."""
    results = run_ranks(
        WORLD, call_collectives, tmp_path_factory.mktemp("ranks"), config=configure()
    )
    return {key: [result[key] for result in results] for key in results[0]}


def test_rank_world_size_and_rank_zero(observed):
    assert observed["identity"] == [[0, WORLD, True], [1, WORLD, False], [2, WORLD, False]]


def test_all_gather_returns_every_value_on_every_rank(observed):
    assert observed["all_gather"] == [VALUES] * WORLD


def test_values_of_any_length(observed):
    assert observed["lengths"] == [LENGTHS] * WORLD


def test_rank_zero_decides_on_the_values_of_all(observed):
    for found in observed["decided"]:
        assert found["values"] == ["value", [[10, 0], [1000, 1], [100_000, 2]]]
        assert found["afterwards"] == ["value", "done"]


def test_the_error_of_the_lowest_rank_is_raised_everywhere(observed):
    full = "rank 1: rank 1 is full"
    for rank, found in enumerate(observed["decided"]):
        cause = rank and f"[Errno {errno.ENOSPC}] rank {rank} is full"
        assert found["full"] == ["OSError", full, errno.ENOSPC, cause or None]
        cause = rank and f"run error: of rank {rank}"
        assert found["user error"] == ["RunError", "run error: of rank 1", None, cause or None]


def test_an_error_in_the_decision_is_raised_everywhere(observed):
    causes = {
        "refused": "training error: 3 values: ['fine']",
        "full on rank 0": f"[Errno {errno.ENOSPC}] no space is left",
        "crash": "by zero",
    }
    for rank, found in enumerate(observed["decided"]):
        for name, error in {
            "refused": ["TrainingError", causes["refused"], None],
            "full on rank 0": ["OSError", "rank 0: no space is left", errno.ENOSPC],
            "crash": ["OSError", "rank 0: by zero", None],
        }.items():
            assert found[name] == [*error, None if rank else causes[name]]


def test_all_agree_tells_if_all_ranks_pass_the_same_value(observed):
    assert observed["agree"] == [[True, False]] * WORLD


def test_a_long_value_of_rank_zero(observed):
    assert observed["long"] == [hashlib.sha256(LONG.encode()).hexdigest()] * WORLD


def test_nodes_with_different_values_are_refused(observed):
    message = "run error: the nodes have different texts or configurations: ['node 0"
    advice = "; give every node the same files"
    for short, long in observed["different nodes"]:
        assert short == ["RunError", f"{message}', 'node 2']{advice}"]
        assert long[1].startswith(message)
        assert len(long[1]) == 300 + len("run error: ") + len(advice)


def test_the_heartbeat_tells_who_waits(observed):
    """Rank 1 is late, so it does not wait."""
    start, later = zip(*observed["heartbeat"], strict=True)
    assert [beat["activity"] for beat in start] == ["starting"] * WORLD
    assert [beat["waiting"] for beat in start] == [False] * WORLD
    blocked, after = zip(*later, strict=True)
    assert [beat["activity"] for beat in blocked + after] == ["evaluating"] * 2 * WORLD
    assert [beat["waiting"] for beat in blocked] == [True, False, True]
    assert [beat["waiting"] for beat in after] == [False] * WORLD


def test_the_first_value_is_kept(observed):
    (value,) = set(observed["get_or_set"])
    assert value in [f"of rank {rank}" for rank in range(WORLD)]


def test_two_threads_gather_in_any_order(observed):
    expected = {
        "snapshot": ["snapshot"] * WORLD,
        "training": ["training"] * WORLD,
        "rank zero": "rank zero",
    }
    assert observed["threads"] == [expected] * WORLD


def test_an_asynchronous_gather_has_a_row_per_rank(observed):
    assert observed["async"] == [[[0, 0], [1, 10], [2, 20]]] * WORLD


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


def test_preparing_may_take_longer_than_a_collective(observed):
    assert observed["prepared"] == [[0, PREPARING, STARTING]] * WORLD


def test_every_rank_reports_the_first_failure(observed):
    assert (
        observed["failure"]
        == observed["failure later"]
        == [{"rank": 1, "error_class": "", "message": "out of memory"}] * WORLD
    )


def in_copies(config: dict[str, Any]) -> dict[str, Any]:
    runtime = Runtime(from_mapping(config), read_env())
    group = runtime.group
    assert group.mesh is not None
    copy = [group.any_in_copy(group.rank == rank) for rank in range(4)]
    mesh = {name: group.mesh[name].mesh.tolist() for name in ("data", "tensor")}
    gathered = group.all_gather_async(torch.tensor([group.rank]))().tolist()
    runtime.close()
    return {"copy": copy, "transport": group.transport, "gathered": gathered, **mesh}


def test_the_ranks_of_a_copy_decide_alike(tmp_path):
    for rank, found in enumerate(
        run_ranks(4, in_copies, tmp_path, config=configure("ddp.tensor_parallel=2"))
    ):
        first, second = rank < 2, rank >= 2
        assert found == {
            "copy": [first, first, second, second],
            "transport": "gloo",
            "gathered": [[0], [1], [2], [3]],
            "data": [rank % 2, rank % 2 + 2],
            "tensor": [0, 1] if first else [2, 3],
        }


def failing_jobs(config: dict[str, Any], messages: list[str]) -> list[bool]:
    alike = []
    for job, message in enumerate(messages):
        runtime = Runtime(from_mapping(config), read_env(), job)
        alike.append(runtime.group.failures.compare_with_all(message.format(runtime.group.rank)))
        if alike[-1]:
            runtime.group.leave()
        else:
            runtime.close()
        del runtime
    return alike


def test_a_sweep_continues_only_after_the_same_error_on_every_rank(tmp_path):
    """The next job then gets a new process group."""
    messages = ["no text", "rank {} has no text", "no text"]
    assert (
        run_ranks(2, failing_jobs, tmp_path, config=configure(), messages=messages)
        == [[True, False, True]] * 2
    )


def blocked_after_a_failure(config: dict[str, Any]) -> str:
    """Let rank 1 fail, and take longer to end than ranks may be blocked."""
    runtime = Runtime(from_mapping(config), read_env())
    group = runtime.group
    if group.rank == 1:
        group.failures.record("broken")
        time.sleep(2 * BLOCKED_S)
    else:
        group.is_writing = True  # a rank that writes a snapshot may finish
    group.barrier()
    runtime.close()
    return "goes on"


def test_a_rank_is_not_ended_by_its_own_failure(tmp_path):
    """The rank reports its failure, and ends by itself."""
    done = run_ranks(2, blocked_after_a_failure, tmp_path, config=configure())
    assert done == ["goes on"] * 2


def refused_text(config: dict[str, Any]) -> str:
    """Open a text that is then refused. Rank 1 opens it late. Return the error."""
    runtime = Runtime(from_mapping(config), read_env())
    memmap = EncodedText.memmap

    def late(text: EncodedText) -> Any:
        time.sleep(runtime.group.rank)
        return memmap(text)

    EncodedText.memmap = late
    message = ""
    try:
        task = build_task(from_mapping(config), runtime.group)
        with task.discarded_if_refused():
            task.train_loader(runtime.device)
    except UserError as error:
        message = str(error)
    runtime.close()
    return message


def test_a_refused_text_is_deleted_once_all_ranks_have_opened_it(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not")
    words = [f"data.path={tmp_path}/text.txt", f"data.cache_dir={tmp_path}/cache"]
    errors = run_ranks(2, refused_text, tmp_path / "ranks", config=configure(*words))
    assert errors[0] == errors[1]
    assert "the training text has 10 tokens, but one window needs" in errors[0]
    assert not (tmp_path / "cache").exists()


def one_rank_fails(config: dict[str, Any]) -> bool:
    runtime = Runtime(from_mapping(config), read_env())
    alike = runtime.group.rank == 1 and runtime.group.failures.compare_with_all("no text")
    runtime.close()
    return alike


def test_an_error_of_one_rank_does_not_count_as_an_error_of_all(tmp_path):
    assert run_ranks(2, one_rank_fails, tmp_path, config=configure()) == [False, False]
