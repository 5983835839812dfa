"""Check the evaluate command on runs of a language model."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import ROOT, TINY, WITH_DIGITS, WITH_TOY, call, python_main, torchrun
from runs import read_result, succeed
from snapshot_helpers import mend_manifest

import mingpt_ddp

METRICS = ("loss", "accuracy", "bits_per_byte", "bits_per_char")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("trained")
    succeed(
        [
            *python_main(),
            *TINY,
            "trainer.precision=fp32",
            "data.train_split=0.8",
            "data.test_split=0.1",
            "run.name=a",
        ],
        cwd,
    )
    return cwd


def evaluate(
    cwd: Path, *args: str, run: str = "outputs/a", launcher: tuple[str, ...] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    command = [
        *launcher,
        "-m",
        "mingpt_ddp",
        "evaluate",
        run,
        "device=cpu",
        "precision=fp32",
        *args,
    ]
    return call(command, cwd, separate=True, PYTHONPATH=str(ROOT))


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_metrics_equal_those_of_training(split, ranks, trained):
    launcher = (sys.executable,) if ranks == 1 else tuple(torchrun(2)[:-1])
    done = evaluate(trained, f"split={split}", launcher=launcher)
    assert done.returncode == 0, done.stderr
    result = read_result(trained / "outputs" / "a")
    metrics = json.loads(done.stdout)
    assert metrics.pop("split") == split
    assert metrics == {name: pytest.approx(result[f"{split}_{name}"], abs=1e-5) for name in metrics}
    assert set(metrics) == {"loss", "accuracy", "bits_per_byte", "bits_per_char"}


def test_several_runs_are_listed(trained):
    """The runs have different tokenizers and context lengths.

    Each has the metrics that its training has recorded. Their bits per byte can be compared, since
    all runs use the same text.
    """
    settings = [*TINY, "trainer.precision=fp32", "data.train_split=0.8", "data.test_split=0.1"]
    names = {"a": [], "byte": ["data.tokenizer=byte"], "short": ["data.block_size=8"]}
    for name, keys in names.items():
        if keys:
            succeed([*python_main(), *settings, f"run.name={name}", *keys], trained)
    runs = [f"outputs/{name}" for name in names]
    done = evaluate(trained, *runs[1:])
    assert done.returncode == 0, done.stderr
    results = [read_result(trained / run) for run in runs]
    assert json.loads(done.stdout) == {
        "split": "val",
        "runs": [
            {
                "snapshot": run,
                **{key: pytest.approx(result[f"val_{key}"], abs=1e-5) for key in METRICS},
            }
            for run, result in zip(runs, results, strict=True)
        ],
    }
    (trained / "other.txt").write_text("the rest is silence" * 9)
    other = evaluate(trained, "outputs/byte", "data.path=other.txt")
    assert other.returncode == 0, other.stderr
    alone = [
        json.loads(evaluate(trained, "data.path=other.txt", run=f"outputs/{name}").stdout)
        for name in ("a", "byte")
    ]
    assert [run["bits_per_byte"] for run in json.loads(other.stdout)["runs"]] == [
        pytest.approx(one["bits_per_byte"], abs=1e-6) for one in alone
    ]


@pytest.mark.parametrize(
    ("text", "split"), [("no", "val"), ("the rest is silence", "val"), ("zyx" * 30, "test")]
)
def test_another_text_is_measured_as_a_whole(text, split, trained):
    """The text may be shorter than a training window, and the name of the split does not matter."""
    (trained / "other.txt").write_text(text)
    done = evaluate(trained, "data.path=other.txt", f"split={split}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"] == "other.txt"
    run = mingpt_ddp.load(str(trained / "outputs" / "a"))
    model, tokens, length = run.model, torch.tensor([run.tokenizer.encode(text)]), 16
    losses = []
    for first in range(0, tokens.shape[1] - 1, length):
        x, y = tokens[:, first : first + length], tokens[:, first + 1 : first + 1 + length]
        with torch.no_grad():
            logits = model(x[:, : y.shape[1]])
        losses.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        )
    assert json.loads(done.stdout)["loss"] == pytest.approx(
        float(torch.cat(losses).mean()), abs=1e-5
    )


def change_state(trained: Path, target: Path, change: Callable[[dict], None]) -> Path:
    """Copy the newest snapshot, change its state, and correct the digest in the manifest."""
    [newest] = (trained / "outputs" / "a" / "snapshots").glob("step_00000012")
    shutil.copytree(newest, target / newest.name)
    state = json.loads((target / newest.name / "state.json").read_text())
    change(state)
    (target / newest.name / "state.json").write_text(json.dumps(state))
    mend_manifest(target / newest.name, "state.json")
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(text=[1]), "has an invalid state"),
        (lambda state: state.pop("text"), "has an invalid state"),
        (lambda state: state.pop("vocabulary"), "has an invalid state"),
        (lambda state: state.update(data=7, text=None), "has an invalid state"),
        (
            lambda state: state["config"]["model"].update(n_embd=24_000),
            "the snapshot's weights do not fit the model",
        ),
        (
            lambda state: state["config"]["model"].update(n_layer=1_000),
            "tensors do not fit a model with 1000 layers",
        ),
        (
            lambda state: state["config"]["data"].update(path="a::b"),
            "is a chain of URLs, which this command does not open",
        ),
    ],
)
def test_a_hostile_state_is_refused_in_one_line(change, message, trained, tmp_path):
    changed = change_state(trained, tmp_path, change)
    done = evaluate(trained, run=str(changed))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr
    assert re.match("(snapshot|data) error: ", done.stderr)


def test_data_files_that_have_moved(tmp_path):
    """Check the four files of MNIST. A toy data set has no path that could move."""
    for part, n in (("train", 40), ("t10k", 10)):
        for name, shape in (
            (f"{part}-images-idx3-ubyte", (n, 8, 8)),
            (f"{part}-labels-idx1-ubyte", (n,)),
        ):
            values = (np.arange(np.prod(shape)) % 10).astype(np.uint8)
            content = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + values.tobytes()
            (tmp_path / "before").mkdir(exist_ok=True)
            (tmp_path / "before" / name).write_bytes(content)
    settings = [
        WITH_DIGITS,
        "experiment=digits_convnet",
        "data=mnist",
        "data.path=before",
        "trainer.max_steps=2",
        "run.name=a",
    ]
    succeed([*python_main(), *settings, "trainer.batch_size=8"], tmp_path)
    (tmp_path / "before").rename(tmp_path / "after")
    code = f"code={ROOT}/examples/digits/digits.py"
    assert evaluate(tmp_path, "split=test", code).returncode == 2
    done = evaluate(tmp_path, "split=test", "data.path=after", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"] <= 1
    succeed(
        [*python_main(), WITH_TOY, "experiment=toy", "trainer.max_epochs=1", "run.name=toy"],
        tmp_path,
    )
    code = f"code={ROOT}/examples/toy/toy.py"
    done = evaluate(tmp_path, "data.path=after", code, run="outputs/toy")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "its data has no key data.path; leave out data.path" in done.stderr


def test_a_character_that_the_model_does_not_know_is_refused(trained):
    (trained / "greek.txt").write_text("logos is λόγος" * 9)
    done = evaluate(trained, "data.path=greek.txt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("data error: ")
    assert len(done.stderr.splitlines()) == 1
