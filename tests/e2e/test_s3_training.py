"""Runs with their snapshots on a real S3 server: killed, disconnected, started twice, and
resumed.
"""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from pathlib import Path

import pytest
from fault_proxy import Fault, FaultProxy, Rule
from launching import TINY, Job, call, last_step, python_main, wait_for
from pause_points import kill_before
from store_limits import UNAVAILABLE, with_limits

from mingpt_ddp.snapshots.format import CorruptSnapshotError
from mingpt_ddp.snapshots.store import SnapshotStore

STEPS = 60
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=25",
    "snapshot.every_steps=8",
]
# Slow enough to be killed in mid-run: a step takes 10 ms or more.
SETTINGS += [
    "model.n_embd=48",
    "data.block_size=64",
    "data.truncate=0.2",
    "trainer.batch_size=24",
    "run.name=run",
]
ENDLESS = [
    *TINY,
    "trainer.max_steps=10000000",
    "trainer.eval_every=null",
    "snapshot.every_steps=20",
    "run.name=run",
]
TWO_RANKS = [*python_main(), "ddp.nproc_per_node=2"]
# the defaults are 30, 60
SHORT = {"REQUEST_TIMEOUT_S": 2.0, "OPERATION_DEADLINE_S": 5.0, "INITIAL_BACKOFF_S": 0.05}
ALWAYS = float("inf")


@pytest.fixture(scope="module")
def bucket(seaweed):
    return seaweed.make_bucket("training")


