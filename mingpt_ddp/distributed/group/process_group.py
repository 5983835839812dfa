"""The process group of one attempt: collectives and the heartbeat.

With a single process every collective is the identity, so callers need not check the world size.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.distributed.device.device import refuse_shared_gpus
from mingpt_ddp.distributed.group.json_collectives import JsonCollectives
from mingpt_ddp.distributed.group.rendezvous import join
from mingpt_ddp.distributed.group.shared_memory import SharedMemoryGroup, connect_local_ranks
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.failures import Failures
from mingpt_ddp.storage.lock import log_if_long

T = TypeVar("T")
SMALL_BYTES = 1 << 20  # of tensors that share a message
WAITING = "waiting for other ranks"  # name of the profiler's events
STARTING = "starting"  # the activity until the first batch or evaluation
PREPARING = "reading the data"  # the activity of ranks of which nothing but a stop is a hang
FIRST_HEARTBEAT = {"count": 0, "activity": STARTING, "waiting": False}


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
    """Return torch's name of the backends of a group, and the one that reduces gradients.

    Args:
        backend: ddp.backend. CPU tensors use gloo or MPI even if there is a GPU.
    """
    cpu_backend = "mpi" if backend == "mpi" else "gloo"
    if device_type != "cuda":
        return cpu_backend, cpu_backend
    gpu_backend = "nccl" if backend == "auto" else backend
    return f"cpu:{cpu_backend},cuda:{gpu_backend}", gpu_backend


class ProcessGroup(JsonCollectives):
    """This rank's handle on all ranks of the job."""

    def __init__(self, env: DistEnv, ddp: DDPConfig, job: int) -> None:
        """Join the process group of this attempt; `connect` then connects the ranks.

        Args:
            job: index of the job in a sweep; every job has its own process group.

        Raises:
            JoinError: not all ranks joined within ddp.timeout_s.
            RunError: an earlier attempt failed with a fatal error.
            ConfigError: the ranks cannot share copies of the model.
        """
        super().__init__(env)
        # For the snapshot thread, which runs concurrently with the training thread.
        self.io = JsonCollectives(env, caught=Exception)
        # For the training thread, before there is a snapshot thread: without a timeout.
        self._patient = JsonCollectives(env)
        self.timeout_s = ddp.timeout_s
        # Tensor parallelism: consecutive ranks share a copy of the model, and the part of the batch
        # of that copy.
        self.tensor_size = ddp.tensor_parallel
        check_ranks(ddp, self.world_size)
        self.data_rank = self.rank // self.tensor_size
        self.data_size = self.world_size // self.tensor_size
        self.mesh: DeviceMesh | None = None  # data x tensor, with tensor parallelism
        self._copy_group: dist.ProcessGroup | None = None  # the ranks of this copy, for CPU tensors
        self.store: dist.Store | None = None  # of this attempt
        # With ddp.backend=auto, if all ranks are on one machine.
        self.shared_memory: SharedMemoryGroup | None = None
        self.transport = "none"  # of the gradients: shared memory, or a backend of torch
        # The training thread's activity, which the watchdog reads to find the straggler: a new dict
        # at every change.
        self.heartbeat: dict[str, Any] = FIRST_HEARTBEAT
        # Whether this rank's snapshot thread writes what it has staged, or waits for the others.
        self.is_writing = False
        self._job_store: dist.Store | None = None  # shared by all attempts under one agent
        if self.world_size > 1 or env.has_agent:  # a worker whose agent died finds no store
            self._job_store, self.store = join(env, job, self.timeout_s)
        self.closed = threading.Event()
        self.failures = Failures(self.store, self.rank, self.world_size, self._job_store)

    def connect(self, device: torch.device, ddp: DDPConfig) -> None:
        """Connect to the other ranks, which have joined.

        Args:
            device: of this rank.

        Raises:
            ConfigError: two ranks use the same GPU.
        """
        if self.world_size == 1:
            return
        backend = ddp.backend
        self.set_activity("connecting to the other ranks", waiting=True)
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
        io_group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        self.io = JsonCollectives(self.env, io_group, caught=Exception)
        self._patient = JsonCollectives(self.env, io_group)
        if device.type == "cuda" and backend in ("auto", "nccl"):
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            refuse_shared_gpus(self.all_gather(uuid))
        if ddp.tensor_parallel > 1:
            self._split_into_copies(device.type)
        elif device.type == "cpu" and backend == "auto":
            self.shared_memory = connect_local_ranks(self.rank, self.all_gather, self.timeout_s)
            if self.shared_memory:
                self.transport = "shared memory"
        self.set_activity(STARTING)

    def _split_into_copies(self, device_type: str) -> None:
        """Create the groups of tensor parallelism."""
        shape = (self.data_size, self.tensor_size)
        self.mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "tensor"))
        for first in range(0, self.world_size, self.tensor_size):
            ranks = list(range(first, first + self.tensor_size))
            group = dist.new_group(ranks, backend="gloo")  # every rank creates all groups
            if self.rank in ranks:
                self._copy_group = group

    def prepare_on_each_node(self, work: Callable[[], T], what: str) -> T:
        """Call `work` on the first rank of every node before training, however long it takes.

        Return its JSON value on every rank. The end or a stop of a process ends the wait, nothing
        else; the log says what the others wait for.

        Args:
            what: it does, as in "reading data.path=my.txt".

        Raises:
            UserError: as `run_on_each_node`.
        """
        where = "" if self.world_size == 1 else " on one rank of each node; the others wait for it"
        self.set_activity(PREPARING)
        with log_if_long(f"{what}{where}"):
            value = self._patient.run_on_each_node(work)
        self.set_activity(STARTING)
        return value

    def close(self) -> None:
        """Destroy the process group. A collective.

        An early exit would stall the launcher's exit barrier.
        """
        if dist.is_initialized():
            self.set_activity("ending")
            self.barrier()
        self.leave()

    def leave(self) -> None:
        """Destroy this rank's part of the process group, which also ends its watchdog."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.shared_memory is not None:
            self.shared_memory.close()
        self.closed.set()

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce(torch.zeros(1))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum a CPU tensor element-wise over all ranks, in place."""
        if self.world_size > 1:
            with self._blocked():
                dist.all_reduce(values)
        return values

    def all_gather_async(self, values: Tensor) -> Callable[[], Tensor]:
        """Start an all_gather of a CPU tensor (n).

        The returned function waits for the result (world size, n).
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
        shapes = {}
        for name, tensor in (tensors or {}).items():
            shapes[name] = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        described = self.broadcast_json(shapes)
        received = {}
        for name, (shape, dtype) in described.items():
            if tensors:
                received[name] = tensors[name].contiguous()
            else:
                received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        small = [tensor for tensor in received.values() if tensor.nbytes <= SMALL_BYTES]
        for tensor in received.values():
            if tensor.nbytes > SMALL_BYTES:
                with self._blocked():  # each, or many large ones would look like a hang
                    dist.broadcast(tensor, src=0)
        with self._blocked():
            self._broadcast_packed(small)
        return received

    def _broadcast_packed(self, tensors: list[Tensor]) -> None:
        """Broadcast rank zero's contiguous CPU tensors into those of the other ranks.

        It is one message: each takes a millisecond, however small it is.
        """
        if not tensors:
            return
        contents = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        packed = torch.cat(contents)
        dist.broadcast(packed, src=0)
        if self.is_rank_zero:
            return
        for content, part in zip(contents, packed.split([*map(len, contents)]), strict=True):
            content.copy_(part)

    def any_in_copy(self, flag: bool) -> bool:
        """Return whether a rank of this copy of the model set the flag: they must decide alike."""
        if self.mesh is None:
            return flag
        flags = torch.tensor([float(flag)])
        with self._blocked():
            dist.all_reduce(flags, group=self._copy_group)
        return bool(flags)

    def get_or_set(self, key: str, make: Callable[[], str]) -> str:
        """Return the value of `make` from the first attempt, also after restarts by the agent."""
        if self._job_store is None:
            return make()
        return self._job_store.compare_set(key, "", make()).decode()

    def set_activity(self, activity: str, waiting: bool = False) -> None:
        """Update the heartbeat: the activity of this rank, and whether it waits for others."""
        self.heartbeat = {
            "count": self.heartbeat["count"] + 1,
            "activity": activity,
            "waiting": waiting,
        }

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark in the heartbeat that this rank waits for others in this context.

        For a collective of torch that blocks, and for reading from a GPU, whose queue may hold
        collectives: else the watchdog would blame this rank for one that is late.
        """
        was_waiting = self.heartbeat["waiting"]
        self.set_activity(self.heartbeat["activity"], waiting=True)
        try:
            yield
        finally:
            self.set_activity(self.heartbeat["activity"], waiting=was_waiting)

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        with self.waiting(), torch.profiler.record_function(WAITING):
            yield
