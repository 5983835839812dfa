"""Train on documents that end with an end token. SIGKILL on several ranks changes no bits."""

from __future__ import annotations

from pathlib import Path

from holding import kill_before
from launching import TINY, committed, python_main
from runs import tensor_files, train, write_files

SETTINGS = [
    *TINY,
    "data=text_file",
    "data.path=texts/",
    "data.end_token=true",
    "data.split_paths={val: val.txt}",
    "data.truncate=1",
    "trainer.max_steps=24",
    "ddp.nproc_per_node=3",
]


def texts(cwd: Path) -> Path:
    files = {f"texts/{i:03}.txt": f"document {i} of {i * i} words, no line feed" for i in range(60)}
    return write_files(cwd, files | {"val.txt": "document 7 of 49 words"})


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path):
    whole = train(texts(tmp_path / "whole"), *SETTINGS)
    killed = texts(tmp_path / "killed")
    run = killed / "outputs" / "run"
    kill_before(11, [*python_main(), *SETTINGS, "run.name=run"], killed, lambda: committed(run))
    train(killed, *SETTINGS)
    assert tensor_files(run) == tensor_files(whole)
