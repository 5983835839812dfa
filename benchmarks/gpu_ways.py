"""Time several ways to do the same, for part 7 of gpu.py. The first way is the package's.

Each function runs in a process of its own. Collectives run on one rank. They show how much a call
costs the host and the GPU, but not the time that a network adds.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from common import alternate, compose_config

Seconds = dict[str, list[float]]  # seconds of each repetition, by the name of the way
REPETITIONS = 5
CALLS = 50  # number of calls of a collective in one measurement
PINNED, REGISTERED = "pin_memory=True", "cudaHostRegister"


def synchronized(device: str, work: Callable[[], object], calls: int = 1) -> float:
    """Measure the seconds of a call, until the device has done its work."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else int
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    wait()
    return (time.perf_counter() - begin) / calls


def by_turns(device: str, ways: dict[str, Callable[[], object]], calls: int = 1) -> Seconds:
    """Call each way once to warm up, then measure all ways in turns."""
    for work in ways.values():
        work()
    measures = {name: partial(synchronized, device, work, calls) for name, work in ways.items()}
    return alternate("seconds", measures, REPETITIONS)


# Host memory.


def buffer_size(dry: bool) -> int:
    """Return the size of a staging buffer in bytes, as for GPT-2's weights and moments."""
    return (1 << 20) if dry else 1_500_000_000


@contextmanager
def staging_buffer(way: str, device: str, size: int) -> Iterator[Any]:
    """Allocate host memory that a GPU can copy to without waiting, and touch every page of it."""
    import torch

    runtime: Any = torch.cuda.cudart() if device == "cuda" and way == REGISTERED else None
    is_pinned = device == "cuda" and way == PINNED
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned).zero_()
    if runtime is not None and int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0)) != 0:
        raise RuntimeError("cudaHostRegister failed")
    try:
        yield buffer
    finally:
        if runtime is not None:
            runtime.cudaHostUnregister(buffer.data_ptr())


def allocation(device: str, dry: bool) -> Seconds:
    """Allocate a staging buffer, only once, because torch would use its memory for the next one."""
    found = {}
    for way in (PINNED, REGISTERED):
        begin = time.perf_counter()
        with staging_buffer(way, device, buffer_size(dry)):
            found[way] = [time.perf_counter() - begin]
    return found


def host_memory(device: str, dry: bool) -> dict[str, list[float]]:
    """Measure how much host memory a staging buffer takes. Other processes disturb the figure."""
    found = {}
    for way in (PINNED, REGISTERED):
        before = available_memory()
        with staging_buffer(way, device, buffer_size(dry)):
            found[way] = [before - available_memory()]
    return found


def available_memory() -> float:
    lines = Path("/proc/meminfo").read_text()
    return 1024.0 * int(re.findall(r"^MemAvailable: *(\d+) kB", lines, flags=re.MULTILINE)[0])


def staging_copy(device: str, dry: bool) -> Seconds:
    """Copy from the GPU to a staging buffer."""
    import torch

    size = buffer_size(dry)
    state = torch.zeros(size, dtype=torch.uint8, device=device)
    with (
        staging_buffer(PINNED, device, size) as pinned,
        staging_buffer(REGISTERED, device, size) as registered,
    ):
        ways: dict[str, Callable[[], object]] = {
            PINNED: partial(pinned.copy_, state, non_blocking=True),
            REGISTERED: partial(registered.copy_, state, non_blocking=True),
        }
        return by_turns(device, ways)


# Between ranks of one machine, without a GPU.


def flags(device: str, dry: bool) -> Seconds:
    """Exchange the flags of a step between two CPU ranks, over gloo and over shared memory.

    Runs on GPUs use gloo.
    """
    ways = {"gloo": "gloo", "shared memory": "auto"}
    found = {}
    for name, backend in ways.items():
        found[name] = on_two_ranks(backend, 20 if dry else 2000)
    return found


