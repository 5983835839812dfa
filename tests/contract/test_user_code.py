"""Check that a user's model, as in docs/your-own-model.md, trains, resumes byte for byte and samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from .contract import (
    MAIN,
    SAMPLE,
    call,
    check_equal_runs,
    committed,
    one_error_line,
    result,
    settings,
    succeed,
)

pytestmark = pytest.mark.timeout(600)

YAML = """
name: convolution
architecture: convolution
code: mine.py
width: 32
dropout: 0.1
"""
CODE = '''
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from mingpt_ddp.registry import ModelConfig, check, register


@dataclass(frozen=True)
class ConvolutionConfig(ModelConfig):
    width: int
    dropout: float

    def __post_init__(self):
        check(self.width >= 1, f"model.width={self.width} must be at least 1")


@register("model", "convolution", ConvolutionConfig)
class Convolution(nn.Module):
    """Each character depends on the three characters before it."""

    def __init__(self, config, vocab_size, block_size):
        super().__init__()
        self.dropout = config.dropout
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.convolution = nn.Conv1d(config.width, config.width, 4)
        self.head = nn.Linear(config.width, vocab_size)

    def forward(self, tokens, targets=None):
        x = F.pad(self.embedding(tokens).transpose(1, 2), (3, 0))
        x = F.dropout(F.gelu(self.convolution(x)).transpose(1, 2), self.dropout, self.training)
        logits = self.head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("my_project")
    (directory / "model").mkdir()
    (directory / "model" / "convolution.yaml").write_text(YAML)
    (directory / "mine.py").write_text(CODE)
    return directory


def train(project: Path, text: Path, *overrides: str) -> list[str]:
    replaced = ("model=", "model.n_layer=", "model.n_embd=", "trainer.batch_size=")
    kept = [override for override in settings(text) if not override.startswith(replaced)]
    return [*MAIN, f"--config-dir={project}", "model=convolution", "trainer.batch_size=48", *kept, *overrides]


@pytest.fixture(scope="module")
def uninterrupted(project: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("uninterrupted")
    succeed(train(project, text), cwd)
    return cwd / "outputs" / "run"


def test_resumes(uninterrupted: Path, project: Path, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    succeed(train(project, text, "trainer.max_steps=35"), tmp_path)
    assert (result(run)["step"], committed(run)[-1]) == (35, 35)
    succeed(train(project, text), tmp_path)
    check_equal_runs(run, uninterrupted, ranks=1)
    assert result(run)["val_loss"] < 2.7, "the model has not learned"


def test_samples(uninterrupted: Path, project: Path, tmp_path: Path) -> None:
    """The user has to name the file, since code that a snapshot names is never run automatically."""
    command = [*SAMPLE, f"snapshot={uninterrupted}", "prompt=the king", "max_new_tokens=80"]
    text = succeed([*command, f"code={project / 'mine.py'}"], tmp_path)
    assert text.startswith("the king")
    assert len(text) == len("the king") + 80 + len("\n")
    refused = call(command, tmp_path)
    assert refused.returncode == 2
    assert "code=" in one_error_line(refused.stdout)


def test_its_config_errors_are_one_line(project: Path, text: Path, tmp_path: Path) -> None:
    done = call(train(project, text, "model.width=0"), tmp_path)
    assert done.returncode == 2
    assert "model.width=0 must be at least 1" in one_error_line(done.stdout)
    assert list(tmp_path.iterdir()) == []
