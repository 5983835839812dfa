"""The Tab key in bash, by Hydra's script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import PATIENCE_S, ROOT, environment

# What bash does at a Tab at the end of a line, for each of the lines, by the rule of their program.
TAB = """
eval "$("$@" -sc install=bash)"
[[ $(complete -p $1) == *hydra_bash_completion* ]] || exit 1
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE}
    words=($COMP_LINE)
    COMP_CWORD=$(( ${#words[@]} - 1 ))
    [[ $COMP_LINE == *' ' ]] && COMP_CWORD=${#words[@]}
    hydra_bash_completion
    echo "${COMPREPLY[@]}"
done
"""
CASES = {
    "mingpt-ddp": {
        "mingpt-ddp ": "train sample evaluate snapshots report plan again versions",
        "mingpt-ddp sn": "snapshots",
        "mingpt-ddp train model=gpt_n": "model=gpt_nano",
        "mingpt-ddp train -m model=gpt_nano optimizer.decay": "optimizer.decay_ratio=",
        "mingpt-ddp plan exp": "experiment=",
        "mingpt-ddp sample mai": "main.py",  # a file
    },
    "python main.py": {"python main.py model=gpt_n": "model=gpt_nano"},
}


@pytest.mark.parametrize("program", CASES)
def test_tab(program, tmp_path):
    console = tmp_path / "mingpt-ddp"  # as pip writes it
    console.write_text(f"#!{sys.executable}\nfrom mingpt_ddp.cli.main import main\nmain()\n")
    console.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.defpath])
    done = subprocess.run(
        ["bash", "-c", TAB, "bash", *program.split()],
        cwd=ROOT,
        env=environment(tmp_path, PATH=path, PYTHONPATH=str(ROOT)),
        input="\n".join([*CASES[program], ""]),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert dict(zip(CASES[program], done.stdout.splitlines(), strict=True)) == CASES[program]
