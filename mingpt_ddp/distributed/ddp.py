"""Data parallelism: DistributedDataParallel, torch.compile, and the communication of gradients."""

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from mingpt_ddp import torch_internals
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import BUILDERS
from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.distributed.ring import ring_hook
from mingpt_ddp.distributed.shared_memory import SharedMemoryAllReduce
from mingpt_ddp.distributed.sync_batchnorm import synchronize
from mingpt_ddp.distributed.tensor_parallel import average_gradients
from mingpt_ddp.errors import ConfigError

WARMUP_PASSES = 2  # after these DDP does not rebuild its buckets
TIMED_EVERY = 10  # steps between two that DDP times
# Gradients and their sums are rounded to 16 bits; fp16 has more precision, bf16 the range of fp32. DDP accepts torch's
# bf16 hook only with NCCL, although gloo can sum bf16 too.
BUILDERS["comm_hook"].update(
    fp16=default_hooks.fp16_compress_hook, bf16=default_hooks.bf16_compress_hook, ring=ring_hook
)
COMPILE_BACKEND = "inductor"
COMPILERS = {"cuda": ("CC", ("gcc", "clang", "cc")), "cpu": ("CXX", ("g++", "clang++", "c++"))}
MIN_CAPABILITY = (7, 0)  # of a GPU, for Triton


