"""The functions of `import mingpt_ddp`, for scripts and notebooks.

Everything is imported when it is first used, so that `import mingpt_ddp` takes no time.
docs/python.md shows their use.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import nn

    from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer


def train(
    overrides: Iterable[str] | DictConfig = (), nproc: int | Literal["gpu"] | None = None
) -> dict[str, Any]:
    """Train as the train command does, in processes of its own, and print what it prints.

    The same call again resumes. Ctrl-C, or the stop button of a notebook, saves a snapshot, then
    raises KeyboardInterrupt. The training ends with the calling process, even if that is killed.

    Args:
        overrides: as on the command line, `key=value` and options of Hydra; or the composed
            configuration of another Hydra application, or its node that holds the groups.
        nproc: local processes that train together; None: as `ddp.nproc_per_node` says, by default
            one.

    Returns:
        The content of result.json, and the run directory as `run`.

    Raises:
        UserError: its one line says what went wrong.
    """
    from omegaconf import DictConfig

    from mingpt_ddp.cli.application import application_words
    from mingpt_ddp.errors import ConfigError
    from mingpt_ddp.storage.run_directory import read_result

    with tempfile.TemporaryDirectory(prefix="mingpt_ddp-") as name:
        if isinstance(overrides, DictConfig):
            words = application_words(overrides, Path(name))
        else:
            words = _words(overrides, "train")
        if {"-m", "--multirun"} & {*words}:
            raise ConfigError("train runs one job; start a sweep with mingpt_ddp.sweep")
        [directory] = _train(words, nproc)["directories"]
    return {"run": directory, **read_result(Path(directory))}


def sweep(
    overrides: Iterable[str], nproc: int | Literal["gpu"] | None = None
) -> list[dict[str, Any]]:
    """Run the jobs of a sweep or a search as the train command does with `-m`, and print the same.

    The same call again continues. Ctrl-C, or the stop button of a notebook, saves the jobs that
    run, then raises KeyboardInterrupt. All jobs end with the calling process.

    Args:
        overrides: as on the command line: `key=a,b`, the space of a search, options of Hydra.
        nproc: local processes that train each job together, as in `train`.

    Returns:
        The `rows` of the jobs that the table at the end of the sweep shows: all jobs in the sweep's
        directory, if `run.name` is set. The best setting by `sweep.metric` comes first.

    Raises:
        JobError: jobs have failed; it names them, and `rows` has the others.
        UserError: its one line says what went wrong.
    """
    from mingpt_ddp.results.report_json import job_rows

    report = _train(["-m", *_words(overrides, "sweep")], nproc)
    return job_rows([*map(Path, report["directories"])], report["metric"])


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the script at an error of this package: print its one line, and exit with code 2.

    Hydra would print a traceback, and exit with code 1.
    """
    from mingpt_ddp.distributed.exit import cli_errors

    with cli_errors():
        yield


def _words(overrides: Iterable[str], function: str) -> list[str]:
    from mingpt_ddp.errors import ConfigError

    if isinstance(overrides, str):
        raise ConfigError(f"{function} takes a list of overrides: {function}([{overrides!r:.100}])")
    is_list = isinstance(overrides, Iterable) and not isinstance(overrides, Mapping)
    words = [*overrides] if is_list else []
    if not is_list or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"{function} takes a list of overrides, not {overrides!r:.100}: "
            f"{function}(['run.name=a', ...])"
        )
    return words


def _train(words: list[str], nproc: int | Literal["gpu"] | None) -> dict[str, Any]:
    """Run the train command, and return what it reports: `directories`, and the `metric`."""
    from mingpt_ddp.distributed.env import REPORT_FILE
    from mingpt_ddp.distributed.launch.fork_server import import_path
    from mingpt_ddp.errors import RunError
    from mingpt_ddp.storage.yaml_and_json import read_json

    if nproc is not None:
        words = [*words, f"ddp.nproc_per_node={nproc}"]
    with tempfile.TemporaryDirectory(prefix="mingpt_ddp-") as name:
        file = Path(name, "report.json")
        environ = {**os.environ, "PYTHONPATH": import_path(), REPORT_FILE: str(file)}
        code, last = run_process([sys.executable, "-m", "mingpt_ddp", *words], environ)
        report = read_json(file)
    if code != 0:
        raise error_of(report, last or f"training ended with exit code {code}")
    if "directories" not in report:  # --help
        raise RunError("these arguments do not train")
    return report


