"""The same promises on a GPU; `pytest -m gpu` runs these alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import TINY, call, python_main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


def weights(run: Path) -> bytes:
    return (run / "snapshots" / "step_00000012" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_in_two_parts_equals_the_whole(precision, tmp_path):
    options = [*TINY, "model.dropout=0.1", "trainer.device=cuda", "trainer.deterministic=true"]
    options += [f"trainer.precision={precision}", "optimizer.schedule_steps=12"]
    assert call([*python_main(), *options, "run.name=whole"], tmp_path).returncode == 0
    for steps in (8, 12):
        done = call([*python_main(), *options, "run.name=parts", f"trainer.max_steps={steps}"], tmp_path)
        assert done.returncode == 0, done.stdout
    assert weights(tmp_path / "outputs" / "parts") == weights(tmp_path / "outputs" / "whole")


def test_compiled_and_under_torchrun(tmp_path):
    options = [*TINY, "ddp.nproc_per_node=1", "trainer.compile=true", "trainer.precision=auto"]
    done = call([*python_main(), *options, "run.name=a"], tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout
    assert "cuda in bf16" in done.stdout


def test_one_rank_per_gpu(tmp_path):
    options = [*TINY, f"ddp.nproc_per_node={torch.cuda.device_count() + 1}"]
    done = call([*python_main(), *options], tmp_path)
    assert done.returncode == 2
    assert "has no GPU" in done.stdout
