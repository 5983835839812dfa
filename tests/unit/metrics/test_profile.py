"""Which steps are profiled, how long they take, and what an out-of-memory error leaves behind."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from multiprocess.ranks import configure
from queued_device import QueuedDevice

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.profiling import Profiler, snapshot_when_out_of_memory


def test_a_step_ends_when_the_device_has_done_it(tmp_path, monkeypatch):
    """The profiler is torch's, the device one whose steps take 5 seconds behind the host."""
    config = from_mapping(configure("trainer.device=cpu"))
    device = QueuedDevice(Runtime(config, DistEnv()))
    profiler = Profiler(tmp_path, device, (2, 3), range(0, 4), nullcontext)
    seen = []
    monkeypatch.setattr(profiler, "_summary", lambda *_: seen.extend(profiler._seconds) or "")
    for step in range(1, 5):
        with profiler.step(step):
            device.queue(5.0)
    assert seen == [5.0, 5.0]


@pytest.mark.parametrize("window", ["[5,4]", "[1,101]", "[0,3]", "[1]", "3"])
def test_a_window_that_cannot_be_profiled_is_refused(window):
    with pytest.raises(ConfigError, match=r"trainer.profile"):
        configure(f"trainer.profile={window}")


@pytest.mark.parametrize(("fails", "is_refused"), [(False, False), (True, False), (False, True)])
def test_an_out_of_memory_error_leaves_a_snapshot(
    fails, is_refused, tmp_path, monkeypatch, log_lines
):
    """torch's dump is replaced, for want of a GPU."""

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
    kept = snapshot_when_out_of_memory(tmp_path, 1)
    with pytest.raises(type(error), match="tried to allocate"), kept:
        raise error from cause
    path = tmp_path / "profile" / "rank1.memory.pickle"
    assert path.exists() == (not fails)
    (line,) = log_lines
    assert line.startswith(
        f"WARNING cannot write {path}: " if fails else f"ERROR {path} shows what fills the GPU"
    )


def test_other_errors_leave_none(tmp_path):
    with pytest.raises(ValueError, match="other"), snapshot_when_out_of_memory(tmp_path, 0):
        raise ValueError("other")
