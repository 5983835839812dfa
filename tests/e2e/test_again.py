"""Train a recorded run again."""

from __future__ import annotations

from launching import TINY, python_main
from runs import read_result, recorded_config, succeed, tool


def test_again(tmp_path):
    succeed([*python_main(), *TINY, "run.name=first"], tmp_path)
    command = tool("again", "outputs/first")
    text = succeed([*command, "optimizer.lr=1e-2", "run.name=second"], tmp_path)
    assert text.startswith("python -m mingpt_ddp ")
    first, second = (recorded_config(tmp_path / "outputs" / name) for name in ("first", "second"))
    first["optimizer"]["lr"], first["run"]["name"], first["run"]["root"] = (
        1e-2,
        "second",
        str(tmp_path / "outputs"),
    )
    assert second == first
    assert read_result(tmp_path / "outputs" / "second")["step"] == 12