def on_two_ranks(backend: str, calls: int) -> list[float]:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [
        spawn.Process(target=exchange_flags, args=(rank, port, backend, calls, results))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    seconds: list[float] = results.get(timeout=120)
    for worker in workers:
        worker.join()
    return seconds


def exchange_flags(rank: int, port: int, backend: str, calls: int, results: Any) -> None:
    import torch

    from mingpt_ddp.distributed.runtime import Runtime
    from mingpt_ddp.process.env import read_env

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    config = compose_config("trainer.device=cpu", f"ddp.backend={backend}")
    runtime = Runtime(config, read_env())
    values = torch.zeros(4, dtype=torch.float64)
    measured = []

    def exchange() -> object:
        return runtime.group.all_gather_async(values)()

    for _ in range(REPETITIONS):
        measured.append(synchronized("cpu", exchange, calls))
    if rank == 0:
        results.put(measured)
    runtime.close()


# Collectives on one rank.


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Join a process group that has only this process, over NCCL, or over gloo on a CPU."""
    import torch
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def broadcast_state(device: str, dry: bool) -> Seconds:
    """Broadcast 1.5 GB of state through the host, as a restart does, and from the GPU's memory.

    One rank has nobody to send to. So this compares the copies through the host to a call of NCCL.
    """
    import torch
    import torch.distributed as dist

    state = torch.zeros((1 << 18) if dry else 375_000_000, device=device)
    with one_rank(device):
        ways = {
            "through the host": lambda: broadcast_through_host(state),
            "from the device": lambda: dist.broadcast(state, src=0),
        }
        return by_turns(device, ways)


def broadcast_through_host(state: Any) -> None:
    import torch.distributed as dist

    on_host = state.to("cpu", copy=True)
    dist.broadcast(on_host, src=0)
    state.copy_(on_host)


def ddp_timer(device: str, dry: bool) -> Seconds:
    """Take steps with DDP, which times its communication in every 10th or every 100th step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from mingpt_ddp.torch_internals import time_communication

    with one_rank(device):
        ways: dict[str, Callable[[], object]] = {}
        for every in (10, 100):
            layers = [torch.nn.Linear(64, 64) for _ in range(8)]
            model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
            time_communication(model, every)
            batch = torch.ones(8, 64, device=device)
            ways[f"every {every}th step"] = partial(pass_through, model, batch)
        return by_turns(device, ways, calls=20 if dry else 500)


def pass_through(model: Any, batch: Any) -> None:
    model(batch).sum().backward()
    model.zero_grad(set_to_none=True)


def all_reduces(device: str, dry: bool) -> Seconds:
    """Average gpt_mini's gradients with a call for each, as tensor parallelism does, or at once."""
    import torch
    import torch.distributed as dist

    from mingpt_ddp.models import build_model

    config = compose_config("model=gpt_nano" if dry else "model=gpt_mini")
    model = build_model(config.model, 65, config.data.block_size)
    gradients = [torch.zeros_like(p, device=device) for p in model.parameters()]

    def each() -> None:
        pending = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for work in pending:
            work.wait()

    def flattened() -> None:
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    with one_rank(device):
        return by_turns(device, {f"{len(gradients)} calls": each, "flattened": flattened}, CALLS)


def all_gathers(device: str, dry: bool) -> Seconds:
    """Gather Muon's updates of gpt_mini as bytes, into a list of tensors or into a single one."""
    import torch
    import torch.distributed as dist

    sent = torch.zeros(1 << (14 if dry else 22), dtype=torch.bfloat16, device=device)
    received = sent.new_empty(1, len(sent))
    own = sent.view(torch.uint8)
    whole = received.view(torch.uint8)
    with one_rank(device):
        ways = {
            "list form": lambda: dist.all_gather(list(whole), own),
            "into one tensor": lambda: dist.all_gather_into_tensor(whole.view(-1), own),
        }
        return by_turns(device, ways, CALLS)


# The model.


def vocabulary(device: str, dry: bool) -> Seconds:
    """Train GPT-2's shape in eager bf16, with its own vocabulary and one padded to 64 * n."""
    import torch

    from mingpt_ddp.models import build_model

    words = ["model=gpt_nano", "data.block_size=16"] if dry else ["model=gpt2"]
    context, batch = (16, 2) if dry else (1024, 12)
    config = compose_config(*words, f"data.block_size={context}")
    ways: dict[str, Callable[[], object]] = {}
    for size in (257, 320) if dry else (50257, 50304):
        model = build_model(config.model, size, context).to(device)
        tokens = torch.randint(size, (batch, context + 1), device=device)
        ways[f"{size} tokens"] = partial(train_on, device, model, tokens)
    return by_turns(device, ways, calls=1 if dry else 10)


def train_on(device: str, model: Any, tokens: Any) -> None:
    import torch

    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    model.zero_grad(set_to_none=True)
