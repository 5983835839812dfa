"""Bad input gives one line that says what to fix, exit code 2, and nothing is written.

All cases run in one process, from the entry point of the program to `os._exit`
(`tests/one_process.py`). Those that train, and a few of each kind of error, run as users launch
them, alone and under torchrun: they show the exit code.
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
    torchrun,
)
from torch.distributed import is_mpi_available

# Files with user code, each named by a model of the same name.
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
OTHER_SHA = "0" * 64


@dataclass
class Outcome:
    code: int
    lines: list[str]
    text: str
    written: set[str]  # names in the working directory that were not there before


@pytest.fixture(scope="module")
def program():
    """Return a function that runs the program in the process of all cases: `program(args, cwd)`."""
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
        # a refused configuration leaves no cache of its text
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
    """Run the program in a process of its own, as users do."""
    before = set(os.listdir(cwd))
    env = {"XDG_CACHE_HOME": str(cwd / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    done = call([*python_main(), *args], cwd, **env)
    written = set(os.listdir(cwd)) - before
    return Outcome(done.returncode, done.stdout.splitlines(), done.stdout, written)


@pytest.fixture
def cwd(tmp_path):
    """A working directory with valid and invalid texts."""
    directory = tmp_path / "cwd"
    (directory / "extra" / "experiment").mkdir(parents=True)
    (directory / "extra" / "experiment" / "broken.yaml").write_text("trainer: [1\n")
    (directory / "extra" / "experiment" / "number.yaml").write_text("7\n")
    # OmegaConf 2.4 reads YAML in C, whose stack ends between 10,000 and 30,000 levels
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

# Command line, and the start of the error line.
CASES = [
    # Unknown keys, with the intended one
    (
        "+trainer.epochs=1",
        "config error: trainer.epochs is not a key; did you mean trainer.max_epochs?",
    ),
    (
        "optimizer=sgd optimizer.betas=[0.9,0.95]",
        "config error: optimizer.betas is not a key of the chosen optimizer",
    ),
    (
        f"{WITH_TOY} task=regression",
        "config error: task.name=regression needs a dataset of yours (docs/your-own-model.md); "
        "python_docs is a text, whose task is language_model or derives from mingpt_ddp.tasks.",
    ),
    ("+nosuch=1", "config error: nosuch is not a key"),
    # Names of the keys in nanoGPT
    (
        "learning_rate=1e-3",
        "config error: learning_rate is not a key; did you mean optimizer.lr?",
    ),
    # A habit from other templates
    (
        "+experiment=demo",
        "config error: experiment is already in the defaults list; write experiment=demo, without",
    ),
    # Values of another type
    ("trainer.max_steps=1.5", "config error: trainer.max_steps=1.5 must be a whole number"),
    ("optimizer.lr=fast", "config error: optimizer.lr='fast' must be a number"),
    ("optimizer.lr=nan", "config error: optimizer.lr=nan must be a finite number"),
    # Values out of range
    ("model.n_layer=0", "config error: model.n_layer=0 must be greater than or equal to 1"),
    (
        "model.n_layer=100000000",
        "config error: model.n_layer=100000000 must be less than or equal to 1000",
    ),
    (
        "data.sha256=abc",
        "config error: data.sha256=abc must be 64 lower-case hexadecimal digits or null",
    ),
    # Invalid combinations
    (
        "model.n_embd=64 model.n_head=5",
        "config error: model.n_embd=64 must be divisible by model.n_head=5",
    ),
    (
        "trainer.batch_size=12 trainer.micro_batch_size=5",
        "config error: trainer.batch_size=12 must be a multiple of trainer.micro_batch_size=5",
    ),
    (
        "trainer.max_epochs=null",
        "config error: trainer.max_epochs, trainer.max_steps and trainer.max_minutes are null; set",
    ),
    (
        "trainer.max_minutes=1 optimizer.warmup_steps=19",
        "config error: trainer.max_minutes=1 becomes a number of steps at the end of the warm-up, "
        "and needs optimizer.warmup_steps >= 20, not 19; raise it, or set optimizer.schedule_steps",
    ),
    (
        "trainer.max_minutes=1 optimizer.weight_decay_schedule=linear",
        "config error: optimizer.weight_decay_schedule=linear needs the number of steps at once, "
        "which trainer.max_minutes=1 fixes later; set optimizer.schedule_steps, or",
    ),
    (
        "optimizer=sgd optimizer.momentum=0",
        "config error: optimizer.nesterov=true needs optimizer.momentum > 0",
    ),
    (
        "ddp.static_graph=true ddp.find_unused_parameters=true",
        (
            "config error: ddp.static_graph=true cannot be combined with "
            "ddp.find_unused_parameters=true"
        ),
    ),
    (
        "ddp.preempted_exit_code=75",
        "config error: ddp.preempted_exit_code=75 means a failure; use 0, or 143 in pods",
    ),
    (
        "model=gpt_nano ddp.tensor_parallel=2",
        "config error: ddp.tensor_parallel=2 must divide model.n_head=3; change one of them",
    ),
    # Hardware and software that this machine lacks
    ("trainer.device=cuda", "config error: trainer.device=cuda, but torch sees no GPU here"),
    ("ddp=nccl", "config error: ddp.backend=nccl needs a GPU and there is none"),
    pytest.param(
        "ddp=mpi",
        "config error: ddp.backend=mpi, but this torch is built without MPI",
        marks=needs_no_mpi,
    ),
    pytest.param(
        text_file("s3://bucket/text.txt"),
        (
            "config error: data.path=s3://bucket/text.txt: s3:// is not installed; pip install "
            "'mingpt_ddp[s3]'"
        ),
        marks=needs_no_s3fs,
    ),
    pytest.param(
        "tracker=[tensorboard,trackio]",
        "config error: tracker=trackio is not installed; pip install 'mingpt_ddp[trackio]'",
        marks=needs_no_trackio,
    ),
    # Trackers
    ("tracker=tensorbord", "config error: Could not find 'tracker/tensorbord'"),
    (
        "tracker.project=../up",
        "config error: tracker.project=../up must be a name of letters, digits, spaces",
    ),
    ("tracker.uri=http://me:secret@host:5000", "config error: tracker.uri holds credentials"),
    # Paths
    ("run.name=../elsewhere", "config error: run.name=../elsewhere must be a directory name"),
    (
        "run.name=a/b/c",
        "config error: run.name=a/b/c must be a directory name of letters, digits and . _ + = , -, "
        "or two with one slash between them: group/name",
    ),
    (f"run.root=a/{'x' * 256}", "config error: run.root has a name of more than 255 bytes"),
    (f"data.cache_dir={'x' * 256}", "config error: data.cache_dir has a name of more than 255"),
    (
        "-m experiment=demo,null",
        "config error: cannot read the command line or a configuration file (ValueError: ",
    ),
    (
        "model=null",
        "config error: cannot read the command line or a configuration file (ValueError: ",
    ),
    ("+callbacks.x=1", "config error: callbacks is not a key"),
    ("run.name=.hidden", "config error: run.name=.hidden must be a directory name"),
    ("run.name=''", "config error: run.name= must be a directory name"),
    ("run.root=memory://runs", "config error: run.root=memory://runs must be a local directory"),
    ("run.root=good.txt", "run error: cannot write to the run directory good.txt/"),
    ("snapshot.path=good.txt", "run error: cannot write to the snapshot directory /"),
    (
        "snapshot.path=foo://bar",
        "config error: snapshot.path=foo://bar: no such protocol as foo://",
    ),
    (
        "snapshot.path=http://127.0.0.1:9/snapshots",
        "config error: snapshot.path=http://127.0.0.1:9/snapshots",
    ),
    (
        "snapshot.path=reference://x",
        "config error: snapshot.path=reference://x: reference:// needs more than a URL",
    ),
    (
        "run.resume=dir://x",
        "config error: run.resume=dir://x: dir:// needs more than a URL; use a directory or",
    ),
    ("run.resume=foo://bar", "config error: run.resume=foo://bar: no such protocol as foo://"),
    ("run.resume=nowhere", "snapshot error: there is no whole snapshot at nowhere"),
    # Texts
    (
        "data=text_file",
        "config error: data.path is missing; give a text, or several as data.sources",
    ),
    (
        text_file("train.bin"),
        "data error: data.path=train.bin looks like binary data with NUL bytes, such as tokens,",
    ),
    (
        text_file("docs.jsonl"),
        "data error: data.path=docs.jsonl has several columns of text; its columns are id, text: ",
    ),
    (
        "data=text_file data.sources=[[good.txt,1],[docs.jsonl,1]]",
        "data error: data.sources=docs.jsonl looks like data.format=jsonl, but the first ",
    ),
    (
        text_file("shards"),
        "data error: data.path=shards is mostly not text: skipped 1 binary data with NUL bytes, ",
    ),
    (text_file("nowhere.txt"), "data error: data.path=nowhere.txt: there is no such file"),
    (text_file("/dev/null"), "data error: data.path=/dev/null is not a regular file"),
    (
        text_file("https://host.invalid/text.txt"),
        "data error: cannot read data.path=https://host.invalid/text.txt",
    ),
    (
        text_file("http://127.0.0.1:9/text.txt"),
        "data error: cannot read data.path=http://127.0.0.1:9/text.txt",
    ),
    (
        text_file("latin1.txt"),
        (
            f"data error: data.path=latin1.txt is not UTF-8 at byte {len(TEXT) + 3}; convert it: "
            "iconv -f ISO-8859-1 -t UTF-8 OLD >NEW"
        ),
    ),
    (text_file("empty.txt"), "data error: data.path=empty.txt is empty"),
    (
        text_file("same.txt"),
        "data error: data.path=same.txt has one distinct character; there is nothing to learn",
    ),
    (text_file("not.gz"), "data error: data.path=not.gz is damaged or cut off: "),
    (text_file("half.gz"), "data error: data.path=half.gz is damaged or cut off: "),
    (
        text_file("good.txt") + f" data.sha256={OTHER_SHA}",
        "data error: data.path=good.txt has SHA-256 ",
    ),
    (  # 19 characters, of which int(19 * 0.9) = 17 train
        text_file("short.txt") + " data.block_size=17",
        "data error: the training text has 17 tokens, one window needs data.block_size + 1 = 18",
    ),
    (  # 4,300 characters, 3,870 of them train: (3870 - 64) // 64 = 59 windows
        text_file("good.txt") + " trainer.batch_size=60",
        (
            "data error: the training text has 59 windows of data.block_size=64, fewer than "
            "trainer.batch_size=60"
        ),
    ),
    # User code
    (
        own("name"),
        "code error: own/name.py:2: AttributeError: module 'os' has no attribute 'nowhere'",
    ),
    (own("syntax"), "code error: own/syntax.py:3: SyntaxError: expected ':'"),
    (
        own("taken"),
        "code error: own/taken.py:2: ValueError: @register('model', 'gpt', ...): the name is taken",
    ),
    (
        own("plain"),
        (
            "code error: own/plain.py:3: TypeError: Mine must be a subclass of ModelConfig with "
            "@dataclass"
        ),
    ),
    (
        own("hint"),
        "code error: own/hint.py:6: TypeError: Mine.widths has a type that YAML cannot represent",
    ),
    (
        own("good") + " model.code=nowhere.py",
        "config error: model.code=nowhere.py was not found in /",
    ),
    (
        own("good") + " model.code=good",
        "config error: model.code=good must be a local Python file, as in mine.py",
    ),
    (
        own("good") + " model.code=https://x.org/a.py",
        "config error: model.code=https://x.org/a.py must be a local",
    ),
    (
        own("good") + " model.widht=2",
        "config error: model.widht is not a key; did you mean model.width?",
    ),
    (own("good") + " model.width=wide", "config error: model.width='wide' must be a whole number"),
    (own("good") + " model.width=0", "config error: model.width=0 must be at least 1"),
    (own("good") + " model.width=100", "code error: own/good.py:11: AssertionError"),
    (
        own("good") + " model.architecture=tabel",
        "config error: model.architecture=tabel must be one of gpt, modern, table",
    ),
    (own("good"), "code error: own/good.py:19: TypeError: 'Embedding' object is not subscriptable"),
    (
        own("good") + " +data.reader=words",
        "config error: data.reader=words must be one of null, lines",
    ),
    (
        own("good") + " +data.reader=lines data.path=0",
        "code error: own/good.py:24: ZeroDivisionError",
    ),
    (
        own("good") + " +data.reader=lines data.path=7",
        "data error: data.reader=lines must yield text: 'int' object",
    ),
    (
        own("good") + " +data.reader=lines data.path=nowhere",
        "data error: data.reader=lines cannot read data.path=nowhere",
    ),
    # Keys and errors of Hydra
    (
        "hydra.run.dir=/nowhere/x",
        "config error: hydra.run.dir=/nowhere/x has no effect here: run.root and run.name set",
    ),
    ("hydra.output_subdir=.hydra", "config error: hydra.output_subdir=.hydra has no effect here"),
    (
        "'hydra.run.dir=x${hydra.job.num}'",
        "config error: hydra.run.dir=x${hydra.job.num} has no effect here: run.root and run.name",
    ),
    (
        f"{WITH_DIGITS} data=mnist 'data.name=${{data.path}}'",
        "config error: data.name: Missing mandatory value: data.path",
    ),
    ("hydra.verbose=true", "config error: hydra.verbose has no effect here"),
    ("optimizer.lr = 1e-3", "config error: cannot read 'optimizer.lr': "),
    ("optimizer.lr= 1e-3", "config error: cannot read '1e-3': "),
    ("--cfg model", "config error: argument --cfg/-c: invalid choice: 'model' (choose from "),
    ("-x", "config error: unrecognized arguments: -x"),
    # More than any machine has
    ("ddp.nproc_per_node=100000", "config error: ddp.nproc_per_node=100000 must be at most "),
    (
        "-m ddp.nproc_per_node=100000 run.seed=1,2",
        "config error: ddp.nproc_per_node=100000 must be at most ",
    ),
    (
        f"{WITH_TOY} experiment=toy data.num_workers=100000",
        "config error: data.num_workers=100000 must be at most ",
    ),
    # Once the text is encoded
    ("trainer.batch_size=1000000", "data error: the training text has "),
    (
        "data.val_paths={a:nowhere}",
        "data error: data.val_paths.a: nowhere: there is no such file",
    ),
    (
        "data.sources=[[good.txt,1],[nowhere,1]]",
        "data error: data.sources=nowhere: there is no such file",
    ),
    (
        "data.sources=[[good.txt,1],[empty.txt,1]]",
        "data error: data.sources=empty.txt is empty",
    ),
    ("data.sources=[[/,1]]", "data error: data.sources=/ is the root of the file system; name a"),
    (
        "run.init_from=gpt2",
        "snapshot error: run.init_from=gpt2 does not exist; name the directory of a run, ",
    ),
    (
        "data.tokenizer=gpt2",
        "data error: data.tokenizer=gpt2: there is no such file; name a tokenizer.json, or use",
    ),
    (
        "data.sources=[[good.txt,1e308],[short.txt,1e308]]",
        "config error: the weights of data.sources have no finite",
    ),
    ("config/train_char.py", "config error: cannot read 'config/train_char.py': "),
    (
        "--learning-rate 1e-3",
        "config error: --learning-rate is not an option; did you mean optimizer.lr",
    ),
    ("--config x.yaml", "config error: --config is not an option"),
    ("optimizer.lr=[1", "config error: "),
    (
        "optimizer.lr=interval(1,2)",
        "config error: Sweep parameters 'optimizer.lr=interval(1,2)' requires --multirun",
    ),
    (
        "optimizer.lr=1,2",
        "config error: optimizer.lr=1,2 has several values; add -m to train a job with each, or "
        "write 'optimizer.lr=[1,2]' for a list, or 'optimizer.lr=\"1,2\"' for a text",
    ),
    ("=3", "config error: "),
    (
        "model=huge",
        (
            "config error: Could not find 'model/huge'; choose one of gpt2, gpt_micro, gpt_mini, "
            "gpt_nano"
        ),
    ),
    ("~model", "config error: the group model is missing"),
    ("~model.n_head", "config error: model.n_head is missing; give it a value"),
    (
        "optimizer.lr='${nowhere}'",
        "config error: optimizer.lr: Interpolation key 'nowhere' not found",
    ),
    (
        "run.root='${oc.env:NOWHERE}'",
        "config error: run.root: \"Environment variable 'NOWHERE' not found\"",
    ),
    ("optimizer.lr='${optimizer.lr}'", "config error: optimizer.lr: Recursive interpolation"),
    ("--config-name nowhere", "config error: Cannot find primary config 'nowhere'"),
    ("--config-dir nowhere", "config error: Additional config directory '"),
    ("--config-dir extra experiment=broken", "config error: "),
    ("--config-dir extra experiment=number", "config error: "),
    (
        "--config-dir extra experiment=deep",
        "config error: cannot read the command line or a configuration file (RecursionError: ",
    ),
    (
        f"data.path={'[' * 2000}{']' * 2000}",
        "config error: cannot read the command line or a configuration file (RecursionError: ",
    ),
]

SWEEPS = [
    (
        "-m trainer.max_epoch=1,2",
        "config error: trainer.max_epoch is not a key; did you mean trainer.max_epochs?",
    ),
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
        "config error: run.name=a/b must be one name in a sweep: it holds the jobs' directories",
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
        "config error: optimizer.lr=interval(1e-4,1e-3) is for a search",
    ),
    (
        "-m hydra.sweeper.max_batch_size=2 run.seed=1,2",
        "config error: hydra.sweeper.max_batch_size has no effect here; sweep.parallel says how",
    ),
    (
        "-m hydra.sweeper.max_batch_size=0 run.seed=1,2",
        "config error: hydra.sweeper.max_batch_size=0 must be at least",
    ),
    (
        "-m hydra.job.chdir=true run.seed=1,2",
        "config error: hydra.job.chdir=true would move the jobs",
    ),
    (
        "-m hydra.sweep.dir=jobs run.seed=1,2",
        "config error: hydra.sweep.dir=jobs has no effect here: run.root and",
    ),
    (
        "-m 'hydra.sweep.subdir=x${hydra.job.num}' run.seed=1,2",
        "config error: hydra.sweep.subdir=x${hydra.job.num} has no effect here: run.root and",
    ),
    (
        "-m hydra.output_subdir=x run.seed=1,2",
        "config error: hydra.output_subdir=x has no effect here",
    ),
    (
        "-m sweep.parallel=0 run.seed=1,2",
        "config error: sweep.parallel=0 must be greater than or equal to 1 or 'auto'",
    ),
    *(
        (
            f"-m '{word}' run.seed=1,2",
            f"config error: {word} is used by a search only: add sweep=optuna, or leave it out",
        )
        for word in (
            "sweep.trials=20",
            "sweep.seed=2",
            "sweep.sampler_settings={n_startup_trials:3}",
        )
    ),
    (
        "-m sweep.pruner=median run.name=pruned run.seed=1,2",
        "config error: sweep.pruner=median ends jobs of a search: add sweep=optuna, or leave it",
    ),
    (
        "-m 'sweep.pruner_settings={n_startup_trials:3}' run.seed=1,2",
        "config error: sweep.pruner_settings is used by a pruner only: add sweep.pruner=median, or",
    ),
    (
        "-m sweep.metric=val_los run.seed=1,2",
        "config error: sweep.metric=val_los is not a number of result.json; did you mean val_loss?",
    ),
    (
        "-m sweep.parallel=2,3 run.seed=1,2",
        "config error: sweep.* holds for all jobs of a sweep; give each key one value",
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
        "-m run.root=a,b",
        "config error: run.root and run.name must be the same for all jobs of a sweep",
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
        "config error: sweep.pruner=median judges evaluations, which do not measure wall_seconds",
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
        "config error: a search compares the jobs of one directory",
    ),
    (
        "'optimizer.lr=tag(log,interval(-1,1))'",
        "config error: optimizer.lr=-1.0 must be greater than or equal to 1e-30",
    ),
    ("'optimizer.lr=interval(1e-2,1e-3)'", "config error: optimizer.lr=interval(1e-2,1e-3): "),
    ("hydra.sweeper.params=null", "config error: a search needs values to draw"),
]


@pytest.mark.parametrize(("args", "expected"), CASES)
def test_an_error_is_one_line(args, expected, program, cwd):
    check(program(shlex.split(args), cwd), expected)


URLS_WITH_SECRETS = [
    ("data.path", "https://user:hunter2@example.com/text.txt"),
    ("data.path", "https://hunter2@example.com/text.txt"),
    ("data.path", '"https://example.com/text.txt?token=hunter2"'),
    ("snapshot.path", "s3://key:hunter2@bucket/snapshots"),
    ("run.resume", "https://user:hunter2@example.com/run"),
    ("data.path", "http://hunter2@example.com/text.txt"),  # a token alone
]


@pytest.mark.parametrize(("key", "url"), URLS_WITH_SECRETS)
def test_credentials_are_refused_and_not_printed(key, url, program, cwd):
    outcome = program([f"{key}={url}"], cwd)
    check(outcome, f"config error: {key} holds credentials")
    assert "hunter2" not in outcome.text


# The environment variables of a launcher
PLACES = [
    ({"RANK": "0"}, "config error: "),
    ({"WORLD_SIZE": "1"}, "config error: RANK is not set"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "config error: MASTER_ADDR is not set"),
    ({"RANK": "1", "WORLD_SIZE": "1"}, "config error: RANK=1 must lie in 0 .. WORLD_SIZE - 1 = 0"),
    (
        {"RANK": "x", "WORLD_SIZE": "1"},
        "config error: the environment variable RANK='x' must be a whole number",
    ),
]


@pytest.mark.parametrize(("variables", "expected"), PLACES)
def test_contradictory_ranks(variables, expected, program, cwd):
    check(program(["trainer.max_steps=1"], cwd, **variables), expected)


def test_more_workers_than_remaining_ranks(program, cwd):
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    expected = "config error: RANK=0 and ddp.nproc_per_node=4 need WORLD_SIZE=4 or more"
    check(program(["ddp.nproc_per_node=4"], cwd, **variables), expected)


def test_a_sweep_whose_jobs_start_workers_under_torchrun(program, cwd):
    """One of its jobs would start workers: no job starts."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    expected = (
        "config error: ddp.nproc_per_node cannot sweep where RANK is set; leave "
        "it out, and start the ranks with torchrun"
    )
    check(program(["-m", "ddp.nproc_per_node=null,2"], cwd, **variables), expected)


