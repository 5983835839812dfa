"""Check the second example in docs/your-own-model.md: a user's task, dataset and model."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

import pytest
from holding import kill_before
from launching import WITH_TOY, call, committed, python_main
from runs import (
    error_line,
    fail,
    read_history,
    read_result,
    succeed,
    tool,
    verified_steps,
    weights,
    write_files,
)
from user_code_page import page_commands, page_files

STEPS = 160
SETTINGS = [
    "trainer.max_epochs=null",
    f"trainer.max_steps={STEPS}",
    "trainer.batch_size=250",
    "trainer.precision=fp32",
]
# An epoch has 16 steps.
SETTINGS += [
    "optimizer.warmup_steps=4",
    "trainer.log_every=1",
    "trainer.eval_every=80",
    "snapshot.every_steps=4",
]
TWO_RANKS = [*python_main(), "ddp.nproc_per_node=2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("project")
    return write_files(cwd, page_files("my_task"))


@pytest.fixture(scope="module")
def trained(project) -> Path:
    succeed([*TWO_RANKS, *arguments()], project)
    return project / "outputs" / "tags"


def arguments(*more: str) -> list[str]:
    """Return the arguments of the page's training command and the arguments of the tests."""
    args = page_commands(1)[0]
    assert args[:3] == ["torchrun", "--nproc_per_node=2", "main.py"]
    return [*args[3:], *SETTINGS, *more]


def test_the_task_is_learnt_and_measured(trained, project):
    result = read_result(trained)
    assert result["test_accuracy"] > 0.9
    assert result["samples"] == STEPS * 250
    assert len(read_history(trained).series("val_accuracy")) == 2
    args = page_commands(1)[1]
    assert args[:4] == ["python", "-m", "mingpt_ddp", "evaluate"]
    text = succeed([sys.executable, *args[1:]], project)
    assert json.loads(text)["accuracy"] == pytest.approx(result["test_accuracy"], abs=0.01)


def test_killed_in_mid_epoch(trained, project, tmp_path):
    command = [*TWO_RANKS, *arguments(f"run.root={tmp_path}", "data.num_workers=1")]
    run = tmp_path / "tags"
    kill_before(61, command, project, lambda: committed(run))
    text = succeed(
        [*python_main(), *arguments(f"run.root={tmp_path}", "ddp.nproc_per_node=2")], project
    )
    assert "resuming from the snapshot" in text
    assert weights(run, STEPS) == weights(trained, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_under_another_strategy(strategy, trained, project, tmp_path):
    succeed([*TWO_RANKS, *arguments(f"run.root={tmp_path}", f"ddp.strategy={strategy}")], project)
    ours, theirs = read_result(tmp_path / "tags"), read_result(trained)
    for name in ("val_loss", "test_loss", "test_accuracy"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-5)


def test_in_a_sweep_with_snapshots_in_s3(project, tmp_path, seaweed):
    path = f"s3://{seaweed.make_bucket('tasks')}/{uuid.uuid4().hex}"
    sweep = [
        "-m",
        "model.n_hidden=8,32",
        "run.name=sweep",
        f"run.root={tmp_path}",
        f"snapshot.path={path}",
    ]
    text = succeed(
        [*python_main(), *arguments("trainer.max_steps=8"), *sweep],
        project,
        **seaweed.environment(),
    )
    assert "sweep: 2 jobs, 0 already complete, 0 failed" in text
    results = [read_result(found.parent) for found in tmp_path.glob("sweep/*/result.json")]
    assert [result["step"] for result in results] == [8, 8]
    assert all("val_accuracy" in result for result in results)


def test_other_commands_use_the_run(trained, project, tmp_path):
    text = error_line(fail(tool("evaluate", str(trained)), project))
    assert (
        "if you trust the Python file that registers it, name the file, as in code=my_project"
        in text
    )
    text = fail(tool("sample", str(trained), "code=my_task/mine.py"), project)
    expected = (
        "the snapshot's task is not a language model; evaluate its model with "
        "python -m mingpt_ddp evaluate"
    )
    assert error_line(text, "snapshot error: ").endswith(expected)
    assert STEPS in verified_steps(trained, project)
    succeed(tool("snapshots", "export", str(trained), f"to={tmp_path}/export"), project)
    described = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (described["task"]["name"], described["model"]["n_hidden"]) == ("tagging", 32)
    exported = tmp_path / "export" / "model.safetensors"
    assert exported.read_bytes() == weights(trained, STEPS)


SEVERAL = """
from mingpt_ddp.registry import TaskConfig, register
from mingpt_ddp.tasks import Task
from torch.nn import functional as F

@register("task", "autoencoder", TaskConfig)
class Autoencoder(Task):
    def loss(self, model, batch):
        x, _ = batch
        y = model(x)
        return {"squared": F.mse_loss(y, x[:, :5]), "absolute": 0.1 * F.l1_loss(y, x[:, :5])}
"""


def test_each_of_several_losses_is_logged(tmp_path):
    """The run trains their sum. Without a `metrics` method, the evaluation reports their means."""
    preset = "name: autoencoder\ncode: several.py\n"
    write_files(tmp_path / "own", {"several.py": SEVERAL, "task/autoencoder.yaml": preset})
    args = [
        WITH_TOY,
        "experiment=toy",
        "task=autoencoder",
        "--config-dir=own",
        "trainer.max_epochs=1",
        "run.name=run",
    ]
    succeed([*python_main(), *args, "trainer.precision=fp32", "ddp.nproc_per_node=2"], tmp_path)
    run = tmp_path / "outputs" / "run"
    history, result = read_history(run), read_result(run)
    parts = [dict(history.series(f"train_loss_{name}")) for name in ("squared", "absolute")]
    for step, total in history.series("train_loss"):
        assert total == pytest.approx(parts[0][step] + parts[1][step])
    assert result["val_loss"] == pytest.approx(
        result["val_loss_squared"] + result["val_loss_absolute"]
    )


WRONG = """
from mingpt_ddp.registry import TaskConfig, register
from mingpt_ddp.tasks import Task
from torch.nn import functional as F

class Base(Task):
    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

@register("task", "vector", TaskConfig)
class Vector(Task):
    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="none")

@register("task", "nameless", TaskConfig)
class Nameless(Base):
    def metrics(self, model, batch):
        return {"error": (1.0, 2)}

@register("task", "raises", TaskConfig)
class Raises(Task):
    def loss(self, model, batch):
        return batch.nothing

@register("task", "other", TaskConfig)
def other(config, group):
    return 7
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "vector",
            (
                "code error: the task vector: loss(model, batch) must return scalar tensors, not "
                "(32, 5) as loss"
            ),
        ),
        (
            "nameless",
            (
                "code error: the task nameless: metrics(model, batch) must return a dictionary of "
                "pairs (sum, number), and one of its keys"
            ),
        ),
        (
            "raises",
            "code error: own/wrong.py:23: AttributeError: 'list' object has no attribute 'nothing'",
        ),
        ("other", "code error: the task other must be a subclass of mingpt_ddp.tasks.Task"),
    ],
)
def test_a_wrong_task_is_reported_in_one_line(name, message, tmp_path):
    preset = f"name: {name}\ncode: wrong.py\n"
    write_files(tmp_path / "own", {"wrong.py": WRONG, "task/wrong.yaml": preset})
    args = [WITH_TOY, "experiment=toy", "task=wrong", "--config-dir=own"]
    done = call([*python_main(), *args], tmp_path)
    assert (done.returncode, len(done.stdout.splitlines())) == (2, 1), done.stdout
    assert done.stdout.startswith(message), done.stdout
    assert not (tmp_path / "outputs").exists()
