"""Check that training works without the folder study/: it starts, logs, saves and resumes."""

from __future__ import annotations

import shutil
import sys

from launching import TINY, copy_source
from runs import read_result, succeed


def test_the_core_trains_alone(tmp_path):
    copy_source(tmp_path / "core")
    shutil.rmtree(tmp_path / "core" / "mingpt_ddp" / "study")
    command = [sys.executable, "-m", "mingpt_ddp", *TINY, "run.name=run", "trainer.max_steps=6"]
    environment = {"PYTHONPATH": str(tmp_path / "core")}
    succeed(command, tmp_path, **environment)
    text = succeed([*command, "trainer.max_steps=12"], tmp_path, **environment)
    assert "resuming from the snapshot of step 6 of 12" in text
    run = tmp_path / "outputs" / "run"
    assert read_result(run)["step"] == 12
    assert list(run.glob("**/events.out.tfevents*"))
