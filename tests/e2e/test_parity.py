"""Check that each topic of introductions to distributed PyTorch has a command here that works.

Such tutorials train toy models, a ConvNet on MNIST, and "any model, any dataset, any optimizer",
with DataParallel, DDP, model parallelism and FSDP. `make test-slow` runs all of these commands.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import ROOT
from runs import write_files
from user_code_page import page_files

TOY = "main.py --config-dir=examples/toy experiment=toy"
DIGITS = "main.py --config-dir=examples/digits experiment=digits_convnet"
TINY = "main.py model=gpt_nano trainer.max_steps=20"
# Names in the commands: MNIST_DIR is a directory with four idx files, RUN is a run of the ConvNet,
# and my_task is the example in docs/your-own-model.md.
COMMANDS = {
    "any model and loss": f"python {TOY}",
    "a ConvNet on images, two ranks": f"python {DIGITS} ddp.nproc_per_node=2",
    "accuracy over all ranks": f"python {DIGITS} ddp.nproc_per_node=3 trainer.max_steps=20",
    "MNIST from its files": f"python {DIGITS} data=mnist data.path=MNIST_DIR trainer.max_steps=10",
    "any dataset, task and model": (
        "torchrun --nproc_per_node=2 main.py --config-dir=my_task task=tagging model=tagger "
        "data=repeats trainer.max_steps=20"
    ),
    "loader processes": f"python {DIGITS} data.num_workers=2 trainer.max_steps=20",
    "several losses": f"python {TOY} trainer.max_epochs=1",
    "a test split": f"python {TINY} data.test_split=0.05",
    "DataParallel": "python examples/data_parallel.py",
    "gradients averaged by hand": (
        "torchrun --standalone --nproc_per_node=2 examples/manual_averaging.py"
    ),
    "ZeRO": f"python {TOY} ddp.nproc_per_node=2 ddp.strategy=zero1 trainer.max_epochs=1",
    "FSDP": f"torchrun --nproc_per_node=2 {TINY} ddp.strategy=fsdp",
    "a ring all-reduce by hand": (
        "python main.py experiment=demo run.name=ring ddp.nproc_per_node=3 trainer.max_steps=20 "
        f"ddp.comm_hook=ring +data.code={ROOT}/examples/ring_hook.py"
    ),
    "every collective": "torchrun --nproc_per_node=3 examples/collectives.py max_bytes=4096",
    "a model split over devices": (
        "python main.py --config-dir=examples model=model_parallel ddp.nproc_per_node=2 "
        "trainer.max_steps=20"
    ),
    "tensor parallelism": (
        f"python {TINY} model.n_head=4 ddp.nproc_per_node=2 ddp.tensor_parallel=2"
    ),
    "SyncBatchNorm": f"python {DIGITS} ddp.nproc_per_node=2 trainer.max_steps=20",
    "the learning rate scaled with the batch": (
        f"python {TOY} optimizer.lr_scaling=linear optimizer.reference_batch_size=16 "
        "trainer.max_epochs=1"
    ),
    "the batch size per rank": (
        f"python {TOY} ddp.nproc_per_node=2 trainer.batch_size_per_rank=16 trainer.max_epochs=1"
    ),
    "all GPUs": f"python {TOY} ddp.nproc_per_node=gpu",
    "some GPUs": f"CUDA_VISIBLE_DEVICES=0 python {TOY}",
    "two ranks on one GPU": (
        f"python {TOY} ddp.nproc_per_node=2 ddp.backend=gloo trainer.device=cuda"
    ),
    "NCCL": f"python {TOY} ddp.nproc_per_node=1 ddp.backend=nccl trainer.device=cuda",
    "mpirun": "mpirun -np 2 python main.py experiment=demo trainer.max_steps=20",
    "the rank in your own code": (
        "python -c 'from mingpt_ddp.distributed import get_rank, get_world_size; "
        "print(get_rank(), get_world_size())'"
    ),
    "communication during the backward pass": (
        f"python {TINY} ddp.nproc_per_node=2 ddp.backend=gloo"
    ),
    "a snapshot every two epochs": f"python {TOY} snapshot.every_epochs=2",
    "a run on the CPU": f"python {TINY} trainer.device=cpu",
    "the metrics of a saved model": (
        "python -m mingpt_ddp evaluate RUN split=test code=examples/digits/digits.py"
    ),
    "epochs in the log": f"python {TOY} trainer.max_epochs=2",
    "a monitor interval": (
        f"torchrun --monitor_interval=0.5 --nproc_per_node=2 {TOY} trainer.max_epochs=1"
    ),
    "fine-tuning": f"python {DIGITS} run.init_from=RUN run.seed=2 trainer.max_steps=20",
    "the weights alone": "python -m mingpt_ddp snapshots export RUN to=weights",
    "training from Python": (
        'python -c \'import mingpt_ddp; mingpt_ddp.train(["--config-dir=examples/toy", '
        '"experiment=toy", "trainer.max_epochs=1"], nproc=2)\''
    ),
    "backends compared": "torchrun --standalone --nproc_per_node=2 examples/collectives.py",
}
ON_GPU = {"all GPUs", "some GPUs", "two ranks on one GPU", "NCCL"}


def write_digits(directory: Path) -> None:
    """Write a small MNIST data set with 200 training images and 50 test images."""
    directory.mkdir()
    for split, n in (("train", 200), ("t10k", 50)):
        pixels = bytes((label * 25 + pixel) % 256 for label in range(n) for pixel in range(28 * 28))
        head = struct.pack(">HBB3I", 0, 8, 3, n, 28, 28)
        (directory / f"{split}-images-idx3-ubyte").write_bytes(head + pixels)
        labels = bytes(label % 10 for label in range(n))
        head = struct.pack(">HBBI", 0, 8, 1, n)
        (directory / f"{split}-labels-idx1-ubyte").write_bytes(head + labels)


def run_command(command: str, directory: Path, run: Path | None = None) -> None:
    """Run a command of the table with this interpreter and checkout. It must exit with code 0."""
    words = shlex.split(command)
    variables = dict(os.environ, PYTHONPATH=str(ROOT))
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    programs = {
        "python": [sys.executable],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    }
    known = {"main.py": str(ROOT / "main.py"), "python": sys.executable, "RUN": str(run)}
    typed = [*programs[words[0]]]
    for word in words[1:]:
        word = re.sub(r"(?<![\w/])examples/?", f"{ROOT}/examples/", word)
        typed.append(known.get(word, word.replace("=RUN", f"={run}")))
    done = subprocess.run(typed, cwd=directory, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the ConvNet, and return its run directory."""
    directory = tmp_path_factory.mktemp("digits")
    run_command(f"python {DIGITS} run.name=digits trainer.max_steps=20", directory)
    return directory / "outputs" / "digits"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_command(name, tmp_path, digits_run):
    if name in ON_GPU and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if name == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("needs mpirun")
    write_digits(tmp_path / "MNIST_DIR")
    write_files(tmp_path, page_files("my_task"))
    run_command(COMMANDS[name], tmp_path, digits_run)
