"""The machine under the run: device, precision, process group, collectives, the distributed wrapper.

In one process every collective is the identity, so that nobody else has to ask how many ranks there are.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from mingpt_ddp import errors
from mingpt_ddp.config import Config, DDPConfig, TrainerConfig
from mingpt_ddp.errors import ConfigError, UserError
from mingpt_ddp.place import Place
from mingpt_ddp.rendezvous import connect, meet, stop_if_fatal, within

T = TypeVar("T")
FAILURE = "failure"  # the store's key of what the first rank to fail met
ANSWER_S = 1.0  # that the store may take
SAMPLED_STEPS = 10  # one step in so many has its communication timed
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(trainer: TrainerConfig, ddp: DDPConfig, place: Place) -> torch.device:
    """The device of this rank, after checking that the configuration can run on this machine.

    Raises:
        ConfigError: a device, backend or option that this machine or this build of torch does not have.
    """
    has_gpu = torch.cuda.is_available()
    if trainer.device == "cuda" and not has_gpu:
        raise ConfigError("trainer.device=cuda, but torch sees no GPU here; use trainer.device=cpu")
    on_gpu = has_gpu and trainer.device != "cpu"
    if ddp.backend == "nccl" and not on_gpu:
        raise ConfigError("ddp.backend=nccl needs a GPU and there is none; use ddp.backend=gloo")
    if ddp.backend == "mpi" and not dist.is_mpi_available():
        raise ConfigError("ddp.backend=mpi, but this torch is built without MPI; use ddp.backend=gloo")
    if ddp.sync_batchnorm and not on_gpu:
        raise ConfigError("ddp.sync_batchnorm=true needs a GPU; set it to false")
    if not on_gpu:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if place.local_rank >= gpus:
        raise ConfigError(
            f"local rank {place.local_rank} has no GPU, there are {gpus}; start {gpus} ranks or use the CPU"
        )
    return torch.device("cuda", place.local_rank)


@dataclass(frozen=True)
class Mark:
    """Where the thread that trains is; `watch` finds out who keeps the others waiting."""

    count: int  # grows whenever it gets on
    what: str
    waiting: bool  # for other ranks


class Runtime:
    """What one rank computes on, and how it talks to the others."""

    def __init__(self, config: Config, place: Place, job: int = 0) -> None:
        """Join the process group of this attempt.

        Args:
            job: the number of the job in a sweep; every job has a process group of its own.
        """
        self.place = place
        self.rank, self.world_size, self.is_main = place.rank, place.world_size, place.is_main
        self.ddp = config.ddp
        self.device = choose_device(config.trainer, config.ddp, place)
        self.precision = _precision(config.trainer.precision, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.store: dist.Store | None = None  # of this attempt
        self._job_store: dist.Store | None = None  # of all attempts under one agent
        self._side: dist.ProcessGroup | None = None  # for one thread beside the one that trains
        self.mark = Mark(0, "starting", waiting=False)
        _set_determinism(config.trainer.deterministic)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1 or place.agent:  # a worker whose agent is gone already finds no store
            self._job_store = connect(place, job, self.ddp.timeout_s)
            stop_if_fatal(self._job_store)
        if self.world_size > 1:
            self._join(self._job_store)

    def _join(self, job_store: dist.Store | None) -> None:
        assert job_store is not None
        self.store = meet(job_store, self.place, self.ddp.timeout_s)
        gpu = "nccl" if self.ddp.backend in ("auto", "nccl") else self.ddp.backend
        cpu = self.ddp.backend if self.ddp.backend == "mpi" else "gloo"
        dist.init_process_group(
            f"cpu:{cpu},cuda:{gpu}" if self.device.type == "cuda" else cpu,
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.ddp.timeout_s),
        )
        # Whoever uses it may wait for a storage that is away; that a rank has died it notices all the same.
        self._side = dist.new_group(backend="gloo", timeout=timedelta(days=30))

    def close(self) -> None:
        """Leave the process group together: a rank that goes early would stall a launcher's exit."""
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()

    # Collectives. Small control data travels as JSON in CPU tensors: torch's object collectives would unpickle it.

    def barrier(self) -> None:
        self.sum(torch.zeros(1))

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum over all ranks of a CPU tensor, in place."""
        if self.world_size > 1:
            with self._waiting():
                dist.all_reduce(values)
        return values

    def gather_later(self, values: Tensor) -> Callable[[], Tensor]:
        """A CPU tensor (n) of every rank as (world size, n), under way until the function returned is called."""
        if self.world_size == 1:
            return lambda: values[None]
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        work = dist.all_gather(parts, values, async_op=True)

        def wait() -> Tensor:
            with self._waiting():
                work.wait()
            return torch.stack(parts)

        return wait

    def gather(self, value: T, beside: bool = False) -> list[T]:
        """The JSON value of every rank, in rank order, on every rank.

        Args:
            beside: called from the one thread that works beside training; it does not wait for that, nor that for it.
        """
        if self.world_size == 1:
            return [value]
        with nullcontext() if beside else self._waiting():
            return self._gather(value, self._side if beside else None)

    def _gather(self, value: T, group: dist.ProcessGroup | None) -> list[T]:
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=group)
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = content
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, group=group)
        return [json.loads(p[: int(n)].numpy().tobytes()) for p, n in zip(parts, sizes, strict=True)]

    def broadcast(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Rank 0's CPU tensors on every rank."""
        if self.world_size == 1:
            assert tensors is not None
            return tensors
        shapes = {k: (list(t.shape), str(t.dtype).removeprefix("torch.")) for k, t in (tensors or {}).items()}
        received = {}
        for name, (shape, dtype) in self.gather(shapes)[0].items():
            tensor = tensors[name].contiguous() if tensors else torch.empty(shape, dtype=getattr(torch, dtype))
            with self._waiting():
                dist.broadcast(tensor, src=0)
            received[name] = tensor
        return received

    def first(self, work: Callable[[], T], per_node: bool = False) -> T:
        """Do something on rank 0 (or on the first rank of every node) alone; its JSON value, or its error, for all.

        Raises:
            UserError: what the rank that worked raised, on every rank; or the nodes came to different values.
        """
        outcome: dict[str, Any] = {}
        if self.is_main or (per_node and self.place.local_rank == 0):
            try:
                outcome["value"] = work()
            except UserError as error:
                outcome["error"] = [type(error).__name__, str(error.args[0])]
        outcomes = self.gather(outcome)
        for other in outcomes:
            if "error" in other:
                name, message = other["error"]
                raise getattr(errors, name)(message)
        values: list[T] = [other["value"] for other in outcomes if other]
        if any(value != values[0] for value in values):
            raise errors.RunError(f"the machines do not see the same text or configuration: {values}"[:300])
        return values[0]

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do something on all ranks from the thread beside training; every rank's JSON value, in rank order.

        Raises:
            UserError: of its kind, if that is what the first rank to fail met.
            OSError: naming that rank and what it met.
        """
        outcome: dict[str, Any] = {}
        try:
            outcome["value"] = work()
        except UserError as error:
            outcome["error"] = [type(error).__name__, str(error.args[0])]
        except Exception as error:  # whatever it is, the other ranks must hear of it
            what = (
                error.strerror if isinstance(error, OSError) and error.strerror else f"{error or type(error).__name__}"
            )
            outcome["error"] = ["OSError", " ".join(what.split())]
        outcomes = self.gather(outcome, beside=True)
        for rank, other in enumerate(outcomes):
            if "error" in other:
                name, message = other["error"]
                if name == "OSError":
                    raise OSError(message if self.world_size == 1 else f"rank {rank}: {message}")
                raise getattr(errors, name)(message)
        return [other["value"] for other in outcomes]

    def remember(self, key: str, make: Callable[[], str]) -> str:
        """What `make` returned on the first attempt; restarts by the same agent get that value again."""
        if self._job_store is None:
            return make()
        if not self._job_store.check([key]):
            self._job_store.set(key, make())
        return self._job_store.get(key).decode()

    def at(self, what: str, waiting: bool = False) -> None:
        """Tell whoever watches that this rank gets on, what it does now, and whether it needs the others for that."""
        self.mark = Mark(self.mark.count + 1, what, waiting)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.at(self.mark.what, waiting=True)
        yield
        self.at(self.mark.what)

    # The model's surroundings.

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model behind DistributedDataParallel, its weights those of rank 0."""
        if self.world_size == 1:
            return model
        if self.ddp.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        wrapped = DDP(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.ddp.bucket_cap_mb,
            gradient_as_bucket_view=self.ddp.gradient_as_bucket_view,
            static_graph=self.ddp.static_graph,
            find_unused_parameters=self.ddp.find_unused_parameters,
        )
        wrapped._set_ddp_runtime_logging_sample_rate(SAMPLED_STEPS)
        if self.ddp.comm_hook == "fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped

    def settle(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Two throw-away backward passes, so that the sums of a resumed run have the order of an uninterrupted one.

        DDP regroups its buckets after the first backward, and three or more ranks add up another grouping in another
        order.
        """
        if self.world_size == 1:
            return
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for _ in range(2):
            with self.autocast():
                loss = model(x, y)
            loss.backward()
            model.zero_grad(set_to_none=True)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

    def communication(self, model: nn.Module) -> tuple[float, float]:
        """Seconds of the latest sampled step: reducing gradients, and the part of it that no computation hid."""
        if not isinstance(model, DDP):
            return 0.0, 0.0
        times = model._get_ddp_logging_data()  # nanoseconds, sampled by DDP itself
        total = times.get("backward_comm_time", 0) / 1e9
        return total, max(0.0, total - times.get("backward_compute_comm_overlap_time", 0) / 1e9)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.precision])

    def share_gradients(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Gradients are reduced in a rank's last backward of a step only."""
        return nullcontext() if last or not isinstance(model, DDP) else model.no_sync()

    def to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def peak_memory(self) -> int:
        """Bytes at their highest: allocations on the GPU where there is one, else the process's resident memory."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    # Failures: the rank that fails first leaves its error in the store, and those that lose it quote that.

    def report_failure(self, message: str) -> None:
        if self.store is not None:
            store, told = self.store, f"rank {self.rank}: {message}"
            with contextlib.suppress(Exception):
                within(ANSWER_S, lambda: store.compare_set(FAILURE, "", told))

    def reported_failure(self, wait_s: float) -> str | None:
        """What the failing rank reported, if it does within `wait_s` seconds."""
        if self.store is None:
            return None
        store, deadline = self.store, time.monotonic() + wait_s

        def ask() -> str | None:
            while not store.check([FAILURE]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.05)
            return store.get(FAILURE).decode()

        try:
            return within(wait_s + ANSWER_S, ask)
        except Exception:  # the store died with its host, or is cut off: nobody is left to ask
            return None


def _precision(wanted: str, device: torch.device) -> str:
    if wanted != "auto":
        return wanted
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


def _set_determinism(deterministic: bool) -> None:
    if deterministic:  # cuBLAS reads its variable when the first kernel runs
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the setter alone imports for a second
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and back to what it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
