"""Check the exit code and the last line of each failing command, on which users and their scripts rely."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from .contract import MAIN, SAMPLE, call, settings, torchrun

pytestmark = pytest.mark.timeout(600)

# A model that fails as the environment variable FAULT says. Its value is `STEP RANK TIMES CODE`: in the first TIMES
# attempts, CODE runs in the forward pass of the step, on one rank or on `all`.
MODEL = '''
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from mingpt_ddp.registry import ModelConfig, register


@register("model", "faulty", ModelConfig)
class Faulty(nn.Module):
    def __init__(self, config, vocab_size, block_size):
        super().__init__()
        self.scores = nn.Embedding(vocab_size, vocab_size)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, tokens, targets=None):
        logits = self.scores(tokens)
        if self.training:
            self.step += 1
            logits = logits * fail(int(self.step))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fail(step):
    """Run the code in FAULT. Return a factor for the logits."""
    at, rank, times, code = os.environ.get("FAULT", "0 0 0 pass").split(maxsplit=3)
    own = os.environ.get("RANK", "0")
    if step != int(at) or rank not in ("all", own):
        return 1.0
    earlier = len([*Path(__file__).parent.glob(f"failed-{own}-*")])
    if earlier >= int(times):
        return 1.0
    Path(__file__).with_name(f"failed-{own}-{earlier}").touch()
    names = {"factor": 1.0, "send": lambda number: os.kill(os.getpid(), number)}
    exec(code, globals(), names)
    return names["factor"]
'''
PRESET = "name: faulty\narchitecture: faulty\ncode: faulty.py\n"
LOCAL = [*MAIN, "ddp.nproc_per_node=2"]
MODULE = [sys.executable, "-m"]
BOOM = "raise ValueError('boom')"
BOOM_LINE = rf"ValueError: boom \(.*/faulty\.py:{MODEL.splitlines().index('    exec(code, globals(), names)') + 1}\)"
TWICE = rf"error: rank [01]: {BOOM_LINE}, in the forward pass of step 9; this error occurred twice at the same step, .*"
PREEMPTED = "preempted at step 9; rerun the same command to resume"


@dataclass(frozen=True)
class Case:
    """A command that fails. In its words, {run} and {text} stand for the paths of a complete run and the text."""

    name: str
    command: list[str]
    words: str
    code: int
    last: str  # regular expression for the last line of the program's own output
    fault: str = ""
    trains: bool = True  # adds the words of a training run
    before: str = ""  # words of a run in the same directory that must succeed first


CASES = [
    # Input that is refused
    Case(
        "unknown key",
        MAIN,
        "trainer.max_epoch=5",
        2,
        r"config error: trainer\.max_epoch is not a key; did you mean trainer\.max_epochs\?",
    ),
    Case(
        "wrong type",
        MAIN,
        "trainer.max_steps=many",
        2,
        r"config error: trainer\.max_steps='many' must be a whole number",
    ),
    Case(
        "wrong value",
        LOCAL,
        "trainer.batch_size=0",
        2,
        r"config error: trainer\.batch_size=0 must be greater than or equal to 1",
    ),
    Case(
        "unknown preset",
        MAIN,
        "optimizer=adamv",
        2,
        r"config error: .*'optimizer/adamv'; choose one of adamw, muon, sgd, .*",
    ),
    Case(
        "unknown option",
        MAIN,
        "--max-steps=5",
        2,
        r"config error: --max-steps is not an option; did you mean trainer\.max_steps\?",
    ),
    Case(
        "missing text",
        MAIN,
        "data.path=nowhere.txt",
        2,
        r"data error: data\.path=nowhere\.txt: there is no such file",
    ),
    Case(
        "text that is not UTF-8",
        MAIN,
        "data.path={latin}",
        2,
        r"data error: data\.path=.*latin\.txt is not UTF-8 at byte 0; convert it: .*",
    ),
    Case(
        "text that is too short",
        LOCAL,
        "data.path={short}",
        2,
        r"data error: the training text has \d+ tokens, .* use a longer text .*",
    ),
    Case(
        "more ranks than micro-batches",
        LOCAL,
        "trainer.batch_size=1",
        2,
        r"config error: trainer\.batch_size=1 .* occupies 1 of 2 ranks; use at most 1 rank, .*",
    ),
    Case(
        "no GPU",
        MAIN,
        "trainer.device=cuda",
        2,
        r"config error: trainer\.device=cuda, but torch sees no GPU here; use trainer\.device=cpu",
    ),
    Case(
        "another model in a run directory",
        MAIN,
        "model.n_embd=24",
        2,
        r"snapshot error: .* model\.n_embd \(48 in the snapshot, 24 now\); .*",
        before="model.n_embd=48",
    ),
    Case(
        "resume from nothing",
        MAIN,
        "run.resume=nowhere",
        2,
        r"snapshot error: there is no whole snapshot at nowhere, which does not exist; .*",
    ),
    # User code
    Case(
        "error in one process",
        MAIN,
        "",
        1,
        rf"error: rank 0: {BOOM_LINE}, in the forward pass of step 9",
        f"9 0 9 {BOOM}",
    ),
    Case("error on one of two local ranks", LOCAL, "", 2, TWICE, f"9 1 9 {BOOM}"),
    Case("error on all local ranks", LOCAL, "", 2, TWICE, f"9 all 9 {BOOM}"),
    Case(
        "error under torchrun",
        torchrun(2),
        "",
        1,
        rf"error: rank 1: {BOOM_LINE}, in the forward pass of step 9",
        f"9 1 9 {BOOM}",
    ),
    Case(
        "error under torchrun on all ranks",
        torchrun(2),
        "",
        1,
        rf"error: rank [01]: {BOOM_LINE}, in the forward pass of step 9",
        f"9 all 9 {BOOM}",
    ),
    Case("error in the first attempt", LOCAL, "", 0, r"done: .* after 12 steps .*", f"9 1 1 {BOOM}"),
    Case(
        "out of memory",
        LOCAL,
        "",
        2,
        r"error: rank 1: RuntimeError: .*can't allocate memory.*; this error occurred twice at the same step, .*",
        "9 1 9 torch.empty(1 << 50)",
    ),
    Case(
        "a loss that is not a number",
        LOCAL,
        "",
        2,
        r"training error: step 9 has loss nan .*",
        "9 1 9 factor = float('nan')",
    ),
    Case(
        "os._exit in a hook",
        LOCAL,
        "ddp.max_restarts=0",
        1,
        r"error: rank 1 exited with code 3, because .*",
        "9 1 9 os._exit(3)",
    ),
    # Signals
    Case("SIGTERM", MAIN, "", 0, PREEMPTED, "9 0 1 send(signal.SIGTERM)"),
    Case("SIGHUP", MAIN, "", 0, PREEMPTED, "9 0 1 send(signal.SIGHUP)"),
    Case("SIGUSR1", MAIN, "", 0, PREEMPTED, "9 0 1 send(signal.SIGUSR1)"),
    Case("Ctrl-C", MAIN, "", 0, PREEMPTED, "9 0 1 send(signal.SIGINT)"),
    Case(
        "Ctrl-C twice",
        MAIN,
        "",
        130,
        r"ended by SIGINT; rerun the same command to resume",
        "9 0 1 send(signal.SIGINT); send(signal.SIGINT)",
    ),
    Case("SIGTERM to local workers", LOCAL, "", 0, PREEMPTED, "9 all 1 send(signal.SIGTERM)"),
    Case(
        "SIGTERM with an exit code",
        MAIN,
        "ddp.preempted_exit_code=85",
        85,
        PREEMPTED,
        "9 0 1 send(signal.SIGTERM)",
    ),
    # Workers that die
    Case(
        "a killed worker is replaced",
        LOCAL,
        "",
        0,
        r"done: .* after 12 steps .*",
        "9 1 1 send(signal.SIGKILL)",
    ),
    Case(
        "a killed worker without restarts",
        LOCAL,
        "ddp.max_restarts=0",
        1,
        r"error: rank 1 was killed by SIGKILL",
        "9 1 9 send(signal.SIGKILL)",
    ),
    Case(
        "a worker killed in each attempt",
        LOCAL,
        "ddp.max_restarts=1",
        1,
        r"error: rank 1 was killed by SIGKILL",
        "9 1 9 send(signal.SIGKILL)",
    ),
    # Sweeps
    Case(
        "a sweep with a failing job",
        [*MAIN, "-m"],
        "run.seed=1,2",
        1,
        r"job error: 1 of 2 jobs failed: run\.seed=1; rerun the same command to retry",
        f"9 0 1 {BOOM}",
    ),
    Case(
        "a sweep of local workers",
        [*LOCAL, "-m"],
        "run.seed=1,2",
        2,
        r"job error: 2 of 2 jobs failed: .*",
        f"9 0 9 {BOOM}",
    ),
    Case(
        "a sweep under torchrun",
        [*torchrun(2), "-m"],
        "run.seed=1,2",
        1,
        rf"error: rank [01]: {BOOM_LINE}, in the forward pass of step 9",
        f"9 all 1 {BOOM}",
    ),
    Case(
        "an invalid job of a sweep",
        [*MAIN, "-m"],
        "model.dropout=0.1,2",
        2,
        r"config error: model\.dropout=2 must be less than 1",
    ),
    Case(
        "several values without -m",
        MAIN,
        "run.seed=1,2",
        2,
        r"config error: run\.seed=1,2 has several values; a sweep trains a job with each value \(-m.*",
    ),
    # Other commands
    Case(
        "sample of nothing",
        SAMPLE,
        "nowhere",
        2,
        r"snapshot error: there is no whole snapshot at nowhere, .*",
        trains=False,
    ),
    Case(
        "an unknown key of a command",
        SAMPLE,
        "{run} topk=3",
        2,
        r"config error: topk is not a key; did you mean top_k\?",
        trains=False,
    ),
    Case(
        "report of nothing",
        [*MODULE, "mingpt_ddp", "report"],
        "nowhere",
        2,
        r"run error: nowhere is not a directory; .*",
        trains=False,
    ),
    Case(
        "an unknown snapshot",
        [*MODULE, "mingpt_ddp", "snapshots"],
        "export {run} step=7 to=weights",
        2,
        r"snapshot error: there is no snapshot with step=7 at .*; the newest one is from step 12",
        trains=False,
    ),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, text: Path) -> dict[str, str]:
    """Make a text and a complete run, and return the values of the placeholders."""
    root = tmp_path_factory.mktemp("project")
    (root / "latin.txt").write_bytes(b"\xe4\xf6\xfc" * 1000)
    (root / "short.txt").write_text("too short")
    done = call([*MAIN, *train_words(text, write_model(root / "model_code"))], root)
    assert done.returncode == 0, done.stdout
    return {
        "latin": f"{root}/latin.txt",
        "short": f"{root}/short.txt",
        "run": f"{root}/outputs/run",
    }


def write_model(directory: Path) -> Path:
    (directory / "model").mkdir(parents=True)
    (directory / "model" / "faulty.yaml").write_text(PRESET)
    (directory / "faulty.py").write_text(MODEL)
    return directory


def train_words(text: Path, code: Path | None) -> list[str]:
    """Return the words of a run of twelve steps. It trains the failing model in `code`, or a GPT."""
    values = {
        "trainer.max_steps": 12,
        "optimizer.schedule_steps": 12,
        "trainer.eval_every": 6,
        "snapshot.every_steps": 6,
    }
    values |= {"snapshot.background": "false", "data.truncate": 0.2}
    words = settings(text, **values)
    if code is None:
        return words
    kept = [word for word in words if not word.startswith("model")]
    return [f"--config-dir={code}", "model=faulty", *kept]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_command_fails(case: Case, project: dict[str, str], text: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    words = case.words.format(**project).split()
    if case.trains:
        is_faulty = bool(case.fault) or not any(word.startswith("model.") for word in words)
        common = train_words(text, write_model(tmp_path / "code") if is_faulty else None)
        if case.before:
            assert call([*case.command, *common, *case.before.split()], cwd).returncode == 0
        words = [*common, *words]
    done = call([*case.command, *words], cwd, FAULT=case.fault or "0 0 0 pass")
    ours = done.stdout.partition("Traceback")[0]  # torchrun's own traceback comes last
    lines = [line for line in ours.splitlines() if line.strip() and not re.match(r"[WEI]\d{4} ", line)]
    assert done.returncode == case.code, done.stdout
    assert re.fullmatch(rf"(\[rank 1\] )?{case.last}", lines[-1]), done.stdout
