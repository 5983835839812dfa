"""Train a recorded run again."""

from __future__ import annotations

import sys

from launching import ROOT, TINY, call, python_main

from mingpt_ddp.storage.run_directory import read_result, recorded_config


def test_again(tmp_path):
    done = call([*python_main(), *TINY, "run.name=first"], tmp_path)
    assert done.returncode == 0, done.stdout
    command = [sys.executable, "-m", "mingpt_ddp.again", "outputs/first"]
    done = call([*command, "optimizer.lr=1e-2", "run.name=second"], tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("python -m mingpt_ddp ")
    first, second = (recorded_config(tmp_path / "outputs" / name) for name in ("first", "second"))
    first["optimizer"]["lr"], first["run"]["name"], first["run"]["root"] = (
        1e-2,
        "second",
        str(tmp_path / "outputs"),
    )
    assert second == first
    assert read_result(tmp_path / "outputs" / "second")["step"] == 12
