"""The process group of one attempt: collectives and the heartbeat.

An attempt is one start of all ranks of a run. If a rank fails, all ranks start again, in a new
attempt.

With a single process, every collective returns its input, so callers need not check the number of
ranks.
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
MAX_PACKED_BYTES = 1 << 20  # tensors up to this size are packed into one message
WAITING_EVENT = "waiting for other ranks"  # name of this event in the profiler
STARTING = "starting"  # activity of a rank until its first batch or evaluation
# Activity of a rank that may take any time. The watchdog only checks that its process responds.
PREPARING = "reading the data"
FIRST_HEARTBEAT = {"count": 0, "activity": STARTING, "waiting": False}


def check_ranks(ddp: DDPConfig, world_size: int) -> None:
    """Refuse a number of ranks that cannot be divided into copies of the model.

    Raises:
        ConfigError: ddp.tensor_parallel does not divide the number of ranks.
    """
    if world_size % ddp.tensor_parallel:
        raise ConfigError(
            f"ddp.tensor_parallel={ddp.tensor_parallel} must divide the number of ranks, "
            f"{world_size}"
        )


def name_backends(backend: str, device_type: str) -> tuple[str, str]:
    """Return torch's name for the backends of a group, and the backend that reduces gradients.

    CPU tensors use gloo or MPI even if there is a GPU.

    Args:
        backend: The value of ddp.backend.
    """
    cpu_backend = "mpi" if backend == "mpi" else "gloo"
    if device_type != "cuda":
        return cpu_backend, cpu_backend
    gpu_backend = "nccl" if backend == "auto" else backend
    return f"cpu:{cpu_backend},cuda:{gpu_backend}", gpu_backend


def _new_group(
    ranks: list[int] | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Create a gloo group of these ranks, by default of all. All ranks must call this function.

    Return None if this rank is not in the group.
    """
    group: object = dist.new_group(ranks, timeout, "gloo")
    return group if isinstance(group, dist.ProcessGroup) else None


