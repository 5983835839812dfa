"""Profile some steps: a trace per rank for Perfetto, and a summary in the log of rank zero."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.optim import Optimizer

from mingpt_ddp import torch_internals
from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.device import peak_memory
from mingpt_ddp.distributed.phases import FETCH
from mingpt_ddp.distributed.process_group import WAITING
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.ddp import ALL_REDUCE
from mingpt_ddp.distributed.tensor_parallel import local_tensor
from mingpt_ddp.metrics.text_table import columns
from mingpt_ddp.storage.run_dir import run_directory

log = logging.getLogger(__name__)

Paused: TypeAlias = Callable[[], AbstractContextManager[object]]
STEP = "training step "  # begins the name of the event of a step
COMMUNICATION = re.compile(rf"nccl|gloo:|mpi:|c10d::|record_param_comms|{ALL_REDUCE}|{WAITING}")
TOP = 10  # operators in the summary
LONGEST = 44  # characters of an operator's name
OF_KIND = {"cpu": "operator, by its own time", "device": "kernel, by its time"}
HEADINGS = ("ms per step", "share", "calls per step")
WIDTHS = (-LONGEST, 12, 6, 15)
DIRECTORY = "profile"  # in the run directory


class Profiler:
    """Profile the steps of trainer.profile. No number of the run depends on it."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        model: nn.Module,
        optimizer: Optimizer,
        steps: range,
        paused: Paused,
    ) -> None:
        """
        Args:
            steps: range(steps done so far, steps of the whole run).
            paused: a context for what takes time between steps.
        """
        self.runtime = runtime
        self.model = model
        self.optimizer = optimizer
        self._paused = paused
        self._directory = run_directory(config) / DIRECTORY
        self._profile: torch.profiler.profile | None = None  # while profiling
        self._seconds: list[float] = []  # of each profiled step
        first, last = config.trainer.profile or (1, 0)
        self._window = range(max(first, steps.start + 1), min(last, steps.stop) + 1)
        if config.trainer.profile is not None:
            torch_internals.record_gpu_allocations()
        if len(self._window) <= last - first:
            window = self._window
            rest = f"steps {window[0]} to {window[-1]} are" if window else "nothing is"
            log.info(
                "trainer.profile=[%d,%d], but this start trains steps %d to %d: %s profiled",
                first,
                last,
                steps.start + 1,
                steps.stop,
                rest,
            )

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile this step if it is one of those; wait for the device at both of its ends."""
        if step not in self._window:
            yield
            return
        if self._profile is None:
            # one cycle; with acc_events torch 2.11 does not warn that others would be lost
            self._profile = torch.profiler.profile(profile_memory=True, acc_events=True)
            with self._paused(), torch_internals.without_profiler_marks():
                self._profile.start()
        begin = self.runtime.now()
        with torch.profiler.record_function(f"{STEP}{step}"):
            yield
            end = self.runtime.now()  # within the event, which holds all kernels of the step
        self._seconds.append(end - begin)
        if step == self._window[-1]:
            self.close()

    def close(self) -> None:
        """Write the trace and log the summary, if steps were profiled since the last call."""
        profile = self._profile
        self._profile = None
        if profile is None:
            return
        with self._paused():
            self._stop(profile)

    def _stop(self, profile: torch.profiler.profile) -> None:
        with torch_internals.without_profiler_marks():
            profile.stop()
        rank = self.runtime.group.rank
        path = self._directory / f"rank{rank}.json.gz"
        partial = self._directory / f"rank{rank}.partial.json.gz"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(partial))
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:
            log.warning("cannot write %s, training continues without it: %s", path, error)
        env = self.runtime.group.env
        env.call_on_rank_zero(lambda: log.info("%s", self._summary(profile, str(path))))
        self._seconds.clear()

    def _summary(self, profile: torch.profiler.profile, path: str) -> str:
        """Return what took the time and the memory of the profiled steps, on one screen."""
        steps = len(self._seconds) or 1
        kind = "device" if self.runtime.device.type == "cuda" else "cpu"
        total_us = max(sum(self._seconds), 1e-9) * 1e6
        events = events_in_steps(list(profile.events() or []))

        def per_step(microseconds: float) -> str:
            return f"{microseconds / 1e3 / steps:.2f} ms ({microseconds / total_us:.0%})"

        wait = sum(event.cpu_time_total for event in events if event.name == FETCH)
        communication, exposed = communication_times(events, kind)
        lines = [
            f"profile of {steps} steps, {total_us / 1e3 / steps:.2f} ms each with the profiler:",
            f"  data wait {per_step(wait)}, communication {per_step(communication)}, "
            f"exposed {per_step(exposed)}",
            f"  {self._memory(events, kind)}",
            f"  {columns((OF_KIND[kind], *HEADINGS), WIDTHS, gap=' ')}",
        ]
        for name, own in slowest_operators(events, kind):
            cells = [
                name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}...",
                f"{sum(own) / 1e3 / steps:.3f}",
                f"{sum(own) / total_us:.0%}",
                f"{len(own) / steps:.1f}",
            ]
            lines.append(f"  {columns(cells, WIDTHS, gap=' ')}")
        lines.append(f"  the trace is {path}, one per rank; open it in https://ui.perfetto.dev")
        return "\n".join(lines)

    def _memory(self, events: Iterable[Any], kind: str) -> str:
        """Say who holds the peak memory of this rank."""
        held = held_bytes(self.model, self.optimizer)
        peak = peak_memory(self.runtime.devices)
        size = f"self_{kind}_memory_usage"
        now = most = 0
        for event in sorted(events, key=lambda event: event.time_range.end):
            now += getattr(event, size)
            most = max(most, now)
        held["activations and temporary tensors"] = max(0, min(most, peak - sum(held.values())))
        rest = "the rest" if kind == "device" else "the rest of the process"
        held[rest] = max(0, peak - sum(held.values()))
        parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in held.items())
        return f"peak memory {peak / 2**20:.1f} MiB: {parts}"


def held_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of this rank's parameters, gradients and optimizer state."""
    held = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for parameter in model.parameters():
        size = local_tensor(parameter.detach()).nbytes
        held["parameters"] += size
        if parameter.requires_grad:
            held["gradients"] += size
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                held["optimizer"] += local_tensor(value).nbytes
    return held


