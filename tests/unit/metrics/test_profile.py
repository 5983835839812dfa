"""The figures of a profile, worked out by hand, and what an out-of-memory error leaves behind."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from multiprocess.ranks import configure
from queued_device import QueuedDevice
from torch import nn
from torch.autograd import DeviceType

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.profile import (
    Profiler,
    communication_times,
    events_in_steps,
    held_bytes,
    slowest_operators,
    snapshot_when_out_of_memory,
)


def event(
    name: str,
    begin: float,
    end: float,
    parent=None,
    device=DeviceType.CPU,
    is_user_annotation: bool = False,
) -> SimpleNamespace:
    own = SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=begin, end=end),
        cpu_parent=parent,
        cpu_children=[],
        device_type=device,
        is_user_annotation=is_user_annotation,
        self_device_time_total=end - begin,
    )
    if parent is not None:
        parent.cpu_children.append(own)
    return own


def test_communication_is_exposed_where_nothing_computes():
    """It takes 10 to 30 and 50 to 60; operators run from 0 to 20 and from 25 to 27."""
    events = [
        event("gloo:all_reduce", 10, 30),
        event("aten::mm", 0, 15),
        event("aten::add", 12, 20),
        event("aten::mul", 25, 27),
        waiting := event("waiting for other ranks", 50, 60),
        event("aten::copy_", 52, 55, parent=waiting),
        event("[memory]", 50, 60),
    ]
    assert communication_times(events) == (30.0, 10.0 - 2.0 + 10.0)


def test_only_kernels_count_on_a_gpu():
    gpu = DeviceType.CUDA
    events = [
        event("nccl:all_reduce", 0, 100),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 30, device=gpu),
        event("gemm", 5, 25, device=gpu),
    ]
    assert communication_times(events, "device") == (20.0, 5.0)
    assert slowest_operators(events, "device") == [("gemm", [20.0])]


def test_annotations_on_a_gpu_are_neither_work_nor_communication():
    """The profiler shows what the host calls as spans on the GPU, from the first kernel to the
    last.
    """
    gpu = DeviceType.CUDA
    events = [
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 30, device=gpu),
        event("nccl:all_reduce", 5, 40, device=gpu, is_user_annotation=True),
        event("gemm", 5, 25, device=gpu),
        event("DistributedDataParallel.forward", 0, 60, device=gpu, is_user_annotation=True),
        event("aten::mm", 0, 2),
    ]
    assert communication_times(events, "device") == (20.0, 5.0)
    assert slowest_operators(events, "device") == [("gemm", [20.0])]


def test_a_step_ends_when_the_device_has_done_it(tmp_path, monkeypatch):
    """The profiler is torch's, the device one whose steps take 5 seconds behind the host."""
    config = from_mapping(configure("trainer.device=cpu", "trainer.profile=[2,3]"))
    config = replace(config, run=replace(config.run, root=str(tmp_path), name="run"))
    device = QueuedDevice(Runtime(config, DistEnv()))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    profiler = Profiler(config, device, model, optimizer, range(0, 4), nullcontext)
    seen = []
    monkeypatch.setattr(profiler, "_summary", lambda *_: seen.extend(profiler._seconds) or "")
    for step in range(1, 5):
        with profiler.step(step):
            device.queue(5.0)
    assert seen == [5.0, 5.0]


def test_events_between_steps_do_not_count():
    events = [
        event("training step 3", 0, 10),
        event("a", 5, 6),
        event("b", 11, 12),
        event("training step 4", 20, 30),
    ]
    on_gpu = event("training step 3", 8, 18, device=DeviceType.CUDA, is_user_annotation=True)
    assert [e.name for e in events_in_steps([*events, on_gpu, event("c", 20, 21)])] == ["a", "c"]


def test_held_bytes():
    model = nn.Linear(10, 10)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert held_bytes(model, optimizer) == {"parameters": 440, "gradients": 400, "optimizer": 400}


@pytest.mark.parametrize("window", ["[5,4]", "[1,101]", "[0,3]", "[1]", "3"])
def test_a_window_that_cannot_be_profiled_is_refused(window):
    with pytest.raises(ConfigError, match=r"trainer.profile"):
        configure(f"trainer.profile={window}")


@pytest.mark.parametrize(("fails", "is_refused"), [(False, False), (True, False), (False, True)])
def test_an_out_of_memory_error_leaves_a_snapshot(
    fails, is_refused, tmp_path, monkeypatch, log_lines
):
    """torch's dump is replaced, for want of a GPU."""
    config = from_mapping(configure("data.block_size=16"))
    config = replace(config, run=replace(config.run, root=str(tmp_path), name="run"))
    runtime = SimpleNamespace(group=SimpleNamespace(rank=1))

    def dump(path: str) -> None:
        if fails:
            raise OSError("No space left on device")
        open(path, "w").close()

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    error: Exception = torch.OutOfMemoryError("CUDA out of memory: tried to allocate 2 GiB")
    cause = None
    if is_refused:
        cause = error
        error = ConfigError("tried to allocate too much")
    kept = snapshot_when_out_of_memory(config, runtime)
    with pytest.raises(type(error), match="tried to allocate"), kept:
        raise error from cause
    path = tmp_path / "run" / "profile" / "rank1.memory.pickle"
    assert path.exists() == (not fails)
    (line,) = log_lines
    assert line.startswith(
        f"WARNING cannot write {path}: " if fails else f"ERROR {path} shows what fills the GPU"
    )


def test_other_errors_leave_none(tmp_path):
    with pytest.raises(ValueError, match="other"), snapshot_when_out_of_memory(None, None):
        raise ValueError("other")
