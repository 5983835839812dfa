"""Every transport for gradients gives the correct mean, and its runs resume byte for byte."""

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
from example_files import EXAMPLES
from launching import TINY

from mingpt_ddp.config.builders import run_file
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.distributed.group import shared_memory
from mingpt_ddp.distributed.group.shared_memory import SharedMemoryGroup, connect_local_ranks
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models import GPT
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import read_env
from mingpt_ddp.training.run import train_run
from multiprocess.ranks import Ranks, configure, run_ranks

STEPS = 8
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    "trainer.micro_batch_size=2",
    f"optimizer.schedule_steps={STEPS}",
    "trainer.eval_every=3",
    "snapshot.every_steps=null",
    "snapshot.keep_last=100",
]
GLOO = "ddp=gloo"
# For each name: overrides, the steps at which the job ends (and is resumed), and the world sizes.
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
    "own hook": ([], [STEPS], (2, 3)),  # the hook in examples/ring_hook.py
    "own hook, parts": ([], [5, STEPS], (3,)),
    "nonfinite": (["trainer.on_nonfinite=skip"], [STEPS], (2,)),
    "nonfinite, parts": (["trainer.on_nonfinite=skip"], [3, STEPS], (2,)),
    "small buckets": ([GLOO, "ddp.bucket_cap_mb=0.001"], [STEPS], (2, 3)),
    "small buckets, parts": ([GLOO, "ddp.bucket_cap_mb=0.001"], [5, STEPS], (3,)),
}


class JobPatch:
    """The patches for one job. They are undone after it."""

    def __init__(self, name: str, limit: int) -> None:
        self.patch = pytest.MonkeyPatch()
        if "later not" in name and limit == STEPS:
            # simulates a system where sockets have no abstract names
            self.patch.setattr(shared_memory, "_machine_id", lambda: None)
        if "nonfinite" in name:
            self.patch.setattr(
                GPT, "forward", self.inject_nonfinite_loss(GPT.forward, nonfinite_step=3)
            )

    @staticmethod
    def inject_nonfinite_loss(forward: Any, nonfinite_step: int) -> Any:
        """Make the loss of one step non-finite, whenever it is computed."""
        from mingpt_ddp.training import train_step as train_step

        at = {"step": 0}
        original = train_step.seed_everything

        def record_step(*keys: Any) -> None:
            at["step"] = keys[2] if keys[0] == "dropout" else 0
            original(*keys)

        train_step.seed_everything = record_step

        def forward_with_nonfinite_loss(self, x, y=None):
            loss = forward(self, x, y)
            return loss * torch.nan if self.training and at["step"] == nonfinite_step else loss

        return forward_with_nonfinite_loss


