"""Check trackers after two SIGKILLs: each library's reader sees one run with each step once."""

from __future__ import annotations

import importlib.util
import json
import select
import socket
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import TINY, Job, call, committed, is_running, python_main, wait_for
from runs import read_history, succeed

from mingpt_ddp.metrics.jsonl import to_metrics

pytestmark = pytest.mark.integration
PROJECT = "mingpt_ddp"
TRACKERS = [name for name in ("wandb", "mlflow", "trackio") if importlib.util.find_spec(name)]
ENDLESS = 1_000_000
Points = list[tuple[int, dict[str, float]]]


def command(steps: int, cwd: Path, *overrides: str) -> list[str]:
    settings = [
        *TINY,
        "trainer.log_every=2",
        "trainer.eval_every=12",
        "trainer.sample_every=50",
        "optimizer.schedule=constant",
        "run.name=run",
    ]
    own = [f"tracker=[tensorboard,{','.join(TRACKERS)}]", f"tracker.uri=sqlite:///{cwd}/mlflow.db"]
    return [
        *python_main(),
        *settings,
        *own,
        f"trainer.max_steps={steps}",
        "ddp.nproc_per_node=2",
        *overrides,
    ]


def databases(cwd: Path) -> list[Path]:
    return [cwd / "mlflow.db"] * ("mlflow" in TRACKERS) + [cwd / "trackio" / f"{PROJECT}.db"] * (
        "trackio" in TRACKERS
    )


