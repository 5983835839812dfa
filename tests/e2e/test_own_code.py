"""A model, an optimizer and a reader of the user's own: the very files and commands of docs/your-own-model.md."""

from __future__ import annotations

import csv
import re
import shlex
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from launching import ROOT, Job, call, committed, last_step, torchrun, wait_for

STEPS = 40
PAGE = (ROOT / "docs" / "your-own-model.md").read_text()
# Slow enough to be hit in the middle.
SETTINGS = [
    *("model.n_hidden=96", "data.block_size=64", "trainer.batch_size=24", "trainer.max_epochs=null"),
    *(f"trainer.max_steps={STEPS}", "trainer.eval_every=25", "snapshot.every_steps=8", "trainer.log_every=1"),
]


def page_files() -> dict[str, str]:
    """The files of the page, by the name that stands above each."""
    return dict(re.findall(r"^`(my_project/\S+)`\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))


def page_commands() -> list[list[str]]:
    [block] = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for line in block.splitlines()]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A working directory as the page describes it."""
    cwd = tmp_path_factory.mktemp("project")
    for name, content in page_files().items():
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).write_text(content)
    with open(cwd / "notes.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        writer.writerows((name, topics[name]) for name in sorted(topics)[:30])
    return cwd


def train(*more: str) -> list[str]:
    """The page's command for torchrun, with the words of the tests behind it."""
    words = page_commands()[0]
    assert words[:3] == ["torchrun", "--nproc_per_node=2", "main.py"]
    return [*torchrun(2), *words[3:], *SETTINGS, *more]


def sample(cwd: Path, *changes: str) -> tuple[int, str]:
    words = page_commands()[1]
    assert words[:2] == ["python", "sample.py"]
    done = call([sys.executable, str(ROOT / "sample.py"), *(words[2:] if not changes else changes)], cwd)
    return done.returncode, done.stdout


def test_the_page_names_the_files_that_it_shows():
    listed = re.search(r"^```\nmy_project/\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert listed is not None
    assert sorted(page_files()) == sorted(f"my_project/{name.strip()}" for name in listed[1].splitlines())


@pytest.fixture(scope="module")
def undisturbed(project) -> Path:
    done = call(train(), project)
    assert done.returncode == 0, done.stdout
    return project / "outputs" / "notes"


def weights(run: Path) -> bytes:
    return (run / "snapshots" / f"step_{STEPS:08d}" / "model.safetensors").read_bytes()


def test_the_page_trains_and_samples(undisturbed, project):
    code, text = sample(project)
    assert code == 0, text
    assert len(text) == 100 + len("\n")
    assert not list(project.rglob("__pycache__")), "nothing is written beside the user's files"


def test_killed_and_resumed_from_another_directory_byte_for_byte(undisturbed, project, tmp_path):
    """The file is found by the configuration's directory; the second start finds that directory another way."""
    here = [f"data.path={project / 'notes.csv'}", f"--config-dir={project / 'my_project'}", "run.name=victim"]
    job = Job(
        [word for word in train() if not word.startswith(("--config-dir", "data.path", "run.name"))] + here, tmp_path
    )
    run = tmp_path / "outputs" / "victim"
    wait_for(lambda: last_step(run) >= 20 and committed(run), what="step 20")
    job.kill_tree()
    searched = [w for w in here if not w.startswith("--config-dir")] + [f"hydra.searchpath=[{project / 'my_project'}]"]
    words = [word for word in train() if not word.startswith(("--config-dir", "data.path", "run.name", "ddp"))]
    agent = [sys.executable, *words[words.index(str(ROOT / "main.py")) :], *searched, "ddp.nproc_per_node=2"]
    done = call(agent, tmp_path)
    assert done.returncode == 0, done.stdout
    assert "resuming from the snapshot" in done.stdout
    assert weights(run) == weights(undisturbed)


def test_only_the_user_says_what_is_run(undisturbed, project, tmp_path):
    """The snapshot names the file, which lies where it did: without the user's word it is not touched."""
    code, text = sample(project, "snapshot=outputs/notes")
    assert code == 2
    [line] = text.splitlines()
    assert line.startswith("snapshot error: model.architecture=lstm is none of ours; name the Python file")
    words = [sys.executable, "-m", "mingpt_ddp.snapshots", "export", "outputs/notes", f"to={tmp_path / 'export'}"]
    done = call(words, project, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "export" / "model.safetensors").read_bytes() == weights(undisturbed)
