"""Read the results of a sweep and the trials of its search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launching import TINY

from mingpt_ddp.metrics.jsonl import METRICS, read_history

SHORT = [
    *TINY,
    "model.n_layer=1",
    "data.truncate=0.01",
    "trainer.max_steps=4",
    "trainer.eval_every=2",
    "snapshot.every_steps=2",
]
SEARCH = ["-m", "sweep=optuna_lr", *SHORT]
DIRECTORY = Path("outputs", "optuna_lr")


def recorded(directory: Path) -> list[dict[str, Any]]:
    """Return every field of every trial as Optuna reads them, without the times."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.JournalStorage(JournalFileBackend(f"{directory}/study.journal"))
    study = optuna.load_study(study_name=directory.name, storage=storage)
    return [
        {
            "state": trial.state.name,
            "params": trial.params,
            "values": trial.values,
            "reports": list(trial.intermediate_values.items()),
            **trial.user_attrs,
        }
        for trial in study.trials
    ]


def ends(directory: Path) -> list[int]:
    """Return the trial numbers in the order in which the journal says that trials ended."""
    lines = map(json.loads, (directory / "study.journal").read_text().splitlines())
    return [line["trial_id"] for line in lines if line["op_code"] == 6]


def trials(directory: Path) -> list[tuple[str, dict[str, Any], list[float] | None]]:
    """Return the state, parameters and objectives of every trial."""
    return [(each["state"], each["params"], each["values"]) for each in recorded(directory)]


def states(directory: Path) -> list[str]:
    return [state for state, _, _ in trials(directory)]


def results(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the result of each job by the name of its directory."""
    paths = directory.glob("*/result.json")
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def statuses(directory: Path) -> dict[str, str]:
    return {name: result["status"] for name, result in results(directory).items()}


def weights(directory: Path) -> dict[str, bytes]:
    """Return the last weights of each job by the name of its directory."""
    found = {}
    for name, result in results(directory).items():
        snapshot = directory / name / "snapshots" / f"step_{result['step']:08d}"
        found[name] = (snapshot / "model.safetensors").read_bytes()
    return found


def starts(directory: Path) -> dict[str, int]:
    return {path.parent.name: read_history(path).starts for path in directory.glob(f"*/{METRICS}")}


def history_lines(directory: Path) -> int:
    """Return the total number of lines in the jobs' histories, a measure of progress."""
    return sum(len(path.read_bytes().splitlines()) for path in directory.glob(f"*/{METRICS}"))


def content(directory: Path) -> dict[str, bytes]:
    """Return the content of all files below a directory by path."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}