def stored(database: Path) -> int:
    """Return the last step in a library's table of metrics, or 0 if there is none."""
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return connection.execute("SELECT MAX(step) FROM metrics").fetchone()[0] or 0
    except sqlite3.OperationalError:  # there is no table yet, or the database is locked
        return 0


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a run that is killed twice, each time after all trackers have received steps.

    Then the run is completed, and the same command is started once more.
    """
    if not TRACKERS:
        pytest.skip("none of wandb, mlflow, trackio is installed")
    cwd = tmp_path_factory.mktemp("trackers")
    environment = {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(cwd / "trackio"),
        "WANDB_SILENT": "true",
    }
    run, offline = cwd / "outputs" / "run", "wandb/offline-run-*/run-*.wandb"
    for _ in range(2):
        before = [stored(database) for database in databases(cwd)], {*run.glob(offline)}
        job = Job(command(ENDLESS, cwd), cwd, **environment)

        def all_have_more(before=before) -> bool:
            steps = [stored(database) for database in databases(cwd)]
            sent = all(new > old for new, old in zip(steps, before[0], strict=True))
            return sent and ("wandb" not in TRACKERS or bool({*run.glob(offline)} - before[1]))

        wait_for(all_have_more, what="steps in all trackers")
        workers = job.workers()
        job.kill_tree()
        wait_for(lambda: not any(map(is_running, workers)), what="the end of the workers")  # noqa: B023
    last = command(committed(run)[-1] + 30, cwd)
    for _ in range(2):
        send_all(last, cwd, **environment)
    yield cwd


def send_all(command: list[str], cwd: Path, **environment: str) -> None:
    """Repeat a command until no step is left to send. A busy machine may need several runs."""
    for _ in range(5):
        text = succeed(command, cwd, **environment)
        if "lacks the last steps" not in text:
            return
    pytest.fail(text)


def read_wandb(cwd: Path) -> dict[str, Points]:
    """Read the log of an offline run: records in W&B's protobuf schema and LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs: dict[str, Points] = {}
    assert len([*cwd.glob("outputs/run/wandb/offline-run-*")]) == 1
    for path in sorted(cwd.glob("outputs/run/wandb/offline-run-*/run-*.wandb")):
        content, position, part = path.read_bytes(), 7, b""
        points = runs.setdefault(str(path.relative_to(cwd)), [])
        while position + 7 <= len(content):
            if (left := 32768 - position % 32768) < 7:
                position += left
                continue
            _, size, kind = struct.unpack("<IHB", content[position : position + 7])
            part += content[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (1, 4):  # this is a whole record, or its last part
                record, part = Record.FromString(part), b""
                if record.WhichOneof("record_type") == "history":
                    items = {
                        (item.key or item.nested_key[0]): item.value_json
                        for item in record.history.item
                    }
                    points.append(
                        (
                            record.history.step.num,
                            {k: json.loads(v) for k, v in items.items() if "/" in k},
                        )
                    )
    return runs


def read_mlflow(cwd: Path) -> dict[str, Points]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{cwd}/mlflow.db")
    runs: dict[str, Points] = {}
    for run in client.search_runs([client.get_experiment_by_name(PROJECT).experiment_id]):
        merged: dict[int, dict[str, float]] = {}
        for key in run.data.metrics:
            for point in client.get_metric_history(run.info.run_id, key):
                assert key not in merged.setdefault(point.step, {}), (
                    f"{key} of step {point.step} stands there twice"
                )
                merged[point.step][key] = point.value
        runs[run.info.run_id] = sorted(merged.items())
        assert run.info.status == "FINISHED"
        assert run.data.tags["result.status"] == "complete"
        assert run.data.params["trainer.batch_size"] == "12"
    return runs


def read_trackio(cwd: Path) -> dict[str, Points]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    def scalars(entry: dict[str, Any]) -> dict[str, float]:
        return {key: value for key, value in entry.items() if "/" in key}

    runs = trackio.Api().runs(PROJECT)
    logs = {run.id: SQLiteStorage.get_logs(PROJECT, run.name, run_id=run.id) for run in runs}
    return {
        key: [(entry["step"], scalars(entry)) for entry in entries] for key, entries in logs.items()
    }


@pytest.mark.parametrize(
    ("name", "read"), [("wandb", read_wandb), ("mlflow", read_mlflow), ("trackio", read_trackio)]
)
def test_one_run_has_every_step_once(
    name: str,
    read: Callable[[Path], dict[str, Points]],
    killed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The library reads this variable when it is imported.
    monkeypatch.setenv("TRACKIO_DIR", str(killed / "trackio"))
    pytest.importorskip(name)
    (points,) = read(killed).values()
    history = read_history(killed / "outputs" / "run")
    assert history.starts == 3
    expected = {step: to_metrics(record) for step, record in history.by_step().items()}
    assert [step for step, _ in points] == sorted(expected)
    assert dict(points) == expected
    assert "val/loss" in points[-1][1]


@pytest.mark.skipif("mlflow" not in TRACKERS, reason="needs mlflow")
def test_an_unreachable_server_does_not_fail_the_run(tmp_path):
    """Nothing listens on port 9. The same command sends the steps once a server is there."""
    away = [
        *python_main(),
        *TINY,
        "run.name=run",
        "tracker=mlflow",
        "tracker.uri=http://127.0.0.1:9",
    ]
    text = succeed(away, tmp_path)
    assert text.count("cannot send to mlflow, training continues without it") == 1
    assert "mlflow lacks the last steps; run the same command again" in text
    send_all([*away[:-1], f"tracker.uri=sqlite:///{tmp_path}/mlflow.db"], tmp_path)
    (points,) = read_mlflow(tmp_path).values()
    assert [step for step, _ in points] == [*range(1, 13)]


@pytest.mark.skipif("mlflow" not in TRACKERS, reason="needs mlflow")
def test_a_server_that_never_answers_does_not_fail_the_run(tmp_path):
    """The server accepts connections and is silent. The library would wait longer than the run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [
            *python_main(),
            *TINY,
            "run.name=run",
            "tracker=mlflow",
            f"tracker.uri=http://127.0.0.1:{port}",
        ]
        done = call(command, tmp_path, MLFLOW_HTTP_REQUEST_TIMEOUT="3600")
        assert select.select([server], [], [], 0)[0], "a connection waits for an answer"
    assert done.returncode == 0, done.stdout
    assert "step 12/12" in done.stdout
    assert "mlflow lacks the last steps; run the same command again" in done.stdout
