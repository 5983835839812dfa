"""Write directories that look like finished runs, without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, dict[str, Any]] = {
    "run": {"name": None, "root": "outputs", "resume": "auto", "seed": 1337},
    "model": {"name": "gpt_nano", "architecture": "gpt", "n_layer": 3, "dropout": 0.0},
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "data": {"name": "python_docs", "path": "builtin:python_docs", "block_size": 64},
    "trainer": {"max_steps": 100, "batch_size": 12},
}


def fake_run(
    directory: Path,
    values: dict[str, Any] | None = None,
    status: str | None = "complete",
    val_loss: float | None = 2.0,
    steps: int = 100,
    faults: int = 0,
    overrides: list[str] | None = None,
    bits_per_byte: float | None = None,
    minutes: float | None = None,
) -> Path:
    """Write a run whose loss falls from 4.5 to `val_loss` in `steps` steps.

    Args:
        values: Configuration values that differ from CONFIG, by dotted key.
        status: Status in result.json. None for a run without this file.
        val_loss: Last validation loss. None for a run without metrics.
        bits_per_byte: Last bits per byte. None for a run that has not measured them.
        minutes: Training time, as a run with trainer.max_minutes records it.
    """
    config = {group: dict(keys) for group, keys in CONFIG.items()}
    for key, value in (values or {}).items():
        group, _, name = key.partition(".")
        config.setdefault(group, {})[name] = value
    (directory / ".hydra").mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    if overrides is not None:
        (directory / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    lines: list[dict[str, Any]] = [{"start": 1.7e9, "step": 0, "world_size": 1}]
    lines += [{"start": 1.7e9, "step": 0, "world_size": 1}] * faults
    if val_loss is not None:
        for step in range(5, steps + 1, 5):
            loss = val_loss + (4.5 - val_loss) * math.exp(-step / steps * 5)
            lines.append(
                {
                    "step": step,
                    "train_loss": loss,
                    "lr": 1e-3,
                    "grad_norm": 1.0,
                    "tokens_per_s": 40_000.0,
                }
            )
            if step % 20 == 0:
                measured = {"val_loss": val_loss if step == steps else loss + 0.05}
                if bits_per_byte is not None:
                    measured["val_bits_per_byte"] = measured["val_loss"] / val_loss * bits_per_byte
                lines.append({"step": step, **measured})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status is not None:
        result = {"status": status, "step": steps, "val_loss": val_loss, "wall_seconds": 61.5}
        if bits_per_byte is not None:
            result |= {"val_bits_per_byte": bits_per_byte, "bits_per_byte": bits_per_byte}
        if minutes is not None:
            result["minutes"] = minutes
        (directory / "result.json").write_text(json.dumps(result))
    return directory
