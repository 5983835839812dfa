"""The function `at` of `import mingpt_ddp`. As in api.py, torch is imported when it is used."""

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
        step: A number, or "worst" for the step with the largest logged loss.
        without: Number of a sequence to leave out when the step is rehearsed again, from 1.
        nproc: 1 to repeat on one rank. None for as many ranks as the run had.
        words: More words of the command line that trains, to name your own code.
        code: Your Python file that registers the model, if it is not built in.

    Returns:
        What the command prints as JSON, with `losses` (B) and `tokens` (B, T + 1) as tensors in the
        order of the losses. And `before`, the LoadedRun of the step before, or None at the first.

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
            # The step has trained the weights themselves, not their average.
            before.model.load_state_dict(read_snapshot(url, step=number).model)
    for key, of_one in (("losses", "loss"), ("tokens", "tokens")):
        found[key] = torch.tensor([sequence[of_one] for sequence in found["sequences"]])
    return {**found, "before": before}
