"""The runtime of a rank: its device, precision, process group and strategy."""

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
        """Set up the device, and join the process group of this attempt (this start of all ranks).

        Args:
            job: Index of the job in a sweep. Every job has its own process group.
        """
        self.began_at = time.monotonic()  # when this rank began to join the process group
        self.ddp = config.ddp
        self.trainer = config.trainer
        check_strategy(config, env.world_size)
        check_tensor_parallel(config)
        self.device = device_of_rank(config.trainer, config.ddp, env)
        self.precision = precision_of_run(config, self.device)
        self.scaler = self._new_scaler()
        self.compiles = should_compile(config, self.device, env.world_size)
        set_up_device(self.device, config.trainer.deterministic)
        self._threads_before = torch.get_num_threads()  # `close` restores this number
        if threads := canonical_threads(config.ddp):
            torch.set_num_threads(threads)
        self.group = ProcessGroup(env, config.ddp, job)
        # Start the watchdog before `connect`, which waits for other ranks.
        Watchdog(self.group, ProcessExit(job)).start()
        self.group.connect(self.device, config.ddp)
        self.strategy = build_strategy(
            self.ddp, self.trainer, self.device, self.group, self.compiles
        )

    @property
    def dtype(self) -> torch.dtype:
        """The data type of matrix products."""
        return DTYPES[self.precision]

    def resume_precision(self, config: Config, state: Any) -> None:
        """Compute in the precision in which the run began. Call this before the model is built.

        Args:
            state: The state.json of the snapshot that the run resumes from. It is untrusted. None
                if there is no snapshot.
        """
        self.precision = precision_of_run(config, self.device, state)

    def _new_scaler(self, init_scale: float = 2.0**16) -> torch.amp.GradScaler:
        is_enabled = self.precision == "fp16"
        return torch.amp.GradScaler(self.device.type, init_scale, enabled=is_enabled)

    def alone(self) -> "Runtime":
        """Return a runtime in which this rank trains alone, to try some steps before the run.

        It has the same device and precision, but a loss scaler of its own. None of its calls is a
        collective, and nothing is compiled.
        """
        alone = copy.copy(self)
        alone.ddp = for_one_rank(self.ddp)
        alone.scaler = self._new_scaler(init_scale=1.0)  # the few steps must not overflow
        alone.compiles = False
        alone.group = ProcessGroup(DistEnv(), alone.ddp, job=0)
        alone.strategy = SingleStrategy(
            alone.ddp, self.trainer, self.device, alone.group, compiles=False
        )
        return alone

    def close(self) -> None:
        """Destroy the process group. A collective."""
        self.group.close()
        if torch.get_num_threads() != self._threads_before:
            torch.set_num_threads(self._threads_before)

    def free_memory(self) -> None:
        """Free the memory of this job, so that the next job in this process can use it."""
        gc.collect()
        if self.compiles:
            torch.compiler.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def environment(self) -> dict[str, str | int]:
        """Describe the environment of the run: everything that affects the last bits of a step.

        The settings of the model and of the batch are not included.
        """
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
        """Wait until the GPU has finished the work that this thread has queued. Return the time.

        The time is in seconds. Copies of a snapshot run on another stream, so this does not
        wait for them.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which matrix products have the data type `dtype`."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def to_device(self, batch: Any) -> Any:
        """Copy the CPU tensors of a batch to the device, without waiting until a GPU has them.

        Args:
            batch: Tensors, which may be nested in tuples, lists and dicts.
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
