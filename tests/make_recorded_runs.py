"""Small runs of an earlier version in tests/data/recorded, with what this one may have retired.

    git worktree add /tmp/earlier 0ffcafa && python tests/make_recorded_runs.py /tmp/earlier

writes those that are missing; existing ones never change.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data" / "recorded"
SMALL = [
    "model=gpt_nano",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=8",
    "model.dropout=0",  # which elements torch drops depends on the CPU
    "data.block_size=16",
]
COMMON = [
    "run.name=run",
    "trainer.device=cpu",
    "trainer.precision=fp32",
    "trainer.batch_size=4",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
    "trainer.eval_every=2",
    "optimizer.schedule_steps=10",
    "optimizer.warmup_steps=2",
    "snapshot.keep_last=1",
]
TEXT = [*SMALL, "data=text_file", "data.path=text.txt"]
IMAGES = ["data=digits", "task=classification", "model=convnet", "model.channels=2"]
# The overrides of a run, by name.
RUNS = {
    "zip": [*SMALL, "data=text_file", "data.path=text.zip"],
    "tar": [*SMALL, "data=text_file", "data.path=text.tar.gz"],
    "digits": IMAGES,
    "csv": [*TEXT, "tracker=csv"],
    "devices": [*TEXT, "model.devices=2"],
    "moved": [*TEXT, "snapshot.path=second"],
    "study": ["-m", *TEXT, "sweep=optuna_lr", "sweep.sampler=random"],
}
BEGAN = {"moved": [*TEXT, "snapshot.path=first"]}  # with other overrides
STEPS, MORE_STEPS = 4, 8
# Not kept: what names the machine, and what no command reads.
LEFT_OUT = (
    "text.*",
    "tensorboard",
    "attempt.json",
    ".hydra",
    ".lock",
    "main.rank0.log",
    "multirun.yaml",
    "report.html",
)


def command(name: str, more: bool = False) -> list[str]:
    """Return the overrides that begin a run, or that go on with it for `more` steps or trials."""
    overrides = RUNS[name] if more else BEGAN.get(name, RUNS[name])
    if name == "study":
        limits = [f"trainer.max_steps={STEPS}", f"sweep.trials={3 if more else 2}"]
    else:
        limits = [f"trainer.max_steps={MORE_STEPS if more else STEPS}"]
    return [*overrides, *COMMON, *limits]


def write_texts() -> None:
    """Write a text, and two archives of two members, to the working directory."""
    generator = random.Random(2)
    phrases = ["the king", "a horse", "what light", "to be", "or not"]
    text = "".join(generator.choice(phrases) + generator.choice(".\n,; ") for _ in range(400))
    Path("text.txt").write_text(text)
    with (
        zipfile.ZipFile("text.zip", "w", zipfile.ZIP_DEFLATED) as archive,
        tarfile.open("text.tar.gz", "w:gz") as tar,
    ):
        for name, part in {"a.txt": text[:2000], "b/c.txt": text[2000:]}.items():
            archive.writestr(name, part)
            info = tarfile.TarInfo(name)
            info.size = len(part)
            tar.addfile(info, io.BytesIO(part.encode()))


def train_losses(directory: Path) -> dict[str, float]:
    """Return the training loss by step of the one run below a directory, or of its last trial."""
    paths = sorted(directory.rglob("metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    rows = map(json.loads, paths[-1].read_text().splitlines())
    return {str(row["step"]): row["train_loss"] for row in rows if "train_loss" in row}


def make(name: str, checkout: Path) -> None:
    """Write a run's directory, and its losses after it went on."""
    for text in DATA.glob("text.*"):
        shutil.copy(text, ".")
    main = [sys.executable, str(checkout / "main.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*main, *command(name)], env=env, check=True)
    kept = DATA / name
    shutil.copytree(".", kept, ignore=shutil.ignore_patterns(*LEFT_OUT))
    subprocess.run([*main, *command(name, more=True)], env=env, check=True)
    losses = json.dumps(train_losses(Path("outputs")), indent=1)
    (kept / "expected.json").write_text(losses + "\n")


if __name__ == "__main__":
    earlier = Path(sys.argv[1]).resolve()
    if not DATA.exists():
        DATA.mkdir()
        os.chdir(DATA)
        write_texts()
    for missing in (name for name in RUNS if not (DATA / name).exists()):
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            make(missing, earlier)
