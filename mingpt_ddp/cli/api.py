"""The functions of `import mingpt_ddp`, for scripts and notebooks.

Each function imports the modules that it needs, so that `import mingpt_ddp` takes no time.
docs/python.md shows how to use the functions.
"""

from __future__ import annotations

import codecs
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

    from mingpt_ddp.config.job import Outcome
    from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer


def train(
    overrides: Iterable[str] | DictConfig = (),
    nproc: int | Literal["gpu"] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train as the train command does, in new processes, and print their output.

    To resume, make the same call again. Ctrl-C, or the stop button of a notebook, saves a snapshot,
    then raises KeyboardInterrupt. The training ends with the calling process, even if that process
    is killed.

    Args:
        overrides: Words as on the command line: `key=value` and options of Hydra. Or the composed
            configuration of another Hydra application, or the node of that configuration that
            holds this package's groups.
        nproc: Number of local processes that train together. None leaves it to
            `ddp.nproc_per_node`, by default one process.
        quiet: Print nothing.

    Returns:
        The content of result.json, and the run directory as `run`.

    Raises:
        UserError: Training failed. The message is one line.
    """
    from omegaconf import DictConfig

    from mingpt_ddp.cli.application import application_job
    from mingpt_ddp.errors import ConfigError
    from mingpt_ddp.storage.run_directory import read_result

    if isinstance(overrides, DictConfig):
        outcome = _start([], application_job(overrides, nproc), quiet)
    else:
        words = _words(overrides, "train")
        if any(map(_is_multirun, words)):
            raise ConfigError("mingpt_ddp.train runs one job; start a sweep with mingpt_ddp.sweep")
        outcome = _start([*words, *_nproc_words(nproc)], None, quiet)
    [directory] = outcome.directories
    return {"run": str(directory), **read_result(directory)}


def sweep(
    overrides: Iterable[str], nproc: int | Literal["gpu"] | None = None, quiet: bool = False
) -> list[dict[str, Any]]:
    """Run a sweep or a search as the train command does with `-m`, and print its output.

    To continue, make the same call again. Ctrl-C, or the stop button of a notebook, saves the
    running jobs, then raises KeyboardInterrupt. All jobs end with the calling process.

    Args:
        overrides: Words as on the command line: `key=a,b`, the space of a search, options of Hydra.
        nproc: Number of local processes that train each job together, as in `train`.
        quiet: Print nothing.

    Returns:
        One row for each job in the table at the end of the sweep, as from `rows`. If `run.name` is
        set, these are all jobs in the sweep's directory. The best setting by `sweep.metric` comes
        first.

    Raises:
        JobError: Some jobs have failed. The message names them; call `rows` for the other jobs.
        UserError: The sweep failed. The message is one line.
    """
    from mingpt_ddp.study.results.report_json import job_rows

    words = _words(overrides, "sweep")
    outcome = _start(["-m", *words, *_nproc_words(nproc)], None, quiet)
    return job_rows([*outcome.directories], outcome.metric)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error of this package as one line, and end the script with exit code 2.

    Without this, Hydra would print a traceback and exit with code 1.
    """
    from mingpt_ddp.process.root_cause import cli_errors

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


def _is_multirun(word: str) -> bool:
    """Return True if a word starts a sweep: -m, a prefix of --multirun, or Hydra's key."""
    is_flag = word.startswith("--m") and "--multirun".startswith(word)
    return word == "-m" or is_flag or word.lstrip("+").startswith("hydra.mode=")


def _nproc_words(nproc: int | str | None) -> list[str]:
    return [] if nproc is None else [f"ddp.nproc_per_node={nproc}"]


def _start(words: list[str], job: str | None, quiet: bool) -> Outcome:
    """Run the train command, print its output, and return its outcome.

    The command composes the configuration from the words, or trains a job that this process has
    composed. It does not print its error, because the outcome contains the error.

    Args:
        job: The job to train, as JSON. None if the words describe it.

    Raises:
        UserError: The command has failed.
    """
    from mingpt_ddp.config.job import Outcome, RunStatus
    from mingpt_ddp.distributed.launch.fork_server import import_path
    from mingpt_ddp.errors import RunError, UserError
    from mingpt_ddp.process.env import SHOWS_PROGRESS, Caller

    with tempfile.TemporaryDirectory(prefix="mingpt_ddp-") as scratch:
        outcome_file = Path(scratch, "outcome.json")
        job_file = Path(scratch, "job.json")
        job_file.write_text(job or "")
        # The command gets the id of this process, so that it ends when this process ends.
        caller = Caller(os.getpid(), str(outcome_file), None if job is None else str(job_file))
        environ = {**os.environ, "PYTHONPATH": import_path(), **caller.environ()}
        if _is_notebook():
            environ[SHOWS_PROGRESS] = "1"
        # The command has its own session, so that it gets Ctrl-C only once: from this process, and
        # not from the terminal.
        with subprocess.Popen(
            [sys.executable, "-m", "mingpt_ddp", *words],
            env={**environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else subprocess.STDOUT,
        ) as process:
            _print_output_of(process)
        try:
            outcome = Outcome.from_json(outcome_file.read_text())
        except (OSError, ValueError):  # a signal or a crash has ended the command
            outcome = Outcome(RunStatus.FAILED)
    if outcome.error is not None:
        raise outcome.error
    if process.returncode != 0:
        raise UserError(
            f"training ended with exit code {process.returncode}; its output says why (quiet=False "
            "prints it)"
        )
    if not outcome.directories:  # e.g. after --help
        raise RunError("these arguments do not train a model; leave out --help and similar options")
    return outcome


def _print_output_of(process: subprocess.Popen[bytes]) -> None:
    """Print the output of a process until it ends. End it if Ctrl-C interrupts this function."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pipe = process.stdout
    try:
        while pipe is not None and (content := os.read(pipe.fileno(), 1 << 16)):
            print(decoder.decode(content), end="", flush=True)
        process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)  # the process saves a snapshot, then ends
        with contextlib.suppress(OSError):
            print(decoder.decode(process.communicate()[0] or b""), end="", flush=True)
        raise
    finally:
        if process.poll() is None:
            process.kill()


def _is_notebook() -> bool:
    """Return True if standard output is shown in a notebook, which understands carriage returns."""
    return type(sys.stdout).__module__.startswith("ipykernel.")


@dataclass(frozen=True)
class LoadedRun:
    """The model of a snapshot, in evaluation mode, with its tokenizer and configuration."""

    model: nn.Module  # model(ids) returns logits (B, T, V) for ids (B, T) of int64
    tokenizer: Tokenizer
    config: dict[str, Any]  # configuration of the run by group, as in config.yaml
    step: int  # step of the snapshot

    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = 500,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 1,
    ) -> str:
        """Return the prompt and its continuation. The sample command has the same arguments.

        Raises:
            ConfigError: An argument is out of bounds.
            DataError: The prompt has characters that the model does not know.
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
        run: Path or fsspec URL of a run directory, of its directory of snapshots, or of a snapshot.
        step: newest, best (lowest validation loss) or a number.
        device: Where to put the model, such as cpu or cuda:0.
        code: Your Python file that registers the model, if it is not built in.

    Raises:
        SnapshotError: There is no such snapshot, or it does not contain a usable model.
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
    """Return the measurements of a run, or of all jobs of a sweep, as one row for each step.

    A row has a key for each metric that was measured at its step. A step that was repeated after a
    restart has one row. Rows of a sweep also have `job`, which is the job's directory relative to
    the sweep's directory, and the parameters in which the jobs differ, by dotted key.

    Args:
        run: The directory of a run, or a directory with runs one or two levels below it.

    Raises:
        RunError: The directory does not belong to a run or a sweep.
        DataError: The metrics.jsonl of a run is damaged.
    """
    from mingpt_ddp.errors import RunError
    from mingpt_ddp.metrics.jsonl import METRICS, read_history
    from mingpt_ddp.study.results.runs import is_run, read_jobs, varying

    directory = Path(run)
    if directory.is_dir() and not is_run(directory):
        jobs = read_jobs([directory])
        keys = varying(jobs)
        all_rows = []
        for job in jobs:
            parameters = {key: job.config[key] for key in keys if key in job.config}
            all_rows += [{"job": job.name, **parameters} | row for row in job.history.rows]
        return all_rows
    try:
        return read_history(directory / METRICS).rows
    except OSError as error:
        raise RunError(
            f"{run} is not a run directory, because its {METRICS} is missing or cannot be read; "
            "name a run directory"
        ) from error


def rows(*directories: str | os.PathLike[str], metric: str | None = None) -> list[dict[str, Any]]:
    """Return a row for each job of runs or sweeps, best first.

    Jobs that differ only in run.seed have the same setting. The setting with the best mean over its
    seeds comes first, as in the table of a report. A setting has no mean if none of its jobs is
    complete, or if the loss of one of them is not finite. Such settings come last.

    A row has `name`, `directory`, `status`, `seed` and `code`, the other parameters in which the
    jobs differ (by dotted key), and the numbers of result.json. For a job that is not complete,
    `step` and `val_loss` are the latest ones. Values that are unknown or not finite are None.

    Args:
        directories: Directories of runs, or directories with runs one or two levels below them.
        metric: A number of result.json to order the rows by, lowest first; `-NAME` for highest
            first. By default the `sweep.metric` of the sweep, or else the validation loss.

    Raises:
        ConfigError: The arguments are not paths.
        RunError: One of the paths is not a directory or contains no run, or no run has the metric.
    """
    from mingpt_ddp.errors import ConfigError
    from mingpt_ddp.study.results.report_json import job_rows

    are_paths = all(each and isinstance(each, str | os.PathLike) for each in directories)
    if not directories or not are_paths:
        raise ConfigError("rows takes one directory or several: rows('outputs/lr', ...)")
    return job_rows([*map(Path, directories)], metric)
