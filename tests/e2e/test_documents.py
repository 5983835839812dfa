"""Train on documents that end with a token of their own: exact after SIGKILL at any world size."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import TINY, Job, call, committed, python_main, wait_for

SETTINGS = [
    *TINY,
    "data=text_file",
    "data.path=texts/",
    "data.end_token=true",
    "data.split_paths={val: val.txt}",
    "data.truncate=1",
    "trainer.max_steps=24",
    "run.name=run",
]


def texts(cwd: Path) -> Path:
    (cwd / "texts").mkdir(parents=True)
    for i in range(60):
        (cwd / f"texts/{i:03}.txt").write_text(f"document {i} of {i * i} words, and no line feed")
    (cwd / "val.txt").write_text("document 7 of 49 words")
    return cwd


def tensors(cwd: Path) -> list[bytes]:
    directory = cwd / "outputs/run/snapshots/step_00000024"
    return [path.read_bytes() for path in sorted(directory.glob("*.safetensors"))]


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_killed_and_resumed_it_is_the_same_byte_for_byte(ranks, tmp_path):
    command = [*python_main(), *SETTINGS, f"ddp.nproc_per_node={ranks}"]
    whole = texts(tmp_path / "whole")
    done = call(command, whole)
    assert done.returncode == 0, done.stdout
    killed = texts(tmp_path / "killed")
    job = Job(command, killed)
    wait_for(lambda: committed(killed / "outputs/run"), what="a snapshot")
    job.kill_tree()
    done = call(command, killed)
    assert done.returncode == 0, done.stdout
    assert tensors(killed) == tensors(whole) != []
