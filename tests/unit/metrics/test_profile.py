"""The steps that can be profiled, and the memory snapshot after an out-of-memory error."""

from __future__ import annotations

import pytest
import torch
from multiprocess.ranks import configure

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.profiling import snapshot_when_out_of_memory


@pytest.mark.parametrize("window", ["[5,4]", "[1,101]", "[0,3]", "[1]", "3"])
def test_a_window_that_cannot_be_profiled_is_refused(window):
    with pytest.raises(ConfigError, match=r"trainer.profile"):
        configure(f"trainer.profile={window}")


@pytest.mark.parametrize(("fails", "is_refused"), [(False, False), (True, False), (False, True)])
def test_an_out_of_memory_error_leaves_a_snapshot(
    fails, is_refused, tmp_path, monkeypatch, log_lines
):
    """torch's function that dumps the memory is replaced, since it needs a GPU."""

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


def test_other_errors_leave_no_memory_snapshot(tmp_path):
    with pytest.raises(ValueError, match="other"), snapshot_when_out_of_memory(tmp_path, 0):
        raise ValueError("other")