def train_all(configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    job = 0
    for name, values in configs.items():
        for limit in JOBS[name][1]:
            patches = JobPatch(name, limit)
            logs.to_console(read_env())  # stops logging to the file of the previous job
            values["trainer"]["max_steps"] = limit
            if "own hook" in name:
                run_file(EXAMPLES / "ring_hook.py", "data.code")
                values["ddp"]["comm_hook"] = "ring"
            config = from_mapping(values)
            runtime = Runtime(config, read_env(), job)
            job += 1
            loss = train_run(Job(config), runtime)["loss"]
            outcomes[name] = {
                "loss": loss,
                "shared": runtime.group.shared_memory is not None,
                "seconds": runtime.strategy.all_reduce_s,
            }
            runtime.close()
            del runtime
            patches.patch.undo()
    return outcomes


# (world size, results by rank, directory of the runs)
Trained: TypeAlias = tuple[int, list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Callable[[int], Trained]:
    @functools.cache
    def train(world: int) -> Trained:
        root = tmp_path_factory.mktemp(f"ranks{world}")
        jobs = {name: options for name, (options, _, worlds) in JOBS.items() if world in worlds}
        configs = {
            n: configure(*SETTINGS, *o, f"run.root={root}", f"run.name={slug(n)}")
            for n, o in jobs.items()
        }
        with Ranks(world, train_all, root / "ranks", configs=configs) as ranks:
            return world, ranks.results(), root

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


def max_difference(trained, one: str, other: str) -> float:
    first, second = weights(trained, one), weights(trained, other)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def same_bytes(trained, one: str, other: str) -> bool:
    return digest(trained, one) == digest(trained, other)


def test_all_ranks_return_the_same_loss(trained):
    losses = [
        {name: outcome["loss"] for name, outcome in outcomes.items()} for outcomes in trained[1]
    ]
    assert losses == [losses[0]] * trained[0]


def test_ranks_on_one_machine_share_memory_unless_gloo_is_chosen(trained):
    for outcomes in trained[1]:
        assert outcomes["shared"]["shared"]
        assert outcomes["shared"]["seconds"] > 0
        assert not outcomes["gloo"]["shared"]


@pytest.mark.parametrize(
    "job_name", ["gloo", "static", "static, shared", "unused", "small buckets", "own hook"]
)
def test_every_exact_transport_gives_the_same_bits_on_two_ranks(two, job_name):
    """A sum of two numbers does not depend on their order.

    The steps accumulate micro-batches, with evaluations in between.
    """
    assert same_bytes(two, "shared", job_name)


@pytest.mark.parametrize("job_name", ["gloo", "own hook"])
def test_shared_memory_matches_others_on_three_ranks(three, job_name):
    assert 0 < max_difference(three, "shared", job_name) < 1e-5
    assert three[1][0][job_name]["loss"] == pytest.approx(three[1][0]["shared"]["loss"], abs=1e-5)


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_16_bit_hooks_are_used_and_accurate(two, hook):
    assert 0 < max_difference(two, "shared", hook) < 2e-3


def test_a_change_of_transport_is_logged_on_resume(three):
    """Rank zero logs it once, and only if the transport has changed."""

    def lines(name: str, rank: int) -> list[str]:
        log = (three[2] / slug(name) / f"main.rank{rank}.log").read_text()
        return [line for line in log.splitlines() if line.startswith("transport ")]

    assert [line.split() for line in lines("shared, later not", rank=0)] == [
        ["transport", "shared", "memory", "gloo"]
    ]
    assert lines("shared, later not", rank=1) == lines("shared, parts", rank=0) == []


@pytest.mark.parametrize("job_name", ["shared", "small buckets", "own hook"])
def test_a_resumed_run_equals_an_uninterrupted_one_on_three_ranks(three, job_name):
    assert same_bytes(three, job_name, f"{job_name}, parts")


def test_a_static_graph_resumes_exactly(three):
    assert same_bytes(three, "gloo", "static, parts")


def test_a_resumed_run_equals_an_uninterrupted_one_after_a_skipped_step(two):
    """The skipped step leaves no trace in either run."""
    assert same_bytes(two, "nonfinite", "nonfinite, parts")
    assert all(tensor.isfinite().all() for tensor in weights(two, "nonfinite").values())


def test_the_bucket_size_determines_the_order_of_additions(three):
    assert not same_bytes(three, "small buckets", "gloo")


def destroy_group_before_model(config: dict[str, Any]) -> int:
    """Drop the last reference to DDP while threads of gloo wait for the GIL.

    They need it to free the tensors of collectives.
    """
    rounds = 5
    for job in range(rounds):
        runtime = Runtime(from_mapping(config), read_env(), job)
        model = runtime.strategy.wrap(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        sys.setswitchinterval(100)  # this thread releases the GIL only when it blocks
        for _ in range(50):
            dist.all_gather([torch.zeros(1) for _ in range(2)], torch.zeros(1), async_op=True)
        dist.destroy_process_group()
        del model
        gc.collect()
        sys.setswitchinterval(0.005)
        del runtime
    return rounds


def test_a_process_group_may_be_destroyed_before_the_model(tmp_path):
    """This happens after an error on all ranks of a sweep: its traceback keeps the model alive."""
    assert run_ranks(2, destroy_group_before_model, tmp_path, config=configure()) == [5, 5]


# SharedMemoryGroup


class TwoTypes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Linear(3, 1)
        self.precise = torch.nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x).double() + self.precise(x.double())


def average_gradients_of_two_types(runtime: Runtime) -> None:
    model = TwoTypes()
    parallel = runtime.strategy.wrap(model)
    parallel(torch.full((1, 3), 1.0 + runtime.group.rank)).sum().backward()
    for layer in (model.plain, model.precise):
        assert layer.weight.grad.flatten().tolist() == pytest.approx([2.0] * 3)
        assert layer.bias.grad.tolist() == pytest.approx([1.0])


def wait_for_lost_peer(config: dict[str, Any]) -> str:
    runtime = Runtime(from_mapping(config), read_env())
    average_gradients_of_two_types(runtime)
    shared_memory = connect_local_ranks(runtime.group.rank, runtime.group.all_gather, timeout_s=5.0)
    assert shared_memory is not None
    shared_memory.send_all(bytes([runtime.group.rank]))
    assert shared_memory.recv_all(1) == {
        other: bytes([other]) for other in range(3) if other != runtime.group.rank
    }
    parts = shared_memory.allocate(300).split(100)
    parts[runtime.group.rank][:] = runtime.group.rank + 1
    runtime.group.barrier()
    assert [part.tolist() for part in parts] == [[1] * 100, [2] * 100, [3] * 100]
    errors = []
    for close in (False, True):
        if runtime.group.rank == 2 and close:
            shared_memory.close()
        runtime.group.barrier()
        if runtime.group.rank != 2:
            try:
                shared_memory._recv(2, 1)
            except dist.DistNetworkError as error:
                errors.append(str(error))
        runtime.group.barrier()
    runtime.close()
    return "; ".join(errors)


def test_a_silent_or_disconnected_peer_is_named(tmp_path):
    results = run_ranks(3, wait_for_lost_peer, tmp_path, config=configure())
    assert results == ["rank 2 has sent nothing for 5 s; rank 2 has closed its connection"] * 2 + [
        ""
    ]


def test_ranks_on_different_machines_are_not_connected():
    def all_gather(value: Any) -> list[Any]:
        (host, *rest), name = value
        return [[[f"not-{host}", *rest], name], value]

    assert connect_local_ranks(1, all_gather, timeout_s=1.0) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_impersonate_a_rank():
    """Every user of the machine can list the names of sockets."""
    names, barrier = {}, threading.Barrier(2)
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        "s.connect(chr(0) + sys.argv[1]);"
        "s.sendall((1).to_bytes(4, 'little'))"
    )

    def connect(rank: int) -> SharedMemoryGroup | None:
        def all_gather(value: Any) -> list[Any]:
            names[rank] = value
            barrier.wait()
            if rank == 1:
                subprocess.run(
                    [sys.executable, "-c", script, names[0][1].removeprefix("\0")], check=True
                )
            return [names[0], names[1]]

        return connect_local_ranks(rank, all_gather, timeout_s=30)

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(connect, range(2))
    first.send_all(b"x")
    assert second.recv_all(1) == {0: b"x"}
