"""The process group of one attempt: collectives, heartbeat, and failure reports.

With a single process every collective is the identity, so callers need not check the world size.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mingpt_ddp import errors
from mingpt_ddp.config.schema import DDPConfig
from mingpt_ddp.distributed.device import refuse_shared_gpus
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.rendezvous import (
    ask_store,
    connect,
    get_now,
    join_attempt,
    raise_if_fatal,
)
from mingpt_ddp.distributed.shared_memory import SharedMemoryGroup, connect_local_ranks
from mingpt_ddp.errors import ConfigError, UserError

T = TypeVar("T")
WAITING = "waiting for other ranks"  # name of the profiler's events
FAILURE = "failure"  # key in the store: the error of the first rank that failed
ALL_FAILED_TIMEOUT_S = 5.0  # within which all ranks hit an error that all ranks hit


@dataclass(frozen=True)
class Failure:
    """The error of the first rank that failed."""

    rank: int
    kind: str  # the class of a UserError; "" for any other error
    message: str  # one line


def _serialize_error(error: Exception) -> tuple[str, str, int | None]:
    """Return class, message and errno of an error as JSON values.

    All but UserErrors become OSErrors.
    """
    if isinstance(error, UserError):
        return type(error).__name__, str(error.args[0]), None
    message = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else str(error) or type(error).__name__
    )
    return "OSError", " ".join(message.split()), getattr(error, "errno", None)


def check_ranks(ddp: DDPConfig, world_size: int) -> None:
    """Refuse ranks that cannot share copies of a model.

    Raises:
        ConfigError: names the key.
    """
    if world_size % ddp.tensor_parallel:
        raise ConfigError(
            f"ddp.tensor_parallel={ddp.tensor_parallel} must divide the number of ranks, "
            f"{world_size}"
        )


def name_backends(backend: str, device_type: str) -> tuple[str, str]:
    """Return torch's name of the backends of a process group, and the backend that reduces
    gradients.

    Args:
        backend: ddp.backend. CPU tensors use gloo or MPI even if there is a GPU.
    """
    cpu = "mpi" if backend == "mpi" else "gloo"
    gpu = "nccl" if backend == "auto" else backend
    return (f"cpu:{cpu},cuda:{gpu}", gpu) if device_type == "cuda" else (cpu, cpu)


class ProcessGroup:
    """This rank's handle on all ranks of the job."""

    def __init__(self, env: DistEnv, devices: list[torch.device], ddp: DDPConfig, job: int) -> None:
        """Join the process group of this attempt.

        Args:
            devices: of this rank.
            job: index of the job in a sweep; every job has its own process group.

        Raises:
            RunError: not all ranks joined within ddp.timeout_s, or an earlier attempt failed with a
                fatal error.
            ConfigError: two ranks use the same GPU, or they cannot share copies of the model.
        """
        self.env = env
        self.timeout_s = ddp.timeout_s
        self.rank = env.rank
        self.world_size = env.world_size
        self.is_rank_zero = env.is_rank_zero
        # Tensor parallelism: consecutive ranks share a copy of the model, and the part of the batch
        # of that copy.
        self.tensor_size = ddp.tensor_parallel
        check_ranks(ddp, self.world_size)
        self.data_rank = self.rank // self.tensor_size
        self.data_size = self.world_size // self.tensor_size
        self.mesh: DeviceMesh | None = None  # data x tensor, with tensor parallelism
        self._copy_group: dist.ProcessGroup | None = None  # the ranks of this copy, for CPU tensors
        self.store: dist.Store | None = None  # of this attempt
        # if all ranks are on one machine and ddp.backend=auto
        self.shared_memory: SharedMemoryGroup | None = None
        self.transport = "none"  # of the gradients: shared memory, or a backend of torch
        # The training thread's activity, which the watchdog reads to find the straggler: a new dict
        # at every change.
        self.heartbeat: dict[str, Any] = {"count": 0, "activity": "starting", "waiting": False}
        self._job_store: dist.Store | None = None  # shared by all attempts under one agent
        # for the snapshot thread, concurrent with the training thread
        self._io_group: dist.ProcessGroup | None = None
        if self.world_size > 1 or env.has_agent:  # a worker whose agent died finds no store
            self._job_store = connect(env, job, self.timeout_s)
            raise_if_fatal(self._job_store)
            if self.world_size > 1:
                self._join(self._job_store, devices, ddp)

    def _join(self, job_store: dist.Store, devices: list[torch.device], ddp: DDPConfig) -> None:
        backend = ddp.backend
        device = devices[0]
        self.store = join_attempt(job_store, self.env, self.timeout_s)
        backends, self.transport = name_backends(backend, device.type)
        dist.init_process_group(
            backends,
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )
        # Its ranks may wait for storage that is unavailable; gloo notices a dead peer before the
        # timeout.
        self._io_group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        if device.type == "cuda" and backend in ("auto", "nccl"):
            uuids = self.all_gather(
                [str(torch.cuda.get_device_properties(each).uuid) for each in devices]
            )
            refuse_shared_gpus([uuid for own in uuids for uuid in own], len(devices))
        if ddp.tensor_parallel > 1:
            self.mesh = init_device_mesh(
                device.type, (self.data_size, self.tensor_size), mesh_dim_names=("data", "tensor")
            )
            # every rank creates all groups
            for first in range(0, self.world_size, self.tensor_size):
                group = dist.new_group([*range(first, first + self.tensor_size)], backend="gloo")
                self._copy_group = (
                    group if first == self.rank - self.rank % self.tensor_size else self._copy_group
                )
        elif device.type == "cpu" and backend == "auto":
            self.shared_memory = connect_local_ranks(self.rank, self.all_gather, self.timeout_s)
            self.transport = "shared memory" if self.shared_memory else self.transport

    def close(self) -> None:
        """Destroy the process group on all ranks together: an early exit would stall the launcher's
        exit barrier.
        """
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()
        if self.shared_memory is not None:
            self.shared_memory.close()

    # Control data is JSON in CPU tensors, because torch's object collectives unpickle what they
    # receive.

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce(torch.zeros(1))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum a CPU tensor element-wise over all ranks, in place."""
        if self.world_size > 1:
            with self._blocked():
                dist.all_reduce(values)
        return values

    def all_gather(self, value: T, io: bool = False) -> list[T]:
        """Return the JSON value of every rank, in rank order.

        Args:
            io: called from the snapshot thread, on a separate group.
        """
        if self.world_size == 1:
            return [value]
        group = self._io_group if io else None
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with nullcontext() if io else self._blocked():
            dist.all_gather(sizes, torch.tensor([len(content)]), group=group)
            padded = nn.functional.pad(content, (0, int(max(sizes)) - len(content)))
            parts = [torch.empty_like(padded) for _ in range(self.world_size)]
            dist.all_gather(parts, padded, group=group)
        return [
            json.loads(part[: int(n)].numpy().tobytes())
            for part, n in zip(parts, sizes, strict=True)
        ]

    def all_gather_async(self, values: Tensor) -> Callable[[], Tensor]:
        """Start an all_gather of a CPU tensor (n); the returned function waits for the result
        (world size, n).
        """
        if self.world_size == 1:
            return lambda: values[None]
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        if self.shared_memory is not None:
            receive = self.shared_memory.all_gather_async(parts, values)
        else:
            receive = dist.all_gather(parts, values, async_op=True).wait

        def wait() -> Tensor:
            with self._blocked():
                receive()
            return torch.stack(parts)

        return wait

    def broadcast_tensors(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Broadcast rank zero's CPU tensors; the other ranks pass None."""
        if self.world_size == 1:
            assert tensors is not None
            return tensors
        shapes = {
            k: (list(t.shape), str(t.dtype).removeprefix("torch."))
            for k, t in (tensors or {}).items()
        }
        received = {}
        for name, (shape, dtype) in self.all_gather(shapes)[0].items():
            received[name] = (
                tensors[name].contiguous()
                if tensors
                else torch.empty(shape, dtype=getattr(torch, dtype))
            )
            with self._blocked():
                dist.broadcast(received[name], src=0)
        return received

    def any_in_copy(self, flag: bool) -> bool:
        """Return whether the flag is set on a rank of this copy of the model, whose ranks must
        decide alike.
        """
        if self.mesh is None:
            return flag
        with self._blocked():
            dist.all_reduce(flags := torch.tensor([float(flag)]), group=self._copy_group)
        return bool(flags)

    def run_on_rank_zero(self, work: Callable[[], T], per_node: bool = False) -> T:
        """Call `work` on rank 0, or on the first rank of every node.

        Return its JSON value on every rank.

        Raises:
            UserError: on every rank, the error of the calling rank; or the nodes returned different
                values.
        """
        own: list[T] = []
        with self.raise_everywhere(UserError, io=False):
            if self.is_rank_zero or (per_node and self.env.local_rank == 0):
                own.append(work())
        values = [value for part in self.all_gather(own) for value in part]
        if any(value != values[0] for value in values):
            raise errors.RunError(
                f"the nodes have different texts or configurations: {values}"[:300]
            )
        return values[0]

    @contextlib.contextmanager
    def raise_everywhere(
        self, caught: type[Exception] = Exception, io: bool = True
    ) -> Iterator[None]:
        """Raise on every rank the error that one rank raises in this context.

        Args:
            caught: which errors; any by default, because the other ranks must not wait for this
                one.
            io: called from the snapshot thread.

        Raises:
            UserError: of the same class, if the first failing rank raised one.
            OSError: names that rank and its error, with the same errno.
        """
        failure: Exception | None = None
        try:
            yield
        except caught as error:
            # not this frame
            failure = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        for rank, packed in enumerate(
            self.all_gather(_serialize_error(failure) if failure else None, io)
        ):
            if packed is not None:
                kind, message, code = packed
                if kind != "OSError":
                    raise getattr(errors, kind)(message) from failure
                raised = OSError(message if self.world_size == 1 else f"rank {rank}: {message}")
                raised.errno = code
                raise raised from failure

    def get_or_set(self, key: str, make: Callable[[], str]) -> str:
        """Return the value of `make` from the first attempt; restarts by the same agent get the
        same value.
        """
        if self._job_store is None:
            return make()
        return self._job_store.compare_set(key, "", make()).decode()

    def set_activity(self, activity: str, waiting: bool = False) -> None:
        """Update the heartbeat with the activity of this rank, and whether it waits for other
        ranks.
        """
        self.heartbeat = {
            "count": self.heartbeat["count"] + 1,
            "activity": activity,
            "waiting": waiting,
        }

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        self.set_activity(self.heartbeat["activity"], waiting=True)
        with torch.profiler.record_function(WAITING):
            yield
        self.set_activity(self.heartbeat["activity"])

    # Failures: the first rank that fails writes its error to the store, where its peers find the
    # root cause.

    def report_failure(self, message: str, kind: str = "") -> None:
        """Write the error of this rank to the store, unless another rank failed before.

        Args:
            kind: the class of a UserError; "" for any other error.
        """
        if self.store is not None:
            store = self.store
            report = json.dumps(asdict(Failure(self.rank, kind, message)))
            ask_store(lambda: store.compare_set(FAILURE, "", report), otherwise=b"")

    def reported_failure(self, wait_s: float) -> Failure | None:
        """Return the error of the first failed rank, if it is reported within `wait_s` seconds."""
        if self.store is None:
            return None
        store = self.store
        deadline = time.monotonic() + wait_s

        def poll() -> Failure | None:
            while not store.check([FAILURE]) and time.monotonic() < deadline:
                time.sleep(0.05)
            report = get_now(store, FAILURE)
            return Failure(**json.loads(report)) if report else None

        return ask_store(poll, None, wait_s)

    def have_all_failed(self, message: str) -> bool:
        """Return whether every rank failed with the same error.

        If so, destroy the process group for the next job.
        """
        if self.store is None:
            return True
        store = self.store
        keys = [f"failed/{rank}" for rank in range(self.world_size)]

        def compare() -> bool:
            store.set(keys[self.rank], message)
            store.wait(keys, timedelta(seconds=ALL_FAILED_TIMEOUT_S))
            return all(other.decode() == message for other in store.multi_get(keys))

        alike = ask_store(compare, False, ALL_FAILED_TIMEOUT_S)
        if alike:
            dist.destroy_process_group()
        return alike