@pytest.mark.parametrize(
    "args", [["model=gpt_nano", "--info"], ["--info", "model=gpt_nano"], ["--info=config"]]
)
def test_hydra_info_prints_the_configuration(args, program, cwd):
    outcome = program(args, cwd)
    assert outcome.code == 0, outcome.text
    assert "Config search path" in outcome.text or "Provider" in outcome.text
    assert not outcome.written


# Files that cannot be written, in an existing directory


@pytest.mark.parametrize("name", ["main.rank0.log", "config.yaml", "result.json", ".hydra"])
@pytest.mark.parametrize("kind", ["pipe", "other"])
def test_a_path_of_another_kind_instead_of_a_file(name, kind, cwd):
    run = cwd / "outputs" / "x"
    run.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(run / name)
    elif name == ".hydra":
        (run / name).write_text("a file")
    else:
        (run / name).mkdir()
    args = (
        "data=text_file data.path=good.txt model=gpt_nano trainer.max_steps=1 "
        "trainer.max_epochs=null run.name=x"
    )
    outcome = run_alone(shlex.split(args), cwd)
    if kind == "pipe" and name in ("config.yaml", "result.json"):  # it is replaced
        assert outcome.code == 0, outcome.text
    else:
        assert outcome.code == 2, outcome.text
        assert re.match(r"run error: cannot (write|remove) outputs/x/", outcome.lines[-1]), (
            outcome.text
        )
        assert "Traceback" not in outcome.text


