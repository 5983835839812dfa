"""Averages over training steps, MFU, and the matmul rate of the device."""

import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mingpt_ddp.config.registry import BUILDERS
from mingpt_ddp.distributed.device.device import peak_memory
from mingpt_ddp.distributed.group.json_collectives import refuse_other_names
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.peak_flops import vendor_peak_flops
from mingpt_ddp.models import flops_per_token
from mingpt_ddp.tasks.outputs import COUNT, SUM

# n x n; operand and result of the largest take 270 MB in bf16
MATRIX_SIZES = (256, 512, 1024, 2048, 4096, 8192)
SATURATED_S = 0.002  # a product that takes this long saturates the device
REPETITIONS = 5  # per measurement; the fastest counts


@dataclass
class Pause:
    """Time that is not spent on steps."""

    seconds: float = 0.0  # once it has ended


class Meter:
    """Accumulate losses and times without waiting for the device.

    Only `read`, `state`, `paused` and a `clock` that waits synchronize.
    """

    def __init__(self, runtime: Runtime, items_per_step: int, unit: str) -> None:
        """
        Args:
            unit: of the items, as in `tokens`.
        """
        self.runtime = runtime
        self.items_per_step = items_per_step
        self.unit = unit
        self.grad_norm = torch.zeros((), device=runtime.device)  # of the last step, before clipping
        self._paused_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._sums = {"loss": torch.zeros((), dtype=torch.float64, device=self.runtime.device)}
        self._steps = 0
        self._timed_steps = 0
        self._data_s = 0.0
        self._since = self.runtime.now()

    def record(self, losses: dict[str, Tensor], grad_norm: Tensor, data_time_s: float) -> None:
        """Add one step.

        Args:
            losses: this rank's shares by name, which all ranks add up: of the step's mean losses,
                and of the sums and counts of metrics.
        """
        for name, loss in losses.items():
            if name in self._sums:
                self._sums[name] = self._sums[name] + loss
            else:
                self._sums[name] = loss.double()
        self.grad_norm = grad_norm
        self._data_s += data_time_s
        self._steps += 1
        self._timed_steps += 1

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        """Exclude the time in this context, which is not spent on steps.

        It begins when a GPU has done the steps queued before, and ends when the GPU has done what
        is queued in it. A pause within another is a part of that one.
        """
        pause = Pause()
        since = self._since
        paused_s = self._paused_s
        begin = self.runtime.now()
        yield pause
        pause.seconds = self.runtime.now() - begin
        self._since = since + pause.seconds
        self._paused_s = paused_s + pause.seconds

    def clock(self, waits: bool) -> float:
        """Return the seconds of a clock that stands still in pauses.

        Args:
            waits: until a GPU has done what is queued.
        """
        now = self.runtime.now() if waits else time.perf_counter()
        return now - self._paused_s

    def read(self) -> dict[str, float]:
        """Return the metrics since the last reading by tag, and reset; {} without steps.

        A collective.
        """
        sums, steps = self.state()
        if steps == 0:
            return {}
        elapsed = max(self.runtime.now() - self._since, 1e-9)
        divisor = max(1, self._timed_steps)
        metrics = means(sums, steps)
        metrics["train/grad_norm"] = float(self.grad_norm)
        metrics[f"speed/{self.unit}_per_s"] = self._timed_steps * self.items_per_step / elapsed
        metrics["speed/step_ms"] = elapsed / divisor * 1e3
        metrics["speed/data_ms"] = self._data_s / divisor * 1e3
        metrics["speed/work_ms"] = self.runtime.strategy.clock.read() * 1e3
        metrics["memory/peak_mib"] = peak_memory(self.runtime.device) / 2**20
        self._reset()
        return metrics

    def state(self) -> tuple[dict[str, float], int]:
        """Return the sums over all ranks since the last reading, and the number of steps.

        A collective.
        """
        group = self.runtime.group
        with group.waiting():  # reading waits for a GPU
            names = ["loss", *sorted(self._sums.keys() - {"loss"})]  # in one order on all ranks
            own = torch.stack([self._sums[name] for name in names]).cpu()
        if BUILDERS["action"]:  # the loop has compared the names of all others
            group.check_agreement(names, refuse_other_names)
        totals = group.all_reduce(own)
        return dict(zip(names, totals.tolist(), strict=True)), self._steps

    def load_state(self, sums: dict[str, float], steps: int) -> None:
        """Restore an interval.

        Rank zero holds the whole sums, so that `state` returns them bit for bit.
        """
        zeros = dict.fromkeys(sums, 0.0)
        own = self.runtime.group.env.call_on_rank_zero(lambda: sums) or zeros
        self._sums = {}
        for name, total in own.items():
            self._sums[name] = torch.tensor(total, dtype=torch.float64, device=self.runtime.device)
        self._steps = steps


