"""What a run writes, and how it resumes; `test_launchers` covers the launchers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import UNREAD, server_of
from launching import (
    PATIENCE_S,
    ROOT,
    TINY,
    Job,
    call,
    committed,
    copy_source,
    environment,
    last_step,
    python_main,
    torchrun,
    wait_for,
    with_code,
)
from ports import free_port
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def weights(run: Path, step: int = 12) -> bytes:
    return (run / "snapshots" / f"step_{step:08d}" / "model.safetensors").read_bytes()


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The working directory and the output of a run of two ranks under torchrun."""
    cwd = tmp_path_factory.mktemp("pair")
    done = call([*torchrun(2), *TINY, "run.name=pair"], cwd)
    assert done.returncode == 0, done.stdout
    return cwd, done.stdout


def test_run_directory(pair):
    cwd, _ = pair
    run = cwd / "outputs" / "pair"
    names = {p.name for p in run.iterdir()}
    expected = {
        "config.yaml",
        ".hydra",
        "main.rank0.log",
        "main.rank1.log",
        "tensorboard",
        "snapshots",
        "result.json",
        "metrics.jsonl",
        "samples.jsonl",
        "snapshots.jsonl",
    }
    assert names - {".lock"} == expected
    assert {p.name for p in (run / "tensorboard").iterdir()} == {"rank0", "rank1"}
    newest = run / "snapshots" / "step_00000012"
    files = {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    assert {p.name for p in newest.iterdir()} == files
    assert {p.name for p in (run / ".hydra").iterdir()} == {
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    }


def test_result(pair):
    cwd, output = pair
    values = result(cwd / "outputs" / "pair")
    assert values["status"] == "complete"
    assert values["step"] == 12
    assert values["tokens"] == 12 * 12 * 16
    assert values["world_size"] == 2
    assert values["bits_per_char"] == pytest.approx(values["val_loss"] / 0.6931471805599453)
    assert values["best_val_loss"] <= values["val_loss"]
    assert f"validation loss {values['val_loss']:.4f} nats" in output.splitlines()[-1]


def test_the_log_names_epochs_and_the_time(pair):
    """43 steps are an epoch."""
    assert re.search(r"^step 12/12: loss .*, epoch 1/1, lr ", pair[1], flags=re.MULTILINE)
    assert re.search(r" after 12 steps and \d:\d\d:\d\d; the run is in ", pair[1].splitlines()[-1])


def test_communication_overlaps_the_backward_pass(tmp_path):
    """The exposed part of the all-reduce is at most all of it, and some of it is hidden."""
    settings = [
        *TINY,
        "trainer.max_steps=40",
        "trainer.log_every=10",
        "ddp.bucket_cap_mb=0.01",
        "run.name=run",
        "ddp.backend=gloo",
        "ddp.nproc_per_node=2",
        "model.n_embd=96",
        "data.truncate=0.2",
    ]
    done = call([*python_main(), *settings], tmp_path)
    assert done.returncode == 0, done.stdout
    events = EventAccumulator(str(tmp_path / "outputs" / "run" / "tensorboard" / "rank1")).Reload()
    names = ("speed/communication_ms", "speed/communication_exposed_ms")
    total, exposed = ([event.value for event in events.Scalars(name)] for name in names)
    assert len(total) == 4 and min(total) > 0 and min(exposed) >= 0
    assert all(part <= whole for part, whole in zip(exposed, total, strict=True))
    assert sum(exposed) < sum(total)


def test_rank_zero_logs_the_time_of_the_first_step(pair):
    (seconds,) = re.findall(
        r"^the first step was done after ([0-9.]+) s$", pair[1], flags=re.MULTILINE
    )
    assert float(seconds) > 0


def test_same_command_again_is_complete(pair):
    cwd, _ = pair
    before = weights(cwd / "outputs" / "pair")
    done = call([*torchrun(2), *TINY, "run.name=pair"], cwd)
    assert done.returncode == 0, done.stdout
    assert "complete: the newest snapshot is from the last step, 12" in done.stdout
    assert "step 1/" not in done.stdout
    assert weights(cwd / "outputs" / "pair") == before


def test_unnamed_run_of_one_process_is_found_again(tmp_path):
    """Without a name, the directory is derived from the configuration; larger limits continue the
    run.
    """
    first = call([*python_main(), *TINY], tmp_path)
    assert first.returncode == 0, first.stdout
    [run] = (tmp_path / "outputs").iterdir()
    assert re.fullmatch(r"python_docs-gpt_nano-[0-9a-f]{8}", run.name)
    longer = call([*python_main(), *TINY, "trainer.max_steps=20"], tmp_path)
    assert longer.returncode == 0, longer.stdout
    assert "resuming from the snapshot of step 12 of 20" in longer.stdout
    assert re.search(r"^trainer\.max_steps +12 +20$", longer.stdout, re.MULTILINE)
    assert [p.name for p in (tmp_path / "outputs").iterdir()] == [run.name]
    assert (run / "config.2.yaml").exists()
    assert result(run)["step"] == 20


COLLECT = """
import gc
collect = gc.collect
gc.collect = lambda *arguments: print("collected", flush=True) or collect(*arguments)
"""


@pytest.mark.parametrize(("words", "collections"), [([], 0), (["-m", "run.seed=1,2"], 2)])
def test_only_a_job_with_another_after_it_frees_its_memory(words, collections, tmp_path):
    """A process that is about to exit does not look through all objects once more."""
    command = [*python_main(), *TINY, "trainer.max_steps=1", *words]
    done = call(command, tmp_path, PYTHONPATH=with_code(tmp_path / "site", COLLECT))
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines().count("collected") == collections


def test_resume_never_starts_a_new_run(tmp_path):
    for expected in ("a", "a-2", "a-3"):
        done = call(
            [*python_main(), *TINY, "run.name=a", "run.resume=never", "trainer.max_steps=4"],
            tmp_path,
        )
        assert done.returncode == 0, done.stdout
        assert result(tmp_path / "outputs" / expected)["step"] == 4


def test_resume_from_another_run(tmp_path):
    first = call([*python_main(), *TINY, "run.name=a", "trainer.max_steps=8"], tmp_path)
    assert first.returncode == 0, first.stdout
    second = call([*python_main(), *TINY, "run.name=b", "run.resume=outputs/a"], tmp_path)
    assert "resuming from the snapshot of step 8 of 12" in second.stdout
    assert second.returncode == 0


def test_damaged_newest_snapshot_is_reported_and_skipped(tmp_path):
    """One line names it, the run resumes from the one before, and its weights are those of an
    uninterrupted run.
    """
    whole = call([*python_main(), *TINY, "run.name=whole"], tmp_path)
    assert whole.returncode == 0, whole.stdout
    cut = call(
        [
            *python_main(),
            *TINY,
            "run.name=hurt",
            "trainer.max_steps=8",
            "optimizer.schedule_steps=12",
        ],
        tmp_path,
    )
    assert cut.returncode == 0, cut.stdout
    damaged = tmp_path / "outputs/hurt/snapshots/step_00000008/optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = call([*python_main(), *TINY, "run.name=hurt", "optimizer.schedule_steps=12"], tmp_path)
    assert done.returncode == 0, done.stdout
    reported = [line for line in done.stdout.splitlines() if "damaged" in line]
    assert len(reported) == 1
    assert "step_00000008" in reported[0]
    assert "resuming from the snapshot of step 6 of 12" in done.stdout
    assert weights(tmp_path / "outputs" / "hurt") == weights(tmp_path / "outputs" / "whole")


def test_resume_with_another_model_or_text_is_refused(pair):
    cwd, _ = pair
    before = weights(cwd / "outputs" / "pair")
    for override, key in (
        ("model.n_layer=3", "model.n_layer"),
        ("data.block_size=8", "data.block_size"),
    ):
        done = call([*python_main(), *TINY, "run.name=pair", override], cwd)
        assert done.returncode == 2
        [line] = done.stdout.splitlines()
        assert line.startswith("snapshot error: ")
        assert key in line
    text = cwd / "other.txt"
    text.write_text("another text, with other characters " * 400)
    done = call(
        [
            *python_main(),
            *TINY,
            "run.name=pair",
            "data=text_file",
            f"data.path={text}",
            "data.truncate=1",
        ],
        cwd,
    )
    assert done.returncode == 2
    assert "the content of the data (SHA-256)" in done.stdout
    assert weights(cwd / "outputs" / "pair") == before


def test_changed_learning_rate_is_logged_and_applied(tmp_path):
    assert (
        call([*python_main(), *TINY, "run.name=a", "trainer.max_steps=4"], tmp_path).returncode == 0
    )
    options = ["optimizer.lr=0.5", "optimizer.schedule=constant", "run.name=a"]
    done = call([*python_main(), *TINY, *options], tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^optimizer\.lr +0\.001 +0\.5$", done.stdout, re.MULTILINE)
    assert "lr 5.00e-01" in done.stdout


def test_second_run_of_the_same_directory_is_refused(tmp_path):
    long = [*TINY, "run.name=a", "trainer.max_steps=100000"]
    job = Job([*python_main(), *long], tmp_path)
    try:
        wait_for(lambda: last_step(tmp_path / "outputs" / "a") >= 1)
        done = call([*python_main(), *long], tmp_path)
        assert done.returncode == 2
        assert f"process {job.process.pid} on " in done.stdout
        assert job.process.poll() is None
    finally:
        job.kill_tree()


@pytest.mark.slow
def test_the_failing_rank_is_named_last(tmp_path):
    """The disk of rank 1 fails in step 5: the last line of every rank says so, and the traceback is
    logged.
    """
    script = tmp_path / "failing.py"
    script.write_text(
        "from mingpt_ddp.cli.commands.train import main\n"
        "from mingpt_ddp.data.dataloader import TokenLoader\n"
        "get_batch = TokenLoader.get_batch\n"
        "def failing_get_batch(self, step, plan, rank):\n"
        "    if (rank, step) == (1, 5):\n"
        "        raise OSError('the disk of rank 1 is gone')\n"
        "    return get_batch(self, step, plan, rank)\n"
        "TokenLoader.get_batch = failing_get_batch\n"
        "main()\n"
    )
    command = [*torchrun(3)[:-1], str(script), *TINY, "run.name=a"]
    done = call(command, tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    root_cause = (
        "error: rank 1: OSError: the disk of rank 1 is gone (failing.py:6), "
        "fetching the batch of step 5"
    )
    errors = [line for line in done.stdout.splitlines() if "error: rank" in line]
    assert errors
    assert all(line.endswith(root_cause) for line in errors)
    for rank in (0, 2):
        assert (
            (tmp_path / f"outputs/a/main.rank{rank}.log")
            .read_text()
            .splitlines()[-1]
            .endswith(root_cause)
        )
    assert "Traceback" in (tmp_path / "outputs/a/main.rank1.log").read_text()


def test_a_user_error_is_not_restarted(tmp_path):
    """A text that is too short is reported once, although three restarts are allowed."""
    command = [
        *python_main(),
        *TINY,
        "ddp.nproc_per_node=2",
        "data.block_size=9999",
        "ddp.max_restarts=3",
    ]
    done = call(command, tmp_path)
    assert done.returncode == 2
    assert done.stdout.startswith("data error: ")
    assert len(done.stdout.splitlines()) == 1
    assert not (tmp_path / "outputs").exists()


def test_a_nonfinite_loss_stops_the_run_before_a_snapshot(tmp_path):
    options = ["optimizer.lr=1e30", "optimizer.warmup_steps=0", "run.name=a"]
    done = call([*torchrun(2), *TINY, *options], tmp_path)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("training error: ")]
    assert len(lines) == 1
    assert "optimizer.lr" in lines[0]
    assert not list(tmp_path.glob("outputs/a/snapshots/*/manifest.json"))


def test_snapshots_on_another_filesystem(tmp_path):
    """memory:// lives as long as the process: enough to show that no code assumes a local path."""
    done = call(
        [*python_main(), *TINY, "run.name=a", "snapshot.path=memory://bucket/runs"], tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert (
        "committed to memory://bucket/runs/a" in (tmp_path / "outputs/a/main.rank0.log").read_text()
    )
    assert not (tmp_path / "outputs/a/snapshots").exists()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_reduced_precision_resumes_exactly(precision, tmp_path):
    """The gradient scaler's state is part of the snapshot."""
    options = [*TINY, f"trainer.precision={precision}", "optimizer.schedule_steps=12"]
    assert call([*python_main(), *options, "run.name=whole"], tmp_path).returncode == 0
    for steps in (8, 12):
        done = call(
            [*python_main(), *options, "run.name=parts", f"trainer.max_steps={steps}"], tmp_path
        )
        assert done.returncode == 0, done.stdout
    assert weights(tmp_path / "outputs" / "parts") == weights(tmp_path / "outputs" / "whole")
    state = json.loads((tmp_path / "outputs/parts/snapshots/step_00000012/state.json").read_text())
    assert ("scale" in state["scaler"]) == (precision == "fp16")


@pytest.mark.slow
def test_four_ranks_under_plain_torchrun_killed_and_run_again(tmp_path):
    """torchrun --nproc_per_node=4 main.py trainer.max_epochs=... is all that is needed."""
    command = [
        str(Path(sys.executable).parent / "torchrun"),
        "--nproc_per_node=4",
        "main.py",
        "trainer.max_epochs=50",
        "snapshot.every_steps=5",
        "trainer.log_every=1",
        f"run.root={tmp_path}/outputs",
        f"data.cache_dir={tmp_path}/cache",
    ]
    runs = tmp_path / "outputs"
    job = Job(command, clone := make_clone(tmp_path))
    wait_for(
        lambda: any(last_step(run) >= 7 and committed(run) for run in runs.glob("*")), what="step 7"
    )
    job.kill_tree()
    again = Job(command, clone)
    wait_for(lambda: "resuming from the snapshot of step" in again.text(), what="the resumption")
    wait_for(lambda: "step 12/" in again.text(), what="step 12")
    again.kill_tree()
    assert len(list(runs.iterdir())) == 1


def make_clone(tmp_path: Path) -> Path:
    """Make a working directory with main.py, conf/ and the package, like a clone."""
    target = tmp_path / "clone"
    target.mkdir()
    for name in ("main.py", "conf", "mingpt_ddp"):
        (target / name).symlink_to(ROOT / name)
    return target


@pytest.mark.slow
def test_installed_wheel_contains_its_configuration(tmp_path):
    """`pip install .`, then `torchrun -m mingpt_ddp` in any directory."""
    source, site = tmp_path / "source", tmp_path / "site"
    copy_source(source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
        str(source),
    ]
    subprocess.run(pip, check=True, env=environment(tmp_path))
    assert (site / "mingpt_ddp" / "conf" / "experiment" / "demo.yaml").exists()
    shutil.rmtree(source)
    command = [*torchrun(1)[:-1], "-m", "mingpt_ddp", *TINY, "run.name=wheel"]
    done = call(command, tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stdout
    assert result(tmp_path / "outputs" / "wheel")["step"] == 12
    console = [sys.executable, str(site / "bin" / "mingpt-ddp")]
    again = call([*console, "train", *TINY, "run.name=wheel"], tmp_path, PYTHONPATH=str(site))
    assert again.returncode == 0 and "the run is in outputs/wheel" in again.stdout, again.stdout
    listed = call(
        [*console, "snapshots", "list", "outputs/wheel"], tmp_path, PYTHONPATH=str(site)
    ).stdout
    assert listed.splitlines()[-1].split()[:2] == ["12", "whole"]
    report = call([*console, "report", "outputs/wheel"], tmp_path, PYTHONPATH=str(site)).stdout
    assert report.endswith(
        "mingpt-ddp train "
        + " ".join([*TINY, "run.name=wheel"])
        + "\nthe page is outputs/wheel/report.html\n"
    )


def test_a_worker_whose_agent_died_before_the_rendezvous_exits(tmp_path):
    """The store of the agent is unreachable: an orphaned worker must not train, not even as the
    only rank.
    """
    orphan = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
    }
    done = call(
        [*python_main(), *TINY, "ddp.timeout_s=2"],
        tmp_path,
        TORCHELASTIC_USE_AGENT_STORE="True",
        **orphan,
    )
    assert done.returncode == 2
    assert "cannot reach MASTER_ADDR:MASTER_PORT" in done.stdout
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
    jobs = [
        Job(
            [*python_main(), *TINY, *(word.format(number) for word in words)],
            tmp_path,
            RANK=rank,
            **shared,
        )
        for rank, number in ("01", "12")
    ]
    assert [job.wait() for job in jobs] == [2, 2]
    expected = "config error: rank 1 has another configuration than rank 0: "
    assert re.search(expected + difference, jobs[0].text())
    assert not (tmp_path / "outputs").exists()


def test_two_runs_cannot_share_a_snapshot_directory(tmp_path):
    options = [*TINY, "run.name=a", f"snapshot.path={tmp_path}/shared", "trainer.max_steps=100000"]
    job = Job([*python_main(), *options, "run.root=first"], tmp_path)
    try:
        wait_for(lambda: last_step(tmp_path / "first" / "a") >= 1)
        done = call([*python_main(), *options, "run.root=second"], tmp_path)
        assert done.returncode == 2
        assert "shared/a is locked by process" in done.stdout
    finally:
        job.kill_tree()


@pytest.mark.parametrize("console", ["unread", "closed"])
def test_a_closed_console_does_not_stop_training(console, tmp_path):
    command, env = [*python_main(), *TINY, "run.name=a"], environment(tmp_path)
    if console == "closed":
        shell = ["bash", "-c", " ".join([*command, "2>&- >&-"])]
        subprocess.run(shell, cwd=tmp_path, env=env, timeout=PATIENCE_S)
    else:
        server = server_of(command, env)
        assert server is not None
        outputs = {"stdout": UNREAD, "stderr": UNREAD}
        server.run(command, tmp_path, env, PATIENCE_S, separate=True, outputs=outputs)
    assert result(tmp_path / "outputs" / "a")["step"] == 12


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (40 << 10, 40 << 10))
"""


def test_a_full_disk_is_one_line_and_keeps_the_older_snapshots(tmp_path):
    """A limit on the size of files makes a write fail."""
    whole = call([*python_main(), *TINY, "run.name=a", "trainer.max_steps=8"], tmp_path)
    assert whole.returncode == 0, whole.stdout
    limited = with_code(tmp_path / "site", LIMITED)
    done = call([*python_main(), *TINY, "run.name=a"], tmp_path, PYTHONPATH=limited)
    assert done.returncode == 2, done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "storage error: cannot write the snapshot of step 12"
    )
    again = call([*python_main(), *TINY, "run.name=a"], tmp_path)
    assert again.returncode == 0, again.stdout
    assert "resuming from the snapshot of step 8 of 12" in again.stdout
