"""Check that examples/verify_copies.py reports a bit flip on one rank before it is saved."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from example_files import EXAMPLES, command_of, run_in_shell
from launching import TINY, call, python_main
from snapshot_helpers import digests

EXAMPLE = EXAMPLES / "verify_copies.py"
# Rank 1 flips a low bit of a weight after step 6, but only once. Then the example compares the
# weights.
HOOKS = f"""
import os, sys
from pathlib import Path
import torch
from mingpt_ddp.registry import acts

@acts("update")
def flip(step, weights):
    if step == 6 and os.environ["RANK"] == "1" and not Path("flipped").exists():
        Path("flipped").touch()
        weights["token_embedding.weight"].view(torch.int32)[3, 4] ^= 4

sys.path.insert(0, {str(EXAMPLES)!r})
import verify_copies
"""


def train(cwd: Path) -> subprocess.CompletedProcess[str]:
    cwd.mkdir(exist_ok=True)
    (cwd / "hooks.py").write_text(HOOKS)
    settings = ["trainer.device=cpu", "ddp.nproc_per_node=2", "run.name=run"]
    saves = ["snapshot.every_steps=2", "snapshot.background=false", "snapshot.keep_last=9"]
    return call([*python_main(), *TINY, *settings, *saves, f"+data.code={cwd}/hooks.py"], cwd)


def test_the_command_of_the_example(tmp_path):
    done = run_in_shell(command_of(EXAMPLE), tmp_path)
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "outputs" / "verified" / "result.json").read_text())
    assert (result["status"], result["step"], result["world_size"]) == ("complete", 20, 2)


def test_a_flipped_bit_is_named_before_it_is_saved_and_a_restart_undoes_it(tmp_path):
    undisturbed, cwd = tmp_path / "undisturbed", tmp_path / "flipped"
    undisturbed.mkdir()
    (undisturbed / "flipped").touch()
    done = train(undisturbed)
    assert done.returncode == 0, done.stdout
    done = train(cwd)
    assert done.returncode == 0, done.stdout
    named = "after step 6 rank 1 holds different bits of token_embedding.weight than rank 0; "
    before, restarted = done.stdout.split("restart 1 of 3\n")
    assert named in before
    assert named not in restarted
    assert "resuming from the snapshot of step 4 of 12" in restarted
    assert digests(cwd / "outputs" / "run") == digests(undisturbed / "outputs" / "run")