@pytest.fixture
def path(bucket):
    """The value of snapshot.path; the snapshots of the run are in `run` below it."""
    return f"s3://{bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def aws(seaweed, monkeypatch, tmp_path):
    """The environment of a client of this server, without other AWS settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("CONFIG", "SHARED_CREDENTIALS"):
        monkeypatch.setenv(f"AWS_{name}_FILE", str(tmp_path / "none"))
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxy(aws, seaweed, monkeypatch):
    """A fault proxy between the run and the server."""
    proxy = FaultProxy(seaweed.port, seed=1)
    yield proxy
    proxy.close()


def proxied(proxy: FaultProxy) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}


def short_timeouts(tmp_path: Path, **lease: float) -> dict[str, str]:
    """Return an environment in which processes time out sooner than in production."""
    return {"PYTHONPATH": with_limits(tmp_path / "site", SHORT, lease)}


@pytest.fixture(scope="module")
def local_weights(tmp_path_factory):
    """The weights of an uninterrupted run of two ranks on a local disk."""
    cwd = tmp_path_factory.mktemp("local")
    done = call([*TWO_RANKS, *SETTINGS], cwd)
    assert done.returncode == 0, done.stdout
    return (cwd / "outputs/run/snapshots" / f"step_{STEPS:08d}" / "model.safetensors").read_bytes()


def remote_weights(path: str, step: int = STEPS) -> bytes:
    return SnapshotStore(f"{path}/run").storage.read(f"step_{step:08d}/model.safetensors")


def log_of(cwd: Path, root: str = "outputs") -> str:
    try:
        return (cwd / root / "run" / "main.rank0.log").read_text()
    except FileNotFoundError:
        return ""


def committed(cwd: Path, root: str = "outputs") -> list[tuple[int, str]]:
    """Return the step and directory of each snapshot that the log reports, in order."""
    found = re.findall(
        r"snapshot of step (\d+) committed to (\S+?),?(?: |$)",
        log_of(cwd, root),
        flags=re.MULTILINE,
    )
    return [(int(step), directory) for step, directory in found]


def verified_steps(path: str) -> list[int]:
    """Return the committed steps after verifying every digest; a run may delete some meanwhile."""
    store = SnapshotStore(f"{path}/run")
    steps = [step for step in store.steps() if store.is_committed(step)]
    for step in steps:
        try:
            assert store.read(step).step == step
        except CorruptSnapshotError:
            assert not store.is_committed(step), f"step {step} is damaged"
    return steps


def test_killed_run_resumes_and_leaks_no_credentials(aws, seaweed, path, tmp_path, local_weights):
    command = [*TWO_RANKS, *SETTINGS, f"snapshot.path={path}"]
    kill_before(21, command, tmp_path, lambda: verified_steps(path))
    done = call(command, tmp_path)
    assert done.returncode == 0, done.stdout
    assert "resuming from the snapshot" in done.stdout
    assert "waiting" not in done.stdout, "the previous owner of the lease is known to be dead"
    assert remote_weights(path) == local_weights
    assert not (tmp_path / "outputs/run/snapshots").exists()
    objects = SnapshotStore(f"{path}/run").storage
    names = [
        f"{step}/{name}"
        for step in objects.list()
        for name in SnapshotStore(f"{path}/run/{step}").storage.list()
    ]
    contents = {name: objects.read(name) for name in names}
    contents |= {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert len(contents) > 10
    for name, content in contents.items():
        assert seaweed.secret.encode() not in content, name
        assert seaweed.key.encode() not in content, name


def test_faulty_network(proxy, path, tmp_path, local_weights):
    proxy.rules = [
        Rule(".", Fault.STATUS, times=ALWAYS, probability=0.2),
        Rule("^PUT", Fault.RESET_SENDING, times=ALWAYS, probability=0.1, after=10_000),
        Rule("^GET", Fault.RESET_ANSWERING, times=ALWAYS, probability=0.1, after=1000),
        Rule("^PUT", Fault.RESET_UNANSWERED, times=ALWAYS, probability=0.1),
        Rule(".", Fault.DELAY, times=4, probability=0.05, seconds=2),
    ]
    command = [*TWO_RANKS, *SETTINGS, f"snapshot.path={path}"]
    job = Job(command, tmp_path, **proxied(proxy))
    is_under_way = lambda: last_step(tmp_path / "outputs/run") >= 20 and committed(tmp_path)  # noqa: E731
    wait_for(is_under_way, what="step 20")
    job.kill_tree()
    done = call(command, tmp_path, **proxied(proxy))
    assert done.returncode == 0, done.stdout
    assert sum(rule.hits for rule in proxy.rules) > 10
    assert STEPS in verified_steps(path)
    assert remote_weights(path) == local_weights


@pytest.mark.slow
def test_store_killed_and_restarted(aws, seaweed, path, tmp_path):
    """Training does not wait for the store, and a partially written snapshot is never taken for a
    whole one.
    """
    job = Job(
        [*TWO_RANKS, *ENDLESS, f"snapshot.path={path}", "snapshot.max_failures=1000"],
        tmp_path,
        **short_timeouts(tmp_path),
    )
    try:
        wait_for(lambda: len(committed(tmp_path)) >= 3, what="three snapshots")
        seaweed.kill()
        wait_for(
            lambda: "training continues (failure 1 of 1000 allowed)" in log_of(tmp_path),
            what="the first failure",
        )
        step = last_step(tmp_path / "outputs/run")
        wait_for(
            lambda: last_step(tmp_path / "outputs/run") > step + 5,
            what="training without the store",
        )
    finally:
        if seaweed.process is None:
            seaweed.start()
    before = len(committed(tmp_path))
    verified = verified_steps(path)
    assert verified, "no committed snapshot is left"
    wait_for(
        lambda: len(committed(tmp_path)) >= before + 3,
        what="snapshots after the restart of the store",
    )
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    last = int(re.findall(r"preempted at step (\d+); ", log_of(tmp_path))[0])
    assert verified_steps(path)[-1] == last
    assert len(verified_steps(path)) <= 2, "the older ones were not deleted"
    assert "Traceback" not in log_of(tmp_path)


@pytest.mark.slow
def test_store_unavailable_for_too_long(proxy, path, tmp_path):
    command = [*TWO_RANKS, "ddp.max_restarts=0"]
    options = [f"snapshot.path={path}", "snapshot.max_failures=1"]
    job = Job(
        [*command, *ENDLESS, *options], tmp_path, **proxied(proxy), **short_timeouts(tmp_path)
    )
    wait_for(lambda: committed(tmp_path), what="the first snapshot")
    proxy.down = True
    assert job.wait() == 2, job.text()
    reported = [
        line for line in job.text().splitlines() if not re.match(r"step \d+/|retrying", line)
    ]
    assert re.match(
        r"storage error: cannot write the snapshot of step \d+: .*, 2 times in a row; older ",
        reported[-1],
    )
    assert len([line for line in reported if "error: " in line]) == 1
    assert re.search(r"training continues \(failure 1 of 1 allowed\)", job.text())
    assert "Traceback" not in job.text() + log_of(tmp_path)
    proxy.down = False
    newest = committed(tmp_path)[-1][0]
    done = call(
        [*command, *ENDLESS, *options, f"trainer.max_steps={newest + 5}"],
        tmp_path,
        **proxied(proxy),
    )
    assert done.returncode == 0, done.stdout
    assert f"resuming from the snapshot of step {newest} " in done.stdout


def test_store_unavailable_at_resume(proxy, path, tmp_path):
    """The run is refused; it does not start again at step 1."""
    command = [*python_main(), *TINY, "run.name=run", f"snapshot.path={path}"]
    assert call(command, tmp_path, **proxied(proxy)).returncode == 0
    before = log_of(tmp_path)
    proxy.down = True
    done = call(
        [*command, "trainer.max_steps=24"],
        tmp_path,
        **proxied(proxy),
        **short_timeouts(tmp_path),
    )
    assert done.returncode == 2
    [line] = [line for line in done.stdout.splitlines() if not line.startswith("retrying")]
    assert re.match(rf"storage error: {UNAVAILABLE}", line)
    assert "step 13/" not in log_of(tmp_path)
    assert log_of(tmp_path).count("\n") - before.count("\n") <= 2
    proxy.down = False
    done = call([*command, "trainer.max_steps=24"], tmp_path, **proxied(proxy))
    assert "resuming from the snapshot of step 12 of 24" in done.stdout


@pytest.mark.slow
def test_two_runs_of_one_name(aws, path, tmp_path):
    """The run directories differ, perhaps on different machines: the runs share only the object
    store.
    """
    command = [*python_main(), *ENDLESS, f"snapshot.path={path}"]
    limits = {
        "PYTHONPATH": with_limits(
            tmp_path / "site", {}, {"HEARTBEAT_INTERVAL_S": 1.0, "LEASE_TTL_S": 8.0}
        )
    }
    first = Job([*command, "run.root=first"], tmp_path, **limits)
    try:
        wait_for(lambda: committed(tmp_path, "first"), what="a snapshot of the first")
        done = call([*command, "run.root=second"], tmp_path, **limits)
        assert done.returncode == 2
        [line] = [line for line in done.stdout.splitlines() if "waiting" not in line]
        assert re.match(
            rf"run error: {path}/run is locked by process {first.process.pid} on .*still running",
            line,
        )
        assert first.process.poll() is None
        step = committed(tmp_path, "first")[-1][0]
        wait_for(
            lambda: committed(tmp_path, "first")[-1][0] > step, what="the first run to continue"
        )
    finally:
        first.kill_tree()
    newest = committed(tmp_path, "first")[-1][0]
    begin = time.monotonic()
    second = Job([*command, "run.root=second"], tmp_path, **limits)
    wait_for(lambda: committed(tmp_path, "second"), what="the takeover")
    second.kill_tree()
    assert time.monotonic() - begin > 8
    resumed = int(
        re.findall(r"resuming from the snapshot of step (\d+)", log_of(tmp_path, "second"))[0]
    )
    assert resumed >= newest
    # on this machine the owner is known to be dead
    third = Job([*command, "run.root=second"], tmp_path, **limits)
    wait_for(lambda: log_of(tmp_path, "second").count("resuming") == 2, what="the same run again")
    third.kill_tree()
    assert "waiting" not in third.text()


@pytest.mark.slow
def test_a_suspended_run_yields_to_its_successor(aws, path, tmp_path):
    command = [*python_main(), *ENDLESS, f"snapshot.path={path}"]
    limits = {
        "PYTHONPATH": with_limits(
            tmp_path / "site", {}, {"HEARTBEAT_INTERVAL_S": 0.5, "LEASE_TTL_S": 1.5}
        )
    }
    first = Job([*command, "run.root=first"], tmp_path, **limits)
    second = None
    try:
        wait_for(lambda: committed(tmp_path, "first"), what="a snapshot of the first")
        first.process.send_signal(signal.SIGSTOP)
        second = Job([*command, "run.root=second"], tmp_path, **limits)
        wait_for(lambda: committed(tmp_path, "second"), what="a snapshot of the second")
        first.process.send_signal(signal.SIGCONT)
        assert first.wait() == 2
        assert re.search(
            rf"run error: {path}/run was taken over by process {second.process.pid} on",
            first.text(),
        )
        step = committed(tmp_path, "second")[-1][0]
        wait_for(
            lambda: committed(tmp_path, "second")[-1][0] > step, what="the second run to continue"
        )
        second.process.send_signal(signal.SIGTERM)
        second.wait()
        assert verified_steps(path)[-1] == int(
            re.findall(r"preempted at step (\d+); ", log_of(tmp_path, "second"))[0]
        )
    finally:
        for job in (first, second):
            if job is not None and job.process.poll() is None:
                job.kill_tree()


@pytest.mark.parametrize("strategy", ["zero1", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_read_and_write_their_own_parts(strategy, aws, path, tmp_path):
    """Two ranks, then three, whose rows are others; the end is that of one rank."""
    settings = [
        *TINY,
        "snapshot.keep_last=9",
        f"snapshot.path={path}",
        "run.name=run",
        "optimizer.schedule_steps=12",
    ]
    for ranks, steps in ((2, 5), (3, 12)):
        command = [*python_main(), f"ddp.nproc_per_node={ranks}", f"ddp.strategy={strategy}"]
        done = call(
            [*command, *settings, f"trainer.max_steps={steps}", "trainer.micro_batch_size=3"],
            tmp_path,
        )
        assert done.returncode == 0, done.stdout
    assert "resuming from the snapshot of step 5" in log_of(tmp_path)
    found = SnapshotStore(f"{path}/run").read_latest()
    (tmp_path / "one").mkdir()
    alone = [
        *settings[:-3],
        "run.name=run",
        "optimizer.schedule_steps=12",
        "trainer.micro_batch_size=3",
    ]
    done = call([*python_main(), *alone], tmp_path / "one")
    assert done.returncode == 0, done.stdout
    expected = SnapshotStore(str(tmp_path / "one" / "outputs" / "run" / "snapshots")).read_latest()
    assert found.model.keys() == expected.model.keys()
    assert found.optimizer.keys() == expected.optimizer.keys()
    for name, tensor in expected.model.items():
        assert float((found.model[name] - tensor).abs().max()) < 1e-4, name
