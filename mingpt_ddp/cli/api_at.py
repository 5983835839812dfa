"""The function `at` of `import mingpt_ddp`. As in api.py, torch is imported inside functions."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from mingpt_ddp.cli.api import load


def at(
    run: str | os.PathLike[str],
    step: int | Literal["worst"],
    without: int | None = None,
    nproc: int | None = None,
    words: Iterable[str] = (),
    code: str | None = None,
) -> dict[str, Any]:
    """Repeat a step of a run as the command `at` does, in new processes.

    Args:
        run: Path or fsspec URL of a run directory, or of its directory of snapshots.
        step: Number of the step, or "worst" for the step with the largest logged loss.
        without: Number of a sequence, where sequence 1 has the highest loss. Measure the step a
            second time without this sequence.
        nproc: 1 to repeat on one rank. None for as many ranks as the run had.
        words: Additional arguments of the train command that repeats the step, such as
            `--config-dir=DIR` for your own code.
        code: Your Python file that registers the model, if the model is not built in. It is needed
            to load the model that is returned as `before`.

    Returns:
        The values that the command prints as JSON, and three more. `losses` (B) and `tokens`
        (B, T + 1) are tensors, with the highest loss first. `before` is the LoadedRun of the
        previous step, or None if the step is the first one.

    Raises:
        UserError: The step cannot be repeated. The message is one line.
    """
    import torch

    from mingpt_ddp.cli.at import look_at
    from mingpt_ddp.cli.replay import REPLAY_RUN_NAME, TEMPORARY
    from mingpt_ddp.snapshots.read.load import load as read_snapshot

    before = None
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
        found = look_at(os.fspath(run), step, Path(name), without, nproc, [*words])
        number = found["step"] - 1
        if number:
            is_recorded = found["repeated_from"] == number
            url = os.fspath(run) if is_recorded else f"{name}/{REPLAY_RUN_NAME}"
            before = load(url, number, code=code)
            # `load` prefers averaged weights (trainer.ema), but the step was trained with the
            # weights that are not averaged.
            before.model.load_state_dict(read_snapshot(url, step=number).model)
    for key, key_in_sequence in (("losses", "loss"), ("tokens", "tokens")):
        found[key] = torch.tensor([each[key_in_sequence] for each in found["sequences"]])
    return {**found, "before": before}
