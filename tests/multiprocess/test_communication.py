"""How gradients travel: every way gives the right mean, and each resumes byte for byte."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from launching import TINY

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed import logs, shared_memory
from mingpt_ddp.distributed.device import choose_device
from mingpt_ddp.distributed.env import DistEnv, read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.shared_memory import SharedMemoryGroup, connect_local_ranks
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import GPT
from mingpt_ddp.training.run import run
from multiprocess.ranks import Ranks, configure, run_ranks

STEPS = 8
SETTINGS = [*TINY, "model.dropout=0.1", "trainer.micro_batch_size=2", f"optimizer.schedule_steps={STEPS}"]
SETTINGS += ["trainer.eval_every=3", "snapshot.every_steps=null", "snapshot.keep_last=100"]
GLOO = "ddp=gloo"
# Ways to train: their settings, the steps at which they are stopped and started again, and on how many ranks.
JOBS: dict[str, tuple[list[str], list[int], tuple[int, ...]]] = {
    "shared": ([], [STEPS], (2, 3)),
    "shared, parts": ([], [5, STEPS], (3,)),
    "shared, later not": ([], [5, STEPS], (3,)),
    "gloo": ([GLOO], [STEPS], (2, 3)),
    "static": ([GLOO, "ddp.static_graph=true", "ddp.gradient_as_bucket_view=false"], [STEPS], (2,)),
    "static, parts": ([GLOO, "ddp.static_graph=true"], [5, STEPS], (3,)),
    "static, shared": (["ddp.static_graph=true"], [STEPS], (2,)),
    "unused": (["ddp.find_unused_parameters=true"], [STEPS], (2,)),
    "fp16": (["ddp.comm_hook=fp16"], [STEPS], (2,)),
    "bf16": (["ddp.comm_hook=bf16"], [STEPS], (2,)),
    "sick": (["trainer.on_nonfinite=skip"], [STEPS], (2,)),
    "sick, parts": (["trainer.on_nonfinite=skip"], [3, STEPS], (2,)),
    "small buckets": ([GLOO, "ddp.bucket_cap_mb=0.001"], [STEPS], (2, 3)),
    "small buckets, parts": ([GLOO, "ddp.bucket_cap_mb=0.001"], [5, STEPS], (3,)),
}


class Changed:
    """What a job meets that others do not; undone afterwards."""

    def __init__(self, name: str, limit: int) -> None:
        self.patch = pytest.MonkeyPatch()
        if "later not" in name and limit == STEPS:
            self.patch.setattr(shared_memory, "SOCKET_DIRECTORY", "/nowhere")  # as where /dev/shm cannot be written
        if "sick" in name:
            self.patch.setattr(GPT, "forward", self.sick(GPT.forward, sick_step=3))

    @staticmethod
    def sick(forward: Any, sick_step: int) -> Any:
        """One of the losses that a rank computes in a step is not a number, whenever it is computed."""
        from mingpt_ddp.training import train_step as train_step

        at = {"step": 0}
        original = train_step.seed_everything

        def note(*keys: Any) -> None:
            at["step"] = keys[2] if keys[0] == "dropout" else 0
            original(*keys)

        train_step.seed_everything = note

        def sometimes(self, x, y=None):
            loss = forward(self, x, y)
            return loss * torch.nan if self.training and at["step"] == sick_step else loss

        return sometimes


def train_all(configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    job = 0
    for name, values in configs.items():
        for limit in JOBS[name][1]:
            changed = Changed(name, limit)
            logs.to_console(read_env())  # and no more to the file of the job before
            values["trainer"]["max_steps"] = limit
            config = from_mapping(values)
            runtime = Runtime(config, read_env(), job)
            job += 1
            loss = run(config, runtime, {})
            outcomes[name] = {
                "loss": loss,
                "shared": runtime.group.shared_memory is not None,
                "seconds": runtime.strategy.all_reduce_s,
            }
            runtime.close()
            del runtime
            changed.patch.undo()
    return outcomes


Trained: TypeAlias = tuple[int, list[dict[str, Any]], Path]  # how many ranks, what each returned, and the runs


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Callable[[int], Trained]:
    @functools.cache
    def train(world: int) -> Trained:
        root = tmp_path_factory.mktemp(f"ranks{world}")
        jobs = {name: options for name, (options, _, worlds) in JOBS.items() if world in worlds}
        configs = {n: configure(*SETTINGS, *o, f"run.root={root}", f"run.name={slug(n)}") for n, o in jobs.items()}
        with Ranks(world, train_all, root / "ranks", configs=configs) as ranks:
            return world, ranks.results(timeout=280), root

    return train


@pytest.fixture(params=[2, 3])
def trained(request, start) -> Trained:
    return start(request.param)


@pytest.fixture
def two(start) -> Trained:
    return start(2)


@pytest.fixture
def three(start) -> Trained:
    return start(3)


def slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "_")


def snapshot(root: Path, name: str) -> Path:
    return root / slug(name) / "snapshots" / f"step_{STEPS:08d}"


def digest(trained, name: str) -> list[str]:
    files = [snapshot(trained[2], name) / f"{kind}.safetensors" for kind in ("model", "optimizer")]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def weights(trained, name: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(snapshot(trained[2], name) / "model.safetensors")


def farthest(trained, one: str, other: str) -> float:
    first, second = weights(trained, one), weights(trained, other)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def same(trained, one: str, other: str) -> bool:
    return digest(trained, one) == digest(trained, other)


def test_all_ranks_come_to_the_same_loss(trained):
    losses = [{name: outcome["loss"] for name, outcome in outcomes.items()} for outcomes in trained[1]]
    assert losses == [losses[0]] * trained[0]


def test_ranks_on_one_machine_share_memory_unless_gloo_is_wanted(trained):
    for outcomes in trained[1]:
        assert outcomes["shared"]["shared"]
        assert outcomes["shared"]["seconds"] > 0
        assert not outcomes["gloo"]["shared"]


@pytest.mark.parametrize("way", ["gloo", "static", "static, shared", "unused", "small buckets"])
def test_with_two_ranks_every_exact_way_gives_the_same_bits(two, way):
    """Two numbers have one sum. The steps have micro-batches to add up, and evaluations between them."""
    assert same(two, "shared", way)


def test_with_three_ranks_shared_memory_gives_the_same_steps(three):
    assert farthest(three, "shared", "gloo") < 1e-5


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_16_bits_are_used_and_enough(two, hook):
    assert 0 < farthest(two, "shared", hook) < 2e-3


def test_another_transport_is_named_when_the_run_resumes(three):
    """Once, by rank zero, and not where nothing has changed."""

    def lines(name: str, rank: int) -> list[str]:
        log = (three[2] / slug(name) / f"main.rank{rank}.log").read_text()
        return [
            line.partition("because of ")[2]
            for line in log.splitlines()
            if "results may differ in the last bits" in line
        ]

    assert lines("shared, later not", rank=0) == ["transport: shared memory -> gloo"]
    assert lines("shared, later not", rank=1) == lines("shared, parts", rank=0) == []


@pytest.mark.parametrize("way", ["shared", "small buckets"])
def test_a_run_in_parts_equals_the_whole_on_three_ranks(three, way):
    assert same(three, way, f"{way}, parts")


def test_a_static_graph_settles_like_any_other(three):
    assert same(three, "gloo", "static, parts")


def test_a_run_in_parts_equals_the_whole_behind_a_step_that_was_left_out(two):
    """Nothing of it is left, in the run that goes on as in the one that starts there."""
    assert same(two, "sick", "sick, parts")
    assert all(tensor.isfinite().all() for tensor in weights(two, "sick").values())


def test_the_size_of_buckets_decides_the_order_of_additions(three):
    assert not same(three, "small buckets", "gloo")


def destroy_group_before_model(config: dict[str, Any]) -> int:
    """Drop the last reference to DDP while gloo's threads wait for the GIL to free the tensors of collectives."""
    rounds = 5
    for job in range(rounds):
        runtime = Runtime(from_mapping(config), read_env(), job)
        model = runtime.strategy.wrap(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        sys.setswitchinterval(100)  # this thread gives the GIL away only where it blocks
        for _ in range(50):
            dist.all_gather([torch.zeros(1) for _ in range(2)], torch.zeros(1), async_op=True)
        dist.destroy_process_group()
        del model
        gc.collect()
        sys.setswitchinterval(0.005)
        del runtime
    return rounds


def test_a_process_group_may_be_destroyed_before_the_model(tmp_path):
    """As after an error that all ranks of a sweep have met: the traceback keeps the model."""
    assert run_ranks(2, destroy_group_before_model, tmp_path, config=configure()) == [5, 5]


# SharedMemoryGroup.


def lose_a_rank(config: dict[str, Any]) -> str:
    runtime = Runtime(from_mapping(config), read_env())
    shared_memory = connect_local_ranks(runtime.group.rank, runtime.group.all_gather, timeout_s=1.0)
    assert shared_memory is not None
    shared_memory.send_all(b"unread", skip=True)
    shared_memory.send_all(bytes([runtime.group.rank]))
    assert shared_memory.recv_all(1) == {other: bytes([other]) for other in range(3) if other != runtime.group.rank}
    memory = shared_memory.allocate(100)
    memory[runtime.group.rank][:] = runtime.group.rank + 1
    runtime.group.barrier()
    assert [part.tolist() for part in memory] == [[1] * 100, [2] * 100, [3] * 100]
    told = []
    for close in (False, True):
        if runtime.group.rank == 2 and close:
            shared_memory.close()
        runtime.group.barrier()
        if runtime.group.rank != 2:
            try:
                shared_memory._recv(2, 1)
            except dist.DistNetworkError as error:
                told.append(str(error))
        runtime.group.barrier()
    runtime.close()
    return "; ".join(told)


def test_a_rank_that_is_silent_or_gone_is_named(tmp_path):
    told = run_ranks(3, lose_a_rank, tmp_path, config=configure())
    assert told == ["rank 2 has sent nothing for 1 s; rank 2 has closed its connection"] * 2 + [""]


def test_ranks_on_different_machines_are_not_connected():
    def all_gather(value: Any) -> list[Any]:
        (host, *rest), name = value
        return [[[f"not-{host}", *rest], name], value]

    assert connect_local_ranks(1, all_gather, timeout_s=1.0) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_take_the_place_of_a_rank():
    """Every user of the machine sees the names of the sockets."""
    names, everybody = {}, threading.Barrier(2)
    stranger = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + sys.argv[1]);"
        "s.sendall((1).to_bytes(4, 'little'))"
    )

    def connect(rank: int) -> SharedMemoryGroup | None:
        def all_gather(value: Any) -> list[Any]:
            names[rank] = value
            everybody.wait()
            if rank == 1:
                subprocess.run([sys.executable, "-c", stranger, names[0][1].removeprefix("\0")], check=True)
            return [names[0], names[1]]

        return connect_local_ranks(rank, all_gather, timeout_s=30)

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(connect, range(2))
    first.send_all(b"x")
    assert second.recv_all(1) == {0: b"x"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["ddp.comm_hook=powersgd"], "ddp.comm_hook='powersgd' must be one of none, fp16, bf16$"),
        (["+ddp.powersgd_rank=4"], "ddp.powersgd_rank is not a key"),
        (["ddp.comm_hook=bf16", "ddp.backend=mpi"], "ddp.comm_hook=bf16 needs 16-bit all-reduce"),
        (["ddp.bucket_cap_mb=0"], "ddp.bucket_cap_mb=0.0 must be greater than 0"),
        (["ddp.bucket_cap_mb=auto"], "ddp.bucket_cap_mb='auto' must be a finite number"),
    ],
)
def test_what_cannot_work_is_refused(options, error):
    with pytest.raises(ConfigError, match=error):
        config = from_mapping(configure(*options))
        choose_device(config.trainer, config.ddp, DistEnv())