def run_process(command: list[str], environ: dict[str, str]) -> tuple[int, str]:
    """Train with a command and print its output; return its exit code and its last line.

    An error is not printed, for `error_of`. End the command if this function is ended.
    """
    from mingpt_ddp.distributed.env import CALLER

    last = ""
    held = ""  # a line that may be the error to raise, until it is known
    # In a session of its own: Ctrl-C on the terminal arrives once, from here.
    with subprocess.Popen(
        command,
        env={**environ, CALLER: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                print(held, end="")
                held = line if "error: " in line else ""
                if not held:
                    print(line, end="", flush=True)
                last = line.strip() or last
        except BaseException:
            process.send_signal(signal.SIGINT)  # saves
            with contextlib.suppress(OSError):
                print(held, end="")
                print(process.communicate()[0], end="", flush=True)
            raise
        finally:
            if process.poll() is None and sys.exc_info()[0]:
                process.kill()
    if process.returncode == 0:
        print(held, end="", flush=True)
    return process.returncode, last


def error_of(report: dict[str, Any], line: str) -> Exception:
    """Return the error that training has reported, or its last line if that is another."""
    from mingpt_ddp.errors import UserError, unpack_error

    if "error" in report:
        error = unpack_error(report["error"])
        if str(error) in line:  # else it is of an attempt before a restart
            error.args = (_in_python(report["error"]["message"]),)
            return error
    return UserError(_in_python(line.partition("error: ")[2] or line))


def _in_python(message: str) -> str:
    """Write the call that starts a sweep instead of Hydra's option."""
    message = message.replace("add -m to train", "call mingpt_ddp.sweep([...]) to train")
    return message.replace("--multirun", "mingpt_ddp.sweep([...])")


@dataclass(frozen=True)
class LoadedRun:
    """The model of a snapshot, in evaluation mode, and what belongs to it."""

    model: nn.Module  # model(ids), ids (B, T) int64, gives logits (B, T, V)
    tokenizer: Tokenizer
    config: dict[str, Any]  # of the run, by group, as in config.yaml
    step: int

    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = 500,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 1,
    ) -> str:
        """Return the prompt and its continuation; the arguments are those of the sample command.

        Raises:
            ConfigError: an argument is out of bounds.
            DataError: the prompt has characters that the model does not know.
        """
        from mingpt_ddp.cli.sample_config import SampleConfig
        from mingpt_ddp.config.validation import build
        from mingpt_ddp.inference.generate import SamplingParams, generate_text

        checked = {
            "snapshot": "-",
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
        }
        build(SampleConfig, checked, "")
        sampling = SamplingParams(temperature, top_k, top_p)
        model = self.model
        texts = generate_text(model, self.tokenizer, prompt, max_new_tokens, sampling, seed)
        return prompt + texts[0]


def load(
    run: str | os.PathLike[str],
    step: int | Literal["newest", "best"] = "newest",
    device: str = "cpu",
    code: str | None = None,
) -> LoadedRun:
    """Load the model of a run in fp32.

    Args:
        run: a run directory, its snapshots or one of them; a path or any fsspec URL.
        step: newest, best (lowest validation loss) or a number.
        code: your Python file that registers the model, if it is not built in.

    Raises:
        SnapshotError: there is no such snapshot, or no model can be built from it.
    """
    import torch

    from mingpt_ddp.config.builders import run_file
    from mingpt_ddp.models import move_model
    from mingpt_ddp.snapshots.read.load_model import load_with_state

    if code is not None:
        run_file(Path(code), "code")
    model, tokenizer, snapshot = load_with_state(os.fspath(run), step)
    move_model(model, torch.device(device)).eval()
    return LoadedRun(model, tokenizer, snapshot.state["config"], snapshot.step)


def history(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the measurements of a run by step, or those of all jobs of a sweep.

    A step that was repeated after a restart counts once. A row has the keys of what was measured at
    its step. Of a sweep it also has `job`, a directory relative to the sweep's, and by dotted key
    the parameters in which the jobs differ.

    Args:
        run: a run, or a parent of runs one or two levels below.

    Raises:
        RunError: this is not the directory of a run or a sweep.
        DataError: its metrics.jsonl is damaged.
    """
    from mingpt_ddp.errors import RunError
    from mingpt_ddp.metrics.jsonl import METRICS, read_history
    from mingpt_ddp.results.runs import is_run, read_jobs, varying

    directory = Path(run)
    if directory.is_dir() and not is_run(directory):
        jobs = read_jobs([directory])
        keys = varying(jobs)
        rows = []
        for job in jobs:
            named = {"job": job.name, **{key: job.config[key] for key in keys if key in job.config}}
            rows += [named | row for row in job.history.rows]
        return rows
    try:
        return read_history(directory / METRICS).rows
    except OSError as error:
        raise RunError(
            f"{run} is not a run directory: it has no {METRICS} that can be read"
        ) from error


def rows(*directories: str | os.PathLike[str], metric: str | None = None) -> list[dict[str, Any]]:
    """Return a row for each job. The jobs of the setting with the best mean come first.

    The mean is over all seeds of a setting, as in the table of a report. A setting has no mean if
    none of its jobs is complete, or if a seed has diverged; such settings come last.
    A row has `name`, `directory`, `status`, `seed` and `code`; by dotted key the other parameters
    in which the jobs differ; `step` and `val_loss`, the last ones of a job that is not complete;
    and the other numbers of result.json. What is unknown or not finite is None.

    Args:
        directories: runs, or parents of runs one or two levels below.
        metric: A number of result.json to order the rows by, lowest first; `-NAME` for highest
            first. By default the `sweep.metric` of the sweep, or else the validation loss.

    Raises:
        ConfigError: they are not paths.
        RunError: one of them is not a directory, or contains no run; or no run has the metric.
    """
    from mingpt_ddp.errors import ConfigError
    from mingpt_ddp.results.report_json import job_rows

    are_paths = all(each and isinstance(each, str | os.PathLike) for each in directories)
    if not directories or not are_paths:
        raise ConfigError("rows takes one directory or several: rows('outputs/lr', ...)")
    return job_rows([*map(Path, directories)], metric)
