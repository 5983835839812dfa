"""Print the loss of a nanoGPT checkpoint over the whole validation text, computed like ours.

Windows are contiguous. Every character but the first is predicted exactly once, and the mean is
over characters. `time_to_loss.py` runs this script in nanoGPT's directory, with its model.py and
its data. The output is one JSON object.

    python nanogpt_loss.py out-shakespeare-char/ckpt.pt
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path.cwd()))
from model import GPT, GPTConfig

ROWS = 64  # number of windows in a batch


@torch.no_grad()
def whole_loss(model: GPT, text: torch.Tensor, T: int) -> float:
    n = len(text) - 1  # number of characters that have a predecessor
    whole = n // T * T
    parts = [(start, min(start + ROWS * T, whole), T) for start in range(0, whole, ROWS * T)]
    parts += [(whole, n, n - whole)] * (n > whole)
    total = 0.0
    for start, stop, length in parts:
        x, y = text[start:stop].view(-1, length), text[start + 1 : stop + 1].view(-1, length)
        total += model(x, y)[1].item() * y.numel()
    return total / n


def main() -> None:
    torch.set_num_threads(1)
    checkpoint = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    text = torch.from_numpy(
        np.fromfile("data/shakespeare_char/val.bin", dtype=np.uint16).astype(np.int64)
    )
    loss = whole_loss(model.eval(), text, checkpoint["model_args"]["block_size"])
    print(
        json.dumps(
            {
                "val_loss": loss,
                "step": checkpoint["iter_num"],
                "estimate": float(checkpoint["best_val_loss"]),
            }
        )
    )


if __name__ == "__main__":
    main()