def test_a_sweep_is_not_mixed_with_a_run(program, cwd):
    """In a run's directory it would list that run among its jobs, and a run in a sweep's too."""
    run, sweep = cwd / "outputs" / "run", cwd / "outputs" / "sweep"
    for file in (run / "result.json", sweep / "sweep.json"):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    outcome = program(["-m", "run.name=run", "run.seed=1,2", "trainer.max_steps=1"], cwd)
    check(outcome, "config error: run.name=run names a single run, not a sweep; choose another")
    args = "data=text_file data.path=good.txt model=gpt_nano trainer.max_steps=1 run.name=sweep"
    outcome = run_alone([*args.split(), "trainer.max_epochs=null"], cwd)
    assert outcome.code == 2, outcome.text
    assert outcome.lines[-1] == (
        "run error: outputs/sweep is the directory of a sweep; choose another run.name"
    )
    assert [*map(os.listdir, (run, sweep))] == [["result.json"], ["sweep.json"]]


def test_a_valid_run_is_distinguished(cwd):
    """The same call with valid input trains and writes a run, so the checks above can fail."""
    args = (
        "data=text_file data.path=good.txt model=gpt_nano trainer.max_steps=1 "
        "trainer.max_epochs=null run.name=x"
    )
    outcome = run_alone(shlex.split(args), cwd)
    assert outcome.code == 0, outcome.text
    assert outcome.written == {"outputs", "cache"}


