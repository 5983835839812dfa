"""This project and nanoGPT as their users start them, at the same shapes: eagerly on a CPU, compiled on a GPU."""

from __future__ import annotations

import pickle
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT

FOREVER = 1_000_000  # steps; no timed run gets there
OURS, NANOGPT = r"^step (\d+)/", r"^iter (\d+):"  # how a step is reported


@dataclass(frozen=True)
class Setting:
    n_layer: int
    n_head: int
    n_embd: int
    context: int
    batch: int
    warmup: int  # steps before the first stamp
    timed: int  # steps between the first stamp and the last
    log_every: int

    @property
    def span(self) -> tuple[int, int]:
        return self.warmup, self.timed

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.context


SETTINGS = {
    "small": Setting(4, 4, 128, context=64, batch=12, warmup=50, timed=300, log_every=10),
    "mid": Setting(6, 6, 384, context=256, batch=16, warmup=2, timed=8, log_every=1),
    "char": Setting(6, 6, 384, context=256, batch=64, warmup=200, timed=1000, log_every=100),  # nanoGPT's for a GPU
    "gpt2": Setting(12, 12, 768, context=1024, batch=12, warmup=50, timed=200, log_every=10),
}
ON = {"cpu": ["small", "mid"], "cuda": ["char", "gpt2"]}  # what is measured where

# Ours: nanoGPT's architecture and optimizer, and the fast recipe. On a CPU the first computes as nanoGPT does there.
PLAIN = ["model=gpt_micro", "model.bias=false", "optimizer=adamw"]
PLAIN_FP32 = [*PLAIN, "trainer.precision=fp32"]
MODERN = ["model=modern_micro", "optimizer=muon"]


def ours(setting: Setting, text: Path, scratch: Path, recipe: list[str], device: str = "cpu") -> list[str]:
    """The command that trains without an end: its loader, clipping, metering and TensorBoard, no evaluation, no save.

    Args:
        scratch: the directory of its runs and of the encoded text.
        recipe: overrides that choose the model and the optimizer; the precision is auto unless it says another.
    """
    shape = {"model.n_layer": setting.n_layer, "model.n_head": setting.n_head, "model.n_embd": setting.n_embd}
    shape |= {"data.block_size": setting.context, "trainer.batch_size": setting.batch}
    shape |= {"trainer.log_every": setting.log_every, "trainer.max_steps": FOREVER}
    overrides = ["trainer.precision=auto", *recipe, "model.dropout=0.0", "data=shakespeare"]
    overrides += [f"trainer.device={device}", f"trainer.compile={str(device == 'cuda').lower()}"]
    overrides += ["trainer.grad_norm_clip=1.0", "trainer.max_epochs=null", "trainer.eval_every=null"]
    overrides += ["snapshot.every_steps=null", "run.resume=never"]
    overrides += [*places(text, scratch), *(f"{key}={value}" for key, value in shape.items())]
    return [sys.executable, str(ROOT / "main.py"), *overrides]


def places(text: Path, scratch: Path) -> list[str]:
    """Overrides that name the text and keep everything else in one directory."""
    return [f"data.path='{text}'", f"data.cache_dir='{scratch / 'cache'}'", f"run.root='{scratch / 'runs'}'"]


def nanogpt(setting: Setting, device: str = "cpu") -> list[str]:
    """nanoGPT's command, in a copy that `copy_with_data` made; on a CPU it computes in fp32, on a GPU in bf16."""
    shape = {"n_layer": setting.n_layer, "n_head": setting.n_head, "n_embd": setting.n_embd}
    shape |= {"block_size": setting.context, "batch_size": setting.batch, "log_interval": setting.log_every}
    options: dict[str, Any] = shape | {"eval_iters": 1, "eval_interval": FOREVER, "max_iters": FOREVER}
    options |= {"device": device, "compile": device == "cuda", "dropout": 0.0, "grad_clip": 1.0}
    flags = [f"--{key}={value}" for key, value in options.items()]
    return [sys.executable, "train.py", "config/train_shakespeare_char.py", *flags]


def copy_with_data(checkout: Path, text: Path, copy: Path) -> Path:
    """nanoGPT's code in a directory of its own, with the text in the form that it reads."""
    if not (checkout / "train.py").is_file() or not (checkout / "config").is_dir():
        sys.exit(f"--nanogpt {checkout} is not a checkout of nanoGPT: it has no train.py or no config/")
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "assets", "*.ipynb", "*.bin", "out*"))
    characters = text.read_text(encoding="utf-8")
    vocabulary = {character: token for token, character in enumerate(sorted(set(characters)))}
    tokens = np.array([vocabulary[character] for character in characters], dtype=np.uint16)
    boundary = int(0.9 * len(tokens))
    data = copy / "data" / "shakespeare_char"
    data.mkdir(parents=True, exist_ok=True)
    tokens[:boundary].tofile(data / "train.bin")
    tokens[boundary:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(vocabulary)}))
    return copy
