"""Check the output and the resumption of runs in cases that the contract tests do not have.

test_launchers.py checks the launchers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import UNREAD, server_of
from launching import (
    PATIENCE_S,
    TINY,
    Job,
    call,
    copy_source,
    environment,
    python_main,
    torchrun,
)
from ports import free_port
from runs import curve, error_line, fail, read_result, succeed, train, weights


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, str]:
    """Train a run on two ranks under torchrun. Return its directory and its output."""
    cwd = tmp_path_factory.mktemp("pair")
    text = succeed([*torchrun(2), *TINY, "run.name=run"], cwd)
    return cwd / "outputs" / "run", text


def test_run_directory(pair):
    run, _ = pair
    names = {path.name for path in run.iterdir()} - {".lock", "code.patch"}
    logs = {"main.rank0.log", "main.rank1.log", "metrics.jsonl", "samples.jsonl", "snapshots.jsonl"}
    assert names == {"config.yaml", ".hydra", "tensorboard", "snapshots", "result.json"} | logs


def test_the_log_names_epochs_and_the_time(pair):
    """An epoch has 43 steps."""
    run, text = pair
    assert re.search(r"^step 12/12: loss .*, epoch 1/1, lr ", text, flags=re.MULTILINE)
    assert len(re.findall(r"^the first step was done after [0-9.]+ s$", text, re.MULTILINE)) == 1
    last = text.splitlines()[-1]
    assert f"validation loss {read_result(run)['val_loss']:.4f} nats" in last
    assert re.search(r" after 12 steps and \d:\d\d:\d\d; the run is in ", last)


def test_communication_overlaps_the_backward_pass(tmp_path):
    """The exposed part of the all-reduce is less than all of it, since the rest is hidden."""
    steps = ["trainer.max_steps=40", "trainer.log_every=10", "data.truncate=0.2"]
    two = ["ddp.nproc_per_node=2", "ddp.bucket_cap_mb=0.01", "ddp.backend=gloo", "model.n_embd=96"]
    run = train(tmp_path, *TINY, *steps, *two)
    names = ("speed/communication_ms", "speed/communication_exposed_ms")
    total, exposed = ([value for _, value in curve(run, name, rank=1)] for name in names)
    assert len(total) == 4 and min(total) > 0 and min(exposed) >= 0
    assert all(part <= whole for part, whole in zip(exposed, total, strict=True))
    assert sum(exposed) < sum(total)


def test_resume_never_starts_a_new_run_and_another_run_can_be_resumed(tmp_path):
    for expected in ("run", "run-2", "run-3"):
        train(tmp_path, *TINY, "run.resume=never", "trainer.max_steps=4")
        assert read_result(tmp_path / "outputs" / expected)["step"] == 4
    text = succeed([*python_main(), *TINY, "run.name=b", "run.resume=outputs/run-2"], tmp_path)
    assert "resuming from the snapshot of step 4 of 12" in text


def test_damaged_newest_snapshot_is_reported_and_skipped(tmp_path):
    """One line of the log names the damaged snapshot."""
    run = train(tmp_path, *TINY, "trainer.max_steps=8")
    damaged = run / "snapshots" / "step_00000008" / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    text = succeed([*python_main(), *TINY, "run.name=run"], tmp_path)
    (line,) = [line for line in text.splitlines() if "damaged" in line]
    assert "step_00000008" in line and "resuming from the snapshot of step 6 of 12" in text


def test_resume_with_another_model_or_text_is_refused(pair):
    run, _ = pair
    cwd, before = run.parents[1], weights(run)
    (cwd / "other.txt").write_text("another text, with other characters " * 400)
    for words, named in (
        (["model.n_layer=3"], "model.n_layer"),
        (["data.block_size=8"], "data.block_size"),
        (["data=text_file", "data.path=other.txt", "data.truncate=1"], "the data (SHA-256)"),
    ):
        text = fail([*python_main(), *TINY, "run.name=run", *words], cwd)
        assert named in error_line(text, "snapshot error: ")
    assert weights(run) == before


def test_changed_learning_rate_is_logged_and_applied(tmp_path):
    train(tmp_path, *TINY, "trainer.max_steps=4")
    options = ["optimizer.lr=0.5", "optimizer.schedule=constant", "run.name=run"]
    text = succeed([*python_main(), *TINY, *options], tmp_path)
    assert re.search(r"^optimizer\.lr +0\.001 +0\.5$", text, re.MULTILINE)
    assert "lr 5.00e-01" in text


def test_snapshots_on_another_filesystem(tmp_path):
    """Snapshots in memory:// last as long as the process. So no code may assume a local path."""
    run = train(tmp_path, *TINY, "snapshot.path=memory://bucket/runs")
    assert "committed to memory://bucket/runs/run" in (run / "main.rank0.log").read_text()
    assert not (run / "snapshots").exists()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_reduced_precision_resumes_exactly(precision, tmp_path):
    """A snapshot contains the state of the gradient scaler."""
    options = [*TINY, f"trainer.precision={precision}", "optimizer.schedule_steps=12"]
    whole = train(tmp_path / "whole", *options)
    for steps in (8, 12):
        run = train(tmp_path / "parts", *options, f"trainer.max_steps={steps}")
    assert weights(run) == weights(whole)
    state = (run / "snapshots" / "step_00000012" / "state.json").read_text()
    assert ('"scale":' in state) == (precision == "fp16")