# Launched as users do


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["ddp.nproc_per_node=2", "trainer.device=cuda"],  # a worker finds it
            "config error: trainer.device=cuda, but torch sees no GPU here",
        ),
        (["data=text_file", "data.path=empty.txt"], "data error: data.path=empty.txt is empty"),
    ],
)
def test_python_main(args, expected, cwd):
    check(run_alone(args, cwd), expected)


def test_torchrun(cwd):
    """Both ranks have the same error; rank zero reports it once, and the agent exits with 1."""
    done = call([*torchrun(2), "trainer.batch_size=1", "trainer.device=cpu"], cwd)
    errors = [line for line in done.stdout.splitlines() if re.search(r"\w error: ", line)]
    assert len(errors) == 1, done.stdout
    assert errors[0].startswith(
        "config error: trainer.batch_size=1 in micro-batches of 1 occupies 1 of 2 ranks; use at "
        "most 1, or"
    )
    assert done.returncode == 1
    assert not (cwd / "outputs").exists()


@pytest.mark.parametrize(("args", "expected"), SWEEPS)
def test_a_sweep_with_an_invalid_value_does_not_start(program, cwd, args, expected):
    check(program(shlex.split(args), cwd), expected)


@pytest.mark.parametrize(("args", "expected"), SEARCHES)
def test_an_invalid_search_does_not_start(program, cwd, args, expected):
    pytest.importorskip("optuna")
    check(program(["-m", "sweep=optuna_lr", *shlex.split(args)], cwd), expected)
