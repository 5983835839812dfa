"""Check runs with snapshots on an S3 server: killed, disconnected, started twice and resumed."""

from __future__ import annotations

import os
import re
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Fault, FaultProxy, Rule
from launching import TINY, Job, call, last_step, python_main, wait_for
from runs import fail, succeed, tool, train, verified_steps
from safetensors.torch import load_file
from store_limits import UNAVAILABLE, with_limits

s3fs = pytest.importorskip("s3fs")


STEPS = 60
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=25",
    "snapshot.every_steps=8",
]
# A step takes 10 ms or more, so that the run can be killed in mid-run.
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
# The defaults are 30 and 60.
SHORT = {"REQUEST_TIMEOUT_S": 2.0, "OPERATION_DEADLINE_S": 5.0, "INITIAL_BACKOFF_S": 0.05}
ALWAYS = float("inf")


@pytest.fixture(scope="module")
def bucket(seaweed):
    return seaweed.make_bucket("training")


@pytest.fixture
def path(bucket):
    """Return a value for snapshot.path. The run's snapshots are in `run` below it."""
    return f"s3://{bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def aws(seaweed, monkeypatch, tmp_path):
    """Set the environment of a client of this server, without other AWS settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("CONFIG", "SHARED_CREDENTIALS"):
        monkeypatch.setenv(f"AWS_{name}_FILE", str(tmp_path / "none"))
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxy(aws, seaweed, monkeypatch):
    """Start a fault proxy between the run and the server."""
    proxy = FaultProxy(seaweed.port, seed=1)
    yield proxy
    proxy.close()


def proxied(proxy: FaultProxy) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}


def short_timeouts(tmp_path: Path, **lease: float) -> dict[str, str]:
    """Return environment variables with which processes time out sooner than in production."""
    return {"PYTHONPATH": with_limits(tmp_path / "site", SHORT, lease)}


@pytest.fixture(scope="module")
def local_weights(tmp_path_factory):
    """Train an uninterrupted run on two ranks and a local disk. Return its weights."""
    cwd = tmp_path_factory.mktemp("local")
    succeed([*TWO_RANKS, *SETTINGS], cwd)
    return (cwd / "outputs/run/snapshots" / f"step_{STEPS:08d}" / "model.safetensors").read_bytes()


def client() -> Any:
    """Return a client of the server that the environment names. It has no cache of listings."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    return s3fs.S3FileSystem(
        endpoint_url=endpoint, skip_instance_cache=True, use_listings_cache=False
    )


def saved(path: str) -> list[int]:
    """Return the steps of the committed snapshots."""
    manifests = client().glob(f"{path}/run/step_*/manifest.json")
    return sorted(int(name.split("/")[-2].removeprefix("step_")) for name in manifests)


def remote_weights(path: str, step: int = STEPS) -> bytes:
    return client().cat_file(f"{path}/run/step_{step:08d}/model.safetensors")


def log_of(cwd: Path, root: str = "outputs") -> str:
    try:
        return (cwd / root / "run" / "main.rank0.log").read_text()
    except FileNotFoundError:
        return ""


def committed(cwd: Path, root: str = "outputs") -> list[tuple[int, str]]:
    """Return the step and directory of each snapshot in the log, in order."""
    found = re.findall(
        r"snapshot of step (\d+) committed to (\S+?),?(?: |$)",
        log_of(cwd, root),
        flags=re.MULTILINE,
    )
    return [(int(step), directory) for step, directory in found]


