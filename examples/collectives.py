"""Check and time the communication between the ranks of a cluster, before training on it.

    torchrun --standalone --nproc_per_node=3 examples/collectives.py max_bytes=4096

This script needs only torch. Copy it to a new cluster, and start it in the same way as the training
later:

    torchrun --nnodes=2 ... collectives.py all_reduce ring json=busbw.json
    mpirun -np 4 python collectives.py backend=mpi        # if torch is built with MPI

Without names of operations, it runs all of them. SETTINGS lists the keys and their defaults. Every
result is checked. If one is wrong, a line names the operation, the size, the rank and the position,
and all ranks end with exit code 1. The columns of the output are:

* latency: the median over the repetitions, on the slowest rank
* algbw: the size of the message divided by the latency
* busbw: a bandwidth that can be compared to the speed of the network, for any number of ranks
"""

import json
import os
import socket
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SETTINGS: dict[str, Any] = {
    "backend": "auto",  # gloo, nccl or mpi; auto chooses nccl on GPUs, else gloo
    "device": "auto",  # cpu or cuda; auto chooses the GPU if there is one
    "min_bytes": 8,  # smallest message; sizes are rounded down to whole floats on each rank
    "max_bytes": 1 << 24,
    "factor": 8,  # each size is this many times the previous one
    "repetitions": 20,  # number of measurements of each operation and size
    "timeout_s": 120.0,  # how long a rank waits for the others
    "json": "",  # name of a file to write the numbers to
}
# torch 2.13 has renamed these functions.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Message:
    """This rank's tensors for one message size. A tensor has a row of n numbers for each rank.

    Each number of the input is its position modulo a prime, so that rows differ, plus the rank. The
    correct output of every operation is therefore known, and exact in fp32 on up to 4,000 ranks. A
    number from a wrong rank or position is noticed.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        n = max(1, size // (4 * self.ranks))
        positions = torch.arange(self.ranks * n, device=device) % 1021
        self.positions = positions.float().view(self.ranks, n)  # the input of rank 0
        self.input = self.positions + self.rank
        self.output = torch.empty_like(self.input)
        # The sum of the inputs of all ranks.
        self.total = self.ranks * self.positions + self.ranks * (self.ranks - 1) / 2

    def rows(self, row: int) -> Tensor:
        """Compute one row of every rank's input, (ranks, n)."""
        ranks = torch.arange(self.ranks, device=self.positions.device)
        return self.positions[row] + ranks[:, None]

    def on_rank_0(self, rows: Any) -> Any:
        """Return all rows on rank 0, and no rows on other ranks."""
        return rows if self.rank == 0 else rows[:0]


