"""The machine under the run: device, precision, the ranks, the distributed wrapper of the model."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.schema import DDPConfig, TrainerConfig
from mingpt_ddp.distributed.comm_hooks import WARMUP_PASSES, CommHook, make_hook
from mingpt_ddp.distributed.compile import compile_model, report_compile_errors, should_compile
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.memory import installed_memory, keep_freed_memory
from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.distributed.shared_memory import connect_local_ranks
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import ops as arithmetic
from mingpt_ddp.models.ops import DTYPES, choose_precision
from mingpt_ddp.torch_internals import communication_times, cut_graph_at_buckets, keep_process_group, time_communication

SAMPLED_STEPS = 10  # one step in so many has its communication timed


def choose_device(trainer: TrainerConfig, ddp: DDPConfig, env: DistEnv) -> torch.device:
    """The device of this rank, after checking that the configuration can run on this machine.

    Raises:
        ConfigError: a device, backend or option that this machine or this build of torch does not have.
    """
    on_gpu = arithmetic.choose_device(trainer.device, "trainer.device").type == "cuda"
    if ddp.backend == "nccl" and not on_gpu:
        raise ConfigError("ddp.backend=nccl needs a GPU and there is none; use ddp.backend=gloo")
    if ddp.backend == "mpi" and not dist.is_mpi_available():
        raise ConfigError("ddp.backend=mpi, but this torch is built without MPI; use ddp.backend=gloo")
    if ddp.sync_batchnorm and not on_gpu:
        raise ConfigError("ddp.sync_batchnorm=true needs a GPU; set it to false")
    if not on_gpu:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1 and not env.shares_devices:  # a scheduler may show every process a GPU of its own
        return torch.device("cuda", 0)
    if env.local_rank >= gpus:
        raise ConfigError(
            f"local rank {env.local_rank} has no GPU, there are {gpus}; start {gpus} ranks or use the CPU"
        )
    return torch.device("cuda", env.local_rank)


def refuse_shared_gpus(gpus: list[str]) -> None:
    """NCCL wants a GPU for each rank, and says so less clearly.

    Args:
        gpus: what identifies each rank's, the same on all ranks.

    Raises:
        ConfigError: two ranks have the same.
    """
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise ConfigError(
                f"ranks {gpus.index(gpu)} and {rank} have the same GPU; "
                "give each its own by LOCAL_RANK or CUDA_VISIBLE_DEVICES, or use ddp.backend=gloo"
            )


class Runtime:
    """What one rank computes on, and how it talks to the others."""

    def __init__(self, config: Config, env: DistEnv, job: int = 0) -> None:
        """Join the process group of this attempt.

        Args:
            job: the number of the job in a sweep; every job has a process group of its own.
        """
        self.config, self.ddp, self.hook = config, config.ddp, CommHook()
        self.device = choose_device(config.trainer, config.ddp, env)
        self.compiles = should_compile(config, self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.precision = choose_precision(config.trainer.precision, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        _set_determinism(config.trainer.deterministic)
        if self.device.type == "cuda":
            torch.cuda.init()  # from here on its generator is seeded with the others
            torch.cuda.set_device(self.device)
        self.group = ProcessGroup(env, _backend(config.ddp.backend, self.device), config.ddp.timeout_s, job)
        if self.device.type == "cuda" and config.ddp.backend in ("auto", "nccl"):
            refuse_shared_gpus(self.group.all_gather(str(torch.cuda.get_device_properties(self.device).uuid)))
        if self.device.type == "cpu" and config.ddp.backend == "auto" and self.group.world_size > 1:
            self.group.shared_memory = connect_local_ranks(self.group.rank, self.group.all_gather, config.ddp.timeout_s)

    def close(self) -> None:
        self.group.close()
        self.release()

    def release(self) -> None:
        """Leave nothing to the next job of this process."""
        gc.collect()
        if self.compiles:
            torch.compiler.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    # The model's surroundings.

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model for training: compiled, and behind DistributedDataParallel, its weights those of rank 0."""
        if self.group.world_size > 1 and self.ddp.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        eager = model
        if self.compiles:
            model = compile_model(model, self.config)
        if self.group.world_size == 1:
            return model
        wrapped = DDP(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.ddp.bucket_cap_mb,
            gradient_as_bucket_view=self.ddp.gradient_as_bucket_view,
            static_graph=self.ddp.static_graph,
            find_unused_parameters=self.ddp.find_unused_parameters,
        )
        if self.compiles:
            # A graph with activation checkpointing cannot be cut; outside of DDP the compiler finds no single graph.
            cut_graph_at_buckets(wrapped, not self.config.trainer.activation_checkpointing)
        keep_process_group(wrapped)
        time_communication(wrapped, SAMPLED_STEPS)
        hook = make_hook(self.ddp, self.group.shared_memory, eager)
        if hook is not None:
            self.hook = hook
            wrapped.register_comm_hook(None, lambda state, bucket: hook(bucket))
        return wrapped

    def warm_up(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Throw-away backward passes, so that the sums of a resumed run have the order of an uninterrupted one.

        DDP regroups its buckets after the first backward, and three or more ranks add up another grouping in another
        order. What is compiled is compiled in the first, and CUDA graphs are recorded in the second.

        Raises:
            ConfigError: it cannot be compiled.
        """
        if self.group.world_size == 1 and not self.compiles:
            return
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with report_compile_errors(self.config) if self.compiles else nullcontext():
            for _ in range(WARMUP_PASSES + self.compiles):
                self.group.barrier()
                self.begin_step()
                with self.autocast():
                    loss = model(x, y)
                loss.backward()
                del loss
                model.zero_grad(set_to_none=True)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

    def begin_step(self) -> None:
        """What CUDA graphs left in their memory in the last step is no longer needed."""
        if self.config.trainer.compile == "cuda_graphs":
            torch.compiler.cudagraph_mark_step_begin()

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give all ranks what rank 0's forward passes have made of the buffers, which each snapshot has once."""
        if self.group.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def comm_times(self, model: nn.Module) -> tuple[float, float]:
        """Seconds of the latest sampled step: reducing gradients, and the part of it that no computation hid."""
        if not isinstance(model, DDP):
            return 0.0, 0.0
        total, hidden = communication_times(model)
        if self.device.type == "cpu":  # DDP takes a hook's own work for computation
            hidden = max(0.0, hidden - self.hook.seconds)
        return total, max(0.0, total - hidden)

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices that are multiplied."""
        return DTYPES[self.precision]

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def maybe_no_sync(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Gradients are reduced in a rank's last backward of a step only."""
        return nullcontext() if last or not isinstance(model, DDP) else model.no_sync()

    def to_device(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def memory(self) -> int:
        """Bytes of the GPU, or of the machine where there is none."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return installed_memory()

    def peak_memory(self) -> int:
        """Bytes at their highest: allocations on the GPU where there is one, else the process's resident memory."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _backend(wanted: str, device: torch.device) -> str:
    """As torch.distributed names it; tensors on the CPU travel by gloo, or MPI, also where there is a GPU."""
    gpu = "nccl" if wanted in ("auto", "nccl") else wanted
    cpu = wanted if wanted == "mpi" else "gloo"
    return f"cpu:{cpu},cuda:{gpu}" if device.type == "cuda" else cpu


def _set_determinism(deterministic: bool) -> None:
    if deterministic:  # cuBLAS reads its variable when the first kernel runs
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the setter alone imports for a second
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and back to what it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