def test_faulty_network(proxy, seaweed, path, tmp_path, local_weights):
    """The killed run resumes to the same bytes. No file or output contains the credentials."""
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
    text = succeed(command, tmp_path, **proxied(proxy))
    assert "resuming from the snapshot" in text
    assert "waiting" not in text, "the previous owner of the lease is known to be dead"
    assert sum(rule.hits for rule in proxy.rules) > 10
    assert STEPS in verified_steps(f"{path}/run", tmp_path)
    assert remote_weights(path) == local_weights
    assert not (tmp_path / "outputs/run/snapshots").exists()
    contents = {name: client().cat_file(name) for name in client().find(path)}
    contents |= {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert len(contents) > 10
    for name, content in contents.items():
        assert seaweed.secret.encode() not in content, name
        assert seaweed.key.encode() not in content, name


@pytest.mark.slow
def test_store_killed_and_restarted(aws, seaweed, path, tmp_path):
    """Training does not wait for the store. A partially written snapshot never counts as whole."""
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
    assert saved(path), "no committed snapshot is left"
    wait_for(
        lambda: len(committed(tmp_path)) >= before + 3,
        what="snapshots after the restart of the store",
    )
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    last = int(re.findall(r"preempted at step (\d+); ", log_of(tmp_path))[0])
    steps = verified_steps(f"{path}/run", tmp_path)
    assert steps[-1] == last and len(steps) <= 2, "the older ones were not deleted"
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
    printed = succeed(
        [*command, *ENDLESS, *options, f"trainer.max_steps={newest + 5}"],
        tmp_path,
        **proxied(proxy),
    )
    assert f"resuming from the snapshot of step {newest} " in printed


def test_store_unavailable_at_resume(proxy, path, tmp_path):
    """The run is refused, and does not start again at step 1."""
    command = [*python_main(), *TINY, "run.name=run", f"snapshot.path={path}"]
    succeed(command, tmp_path, **proxied(proxy))
    before = log_of(tmp_path)
    proxy.down = True
    text = fail(
        [*command, "trainer.max_steps=24"], tmp_path, **proxied(proxy), **short_timeouts(tmp_path)
    )
    [line] = [line for line in text.splitlines() if not line.startswith("retrying")]
    assert re.match(rf"storage error: {UNAVAILABLE}", line)
    assert "step 13/" not in log_of(tmp_path)
    assert log_of(tmp_path).count("\n") - before.count("\n") <= 2
    proxy.down = False
    done = call([*command, "trainer.max_steps=24"], tmp_path, **proxied(proxy))
    assert "resuming from the snapshot of step 12 of 24" in done.stdout


@pytest.mark.slow
def test_two_runs_with_one_name(aws, path, tmp_path):
    """The runs have different directories, as on two machines, and share only the object store."""
    command = [*python_main(), *ENDLESS, f"snapshot.path={path}"]
    limits = {
        "PYTHONPATH": with_limits(
            tmp_path / "site", {}, {"HEARTBEAT_INTERVAL_S": 1.0, "LEASE_TTL_S": 8.0}
        )
    }
    first = Job([*command, "run.root=first"], tmp_path, **limits)
    try:
        wait_for(lambda: committed(tmp_path, "first"), what="a snapshot of the first")
        printed = fail([*command, "run.root=second"], tmp_path, **limits)
        [line] = [line for line in printed.splitlines() if "waiting" not in line]
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
    second = Job([*command, "run.root=second"], tmp_path, **limits)
    wait_for(lambda: committed(tmp_path, "second"), what="the takeover")
    second.kill_tree()
    assert re.search(
        r"is locked by process \d+ on .*; waiting \d+ s for a heartbeat", second.text()
    )
    resumed = int(
        re.findall(r"resuming from the snapshot of step (\d+)", log_of(tmp_path, "second"))[0]
    )
    assert resumed >= newest
    # The owner was on this machine, so the new run can see that it is dead, and need not wait.
    third = Job([*command, "run.root=second"], tmp_path, **limits)
    wait_for(lambda: log_of(tmp_path, "second").count("resuming") == 2, what="the same run again")
    third.kill_tree()
    assert "waiting" not in third.text()


@pytest.mark.parametrize("strategy", ["zero1", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_read_and_write_their_own_shards(strategy, aws, path, tmp_path):
    """The run uses two ranks and then three, which have other rows of the tensors.

    Its result equals the result of one rank.
    """
    settings = [*TINY, "snapshot.keep_last=9", "optimizer.schedule_steps=12"]
    settings += ["trainer.micro_batch_size=3"]
    for ranks, steps in ((2, 5), (3, 12)):
        words = [f"ddp.nproc_per_node={ranks}", f"trainer.max_steps={steps}"]
        train(tmp_path, *settings, f"ddp.strategy={strategy}", f"snapshot.path={path}", *words)
    assert "resuming from the snapshot of step 5" in log_of(tmp_path)
    train(tmp_path / "one", *settings)
    for url, target in ((f"{path}/run", "found"), ("one/outputs/run", "expected")):
        succeed(tool("snapshots", "export", url, f"to={target}"), tmp_path)
    found, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("found", "expected")
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((found[name] - tensor).abs().max()) < 1e-4, name
