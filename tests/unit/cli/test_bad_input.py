"""Bad input gives one line that says what to fix and exit code 2, and nothing is written.

The cases run in one process, from the entry point of the program to `os._exit`
(`tests/one_process.py`). tests/contract/ launches some as users do, also under torchrun.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import (
    PATIENCE_S,
    ROOT,
    WITH_DIGITS,
    WITH_TOY,
    call,
    environment,
    python_main,
)
from torch.distributed import is_mpi_available

# Files with user code. A model preset of the same name uses each of them.
CODE = {
    "good": """from dataclasses import dataclass
import torch
from torch import nn
from mingpt_ddp.registry import DataConfig, ModelConfig, check, register

@dataclass(frozen=True)
class Table(ModelConfig):
    width: int
    def __post_init__(self):
        check(self.width > 0, f"model.width={self.width} must be at least 1")
        assert self.width < 100

@register("model", "table", Table)
class Model(nn.Module):
    def __init__(self, config, vocab_size, block_size):
        super().__init__()
        self.scores = nn.Embedding(vocab_size, vocab_size)
    def forward(self, tokens, targets=None):
        return self.scores[tokens]

@register("data", "lines", DataConfig)
def lines(config):
    yield "to be"
    yield 7 if config.path == "7" else open(config.path).read() if config.path != "0" else 1 / 0
""",
    "name": "import os\nos.nowhere()\n",
    "syntax": "import os\n\nif os\n",
    "taken": "from mingpt_ddp.registry import *\nregister('model', 'gpt', ModelConfig)(print)\n",
    "plain": (
        "from mingpt_ddp.registry import *\nclass Mine(ModelConfig): "
        "pass\nregister('model', 'mine', Mine)\n"
    ),
    "hint": """from dataclasses import dataclass
from mingpt_ddp.registry import *
@dataclass(frozen=True)
class Mine(ModelConfig):
    widths: set[int]
