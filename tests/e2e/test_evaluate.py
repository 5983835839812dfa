"""The evaluate command on runs of a language model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from launching import ROOT, TINY, call, environment, python_main, torchrun

from mingpt_ddp.snapshots.load_model import load_model
from mingpt_ddp.storage.run_dir import read_result


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("trained")
    done = call(
        [*python_main(), *TINY, "trainer.precision=fp32", "data.train_split=0.8", "data.test_split=0.1", "run.name=a"],
        cwd,
    )
    assert done.returncode == 0, done.stdout
    return cwd


def evaluate(cwd, *args: str, launcher: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    env = environment(cwd, PYTHONPATH=str(ROOT))
    command = [*launcher, "-m", "mingpt_ddp.evaluate", "outputs/a", "device=cpu", "precision=fp32", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_metrics_are_those_of_the_run(split, ranks, trained):
    launcher = (sys.executable,) if ranks == 1 else tuple(torchrun(2)[:-1])
    done = evaluate(trained, f"split={split}", launcher=launcher)
    assert done.returncode == 0, done.stderr
    result = read_result(trained / "outputs" / "a")
    metrics = json.loads(done.stdout)
    assert metrics.pop("split") == split
    assert metrics == {name: pytest.approx(result[f"{split}_{name}"], abs=1e-5) for name in metrics}
    assert set(metrics) == {"loss", "accuracy", "bits_per_char"}


@pytest.mark.parametrize("text", ["no", "the rest is silence"])
def test_another_text_is_measured_as_a_whole(text, trained):
    """Also one that is shorter than a window of training."""
    (trained / "other.txt").write_text(text)
    done = evaluate(trained, "data.path=other.txt")
    assert done.returncode == 0, done.stderr
    model, tokenizer = load_model(str(trained / "outputs" / "a"))
    tokens, length = torch.tensor([tokenizer.encode(text)]), 16
    losses = []
    for first in range(0, tokens.shape[1] - 1, length):
        x, y = tokens[:, first : first + length], tokens[:, first + 1 : first + 1 + length]
        with torch.no_grad():
            logits = model(x[:, : y.shape[1]])
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none"))
    assert json.loads(done.stdout)["loss"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-5)


def test_a_character_that_the_model_does_not_know_is_refused(trained):
    (trained / "greek.txt").write_text("logos is λόγος" * 9)
    done = evaluate(trained, "data.path=greek.txt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("data error: ")
    assert len(done.stderr.splitlines()) == 1
