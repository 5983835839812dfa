"""How DDP calls the communication hook, and how its time is told from computation."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from multiprocess.ranks import configure
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from mingpt_ddp import torch_internals
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies import ddp
from mingpt_ddp.distributed.strategies.ddp import TIMED_EVERY, DDPStrategy
from mingpt_ddp.torch_internals import CommunicationTimes, keep_process_group

CPU = torch.device("cpu")


@pytest.fixture
def strategy(tmp_path: Path) -> Iterator[DDPStrategy]:
    config = from_mapping(configure("trainer.device=cpu"))
    runtime = Runtime(config, DistEnv())
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DDPStrategy(config.ddp, config.trainer, CPU, runtime.group, compiles=False)
    dist.destroy_process_group()


class Clock:
    """A clock that goes on by `step_s` each time it is read."""

    step_s = 0.0
    now = 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def wrap(strategy: DDPStrategy) -> DDP:
    """Return a model whose gradients the hook of the strategy compresses, in one bucket."""
    model = DDP(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)))
    keep_process_group(model)  # else its end may wait forever for the interpreter's lock
    torch_internals.time_communication(model, TIMED_EVERY)
    model.register_comm_hook(
        lambda bucket: default_hooks.fp16_compress_hook(None, bucket), strategy._comm_hook
    )
    return model


def test_the_hook_averages_and_is_timed(strategy):
    strategy.all_reduce_s = 100.0  # of an earlier pass
    model = wrap(strategy)
    nn.init.ones_(model.module[1].weight)
    model(torch.ones(1, 2)).sum().backward()
    assert model.module[0].weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert 0 < strategy.all_reduce_s < 100


def test_the_time_in_the_hook_is_of_the_iteration_that_ddp_shows(strategy, monkeypatch):
    """DDP shows one iteration in ten, after the next has begun; the hook is called in each.

    The clock makes the hook of iteration n take n seconds. DDP's own times are replaced by ones of
    which the hook is a part.
    """
    model = wrap(strategy)
    measure = torch_internals.communication_times
    shown = []

    def measure_by_this_clock(model: nn.Module) -> CommunicationTimes:
        shown.append(measure(model).iteration)
        return CommunicationTimes(shown[-1], total_s=100.0, hidden_s=80.0)

    clock = Clock()
    monkeypatch.setattr(ddp, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(torch_internals, "communication_times", measure_by_this_clock)
    for iteration in range(1, 3 * TIMED_EVERY + 2):
        clock.step_s = iteration
        with model.no_sync():  # reduces no gradients, so it does not count
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        communication_s, exposed_s = strategy.comm_times(model)
        in_hook_s = float(shown[-1])
        assert (communication_s, exposed_s) == (100.0, 20.0 + in_hook_s)
    assert shown[-1] == 3 * TIMED_EVERY
    assert shown[-2] == 2 * TIMED_EVERY