class ProcessGroup(JsonCollectives):
    """The collectives of this rank with all ranks of the job, and its heartbeat."""

    def __init__(self, env: DistEnv, ddp: DDPConfig, job: int) -> None:
        """Wait in the store for the other ranks of this attempt. Call `connect` afterwards.

        Args:
            job: Index of the job in a sweep. Every job has its own process group.

        Raises:
            JoinError: Not all ranks joined within ddp.timeout_s.
            RunError: An earlier attempt failed with a fatal error.
            ConfigError: The ranks cannot be divided into copies of the model.
        """
        super().__init__(env)
        # For the snapshot thread, which runs concurrently with the training thread.
        self.snapshot_collectives = JsonCollectives(env, shared_errors=Exception)
        # Collectives without a timeout. The training thread uses them before training, when there
        # is no snapshot thread yet.
        self._untimed = JsonCollectives(env)
        self.timeout_s = ddp.timeout_s
        # With tensor parallelism, consecutive ranks hold one copy of the model together and get the
        # same micro-batches. `data_rank` is the number of this rank's copy.
        self.tensor_size = ddp.tensor_parallel
        check_ranks(ddp, self.world_size)
        self.data_rank = self.rank // self.tensor_size
        self.data_size = self.world_size // self.tensor_size
        self.mesh: DeviceMesh | None = None  # (data, tensor); None without tensor parallelism
        # Group of the ranks that share this rank's copy of the model, for CPU tensors.
        self._copy_group: dist.ProcessGroup | None = None
        self.store: dist.Store | None = None  # store with the keys of this attempt
        # Set with ddp.backend=auto if all ranks are on the CPUs of one machine.
        self.shared_memory: SharedMemoryGroup | None = None
        # How gradients travel between ranks: "shared memory", or the name of a backend of torch.
        self.transport = "none"
        # The activity of the training thread. The watchdog reads it to find a rank that hangs.
        # Every change sets a new dict.
        self.heartbeat: dict[str, Any] = FIRST_HEARTBEAT
        # True while the snapshot thread of this rank writes a snapshot or waits for other ranks.
        self.is_writing = False
        self._job_store: dist.Store | None = None  # store that all attempts of the job share
        # A single worker that has an agent (a launcher that restarts it) joins too. If the agent
        # has died, there is no store, and the worker fails.
        if self.world_size > 1 or env.has_agent:
            self._job_store, self.store = join(env, job, self.timeout_s)
        self.closed = threading.Event()
        self.failures = Failures(self.store, self.rank, self.world_size, self._job_store)

    def connect(self, device: torch.device, ddp: DDPConfig) -> None:
        """Connect to the other ranks after all have joined.

        Args:
            device: The device of this rank.

        Raises:
            ConfigError: Two ranks use the same GPU.
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
        # The timeout is long, because ranks may have to wait until storage is available again. Gloo
        # notices a dead peer regardless of the timeout.
        io_group = _new_group(timeout=timedelta(days=30))
        self.snapshot_collectives = JsonCollectives(self.env, io_group, shared_errors=Exception)
        self._untimed = JsonCollectives(self.env, io_group)
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
        """Create the process groups for tensor parallelism."""
        shape = (self.data_size, self.tensor_size)
        self.mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "tensor"))
        for first in range(0, self.world_size, self.tensor_size):
            ranks = list(range(first, first + self.tensor_size))
            self._copy_group = _new_group(ranks) or self._copy_group

    def prepare_on_each_node(self, work: Callable[[], T], what: str) -> T:
        """Call `work` on the first rank of every node, and return its JSON value on every rank.

        Called before training. The other ranks wait without a timeout, and the log says what they
        wait for. They stop waiting only if a process has ended or is stopped.

        Args:
            what: What the call does, for the log, such as "reading data.path=my.txt".

        Raises:
            UserError: A call has failed, or the nodes returned different values.
        """
        where = (
            "" if self.world_size == 1 else " on one rank of each node; the other ranks wait for it"
        )
        self.set_activity(PREPARING)
        with log_if_long(f"{what}{where}"):
            value = self._untimed.run_on_each_node(work)
        self.set_activity(STARTING)
        return value

    def close(self) -> None:
        """Wait for all ranks, then destroy the process group. A collective.

        A rank that exits before the other ranks would stall the launcher's exit barrier.
        """
        if dist.is_initialized():
            self.set_activity("ending")
            self.barrier()
        self.leave()

    def leave(self) -> None:
        """Leave the process group without waiting for other ranks. This also ends the watchdog."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.shared_memory is not None:
            self.shared_memory.close()
        self.closed.set()

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self.all_reduce(torch.zeros(1))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum a CPU tensor element-wise over all ranks, in place."""
        if self.world_size > 1:
            with self._blocked():
                dist.all_reduce(values)
        return values

    def all_gather_async(self, values: Tensor) -> Callable[[], Tensor]:
        """Start to gather a CPU tensor (n) from every rank.

        Return a function that waits for the result, a tensor (world size, n).
        """
        if self.world_size == 1:
            return lambda: values[None]
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        receive: Callable[[], object]
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
        """Return rank zero's CPU tensors on every rank.

        Args:
            tensors: Tensors by name on rank zero. None on the other ranks.
        """
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
        small = [tensor for tensor in received.values() if tensor.nbytes <= MAX_PACKED_BYTES]
        for tensor in received.values():
            if tensor.nbytes > MAX_PACKED_BYTES:
                # Update the heartbeat for each tensor. Otherwise, many large ones look like a hang.
                with self._blocked():
                    dist.broadcast(tensor, src=0)
        with self._blocked():
            self._broadcast_packed(small)
        return received

    def _broadcast_packed(self, tensors: list[Tensor]) -> None:
        """Broadcast rank zero's contiguous CPU tensors into the tensors of the other ranks.

        They travel in one message, because each message takes a millisecond, however small it is.
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
        """Return True if the flag is set on any rank that shares this copy of the model.

        These ranks must decide alike, because their passes are collectives.
        """
        if self.mesh is None:
            return flag
        flags = torch.tensor([float(flag)])
        with self._blocked():
            dist.all_reduce(flags, group=self._copy_group)
        return bool(flags)

    def get_or_set(self, key: str, make: Callable[[], str]) -> str:
        """Return the value that the first attempt has stored under a key, also after restarts.

        Args:
            key: Key of the value in the store of the job.
            make: Returns the value to store. Later attempts ignore it.
        """
        if self._job_store is None:
            return make()
        return self._job_store.compare_set(key, "", make()).decode()

    def set_activity(self, activity: str, waiting: bool = False) -> None:
        """Update the heartbeat of this rank.

        Args:
            activity: What this rank does, for messages about a hang.
            waiting: True if this rank waits for others. Then the watchdog does not blame it.
        """
        self.heartbeat = {
            "count": self.heartbeat["count"] + 1,
            "activity": activity,
            "waiting": waiting,
        }

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark in the heartbeat that this rank waits for other ranks in this context.

        Use it for blocking collectives of torch, and for reads from a GPU, whose queue may contain
        collectives. Otherwise the watchdog would blame this rank for a rank that is late.
        """
        was_waiting = self.heartbeat["waiting"]
        self.set_activity(self.heartbeat["activity"], waiting=True)
        try:
            yield
        finally:
            self.set_activity(self.heartbeat["activity"], waiting=was_waiting)

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        with self.waiting(), torch.profiler.record_function(WAITING_EVENT):
            yield
