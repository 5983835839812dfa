"""The depth of the call stack from the end of a step to Storage.write."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

import pytest
from launching import TINY
from multiprocess.ranks import configure

import mingpt_ddp
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import StorageUnusableError
from mingpt_ddp.snapshots.write.async_writer import AsyncSave
from mingpt_ddp.storage.storage import Storage
from mingpt_ddp.training import trainer
from mingpt_ddp.training.run import train_run

PACKAGE = str(Path(mingpt_ddp.__file__).parent)
SETTINGS = [
    *TINY,
    "trainer.device=cpu",
    "trainer.max_steps=6",
    "trainer.eval_every=null",
    "snapshot.max_failures=0",
]


def frames(stack: traceback.StackSummary) -> list[str]:
    """Return the frames of the package, without those that only call what their caller names."""
    callers = ("run_on_rank_zero", "decide_on_rank_zero", "_value_of")
    return [
        f"{Path(frame.filename).stem}.{frame.name}"
        for frame in stack
        if frame.filename.startswith(PACKAGE) and frame.name not in callers
    ]


def below_trainer(stack: traceback.StackSummary) -> list[str]:
    names = [frame.filename for frame in stack]
    return frames(stack[len(names) - names[::-1].index(trainer.__file__) :])


@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize(
    ("file", "method"), [("model.safetensors", "write_files"), ("manifest.json", "commit")]
)
def test_at_most_four_frames_from_the_end_of_a_step_to_the_write(
    file, method, background, tmp_path, monkeypatch
):
    starts = []

    def fail(self: Storage, name: str, content: bytes) -> None:
        if name.endswith(file):
            raise OSError(errno.ENOSPC, "no space is left")
        write(self, name, content)

    def start(self: AsyncSave) -> None:
        starts.append(traceback.extract_stack()[:-1])
        original_start(self)

    write, original_start = Storage.write, AsyncSave.start
    monkeypatch.setattr(Storage, "write", fail)
    monkeypatch.setattr(AsyncSave, "start", start)
    settings = [
        *SETTINGS,
        "snapshot.every_steps=2",
        f"snapshot.background={background}",
        f"run.root={tmp_path}",
    ]
    config = from_mapping(configure(*settings, "run.name=run"))
    runtime = Runtime(config, DistEnv())
    with pytest.raises(StorageUnusableError, match="no space is left") as refused:
        train_run(config, runtime, {})
    runtime.close()
    on_thread = refused.value.__cause__
    assert isinstance(on_thread.__cause__, OSError)
    writing = frames(traceback.extract_tb(on_thread.__traceback__))
    writing += frames(traceback.extract_tb(on_thread.__cause__.__traceback__))
    assert writing == ["async_writer.run", f"store.{method}"]
    for trainer_side in (
        below_trainer(starts[0]),
        below_trainer(traceback.extract_tb(refused.value.__traceback__)),
    ):
        assert 1 <= len(trainer_side) <= 2, trainer_side
        assert len(trainer_side) + len(writing) <= 4
    assert below_trainer(starts[0]) == ["save_schedule.maybe_save", "manager.save"]
