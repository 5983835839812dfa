"""Averages over training steps, and the matmul rate of the device."""

import time
import timeit

import torch
from torch import Tensor

from mingpt_ddp.distributed.device import peak_memory
from mingpt_ddp.distributed.runtime import Runtime

# n x n; operand and result of the largest take 270 MB in bf16
MATRIX_SIZES = (256, 512, 1024, 2048, 4096, 8192)
SATURATED_S = 0.004  # a product that takes this long saturates the device
REPETITIONS = 5  # per measurement; the fastest counts


class Meter:
    """Accumulate losses and times without waiting for the device.

    Only `read` and `state` synchronize.
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
        self._reset()

    def _reset(self) -> None:
        self._sums = {"loss": torch.zeros((), dtype=torch.float64, device=self.runtime.device)}
        self._steps = 0
        self._timed_steps = 0
        self._data_s = 0.0
        self._since = time.perf_counter()

    def record(self, losses: dict[str, Tensor], grad_norm: Tensor, data_time_s: float) -> None:
        """Add one step.

        Args:
            losses: this rank's share of the step's mean losses by name; the shares of all ranks add
                up to them.
        """
        for name, loss in losses.items():
            self._sums[name] = self._sums[name] + loss if name in self._sums else loss.double()
        self.grad_norm = grad_norm
        self._data_s += data_time_s
        self._steps += 1
        self._timed_steps += 1

    def pause(self, seconds: float) -> None:
        """Exclude time not spent on steps."""
        self._since += seconds

    def read(self) -> dict[str, float]:
        """Return the metrics of the steps since the last reading by tag, {} without steps, and
        reset. A collective.
        """
        sums, steps = self.state()
        if steps == 0:
            return {}
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        metrics = {
            **{f"train/{name}": total / steps for name, total in sums.items()},
            "train/grad_norm": float(self.grad_norm),
            f"speed/{self.unit}_per_s": self._timed_steps * self.items_per_step / elapsed,
            "speed/step_ms": elapsed / max(1, self._timed_steps) * 1e3,
            "speed/data_ms": self._data_s / max(1, self._timed_steps) * 1e3,
            "speed/work_ms": self.runtime.strategy.clock.read() * 1e3,
            "memory/peak_mib": peak_memory(self.runtime.devices) / 2**20,
        }
        self._reset()
        return metrics

    def state(self) -> tuple[dict[str, float], int]:
        """Return the sums over all ranks since the last reading, and the number of steps.

        A collective.
        """
        totals = self.runtime.group.all_reduce(torch.stack([*self._sums.values()]).cpu())
        return dict(zip(self._sums, totals.tolist(), strict=True)), self._steps

    def load_state(self, sums: dict[str, float], steps: int) -> None:
        """Restore an interval; rank zero holds the whole sums, so that `state` returns them bit for
        bit.
        """
        own = self.runtime.group.env.call_on_rank_zero(lambda: sums) or dict.fromkeys(sums, 0.0)
        device = self.runtime.device
        self._sums = {
            name: torch.tensor(total, dtype=torch.float64, device=device)
            for name, total in own.items()
        }
        self._steps = steps


def measured_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest product of two square matrices, with torch's current number
    of threads.

    Takes about 0.2 seconds and draws nothing from torch's global generators.
    """
    tile = torch.randn(
        MATRIX_SIZES[0], MATRIX_SIZES[0], generator=torch.Generator().manual_seed(0)
    ).to(device, dtype)
    best = 0.0
    for n in MATRIX_SIZES:
        # zeros would draw less power and run faster
        a = tile.repeat(n // len(tile), n // len(tile))
        seconds = fastest(
            "torch.mm(a, a, out=out)", {"torch": torch, "a": a, "out": torch.empty_like(a)}
        )
        best = max(best, 2 * n**3 / seconds)
        if seconds > SATURATED_S:
            break
    return best


@torch.no_grad()
def fastest(statement: str, variables: dict[str, object]) -> float:
    """Return the shortest time of a statement in seconds, with the GPU synchronized if one is in
    use.
    """
    wait = "; torch.cuda.synchronize()" if torch.cuda.is_initialized() else ""
    timer = timeit.Timer(statement + wait, globals=variables)
    return min(timer.repeat(REPETITIONS, number=1))
