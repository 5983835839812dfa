"""Check examples/norms.py: its command, its norms, and that a resume gives the same bits."""

from __future__ import annotations

import json

import pytest
import torch
from example_files import EXAMPLES, command_of, run_in_shell
from launching import TINY, python_main
from runs import read_history, succeed
from safetensors.torch import load_file

EXAMPLE = EXAMPLES / "norms.py"


def test_the_command_of_the_example(tmp_path):
    done = run_in_shell(command_of(EXAMPLE), tmp_path)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "outputs" / "norms"
    assert json.loads((run / "result.json").read_text())["status"] == "complete"
    last = read_history(run).by_step()[20]
    for kind in ("weights", "gradients", "update"):
        for layer in ("token_embedding", "blocks.0", "blocks.3", "head"):
            assert last[f"train_{kind}_{layer}"] > 0


def test_the_norms_match_the_weights_and_continue_after_a_resume(tmp_path):
    """The update of the last step must equal the difference between two snapshots."""
    common = [*TINY, "trainer.device=cpu", "trainer.log_every=1", f"+data.code={EXAMPLE}"]
    saves = ["snapshot.every_steps=1", "snapshot.keep_last=9", "snapshot.background=false"]
    for steps in (3, 4):
        words = ["run.name=run", "optimizer.schedule_steps=4", f"trainer.max_steps={steps}"]
        succeed([*python_main(), *common, *saves, *words], tmp_path)
    run = tmp_path / "outputs" / "run"
    before, after = (
        load_file(run / "snapshots" / f"step_{step:08}" / "model.safetensors") for step in (3, 4)
    )
    record = read_history(run).by_step()[4]
    of_block = [name for name in after if name.startswith("blocks.0.")]
    weights = torch.cat([after[name].flatten() for name in of_block])
    change = weights - torch.cat([before[name].flatten() for name in of_block])
    assert record["train_weights_blocks.0"] == pytest.approx(float(weights.norm()), rel=1e-4)
    assert record["train_update_blocks.0"] == pytest.approx(float(change.norm()), rel=1e-4)