def exchange(outgoing: Tensor, incoming: Tensor) -> None:
    """Send a tensor to the next rank while receiving one from the previous rank."""
    if outgoing.is_cuda and "cuda:gloo" in dist.get_backend_config():
        raise RuntimeError("gloo does not support sending tensors of a GPU: it would crash")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, outgoing, (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % ranks)
    # Send and receive at once, because two blocking sends would wait for each other.
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def ring_all_reduce(values: Tensor) -> None:
    """Sum a tensor (n) over all ranks, in place. ring_hook.py explains the algorithm."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = values.tensor_split(ranks)
    received = torch.empty_like(chunks[0])
    for step in range(2 * (ranks - 1)):
        outgoing = chunks[(rank - step) % ranks]
        incoming = chunks[(rank - step - 1) % ranks]
        if step < ranks - 1:
            exchange(outgoing, received[: len(incoming)])
            incoming += received[: len(incoming)]
        else:
            exchange(outgoing, incoming)


class Operation(NamedTuple):
    """A collective.

    Attributes:
        call: Runs the collective on a message, whose output starts as a copy of its input.
        expected: Computes the correct values of the output's first elements.
        shares: busbw is algbw times this number times (ranks - 1) / ranks. 0 stands for a busbw
            that equals algbw. Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """

    call: Callable[[Message], object]
    expected: Callable[[Message], Tensor]
    shares: int = 0


OPERATIONS = {
    "broadcast": Operation(lambda m: dist.broadcast(m.output, 0), lambda m: m.positions),
    "all_reduce": Operation(lambda m: dist.all_reduce(m.output), lambda m: m.total, shares=2),
    "reduce": Operation(lambda m: dist.reduce(m.output, 0), lambda m: m.on_rank_0(m.total)),
    "gather": Operation(
        lambda m: dist.gather(m.input[0], m.on_rank_0([*m.output]) or None, 0),
        lambda m: m.on_rank_0(m.rows(0)),
        shares=1,
    ),
    "all_gather": Operation(
        lambda m: all_gather(m.output, m.input[:1]), lambda m: m.rows(0), shares=1
    ),
    "scatter": Operation(
        lambda m: dist.scatter(m.output[0], m.on_rank_0([*m.input]) or None, 0),
        lambda m: m.positions[m.rank],
        shares=1,
    ),
    "reduce_scatter": Operation(
        lambda m: reduce_scatter(m.output[:1], m.input), lambda m: m.total[m.rank], shares=1
    ),
    "all_to_all": Operation(
        lambda m: dist.all_to_all_single(m.output, m.input), lambda m: m.rows(m.rank), shares=1
    ),
    "send_recv": Operation(
        lambda m: exchange(m.input, m.output), lambda m: m.positions + (m.rank - 1) % m.ranks
    ),
    "ring": Operation(lambda m: ring_all_reduce(m.output.view(-1)), lambda m: m.total, shares=2),
    "barrier": Operation(lambda m: dist.barrier(), lambda m: m.input[:0]),
}


def measure(name: str, message: Message, repetitions: int) -> tuple[list[float], str]:
    """Time an operation and check its results.

    Returns:
        The seconds of each repetition, and a description of the first wrong value or "".
    """
    operation = OPERATIONS[name]
    expected = operation.expected(message).flatten()
    result = message.output.view(-1)[: len(expected)]
    wait = torch.cuda.synchronize if message.input.is_cuda else lambda: None
    fault = ""
    times = []
    # The first call opens connections and is not measured.
    for _ in range(1 + repetitions):
        message.output.copy_(message.input)
        dist.barrier()
        wait()
        start = time.perf_counter()
        operation.call(message)
        wait()
        times.append(time.perf_counter() - start)
        if not fault and not torch.equal(result, expected):
            # Do not leave the loop, because the other ranks go on with the next repetition.
            at = int((result != expected).nonzero()[0])
            fault = f"position {at} is {result[at]:g} and not {expected[at]:g}"
    return times[1:], fault


def check_barrier(store: dist.Store) -> str:
    """Check that a barrier does not end before the last rank has begun it.

    Return a description of the error, or "".
    """
    time.sleep(0.01 * (dist.get_rank() % 8))  # let the ranks arrive one after the other
    store.add("arrived", 1)
    dist.barrier()
    arrived, ranks = store.add("arrived", 0), dist.get_world_size()
    return f"it ended after {arrived} of {ranks} ranks arrived" if arrived < ranks else ""


def gather(value: float, device: torch.device) -> list[float]:
    """Collect a number from every rank, in rank order."""
    own = torch.tensor([value], dtype=torch.float64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [float(number) for number in gathered]


def check(ok: bool, message: str) -> None:
    """End with exit code 2 unless `ok`.

    Every rank prints the message, because torchrun ends all ranks once the first one has ended.
    """
    if not ok:
        print(f"error: {message}", file=sys.stderr, flush=True)
        sys.exit(2)


def read_words(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Parse the operations and the settings on the command line."""
    names = []
    settings = dict(SETTINGS)
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            check(word in OPERATIONS, f"{word} is not an operation; use {', '.join(OPERATIONS)}")
            names.append(word)
            continue
        check(key in settings, f"{key} is not a key; use {', '.join(settings)}")
        try:
            settings[key] = type(SETTINGS[key])(text)
        except ValueError:
            check(False, f"{word} must be a number")
    check(settings["backend"] in ("auto", "gloo", "nccl", "mpi"), "use backend=gloo, nccl or mpi")
    check(settings["device"] in ("auto", "cpu", "cuda"), "use device=cpu or cuda")
    check(0 < settings["min_bytes"] <= settings["max_bytes"], "use 1 <= min_bytes <= max_bytes")
    check(settings["factor"] > 1, "factor must be at least 2")
    check(settings["repetitions"] > 0, "repetitions must be at least 1")
    return names or [*OPERATIONS], settings