def of_kind(events: Iterable[Any], kind: str) -> list[Any]:
    """Return the events that count.

    Args:
        kind: `cpu`: those of the host, or `device`: a GPU's kernels and copies. What the host calls
            around them has spans on the GPU too, from the first to the last kernel: annotations.
    """
    if kind == "cpu":
        return [event for event in events if event.device_type == DeviceType.CPU]
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    return [event for event in on_gpu if not event.is_user_annotation]


def slowest_operators(events: Iterable[Any], kind: str) -> list[tuple[str, list[float]]]:
    """Return what takes the most time, with the own microseconds of each call.

    Args:
        kind: `cpu`: operators, or `device`: kernels.
    """
    operators: dict[str, list[float]] = {}
    for event in of_kind(events, kind):
        if event.name in (FETCH, "[memory]") or COMMUNICATION.search(event.name):
            continue
        own = getattr(event, f"self_{kind}_time_total")
        operators.setdefault(event.name, []).append(own)
    return sorted(operators.items(), key=lambda item: -sum(item[1]))[:TOP]


def events_in_steps(events: list[Any]) -> list[Any]:
    """Return what happens in the profiled steps, without logging and evaluations between them."""
    marks = [event for event in of_kind(events, "cpu") if event.name.startswith(STEP)]
    steps = [mark.time_range for mark in marks]
    found = []
    for event in events:
        if event.name.startswith(STEP):
            continue
        begin = event.time_range.start
        if any(step.start <= begin <= step.end for step in steps):
            found.append(event)
    return found


def communication_times(events: Iterable[Any], kind: str = "cpu") -> tuple[float, float]:
    """Return the microseconds of communication, and those in which nothing else is done.

    Args:
        events: torch.profiler's, of one rank.
        kind: `cpu`: operators count, or `device`: kernels.
    """
    communicating = []
    computing = []
    for event in of_kind(events, kind):
        if event.name == "[memory]":
            continue
        span = (event.time_range.start, event.time_range.end)
        if COMMUNICATION.search(event.name):
            communicating.append(span)
        elif event.cpu_children or event.name == FETCH or _is_part_of_communication(event):
            continue
        else:
            computing.append(span)
    exposed = _covered([*communicating, *computing]) - _covered(computing)
    return _covered(communicating), exposed


def _is_part_of_communication(event: Any) -> bool:
    parent = event.cpu_parent
    if parent is None:
        return False
    return bool(COMMUNICATION.search(parent.name)) or _is_part_of_communication(parent)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length = 0.0
    latest = float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, latest))
        latest = max(latest, end)
    return length


@contextmanager
def snapshot_when_out_of_memory(config: Config, runtime: Runtime) -> Iterator[None]:
    """Write which blocks fill the GPU when an allocation fails in this context."""
    try:
        yield
    except Exception as error:
        # as it is, or refused as a ConfigError
        if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
            raise
        path = run_directory(config) / DIRECTORY / f"rank{runtime.group.rank}.memory.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if torch_internals.dump_gpu_memory(str(path)):
                log.error(
                    "%s shows what fills the GPU: open it in https://pytorch.org/memory_viz", path
                )
        except (OSError, RuntimeError) as failure:
            log.warning("cannot write %s: %s", path, failure)
        raise
