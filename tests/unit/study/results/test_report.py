"""The report of a sweep: reading run directories, the table, and the command to train again."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from fake_runs import fake_run
from hydra import compose, initialize_config_dir
from launching import PATIENCE_S, ROOT
from tools import call_tool

from mingpt_ddp.cli.commands import report as tool
from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory, hydra_value
from mingpt_ddp.errors import RunError
from mingpt_ddp.study.results.formats import NO_COMMAND, command_line, format_brief, short_names
from mingpt_ddp.study.results.report import report
from mingpt_ddp.study.results.runs import plain, read_jobs, varying

# Reading run directories


def test_jobs_by_objective(tmp_path):
    fake_run(tmp_path / "a", {"optimizer.lr": 1e-3, "run.name": "x"}, val_loss=2.0)
    fake_run(tmp_path / "b" / "c", {"optimizer.lr": 3e-3}, val_loss=1.5, faults=2)
    fake_run(tmp_path / "d", {"optimizer.lr": 1e-2}, "preempted", 1.0, steps=60)
    jobs = read_jobs([tmp_path])
    found = [(j.name, j.status, j.objective, j.step, j.metrics.speed) for j in jobs]
    assert found == [
        ("b/c", "complete", 1.5, 100, 4e4),
        ("a", "complete", 2.0, 100, 4e4),
        ("d", "preempted", None, 60, 4e4),
    ]
    assert [job.metrics.faults for job in jobs] == [2, 0, 0]
    assert jobs[2].val_loss == pytest.approx(1.0), "the last validation loss"
    assert [job.name for job in read_jobs([tmp_path / "a"])] == ["a"], "a run itself"
    assert [job.name for job in read_jobs([tmp_path / "b", tmp_path / "a", tmp_path])] == [
        "b/c",
        "a",
        f"{tmp_path.name}/d",
    ]


ADAMW = {"optimizer.name": "adamw", "optimizer.eps": 1e-8, "optimizer.lr": 1e-3}
MUON = {"optimizer.name": "muon", "optimizer.eps": 1e-10, "optimizer.momentum": 0.95}
SGD = {"optimizer.name": "sgd", "optimizer.momentum": 0.9}


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ([{"optimizer.lr": 1, "run.name": "a"}, {"optimizer.lr": 2, "run.name": "b"}], ["lr"]),
        ([{"optimizer.lr": 1}, {"optimizer.lr": 1.0}], []),
        ([{"run.seed": 2**62}, {"run.seed": 2**62 + 1}], ["seed"]),
        # Values that a preset implies are not parameters.
        ([ADAMW, {**MUON, "optimizer.lr": 0.1}], ["name"]),
        ([ADAMW, {**MUON, "optimizer.lr": 0.1}, {**MUON, "optimizer.lr": 0.2}], ["name", "lr"]),
        ([ADAMW, SGD, {**SGD, "optimizer.lr": 1}], ["name", "lr"]),
    ],
)
def test_the_parameters_of_jobs(tmp_path, values, keys):
    for number, each in enumerate(values):
        fake_run(tmp_path / str(number), each)
    assert [key.rpartition(".")[2] for key in varying(read_jobs([tmp_path]))] == keys


def test_the_newest_configuration_counts(tmp_path):
    run = fake_run(tmp_path / "run")
    for number, lr in ((2, 0.1), (10, 0.2)):
        (run / f"config.{number}.yaml").write_text(f"optimizer: {{lr: {lr}}}")
    assert read_jobs([run])[0].config["optimizer.lr"] == 0.2


def test_the_status_of_runs_without_a_result(tmp_path):
    """A training process holds the lock of its run, even if a complete run is resumed."""
    names = ("copied", "running", "stopped")
    runs = {name: fake_run(tmp_path / name, status=None) for name in names}
    runs["resumed"] = fake_run(tmp_path / "resumed", val_loss=1.0)
    (runs["stopped"] / ".lock").touch()
    with open(runs["running"] / ".lock", "w") as one, open(runs["resumed"] / ".lock", "w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)
        jobs = read_jobs([tmp_path])
    assert {job.name: job.status for job in jobs} == {
        "copied": "unfinished",
        "resumed": "running",
        "running": "running",
        "stopped": "stopped",
    }
    assert [job.objective for job in jobs] == [None] * 4
    assert [job.objective for job in read_jobs([runs["resumed"]])] == [1.0], "it has ended"


@pytest.mark.parametrize("loss", ["NaN", "null", '"1"', "true", "1e999", "{}", "-1e200"])
def test_a_nonfinite_loss_is_never_the_best(tmp_path, loss):
    fake_run(tmp_path / "good", {"optimizer.lr": 0.5}, val_loss=3.0)
    run = fake_run(tmp_path / "bad", val_loss=2.0)
    (run / "result.json").write_text(f'{{"status": "complete", "val_loss": {loss}}}')
    best, bad = report([tmp_path], tmp_path / "page.html").splitlines()[1:3]
    assert best.split()[:2] == ["*", "3.0000"] and bad.split()[0] == "-"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", b"a: [1"),
        ("config.yaml", b"!!python/object/apply:os.system ['touch stolen']"),
        ("config.yaml", b"[1, 2]"),
        ("config.yaml", b"{" * 5000),
        # YAML 1.1 reads this as a number in base 60.
        ("config.yaml", b"a: {b: 1" + b":1" * 200 + b".5}"),
        ("config.yaml", b"\xff\xfe\x00"),
        ("result.json", b'{"status"'),
        ("result.json", b"[" * 100_000),
        ("metrics.jsonl", b'{"step": 1}\nnonsense\n{"step": 2}\n'),
    ],
)
def test_a_file_that_cannot_be_read_is_noted(tmp_path, monkeypatch, file, content):
    monkeypatch.chdir(tmp_path)
    fake_run(tmp_path / "sweep" / "good")
    (fake_run(tmp_path / "sweep" / "run") / file).write_bytes(content)
    text = report([tmp_path / "sweep"], tmp_path / "page.html")
    assert file in next(line for line in text.splitlines() if line.startswith("note: "))
    assert "Notes" in (tmp_path / "page.html").read_text()
    assert not (tmp_path / "stolen").exists()


def test_nothing_blocks_the_report_and_it_loads_no_torch(tmp_path):
    """Pipes, devices, and 2 kB of YAML that grow exponentially by merging do not block it."""
    fake_run(tmp_path / "good")
    files = ("config.yaml", "result.json", "metrics.jsonl", ".lock", ".hydra/overrides.yaml")
    for file in (*files, ".hydra/hydra.yaml"):
        name = file.replace("/", "_").strip(".")
        run = fake_run(tmp_path / name, val_loss=1.0, overrides=["optimizer.lr=1"])
        (run / file).unlink(missing_ok=True)
        os.mkfifo(run / file)
    (fake_run(tmp_path / "zeros") / "metrics.jsonl").unlink()
    (tmp_path / "zeros" / "metrics.jsonl").symlink_to("/dev/zero")
    with open(fake_run(tmp_path / "one_line") / "metrics.jsonl", "wb") as file:
        file.truncate(1 << 40)
    merges = "".join(
        f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}, *m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 40)
    )
    (fake_run(tmp_path / "bomb") / "config.yaml").write_text(f"m0: &m0 {{a: 1}}\n{merges}")
    script = (
        "import sys; from pathlib import Path; from mingpt_ddp.study.results.report import report;"
        f"path = Path({str(tmp_path)!r}); print(report([path], path / 'page.html'));"
        "assert not {'torch', 'tensorboard', 'numpy'} & {*sys.modules}"
    )
    output = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout
    notes = sorted(line for line in output.splitlines() if line.startswith("note: "))
    assert len(notes) == 6, notes
    for name in ("bomb/", "config.yaml/", "metrics.jsonl/", "one_line/", "result.json/", "zeros/"):
        assert any(name in note for note in notes), name


def test_extreme_numbers_and_names_are_short(tmp_path):
    key = f"optimizer.{'k' * 500}"
    for number, loss in enumerate((1e99, 1e299)):
        values = {"optimizer.code": "mine.py", key: 10**99 + number, "run.name": None}
        run = fake_run(tmp_path / f"{number}", values, val_loss=loss, overrides=[])
        record = {"step": 10**99, "tokens_per_s": 1e299, "val_loss": loss}
        lines = [{"start": 1, "step": 0}, record]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    lines = report([tmp_path], tmp_path / "page.html").splitlines()
    assert max(map(len, lines)) < 200
    assert lines[1].split() == [
        "*",
        "1e99",
        "complete",
        "1e99",
        "1e99",
        "1e299",
        "0",
        "0:01:02",
        "0",
    ]
    body, _, _ = (tmp_path / "page.html").read_text().partition("<script")
    assert not re.search("[0-9]{40}", body)


@pytest.mark.parametrize("directory", ["nothing", "empty", "file"])
def test_no_run_is_an_error(tmp_path, directory):
    (tmp_path / "empty" / "a" / "b").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="name a run or the directory of a sweep"):
        report([tmp_path / directory], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


# Values


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (3e-4, "3e-4"), (1e-3, "0.001"), (0.25, "0.25"), (1 / 3, "0.3333"), (2, "2")),
        *((123456, "123456"), (12345.678, "1.235e4"), (1e12, "1e12"), (-2e-5, "-2e-5")),
    ],
)
def test_numbers_are_brief(value, text):
    assert format_brief(value) == text


def test_values_of_a_configuration():
    values = ([0.9, 0.99], [[1]], {}, {"a": "b"}, 10**5000, float("inf"))
    expected = [[0.9, 0.99], "[[1]]", "dict", '{"a": "b"}', "int", "inf"]
    assert [plain(value) for value in values] == expected
    sources = [[f"/texts/{i:04d}.txt", 1.0] for i in range(800)]
    others = [*sources[:-1], ["/texts/other.txt", 1.0]]
    assert plain(sources) != plain(others) and plain(sources) == plain([*sources])
    keys = ["optimizer.lr", "model.name", "a.x", "b.x", "my.step"]
    assert [*short_names(keys).values()] == ["lr", "model.name", "a.x", "b.x", "my.step"]


# The table


def test_the_text_has_a_line_for_each_job(tmp_path):
    fake_run(tmp_path / "a", {"optimizer.lr": 3e-4}, val_loss=2.0, faults=1)
    fake_run(tmp_path / "b", {"optimizer.lr": 1e-3}, "pruned", 2.5, steps=40)
    fake_run(tmp_path / "c", {"optimizer.lr": 1e-2}, None, None)
    lines = report([tmp_path], tmp_path / "page.html").splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["val", "loss", "status", "lr", "step", "tokens/s", "faults", "time", "job"],
        ["*", "2.0000", "complete", "3e-4", "100", "40,000", "1", "0:01:02", "a"],
        ["(2.5000)", "pruned", "0.001", "40", "40,000", "0", "0:01:02", "b"],
        ["-", "unfinished", "0.01", "-", "-", "0", "-", "c"],
    ]
    (tmp_path / "c" / "metrics.jsonl").unlink()
    head = report([tmp_path / "c"], tmp_path / "page.html").splitlines()[0]
    assert head.split() == ["status", "job"], "columns that no row has are left out"


def test_without_plotly_the_table_is_printed(tmp_path, monkeypatch):
    fake_run(tmp_path / "a")
    with_page = report([tmp_path], tmp_path / "page.html").splitlines()
    (tmp_path / "page.html").unlink()
    monkeypatch.delitem(sys.modules, "mingpt_ddp.study.results.page.page")
    for name in ["plotly", *(name for name in sys.modules if name.startswith("plotly."))]:
        monkeypatch.setitem(sys.modules, name, None)
    *table, last = report([tmp_path], tmp_path / "page.html").splitlines()
    assert table == with_page[:-1] and "pip install 'mingpt_ddp[report]'" in last
    assert not (tmp_path / "page.html").exists()


# The command that trains a job again


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, []),
        # The again command takes these keys only from its command line.
        ({"snapshot.path": "s3://mine/x"}, ["snapshot.path=s3://mine/x"]),
        ({"model.code": "mine.py"}, ["--config-dir=DIR", "model.code=mine.py"]),
    ],
    ids=str,
)
def test_the_command_trains_the_job_again(tmp_path, values, words):
    run = fake_run(tmp_path / "study" / "lr=1", {"run.name": "study/lr=1", **values})
    again = shlex.split(command_line(read_jobs([run])[0]))
    assert again == ["python", "-m", "mingpt_ddp", "again", str(run), *words]
    (run / "config.yaml").write_text("a: [1")
    assert command_line(read_jobs([run])[0]) == NO_COMMAND


@pytest.mark.parametrize(
    ("config_name", "path", "flags"),
    [
        ("config", "/a conf", ["--config-dir=/b presets"]),
        ("mine", "/", ["--config-name=mine", "--config-path=/", "--config-dir=/b presets"]),
        # No filesystem accepts this name.
        ("mine", "/" + "x" * 300, ["--config-name=mine", "--config-dir=/b presets"]),
    ],
)
def test_a_user_config_directory_is_in_the_command(tmp_path, config_name, path, flags):
    run = fake_run(tmp_path / "run", {"run.name": "run", "task.code": "mine.py"})
    sources = [{"path": path, "provider": "main"}]
    sources += [{"path": "/b presets", "provider": "command-line"}]
    runtime = {"config_sources": sources}
    record = {"hydra": {"job": {"config_name": config_name}, "runtime": runtime}}
    (run / ".hydra").mkdir(exist_ok=True)
    (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(record))
    assert flags == shlex.split(command_line(read_jobs([run])[0]))[5:-1]
    for broken in ("", "[]", "hydra: {runtime: 1}", "hydra: {runtime: {config_sources: [1]}}", "{"):
        (run / ".hydra" / "hydra.yaml").write_text(broken)
        assert "--config-dir=DIR" in command_line(read_jobs([run])[0])


TEXTS = ["a", "it's", "\\", "a\\'b", "\\'", "${run.name}", "\\${x}", "nUll", "1e3", "", " ", "a,b"]
TEXTS += ["[1,2", "{", "x=y", "ü\n", "~/x:y", "[1, 2]", "x: y", "1_000", "$x `y`", "'", "''"]


def test_any_text_survives_hydra():
    overrides = [f"+probe.k{number}={hydra_value(text)}" for number, text in enumerate(TEXTS)]
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        assert list(compose("config", overrides).probe.values()) == TEXTS


# The report command


@pytest.fixture
def call(monkeypatch, capsys):
    return call_tool(tool, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("nothing", "run error: nothing is not a directory; "),
        ("--open", "config error: open is not a key; use one of runs"),
        ("s3://bucket/run", "run error: s3://bucket/run is not a local directory"),
        ("s3://key:hunter2@bucket/run", "config error: runs contains credentials"),
    ],
)
def test_an_error_is_one_line(tmp_path, monkeypatch, call, arg, message):
    monkeypatch.chdir(tmp_path)
    code, out, error = call(arg)
    assert (code, out) == (2, "")
    assert error.startswith(message) and error.count("\n") == 1 and "hunter2" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written(tmp_path, call):
    """The table is printed nevertheless."""
    fake_run(tmp_path / "sweep" / "a")
    (tmp_path / "sweep" / "report.html").mkdir()
    code, out, error = call(tmp_path / "sweep")
    assert code == 2 and "2.0000  complete" in out and f"best: {tmp_path / 'sweep' / 'a'}" in out
    assert re.match(r"run error: cannot write .*report.html: ", error)
