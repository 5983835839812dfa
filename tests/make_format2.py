"""Make the small run directories in tests/data/format2.

Their snapshots have format 2. Every later version must load and resume them.

    python tests/make_format2.py

writes the directories that are missing. Existing directories never change. For a new model or
optimizer, add a line to RUNS.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.config.job import Job
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.jsonl import METRICS, read_history
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.training.run import train_run

DATA = Path(__file__).resolve().parent / "data" / "format2"
RUNS = {
    "gpt-adamw": ["model=gpt_nano", "optimizer=adamw"],
    "modern-muon": ["model=modern_micro", "optimizer=muon"],
}
STEPS, MORE_STEPS = 4, 8  # length of the stored run, and of the run that resumes it
# There is no dropout, since the elements that torch drops depend on the CPU.
OVERRIDES = [
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=8",
    "model.dropout=0.0",
    "run.root=.",
    "run.name=run",
    "data=text_file",
    "data.path=text.txt",
    "data.block_size=16",
    "data.cache_dir=cache",
    "trainer.batch_size=4",
    "optimizer.schedule_steps=10",
    "optimizer.warmup_steps=2",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
    "trainer.device=cpu",
    "trainer.precision=fp32",
    "trainer.eval_every=2",
    "snapshot.keep_last=1",
]


def configuration(name: str, steps: int) -> Config:
    """Compose the configuration of a run in tests/data/format2, or of a copy of the run."""
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return from_mapping(
            to_plain(compose("config", [*RUNS[name], *OVERRIDES, f"trainer.max_steps={steps}"]))
        )


def train(name: str, steps: int) -> dict[str, float]:
    """Train in the working directory. Return the training losses of the whole run by step."""
    config = configuration(name, steps)
    runtime = Runtime(config, DistEnv())
    train_run(Job(config), runtime)
    runtime.close()
    return {
        str(step): loss for step, loss in read_history(Path("run", METRICS)).series("train_loss")
    }


def hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of the dtype, shape and bytes of each tensor."""
    return {
        name: hashlib.sha256(
            f"{t.dtype} {list(t.shape)} ".encode() + t.contiguous().numpy().tobytes()
        ).hexdigest()
        for name, t in sorted(tensors.items())
    }


def make(name: str) -> None:
    generator = random.Random(2)
    phrases = ["the king", "a horse", "what light", "to be", "or not"]
    Path("text.txt").write_text(
        "".join(generator.choice(phrases) + generator.choice(".\n,; ") for _ in range(400))
    )
    train(name, STEPS)
    kept = Path("kept")
    # Leave out the files that name this machine.
    for path in ("config.yaml", METRICS, "result.json", "snapshots"):
        kept.mkdir(exist_ok=True)
        (shutil.copytree if Path("run", path).is_dir() else shutil.copy)(
            Path("run", path), kept / path
        )
    snapshot = SnapshotStore("kept/snapshots").read(STEPS)
    expected = {"model": hashes(snapshot.model), "optimizer": hashes(snapshot.optimizer)}
    values = {**expected, "train_loss": train(name, MORE_STEPS)}
    (DATA / name).mkdir(parents=True)
    shutil.copytree(kept, DATA / name / "run")
    shutil.copy("text.txt", DATA / name)
    (DATA / name / "expected.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    for missing in (name for name in RUNS if not (DATA / name).exists()):
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            make(missing)
        print(
            f"{DATA / missing}: "
            f"{sum(p.stat().st_size for p in (DATA / missing).rglob('*')):,} bytes"
        )
