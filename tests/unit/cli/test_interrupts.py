"""Ctrl-C while a command is still importing its libraries, and in a script that a user wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launching import PATIENCE_S, ROOT, environment

# Sends Ctrl-C to this process as soon as it looks for the module that AT names.
CTRL_C = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"]:
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as error:  # some libraries turn it into an ImportError
                raise ImportError("cannot import") from error
sys.meta_path.insert(0, Finder())
"""
COMMANDS = {
    "train": (["main.py"], "omegaconf"),
    "python -m": (["-m", "mingpt_ddp"], "hydra"),
    "workers": (["main.py", "ddp.nproc_per_node=2"], "omegaconf"),
    "sweep": (["main.py", "-m", "optimizer.lr=1,2"], "mingpt_ddp.study.sweeps.checks"),
    "sample.py": (["sample.py", "RUN"], "pydantic"),
    "evaluate": (["-m", "mingpt_ddp", "evaluate", "RUN"], "pydantic"),
    "report": (["-m", "mingpt_ddp", "report", "RUN"], "yaml"),
    "plan": (["-m", "mingpt_ddp", "plan"], "hydra"),
    "snapshots": (["-m", "mingpt_ddp", "snapshots", "list", "RUN"], "fsspec"),
    "replay": (["-m", "mingpt_ddp", "replay", "RUN", "steps=1"], "pydantic"),
    "at": (["-m", "mingpt_ddp", "at", "RUN", "step=1"], "pydantic"),
    "versions": (["-m", "mingpt_ddp", "versions", "HEAD", "HEAD"], "pydantic"),
    "again": (["-m", "mingpt_ddp", "again", "RUN"], "pydantic"),
    "another program": ([str(Path(sys.executable).with_name("mingpt-ddp")), "plan"], "hydra"),
}
RUN = ROOT / "tests" / "data" / "format2" / "gpt-adamw" / "run"


def interrupt(command: list[str], at: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that gets a Ctrl-C when it imports the module `at`."""
    (cwd / "site").mkdir()
    (cwd / "site" / "sitecustomize.py").write_text(CTRL_C)
    for name in ("main.py", "sample.py"):
        command = [str(ROOT / word) if word == name else word for word in command]
    words = [str(RUN) if word == "RUN" else word for word in command]
    path = os.pathsep.join([str(cwd / "site"), str(ROOT)])
    with tempfile.TemporaryDirectory(
        prefix="t-"
    ) as tmpdir:  # short, because socket paths are limited to about 100 bytes
        done = subprocess.run(
            [sys.executable, *words],
            cwd=cwd,
            env=environment(cwd, PYTHONPATH=path, AT=at, TMPDIR=tmpdir),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert not [*Path(tmpdir).glob("mingpt-*")]
    return done


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_during_an_import_gives_one_line(name, tmp_path):
    done = interrupt(*COMMANDS[name], tmp_path)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "interrupted\n")
    assert done.stdout == "" or name == "replay"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_a_script_of_the_user_gets_its_keyboard_interrupt(tmp_path):
    (tmp_path / "main.py").write_text(
        "import mingpt_ddp, signal\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    print('mine')\n"
    )
    command = [sys.executable, "main.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(tmp_path, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")