def means(sums: dict[str, float], steps: int) -> dict[str, float]:
    """Return the mean losses and metrics of an interval by tag, from the sums over its steps."""
    metrics = {}
    for name, total in sums.items():
        if name.startswith(SUM):
            metric = name.removeprefix(SUM)
            if count := sums[COUNT + metric]:
                metrics[f"train/{metric}"] = total / count
        elif not name.startswith(COUNT):
            metrics[f"train/{name}"] = total / steps
    return metrics


class Utilization:
    """The model's FLOP/s on one device, as a share of what the device could do.

    MFU divides by the rate in the vendor's data sheet, the matmul utilization by a measured one.
    """

    def __init__(self, runtime: Runtime, model: nn.Module) -> None:
        """
        Args:
            model: not wrapped; nothing is reported if it has no `flops_per_token()`.
        """
        self.runtime = runtime
        self._flops_per_token = flops_per_token(model)
        self._peak_flops = vendor_peak_flops(runtime.device, runtime.dtype)
        self._matmul_flops = 0.0  # until `measure`

    def measure(self) -> None:
        """Measure the device's matmul rate, if it is needed."""
        if self._flops_per_token is None:
            return
        device = self.runtime.device
        self._matmul_flops = measured_matmul_flops(device, self.runtime.dtype)
        if device.type == "cuda":
            # exclude the measurement's matrices
            torch.cuda.reset_peak_memory_stats(device)

    def metrics(self, tokens_per_s: float) -> dict[str, float]:
        """Return `speed/matmul_utilization` and, for a listed GPU, `speed/mfu`.

        Args:
            tokens_per_s: of all ranks.
        """
        if self._flops_per_token is None:
            return {}
        flops = self._flops_per_token * tokens_per_s / self.runtime.group.world_size
        metrics = {"speed/matmul_utilization": flops / self._matmul_flops}
        if self._peak_flops is not None:
            metrics["speed/mfu"] = flops / self._peak_flops
        return metrics


def measured_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest product of square matrices, with torch's thread count.

    Takes less than 0.1 seconds and draws nothing from torch's global generators.
    """
    size = MATRIX_SIZES[0]
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(size, size, generator=generator).to(device, dtype)
    best = 0.0
    for n in MATRIX_SIZES:
        # zeros would draw less power and run faster
        a = tile.repeat(n // size, n // size)
        out = torch.empty_like(a)
        seconds = fastest("torch.mm(a, a, out=out)", {"torch": torch, "a": a, "out": out})
        best = max(best, 2 * n**3 / seconds)
        if seconds > SATURATED_S:
            break
    return best


@torch.no_grad()
def fastest(statement: str, variables: dict[str, object]) -> float:
    """Return the shortest time of a statement in seconds; a GPU in use is synchronized."""
    wait = "; torch.cuda.synchronize()" if torch.cuda.is_initialized() else ""
    timer = timeit.Timer(statement + wait, globals=variables)
    return min(timer.repeat(REPETITIONS, number=1))
