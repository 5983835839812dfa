"""Check the model, optimizer and reader in docs/your-own-model.md by running its commands."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from holding import kill_before
from launching import TINY, committed, python_main
from runs import fail, succeed, tool, weights, write_files
from user_code_page import PAGE, page_commands, page_files

STEPS = 30
SETTINGS = {
    "model.n_hidden": "24",
    "data.block_size": "64",
    "trainer.batch_size": "24",
    "trainer.max_epochs": "null",
    "trainer.max_steps": str(STEPS),
    "trainer.eval_every": "25",
    "trainer.log_every": "1",
    "snapshot.every_steps": "8",
}
TWO_RANKS = [*python_main(), "ddp.nproc_per_node=2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Make a working directory with the files of the page."""
    cwd = tmp_path_factory.mktemp("project")
    write_files(cwd, page_files())
    with open(cwd / "notes.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        writer.writerows((name, topics[name]) for name in sorted(topics)[:30])
    return cwd


def train(**other: str) -> list[str]:
    """Return the torchrun command of the page with the overrides of the tests."""
    args = page_commands()[0]
    assert args[:3] == ["torchrun", "--nproc_per_node=2", "main.py"]
    given = dict(arg.split("=", 1) for arg in args[3:]) | SETTINGS | other
    return [f"{key}={value}" for key, value in given.items()]


def test_the_page_lists_the_files_that_it_shows():
    listed = re.search(r"^```\nmy_project/\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert listed is not None
    assert sorted(page_files()) == sorted(
        f"my_project/{name.strip()}" for name in listed[1].splitlines()
    )


@pytest.fixture(scope="module")
def uninterrupted(project) -> Path:
    succeed([*TWO_RANKS, *train()], project)
    return project / "outputs" / "notes"


def test_the_page_trains_and_samples(uninterrupted, project):
    args = page_commands()[1]
    assert args[:2] == ["python", "sample.py"]
    text = succeed(tool("sample", *args[2:]), project)
    assert len(text) == 100 + len("\n")
    assert not list(project.rglob("__pycache__")), "nothing is written next to the user's files"


def test_killed_and_resumed_from_another_directory_byte_for_byte(uninterrupted, project, tmp_path):
    """The user's file is found through the configuration directory.

    The second command spells the path of this directory differently.
    """
    elsewhere = {"data.path": str(project / "notes.csv"), "run.name": "victim"}
    run = tmp_path / "outputs" / "victim"
    args = train(**elsewhere, **{"--config-dir": str(project / "my_project")})
    kill_before(16, [*TWO_RANKS, *args], tmp_path, lambda: committed(run), group="task")
    args = [arg for arg in train(**elsewhere) if not arg.startswith("--config-dir")]
    args += [f"hydra.searchpath=[{project / 'my_project'}]", "ddp.nproc_per_node=2"]
    text = succeed([*python_main(), *args], tmp_path)
    assert "resuming from the snapshot" in text
    assert weights(run, STEPS) == weights(uninterrupted, STEPS)


@pytest.mark.parametrize("presets", ["--config-dir=my_project", "hydra.searchpath=[my_project]"])
def test_a_sweep_over_a_key_of_the_user(presets, project, tmp_path):
    args = train(
        **{
            "trainer.max_steps": "1",
            "trainer.eval_every": "null",
            "data.block_size": "8",
            "model.n_hidden": "4,8",
        },
        **{"run.name": "sweep", "run.root": str(tmp_path)},
    )
    args = [arg for arg in args if not arg.startswith("--config-dir")]
    text = succeed([*python_main(), *args, presets, "-m"], project)
    assert "sweep: 2 jobs, 0 already complete, 0 failed" in text
    assert len(list(tmp_path.glob("sweep/model.n_hidden=[48]-*/result.json"))) == 2


def test_an_export_does_not_run_the_code(uninterrupted, tmp_path):
    """contract/test_user_code.py checks that the code runs only if the user names the file."""
    succeed(tool("snapshots", "export", str(uninterrupted), "to=export"), tmp_path)
    exported = tmp_path / "export" / "model.safetensors"
    assert exported.read_bytes() == weights(uninterrupted, STEPS)


HOOK = """
import torch.distributed as dist
from mingpt_ddp.registry import register_comm_hook

@register_comm_hook("mine")
def average(state, bucket):
    print("averaged", bucket.buffer().numel(), "gradients", flush=True)
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
"""


def test_a_communication_hook(tmp_path):
    """Two local workers use the hook. Without its file, its name is refused."""
    (tmp_path / "hooks.py").write_text(HOOK)
    settings = [
        *TINY,
        "trainer.device=cpu",
        "ddp.comm_hook=mine",
        "ddp.nproc_per_node=2",
        "run.name=hook",
    ]
    text = succeed([*python_main(), *settings, f"+data.code={tmp_path / 'hooks.py'}"], tmp_path)
    assert text.count("averaged") >= 2 * 12
    text = fail([*python_main(), *settings], tmp_path)
    assert text == "config error: ddp.comm_hook=mine must be one of none, fp16, bf16\n"
