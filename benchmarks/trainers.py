"""Build the commands that train with this project and with nanoGPT at the same shapes.

Both are eager on a CPU, and compiled on a GPU.
"""

from __future__ import annotations

import pickle
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT

FOREVER = 1_000_000  # number of steps that no timed run reaches
OURS, NANOGPT = r"^step (\d+)/", r"^iter (\d+):"  # patterns for the log line of a step


@dataclass(frozen=True)
class Setting:
    n_layer: int
    n_head: int
    n_embd: int
    context: int
    batch: int
    warmup: int  # number of steps before the stopwatch starts
    timed: int  # number of timed steps
    log_every: int

    @property
    def span(self) -> tuple[int, int]:
        return self.warmup, self.timed

    @property
    def tokens(self) -> int:
        """Number of tokens in a step."""
        return self.batch * self.context


SETTINGS = {
    "small": Setting(4, 4, 128, context=64, batch=12, warmup=50, timed=300, log_every=10),
    "mid": Setting(6, 6, 384, context=256, batch=16, warmup=2, timed=8, log_every=1),
    # These have the shapes of nanoGPT's settings for a GPU.
    "char": Setting(6, 6, 384, context=256, batch=64, warmup=200, timed=1000, log_every=100),
    "gpt2": Setting(12, 12, 768, context=1024, batch=12, warmup=50, timed=200, log_every=10),
}
ON = {"cpu": ["small", "mid"], "cuda": ["char", "gpt2"]}  # settings by device

# Our recipes: nanoGPT's architecture and optimizer, the same in fp32, and the fast recipe.
PLAIN = ["model=gpt_micro", "model.bias=false", "optimizer=adamw"]
PLAIN_FP32 = [*PLAIN, "trainer.precision=fp32"]
MODERN = ["model=modern_micro", "optimizer=muon"]


def ours(
    setting: Setting, text: Path, scratch: Path, recipe: list[str], device: str = "cpu"
) -> list[str]:
    """Build our command, which trains until it is killed.

    The run has the loader, clipping, metering and TensorBoard, but no evaluation and no save.

    Args:
        setting: The shape of the model and of the batch.
        text: Path of the training text.
        scratch: Directory for runs and the encoded text.
        recipe: Overrides for the model and the optimizer. The precision is auto unless they set it.
        device: Value of trainer.device.
    """
    shape = {
        "model.n_layer": setting.n_layer,
        "model.n_head": setting.n_head,
        "model.n_embd": setting.n_embd,
    }
    shape |= {"data.block_size": setting.context, "trainer.batch_size": setting.batch}
    shape |= {"trainer.log_every": setting.log_every, "trainer.max_steps": FOREVER}
    overrides = [
        "trainer.precision=auto",
        *recipe,
        "model.dropout=0.0",
        "data=shakespeare",
        f"trainer.device={device}",
        f"trainer.compile={str(device == 'cuda').lower()}",
        "trainer.grad_norm_clip=1.0",
        "trainer.max_epochs=null",
        "trainer.eval_every=null",
        "snapshot.every_steps=null",
        "run.resume=never",
        *path_overrides(text, scratch),
        *(f"{key}={value}" for key, value in shape.items()),
    ]
    return [sys.executable, str(ROOT / "main.py"), *overrides]


def path_overrides(text: Path, scratch: Path) -> list[str]:
    """Build overrides that read the text, and put all other files into one directory."""
    return [
        f"data.path='{text}'",
        f"data.cache_dir='{scratch / 'cache'}'",
        f"run.root='{scratch / 'runs'}'",
    ]


def nanogpt(setting: Setting, device: str = "cpu") -> list[str]:
    """Build nanoGPT's command, for a copy that `copy_with_data` has made.

    nanoGPT computes in fp32 on a CPU and in bf16 on a GPU.
    """
    shape = {"n_layer": setting.n_layer, "n_head": setting.n_head, "n_embd": setting.n_embd}
    shape |= {
        "block_size": setting.context,
        "batch_size": setting.batch,
        "log_interval": setting.log_every,
    }
    options: dict[str, Any] = shape | {
        "eval_iters": 1,
        "eval_interval": FOREVER,
        "max_iters": FOREVER,
    }
    options |= {"device": device, "compile": device == "cuda", "dropout": 0.0, "grad_clip": 1.0}
    flags = [f"--{key}={value}" for key, value in options.items()]
    return [sys.executable, "train.py", "config/train_shakespeare_char.py", *flags]


def copy_with_data(checkout: Path, text: Path, copy: Path) -> Path:
    """Copy nanoGPT's code to a new directory, and write the text there in its format.

    Args:
        checkout: A checkout of nanoGPT.
        text: Path of the text.
        copy: The new directory, which is also returned.
    """
    if not (checkout / "train.py").is_file() or not (checkout / "config").is_dir():
        sys.exit(
            f"--nanogpt {checkout} is not a checkout of nanoGPT: it has no train.py or no config/"
        )
    shutil.copytree(
        checkout, copy, ignore=shutil.ignore_patterns(".git", "assets", "*.ipynb", "*.bin", "out*")
    )
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