class DDPStrategy:
    """Train a model on all ranks of a process group; a single rank only compiles it."""

    def __init__(self, config: Config, device: torch.device, group: ProcessGroup, compiles: bool) -> None:
        self.config, self.device, self.group, self.compiles = config, device, group, compiles
        self.all_reduce_s = 0.0  # blocking all-reduce of the latest backward pass

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model for training. All ranks receive the weights of rank zero."""
        ddp = self.config.ddp
        if ddp.sync_batchnorm:
            model = synchronize(model, self.device)
        compiled: Any = model
        if self.compiles:
            torch_internals.compile_deterministically(self.config.trainer.deterministic)
            mode = "reduce-overhead" if self.config.trainer.compile == "cuda_graphs" else None
            compiled = torch.compile(model, fullgraph=True, dynamic=False, mode=mode, backend=COMPILE_BACKEND)
        if self.group.world_size == 1 or self.group.tensor_size > 1:
            return cast(nn.Module, compiled)
        parallel = DDP(
            compiled,
            device_ids=[self.device.index] if self.device.type == "cuda" and ddp.devices_per_rank == 1 else None,
            bucket_cap_mb=ddp.bucket_cap_mb,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            static_graph=ddp.static_graph,
            find_unused_parameters=ddp.find_unused_parameters,
        )
        if self.compiles:
            # A graph with activation checkpointing cannot be split; outside of DDP the compiler finds no single graph.
            torch_internals.cut_graph_at_buckets(parallel, not self.config.trainer.activation_checkpointing)
        torch_internals.keep_process_group(parallel)
        torch_internals.time_communication(parallel, TIMED_EVERY)
        if ddp.comm_hook != "none":
            parallel.register_comm_hook(partial(BUILDERS["comm_hook"][ddp.comm_hook], None), self._comm_hook)
        elif self.group.shared_memory is not None:
            gradients = [p for p in model.parameters() if p.requires_grad]
            all_reduce = SharedMemoryAllReduce(self.group.shared_memory, gradients).all_reduce
            parallel.register_comm_hook(all_reduce, self._comm_hook)
        return parallel

    def _comm_hook(self, all_reduce: Callable[[GradBucket], Future[Tensor]], bucket: GradBucket) -> Future[Tensor]:
        """Return the average of a bucket over all ranks, and measure the time.

        The order of the buckets is the same on every rank. Hooks are stateless, so snapshots need not hold them.
        """
        start = time.perf_counter()
        future = all_reduce(bucket)
        self.all_reduce_s = time.perf_counter() - start + (self.all_reduce_s if bucket.index() else 0.0)
        return future

    def warm_up(self, parallel_model: nn.Module, forward: Callable[[], Tensor]) -> None:
        """Run warm-up passes, so that a resumed run sums gradients in the same order as an uninterrupted one.

        DDP rebuilds its buckets after the first backward, which changes the summation order on three or more ranks.
        The first pass compiles; the second records CUDA graphs.

        Args:
            forward: returns the loss of a micro-batch.

        Raises:
            ConfigError: torch cannot compile the model.
        """
        if self.group.world_size == 1 and not self.compiles:
            return
        buffers = {name: buffer.clone() for name, buffer in parallel_model.named_buffers()}
        with report_compile_errors(self.config) if self.compiles else nullcontext():
            for _ in range(WARMUP_PASSES + self.compiles):
                self.group.barrier()
                self.begin_step()
                forward().backward()
                parallel_model.zero_grad(set_to_none=True)
        for name, buffer in parallel_model.named_buffers():
            buffer.copy_(buffers[name])

    def begin_step(self) -> None:
        """Let CUDA graphs reuse the memory of their outputs of the last step."""
        if self.config.trainer.compile == "cuda_graphs":
            torch.compiler.cudagraph_mark_step_begin()

    def maybe_no_sync(self, parallel_model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Average gradients over ranks only in the last backward of a step."""
        if last and self.group.tensor_size > 1:
            return average_gradients(parallel_model, self.group)
        return nullcontext() if last or not isinstance(parallel_model, DDP) else parallel_model.no_sync()

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast the buffers of rank zero, which snapshots hold."""
        if self.group.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def comm_times(self, parallel_model: nn.Module) -> tuple[float, float]:
        """Return the seconds of gradient communication in the latest timed step: in total, and not overlapped."""
        total, hidden = torch_internals.communication_times(parallel_model)
        if self.device.type == "cpu":  # DDP counts time in a hook as computation
            hidden = max(0.0, hidden - self.all_reduce_s)
        return total, max(0.0, total - hidden)


# torch.compile.


def should_compile(config: Config, device: torch.device) -> bool:
    """Return whether to compile the model. auto: built-in models on a GPU, if all requirements are installed.

    On a CPU compiling takes half a minute for a step at most 10% faster. Only training is compiled, into one graph of
    static shapes; evaluation and sampling have varying shapes and run the same weights eagerly. torch caches compiled
    code in TORCHINDUCTOR_CACHE_DIR, by default in the directory for temporary files.

    Raises:
        ConfigError: trainer.compile cannot work on this machine.
    """
    wanted = config.trainer.compile
    for key in ("devices_per_rank", "tensor_parallel"):
        if getattr(config.ddp, key) > 1:
            if wanted in (True, "cuda_graphs"):
                raise ConfigError(f"trainer.compile={str(wanted).lower()} needs ddp.{key}=1; set one of them")
            return False
    missing = _missing_requirement(device) if wanted else None
    if wanted == "auto":
        return device.type == "cuda" and config.model.code is None and missing is None
    if missing is not None:
        raise ConfigError(f"trainer.compile={str(wanted).lower()} needs {missing} on this machine; set it to false")
    if wanted == "cuda_graphs" and device.type != "cuda":
        raise ConfigError("trainer.compile=cuda_graphs needs a GPU; set it to auto")
    return bool(wanted)


def _missing_requirement(device: torch.device) -> str | None:
    """Return a requirement of torch.compile that this machine lacks; None if it lacks none."""
    variable, programs = COMPILERS[device.type]
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "the package triton"
        if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            return "a GPU of compute capability 7.0"
    if not os.environ.get(variable) and not any(map(shutil.which, programs)):
        return f"a compiler ({' or '.join(programs[:2])})"
    return None


def check_compiles(model: nn.Module, config: Config, call: Callable[[nn.Module], object]) -> None:
    """Capture the graph of the model without generating code.

    Args:
        call: calls the model that it receives.

    Raises:
        ConfigError: torch cannot capture the model as one graph.
    """
    with report_compile_errors(config):
        compiled: Any = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
        call(compiled)


@contextmanager
def report_compile_errors(config: Config) -> Iterator[None]:
    """Raise errors of torch.compile as a ConfigError of one line."""
    try:
        yield
    except torch_internals.compile_error() as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"trainer.compile={str(config.trainer.compile).lower()}: torch cannot compile the model "
            f"{config.model.architecture}; set it to false ({reason})"
        ) from error