def connect(settings: dict[str, Any]) -> tuple[torch.device, dist.Store | None]:
    """Join the process group.

    Returns:
        This rank's device, and the store that the ranks share. MPI has no store.
    """
    on_gpu = settings["device"] != "cpu" and torch.cuda.is_available()
    check(on_gpu or settings["device"] != "cuda", "device=cuda, but this machine has no GPU")
    backend = settings["backend"]
    if backend == "auto":
        backend = "nccl" if on_gpu else "gloo"
    check(on_gpu or backend != "nccl", "backend=nccl needs a GPU; use backend=gloo")
    check(backend != "mpi" or dist.is_mpi_available(), "this torch has no MPI; use backend=gloo")
    device = torch.device("cpu")
    if on_gpu:
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if backend == "mpi":
        dist.init_process_group("mpi")
        return device, None
    is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    check(is_launched, "this needs several ranks; start it with torchrun --nproc_per_node=3")
    timeout = timedelta(seconds=settings["timeout_s"])
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    return device, store


def main() -> None:
    names, settings = read_words(sys.argv[1:])
    device, store = connect(settings)
    rank, ranks, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    hosts = len({*gather(zlib.crc32(socket.gethostname().encode()), device)})
    about = {"ranks": ranks, "hosts": hosts, "backend": backend, "device": device.type}
    show(", ".join(f"{key} {value}" for key, value in about.items()))
    show("operation            bytes latency (us) algbw (GB/s) busbw (GB/s)")
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        for size in [0] if name == "barrier" else sizes(settings, ranks):
            row = {"operation": name, "bytes": size, "latency_s": None}
            rows.append(row)
            try:
                times, fault = measure(name, Message(size, device), settings["repetitions"])
            # torch has no specific type for the error of an unsupported operation.
            except RuntimeError as error:
                if "support" not in str(error):
                    raise
                show(f"{name:<14} {size:>11}  not supported by {backend}")
                break
            if name == "barrier" and store is not None:
                fault = check_barrier(store)
            row["latency_s"] = latency_s = max(gather(statistics.median(times), device))
            row["algbw"] = algbw = size / latency_s
            shares = OPERATIONS[name].shares
            row["busbw"] = busbw = algbw * shares * (ranks - 1) / ranks if shares else algbw
            speeds = f"{1e6 * latency_s:>12.1f} {algbw / 1e9:>12.3f} {busbw / 1e9:>12.3f}"
            show(f"{name:<14} {size:>11} {speeds}")
            has_fault = gather(bool(fault), device)
            if any(has_fault):
                # Only the first rank with a wrong value prints it.
                if rank == has_fault.index(True):
                    place = f"{name} of {size} bytes is wrong on rank {rank}"
                    print(f"error: {place}: {fault}", file=sys.stderr, flush=True)
                gather(0.0, device)  # no rank ends before the error is printed
                sys.exit(1)
    show("every result is correct")
    if rank == 0 and settings["json"]:
        Path(settings["json"]).write_text(json.dumps({**about, "results": rows}, indent=1))
    dist.destroy_process_group()


def show(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def sizes(settings: dict[str, Any], ranks: int) -> list[int]:
    """List the sizes of the messages in bytes."""
    found = []
    size = settings["min_bytes"]
    while size <= settings["max_bytes"]:
        found.append(max(1, size // (4 * ranks)) * 4 * ranks)
        size *= settings["factor"]
    return [*dict.fromkeys(found)]


if __name__ == "__main__":
    try:
        main()
    # All errors of torch are RuntimeErrors.
    except (RuntimeError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())[:300]}")
