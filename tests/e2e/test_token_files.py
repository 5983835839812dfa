"""Train on shards of token ids without a tokenizer, and use the run in other commands.

SIGKILL does not change the bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from holding import kill_before
from launching import ROOT, TINY, call, committed, python_main
from runs import read_result, succeed, tensor_files

STEPS = 30
SETTINGS = [
    *TINY,
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=10",
    "data.truncate=1",
    "data.format=tokens",
    "data.dtype=uint16",
    "data.path=train_*.bin",
    "data.split_paths={val:val.bin}",
    "data.vocab_size=300",
    "data.cache_dir=cache",
    "ddp.nproc_per_node=2",
    "snapshot.every_steps=5",
    "run.name=run",
]


def shards(cwd: Path) -> Path:
    cwd.mkdir()
    for name, size in (("train_0", 3000), ("train_1", 17), ("train_2", 2500), ("val", 500)):
        ids = np.random.default_rng(size).integers(0, 300, size, np.uint16)
        ids.tofile(cwd / f"{name}.bin")
    return cwd


def command(module: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "mingpt_ddp", module, *words]


def test_token_ids_without_a_tokenizer(tmp_path):
    whole = shards(tmp_path / "whole")
    text = succeed([*python_main(), *SETTINGS], whole)
    said = "300 distinct; without data.tokenizer there are no samples and no bits per byte\n"
    assert text.count(said) == 1 and "a sample" not in text
    names = {path.name for path in whole.glob("cache/*/*")}
    assert names == {"meta.json"}  # the shards are not copied
    result = read_result(whole / "outputs/run")
    assert "bits_per_byte" not in result

    killed = shards(tmp_path / "killed")
    run = killed / "outputs/run"
    kill_before(8, [*python_main(), *SETTINGS], killed, lambda: committed(run))
    succeed([*python_main(), *SETTINGS], killed)
    assert tensor_files(run, STEPS) == tensor_files(whole / "outputs/run", STEPS)

    path = str(ROOT)
    done = call(command("sample", "outputs/run"), whole, separate=True, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().startswith("data error: the model has no tokenizer")
    measure = command("evaluate", "outputs/run", "device=cpu", "precision=fp32")
    done = call(measure, whole, separate=True, PYTHONPATH=path)
    assert json.loads(done.stdout).keys() == {"split", "loss", "accuracy"}, done.stderr
    export = command("snapshots", "export", "outputs/run", "to=exported", "format=hf")
    succeed(export, whole, PYTHONPATH=path)
    assert json.loads((whole / "exported/config.json").read_text())["vocab_size"] == 300
    assert not [*whole.glob("exported/tokenizer*")]
