"""The runtime of a rank: device, precision, process group, strategy."""

import copy
import gc
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.device.compile import should_compile
from mingpt_ddp.distributed.device.device import (
    device_name,
    device_of_rank,
    precision_of_run,
    set_up_device,
)
from mingpt_ddp.distributed.device.machine import canonical_threads
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.strategies import build_strategy, check_strategy
from mingpt_ddp.distributed.strategies.single import SingleStrategy, for_one_rank
from mingpt_ddp.distributed.strategies.tensor_split import check_tensor_parallel
from mingpt_ddp.distributed.watchdog import Watchdog
from mingpt_ddp.models.ops import DTYPES
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.root_cause import ProcessExit


class Runtime:
    """Device, precision, process group and strategy of this rank."""

    def __init__(self, config: Config, env: DistEnv, job: int = 0) -> None:
        """Join the process group of this attempt.

        Args:
            job: index of the job in a sweep; every job has its own process group.
        """
        self.began_at = time.monotonic()  # to join
        self.ddp = config.ddp
        self.trainer = config.trainer
        check_strategy(config, env.world_size)
        check_tensor_parallel(config)
        self.device = device_of_rank(config.trainer, config.ddp, env)
        self.precision = precision_of_run(config, self.device)
        self.scaler = self._new_scaler()
        self.compiles = should_compile(config, self.device, env.world_size)
        set_up_device(self.device, config.trainer.deterministic)
        self._threads = torch.get_num_threads()  # of this process, without this run
        if threads := canonical_threads(config.ddp):
            torch.set_num_threads(threads)
        self.group = ProcessGroup(env, config.ddp, job)
        Watchdog(self.group, ProcessExit(job)).start()  # before ranks wait for each other
        self.group.connect(self.device, config.ddp)
        self.strategy = build_strategy(
            self.ddp, self.trainer, self.device, self.group, self.compiles
        )

    @property
    def dtype(self) -> torch.dtype:
        """The type of matrix products."""
        return DTYPES[self.precision]

    def resume_precision(self, config: Config, state: Any) -> None:
        """Compute in the precision in which a run began; call it before its model is built.

        Args:
            state: of the snapshot that the run resumes from, untrusted; None without one.
        """
        self.precision = precision_of_run(config, self.device, state)

    def _new_scaler(self, init_scale: float = 2.0**16) -> torch.amp.GradScaler:
        is_enabled = self.precision == "fp16"
        return torch.amp.GradScaler(self.device.type, init_scale, enabled=is_enabled)

    def alone(self) -> "Runtime":
        """Return the runtime of this rank by itself, for steps tried before the run.

        It has the same device and precision, and a loss scaler of its own; no call is a collective,
        and nothing is compiled.
        """
        alone = copy.copy(self)
        alone.ddp = for_one_rank(self.ddp)
        alone.scaler = self._new_scaler(init_scale=1.0)  # its few steps must not overflow
        alone.compiles = False
        alone.group = ProcessGroup(DistEnv(), alone.ddp, job=0)
        alone.strategy = SingleStrategy(
            alone.ddp, self.trainer, self.device, alone.group, compiles=False
        )
        return alone

    def close(self) -> None:
        """Destroy the process group on all ranks together."""
        self.group.close()
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def free_memory(self) -> None:
        """Free what this job has allocated, for the next one in this process."""
        gc.collect()
        if self.compiles:
            torch.compiler.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def environment(self) -> dict[str, str | int]:
        """Return what affects the last bits of a step, besides model and batch settings."""
        environment: dict[str, str | int] = {
            "torch": torch.__version__,
            "device": device_name(self.device),
            "precision": self.precision,
            "compiled": self.compiles,
            "threads": torch.get_num_threads(),
        }
        if not self.strategy.is_canonical:
            environment |= {
                "world_size": self.group.world_size,
                "strategy": self.strategy.name,
                "tensor_parallel": self.group.tensor_size,
                "transport": self.group.transport,
                "comm_hook": self.ddp.comm_hook,
            }
        return environment | {"reduction": self.ddp.reduction}

    def now(self) -> float:
        """Return the time in seconds, once the GPU has done what is queued on its stream.

        The stream is that of this thread, not the one that copies a snapshot.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which matrix products are computed in `dtype`."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def to_device(self, batch: Any) -> Any:
        """Copy the CPU tensors of a batch to the device, without waiting for a GPU.

        Args:
            batch: tensors in tuples, lists and dicts.
        """
        if isinstance(batch, Tensor):
            if batch.device == self.device:
                return batch
            return batch.pin_memory().to(self.device, non_blocking=True)
        if isinstance(batch, Mapping):
            return {key: self.to_device(value) for key, value in batch.items()}
        if isinstance(batch, (tuple, list)):
            return type(batch)(map(self.to_device, batch))
        return batch