@pytest.mark.slow
def test_installed_wheel_contains_its_configuration(tmp_path):
    """After `pip install .`, `torchrun -m mingpt_ddp` works in any directory."""
    source, site = tmp_path / "source", tmp_path / "site"
    copy_source(source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, str(source)], check=True, env=environment(tmp_path))
    assert (site / "mingpt_ddp" / "conf" / "experiment" / "demo.yaml").exists()
    shutil.rmtree(source)
    path = {"PYTHONPATH": str(site)}
    command = [*torchrun(1)[:-1], "-m", "mingpt_ddp", *TINY, "run.name=wheel"]
    succeed(command, tmp_path, **path)
    assert read_result(tmp_path / "outputs" / "wheel")["step"] == 12
    console = [sys.executable, str(site / "bin" / "mingpt-ddp")]
    again = succeed([*console, "train", *TINY, "run.name=wheel"], tmp_path, **path)
    assert "the run is in outputs/wheel" in again
    listed = succeed([*console, "snapshots", "list", "outputs/wheel"], tmp_path, **path)
    assert listed.splitlines()[-1].split()[:2] == ["12", "whole"]
    report = succeed([*console, "report", "outputs/wheel"], tmp_path, **path)
    words = " ".join(["mingpt-ddp train", *TINY, "run.name=wheel"])
    assert report.endswith(f"{words}\nthe page is outputs/wheel/report.html\n")


def test_a_worker_whose_agent_died_before_the_rendezvous_exits(tmp_path):
    """The agent's store cannot be reached. An orphaned worker must not train, not even alone."""
    orphan = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    agent = {"MASTER_PORT": "9", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    text = fail([*python_main(), *TINY, "ddp.timeout_s=2"], tmp_path, **orphan, **agent)
    assert "cannot reach MASTER_ADDR:MASTER_PORT" in text
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        (["optimizer.lr={}"], r"optimizer\.lr: 1\.0 -> 2\.0"),
        (
            ["--config-dir=recipe{}", "task.code=mine.py"],
            r"task\.code: mine\.py \([0-9a-f]{12}\) -> mine\.py \([0-9a-f]{12}\)",
        ),
    ],
    ids=["key", "file"],
)
def test_ranks_of_different_configuration_are_refused(words, difference, tmp_path):
    for number in (1, 2):
        (tmp_path / f"recipe{number}").mkdir()
        (tmp_path / f"recipe{number}" / "mine.py").write_text(f"x = {number}\n")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = []
    for rank, number in ("01", "12"):
        command = [*python_main(), *TINY, *(word.format(number) for word in words)]
        jobs.append(Job(command, tmp_path, RANK=rank, **shared))
    assert [job.wait() for job in jobs] == [2, 2]
    expected = "config error: rank 1 has a different configuration than rank 0: "
    assert re.search(expected + difference, jobs[0].text())
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("console", ["unread", "closed"])
def test_a_closed_console_does_not_stop_training(console, tmp_path):
    command, env = [*python_main(), *TINY, "run.name=a"], environment(tmp_path)
    if console == "closed":
        call(["bash", "-c", " ".join([*command, "2>&- >&-"])], tmp_path)
    else:
        server = server_of(command, env)
        assert server is not None
        outputs = {"stdout": UNREAD, "stderr": UNREAD}
        server.run(command, tmp_path, env, PATIENCE_S, separate=True, outputs=outputs)
    assert read_result(tmp_path / "outputs" / "a")["step"] == 12