register("model", "mine", Mine)
""",
}
TEXT = "To be, or not to be, that is the question.\n" * 100
SMALL_RUN = [
    "data=text_file",
    "data.path=good.txt",
    "data.block_size=8",
    "model=gpt_nano",
    "model.n_layer=1",
    "trainer.batch_size=2",
    "trainer.max_epochs=null",
    "trainer.max_steps=1",
    "trainer.sample_every=null",
]


@dataclass
class Outcome:
    code: int
    lines: list[str]
    text: str
    written: set[str]  # names of new files in the working directory


@pytest.fixture(scope="module")
def program():
    """Return a function `program(args, cwd)`. It runs all cases in one shared process."""
    # Optuna's plots, not ours
    fonts = os.environ.get("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
    env = environment(ROOT, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", MPLCONFIGDIR=fonts)
    command = [sys.executable, str(ROOT / "tests" / "one_process.py")]
    server = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(args: list[str], cwd: Path, **env: str) -> Outcome:
        before = set(os.listdir(cwd))
        output = cwd.parent / f"{cwd.name}.output"
        # The cache is inside cwd, so that a cache left by a refused configuration is noticed.
        env = {"XDG_CACHE_HOME": str(cwd / "cache"), **env}
        case = {"args": args, "cwd": str(cwd), "env": env, "output": str(output)}
        server.stdin.write(json.dumps(case) + "\n")
        server.stdin.flush()
        line = server.stdout.readline()
        assert line, f"this case ended the process of all cases: {output.read_text()}"
        answer = json.loads(line)
        text = output.read_text()
        written = {*answer["listing"], *os.listdir(cwd)} - before
        return Outcome(answer["code"], text.splitlines(), text, written)

    yield run
    server.stdin.close()
    server.wait(PATIENCE_S)


def run_alone(args: list[str], cwd: Path) -> Outcome:
    """Run the program in a new process, as users do."""
    before = set(os.listdir(cwd))
    env = {"XDG_CACHE_HOME": str(cwd / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    done = call([*python_main(), *args], cwd, **env)
    written = set(os.listdir(cwd)) - before
    return Outcome(done.returncode, done.stdout.splitlines(), done.stdout, written)


@pytest.fixture
def cwd(tmp_path):
    """Create a working directory with valid and invalid texts, and return it."""
    directory = tmp_path / "cwd"
    (directory / "extra" / "experiment").mkdir(parents=True)
    (directory / "extra" / "experiment" / "broken.yaml").write_text("trainer: [1\n")
    (directory / "extra" / "experiment" / "number.yaml").write_text("7\n")
    # OmegaConf 2.4 parses YAML in C. The C stack overflows between 10,000 and 30,000 levels.
    (directory / "extra" / "experiment" / "deep.yaml").write_text("[" * 10_000 + "]" * 10_000)
    (directory / "own" / "model").mkdir(parents=True)
    for name, code in CODE.items():
        (directory / "own" / f"{name}.py").write_text(code)
        model = f"name: own\narchitecture: table\ncode: {name}.py\nwidth: 1\n"
        (directory / "own" / "model" / f"{name}.yaml").write_text(model)
    (directory / "good.txt").write_text(TEXT)
    (directory / "latin1.txt").write_bytes(TEXT.encode() + b"caf\xe9" + TEXT.encode())
    (directory / "empty.txt").write_bytes(b"")
    (directory / "same.txt").write_text("a" * 5000)
    (directory / "short.txt").write_text("To be, or not to be")
    (directory / "not.gz").write_bytes(b"\x1f\x8b" + TEXT.encode())
    (directory / "train.bin").write_bytes(bytes(range(60)) * 100)
    (directory / "docs.jsonl").write_text('{"id": "a", "text": "to be"}\n' * 500)
    (directory / "shards").mkdir()
    (directory / "shards" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 5000)
    (directory / "shards" / "README.md").write_text("Two images.\n")
    (directory / "half.gz").write_bytes(gzip.compress(TEXT.encode())[:-12])
    return directory


def check(outcome: Outcome, expected: str) -> None:
    assert outcome.code == 2, outcome.text
    assert len(outcome.lines) == 1, outcome.text
    assert outcome.lines[0].startswith(expected), outcome.text
    assert not outcome.written, outcome.written


def text_file(name: str) -> str:
    return f"data=text_file data.path={name}"


def own(name: str) -> str:
    return f"model={name} --config-dir=own"


needs_no_s3fs = pytest.mark.skipif(
    importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed"
)
needs_no_trackio = pytest.mark.skipif(
    importlib.util.find_spec("trackio") is not None, reason="trackio is installed"
)
needs_no_mpi = pytest.mark.skipif(is_mpi_available(), reason="this torch has MPI")

# Command lines whose error depends on this machine, or that are too long for a line of the file
SPECIAL = [
    pytest.param(
        "ddp=mpi",
        "config error: ddp.backend=mpi does not work, because this torch is built without MPI",
        marks=needs_no_mpi,
    ),
    pytest.param(
        text_file("s3://bucket/text.txt"),
        (
            "config error: data.path=s3://bucket/text.txt: the library for s3:// is "
            "not installed; pip install 'mingpt_ddp[s3]'"
        ),
        marks=needs_no_s3fs,
    ),
    pytest.param(
        "tracker=[tensorboard,trackio]",
        "config error: tracker=trackio is not installed; run pip install 'mingpt_ddp[trackio]'",
        marks=needs_no_trackio,
    ),
    (
        f"run.root=a/{'x' * 256}",
        "config error: run.root has a directory name of more than 255 bytes",
    ),
    (
        f"data.cache_dir={'x' * 256}",
        "config error: data.cache_dir has a directory name of more than 255",
    ),
    (
        f"data.path={'[' * 2000}{']' * 2000}",
        "config error: cannot read the command line or a configuration file (RecursionError: ",
    ),
]


def read_cases() -> list[tuple[str, str]]:
    """Read the command lines of tests/data/bad_input.txt, each with its expected error."""
    text = (ROOT / "tests" / "data" / "bad_input.txt").read_text()
    text = text.replace("$TOY", WITH_TOY).replace("$DIGITS", WITH_DIGITS).replace("$SHA", "0" * 64)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    errors = [line for line in lines if not line.startswith("$ ")]
    return [*zip(commands, errors, strict=True)]


SWEEPS = [
    (
        "-m optimizer.lr=1e-3,-1",
        "config error: optimizer.lr=-1 must be greater than or equal to 1e-30",
    ),
    ("-m model=gpt_nano,huge", "config error: Could not find 'model/huge'"),
    (
        "-m run.name=a,b",
        "config error: run.root and run.name must be the same for all jobs of a sweep",
    ),
    (
        "-m run.name=a/b run.seed=1,2",
        "config error: run.name=a/b must not contain a / in a sweep; it names the directory",
    ),
    ("-m run.seed=range(3,3)", "config error: run.seed=range(3,3) has no values to sweep over"),
    (
        "-m model.n_head=range(2,400) model.n_embd=2",
        "config error: model.n_embd=2 must be divisible by model.n_head=3",
    ),
    ("-m 'model=glob(zzz*)'", "config error: model=glob(zzz*) has no values to sweep over"),
    (
        "-m 'model=glob(gpt_nan*)' optimizer.lr=1e-3,-1",
        "config error: optimizer.lr=-1 must be greater than or equal to 1e-30",
    ),
    ("-m 'optimizer.lr=${nope:1},1e-3'", "config error: "),
    (
        "-m optimizer.lr=interval(1e-4,1e-3)",
        "config error: optimizer.lr=interval(1e-4,1e-3) is only for a search",
    ),
    (
        "-m sweep.zip=optimizer.lr optimizer.lr=1,2",
        "config error: sweep.zip=optimizer.lr must be a list of keys, as in sweep.zip=[optimizer",
    ),
    (
        "-m sweep.zip=[optimizer.lr,model.n_emd] optimizer.lr=1,2",
        "config error: sweep.zip names model.n_emd, which has no list of values; did you mean",
    ),
    (
        "-m sweep.zip=[optimizer.lr,run.seed] optimizer.lr=1,2",
        "config error: sweep.zip names run.seed, which has no list of values, as in run.seed=A,B",
    ),
    (
        "-m sweep.zip=[optimizer.lr,run.seed] optimizer.lr=1,2 run.seed=1,2,3",
        "config error: sweep.zip needs lists of the same length, but optimizer.lr has 2, run.seed",
    ),
    (
        "-m hydra.job.chdir=true run.seed=1,2",
        "config error: hydra.job.chdir=true would start the jobs",
    ),
    (
        "-m hydra.sweep.dir=jobs run.seed=1,2",
        "config error: hydra.sweep.dir=jobs has no effect here, because run.root",
    ),
    (
        "-m 'hydra.sweep.subdir=x${hydra.job.num}' run.seed=1,2",
        "config error: hydra.sweep.subdir=x${hydra.job.num} has no effect here, because run.root",
    ),
    (
        "-m hydra.output_subdir=x run.seed=1,2",
        "config error: hydra.output_subdir=x has no effect here",
    ),
    (
        "-m sweep.parallel=0 run.seed=1,2",
        "config error: sweep.parallel=0 must be greater than or equal to 1 or 'auto'",
    ),
    (
        "-m sweep.trials=20 run.seed=1,2",
        "config error: sweep.trials=20 is only for a search: add sweep=optuna, or leave it out",
    ),
    (
        "-m 'sweep.sampler_settings={n_startup_trials:3}' run.seed=1,2",
        "config error: sweep.sampler_settings={n_startup_trials:3} is only for a search: add",
    ),
    (
        "-m sweep.pruner=median run.name=pruned run.seed=1,2",
        "config error: sweep.pruner=median is only for a search: add sweep=optuna, or leave it",
    ),
    (
        "-m 'sweep.pruner_settings={n_startup_trials:3}' run.seed=1,2",
        "config error: sweep.pruner_settings is only for a pruner: add sweep.pruner=median, or",
    ),
    (
        "-m sweep.metric=val_los run.seed=1,2",
        "config error: sweep.metric=val_los is not a number of result.json; did you mean val_loss?",
    ),
    (
        "-m sweep.parallel=2,3 run.seed=1,2",
        "config error: sweep.* settings hold for all jobs of a sweep; give each of these keys",
    ),
    (
        "-m sweep.parallel=100000 run.seed=1,2",
        "config error: sweep.parallel=100000 must be at most",
    ),
    (
        "-m sweep.parallel=2 ddp.nproc_per_node=gpu run.seed=1,2",
        "config error: ddp.nproc_per_node=gpu",
    ),
    (
        "-m model.n_embd=48,49 ddp.nproc_per_node=2",
        "config error: model.n_embd=49 must be divisible by model.n_head=4",
    ),
]


SEARCHES = [
    (
        "sweep.sampler=cmaes",
        "config error: sweep.sampler='cmaes' must be 'tpe', 'gp' or 'random'",
    ),
    ("sweep.pruner=hyperband", "config error: sweep.pruner='hyperband' must be 'none', "),
    ("sweep.trials=0", "config error: sweep.trials=0 must be greater than or equal to 1"),
    ("sweep.seed=-1", "config error: sweep.seed=-1 must be greater than or equal to 0"),
    ("sweep.metric=''", "config error: sweep.metric is empty"),
    (
        "sweep.metric=-val_los",
        "config error: sweep.metric=-val_los is not a number of result.json; did you mean val_loss",
    ),
    (
        "sweep.metric=wall_seconds sweep.pruner=median",
        "config error: sweep.pruner=median compares evaluations, which do not measure wall_seconds",
    ),
    (
        "'sweep.sampler_settings={n_startup:1}'",
        "config error: sweep.sampler_settings.n_startup is not a key; did you mean sweep."
        "sampler_settings.n_startup_trials?",
    ),
    (
        "sweep.pruner=asha 'sweep.pruner_settings={reduction_factor:1}'",
        "config error: sweep.pruner_settings.reduction_factor=1",
    ),
    (
        "run.name=null",
        "config error: a search keeps its jobs in one directory",
    ),
    (
        "'optimizer.lr=tag(log,interval(-1,1))'",
        "config error: optimizer.lr=-1.0 must be greater than or equal to 1e-30",
    ),
    ("'optimizer.lr=interval(1e-2,1e-3)'", "config error: optimizer.lr=interval(1e-2,1e-3): "),
    ("hydra.sweeper.params=null", "config error: a search needs values to draw"),
]


@pytest.mark.parametrize(("args", "expected"), [*read_cases(), *SPECIAL])
def test_an_error_is_one_line(args, expected, program, cwd):
    check(program(shlex.split(args), cwd), expected)


URLS_WITH_SECRETS = [
    ("data.path", "https://user:hunter2@example.com/text.txt"),
    ("snapshot.path", "s3://key:hunter2@bucket/snapshots"),
    ("run.resume", "https://hunter2@example.com/run"),
]


@pytest.mark.parametrize(("key", "url"), URLS_WITH_SECRETS)
def test_credentials_are_refused_and_not_printed(key, url, program, cwd):
    outcome = program([f"{key}={url}"], cwd)
    check(outcome, f"config error: {key} contains credentials")
    assert "hunter2" not in outcome.text


# The environment variables that a launcher sets for rank zero
FIRST_OF = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
PLACES = [
    ("", {"RANK": "0"}, "config error: "),
    ("", {"WORLD_SIZE": "1"}, "config error: RANK is not set"),
    ("", {"RANK": "0", "WORLD_SIZE": "2"}, "config error: MASTER_ADDR is not set"),
    ("", {"RANK": "1", "WORLD_SIZE": "1"}, "config error: RANK=1 must lie in 0 .. WORLD_SIZE - 1"),
    ("", {"RANK": "x", "WORLD_SIZE": "1"}, "config error: the environment variable RANK='x' must"),
    (
        "ddp.nproc_per_node=4",
        {**FIRST_OF, "WORLD_SIZE": "3"},
        "config error: RANK=0 and ddp.nproc_per_node=4 need WORLD_SIZE=4 or more",
    ),
    (  # one of the jobs would start workers, so no job starts
        "-m ddp.nproc_per_node=null,2",
        {**FIRST_OF, "WORLD_SIZE": "1"},
        "config error: ddp.nproc_per_node cannot start workers for a sweep if RANK is set; leave",
    ),
]


@pytest.mark.parametrize(("args", "variables", "expected"), PLACES)
def test_contradictory_ranks(args, variables, expected, program, cwd):
    check(program(["trainer.max_steps=1", *args.split()], cwd, **variables), expected)


def test_hydra_info_prints_the_configuration(program, cwd):
    outcome = program(["model=gpt_nano", "--info"], cwd)
    assert outcome.code == 0, outcome.text
    assert "Config search path" in outcome.text or "Provider" in outcome.text
    assert not outcome.written


# Files that cannot be written, in an existing directory


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("pipe", "main.rank0.log"),
        ("directory", "config.yaml"),
        ("directory", "result.json"),
        ("file", ".hydra"),
    ],
)
def test_a_directory_or_special_file_where_a_file_is_expected(kind, name, cwd):
    run = cwd / "outputs" / "x"
    run.mkdir(parents=True)
    make = {"pipe": os.mkfifo, "directory": os.mkdir, "file": Path.touch}[kind]
    make(run / name)
    outcome = run_alone([*SMALL_RUN, "run.name=x"], cwd)
    assert outcome.code == 2, outcome.text
    assert re.match(r"run error: cannot (write|remove) outputs/x/", outcome.lines[-1])
    assert "Traceback" not in outcome.text


def test_pipes_in_the_place_of_files_that_are_replaced(cwd):
    (cwd / "outputs" / "x").mkdir(parents=True)
    for name in ("config.yaml", "result.json"):
        os.mkfifo(cwd / "outputs" / "x" / name)
    outcome = run_alone([*SMALL_RUN, "run.name=x"], cwd)
    assert outcome.code == 0, outcome.text


def test_a_sweep_is_not_mixed_with_a_run(program, cwd):
    """A sweep in a run's directory would list that run among its jobs. So would the reverse."""
    run, sweep = cwd / "outputs" / "run", cwd / "outputs" / "sweep"
    for file in (run / "result.json", sweep / "sweep.json"):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    outcome = program(["-m", "run.name=run", "run.seed=1,2", "trainer.max_steps=1"], cwd)
    check(outcome, "config error: run.name=run names a single run, not a sweep; choose another")
    outcome = run_alone([*SMALL_RUN, "run.name=sweep"], cwd)
    assert outcome.code == 2, outcome.text
    assert outcome.lines[-1] == (
        "run error: outputs/sweep is the directory of a sweep; choose another run.name"
    )
    assert [*map(os.listdir, (run, sweep))] == [["result.json"], ["sweep.json"]]


@pytest.mark.parametrize("name", ["multirun.yaml", "failures.jsonl"])
def test_a_link_where_a_sweep_writes_is_refused(name, program, cwd):
    """In a directory from a stranger, such a link could point to any file."""
    sweep = cwd / "outputs" / "sweep"
    sweep.mkdir(parents=True)
    precious = cwd / "precious"
    precious.write_text("mine")
    (sweep / name).symlink_to(precious)
    outcome = program(["-m", "run.name=sweep", "run.seed=1,2", "trainer.max_steps=1"], cwd)
    check(outcome, f"run error: outputs/sweep/{name} is a symbolic link, which a run does not")
    assert precious.read_text() == "mine" and os.listdir(sweep) == [name]


@pytest.mark.parametrize(("args", "expected"), SWEEPS)
def test_a_sweep_with_an_invalid_value_does_not_start(program, cwd, args, expected):
    check(program(shlex.split(args), cwd), expected)


@pytest.mark.parametrize(("args", "expected"), SEARCHES)
def test_an_invalid_search_does_not_start(program, cwd, args, expected):
    pytest.importorskip("optuna")
    check(program(["-m", "sweep=optuna_lr", *shlex.split(args)], cwd), expected)
