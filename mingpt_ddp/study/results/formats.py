"""Format the numbers and texts of a report, and the commands that it suggests."""

import json
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mingpt_ddp import errors
from mingpt_ddp.storage.recorded_words import confirming_words
from mingpt_ddp.storage.run_directory import SCRIPT, recorded_script
from mingpt_ddp.study.results.objective import Objective
from mingpt_ddp.study.results.runs import Row, RunRecord, Value

NO_COMMAND = "there is no command line, because run.name cannot be read from config.yaml"
MAX_LENGTH = 60  # longest value or name in a table, in characters
# A key that ends with one of these names is shown whole: the name is unclear without its group, or
# it is the title of another column.
AMBIGUOUS_NAMES = {
    "name",
    "path",
    "n",
    "sd",
    "status",
    "step",
    "faults",
    "minutes",
    "time",
    "job",
    "directory",
}
# Words for the prefixes of metric names.
PREFIX_WORDS = {"val_": "validation", "train_": "training", "test_": "test"}
# Words for the short names of keys and metrics.
KEY_WORDS = {
    "lr": "learning rate",
    "n_layer": "layers",
    "n_head": "heads",
    "n_embd": "width",
    "grad_norm": "gradient norm",
    "best_val_loss": "best validation loss",
    "tokens_per_s": "tokens per second",
    "samples_per_s": "samples per second",
    "step_ms": "time of a step, ms",
    "peak_mib": "peak memory, MiB",
    "mfu": "model FLOPs utilization",
}


def duration(seconds: float | None) -> str:
    """Format a time as hours, minutes and seconds. Return "" if it is unknown or impossible."""
    if seconds is None or not 0 <= seconds < 1e13:
        return ""
    return errors.duration(seconds)


def short_names(keys: list[str]) -> dict[str, str]:
    """Shorten dotted keys to their last part. A key with an ambiguous last part stays whole."""
    last = [key.rpartition(".")[2] for key in keys]
    unclear = AMBIGUOUS_NAMES | {name for name, count in Counter(last).items() if count > 1}
    return {key: key if name in unclear else name for key, name in zip(keys, last, strict=True)}


def assignments(row: Row, keys: list[str]) -> list[str]:
    """Format `name=value` for each of these keys that the row has."""
    names = short_names(keys)
    return [f"{names[key]}={format_value(row.config[key])}" for key in keys if key in row.config]


def format_value(value: Value) -> str:
    """Format a value as on the command line, but cut to MAX_LENGTH characters."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return format_brief(value)
    return cut(value if isinstance(value, str) else json.dumps(value))


def format_brief(value: float) -> str:
    """Format a number with at most four digits, such as 3e-4. A whole number keeps all digits."""
    if abs(value) < 1e9 and value == round(value):
        return f"{value:.0f}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 else scientific(value)


def format_number(value: float | None, form: str) -> str:
    """Format a number, or `-` for None. A very large number gets an exponent.

    Args:
        form: Format of an ordinary number, such as `.4f`.
    """
    if value is None:
        return "-"
    return f"{value:{form}}" if abs(value) < 1e12 else scientific(value)


def scientific(value: float) -> str:
    """Format a number with at most four digits and an exponent."""
    digits, _, exponent = f"{value:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def cut(text: str, longest: int = MAX_LENGTH) -> str:
    """Cut the middle out of a long text. Its end stays: similar names often differ there."""
    if len(text) <= longest:
        return text
    return f"{text[: (longest - 1) // 2]}…{text[len(text) - longest // 2 :]}"


def words(name: str) -> str:
    """Write the short name of a key in words for a page, such as "learning rate" for lr."""
    for begin, word in PREFIX_WORDS.items():
        if name.startswith(begin):
            name = f"{word} {name.removeprefix(begin)}"
    return KEY_WORDS.get(name) or re.sub(r"[_.]+", " ", name.removesuffix(".name"))


def format_time(seconds: float | None) -> str:
    """Format a Unix time. Return `-` if it is unknown or impossible."""
    if seconds is None or not 0 <= seconds < 1e11:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def command_line(job: RunRecord) -> str:
    """Return the command that continues or repeats a job, quoted for a shell.

    Returns:
        NO_COMMAND if no run.name is recorded. If the job was trained by the user's own loop, a
        sentence with the path of the recorded script and its arguments.
    """
    if recorded := recorded_script(job.directory):
        started = f", run with {shlex.join(recorded[1])}" if recorded[1] else ""
        return f"trained by the script {job.directory / SCRIPT}{started}"
    # Without run.name, the command would begin a new run.
    if "run.name" not in job.config:
        return NO_COMMAND
    words = [str(job.directory), *confirming_words(job.directory, job.config)]
    return f"{errors.command('again')} {shlex.join(words)}"


def compare_command(directories: Iterable[Path], objective: Objective) -> str:
    """Return the command that compares the runs in these directories."""
    words = [*map(str, directories), "compare"]
    if objective.note:
        words.append(f"metric={objective.metric}")
    return f"{errors.command('report')} {shlex.join(words)}"
