"""The report of a sweep: reading run directories, the table, the page, the command line."""

from __future__ import annotations

import fcntl
import hashlib
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
from mingpt_ddp.config.config import from_mapping, to_plain
from mingpt_ddp.errors import RunError
from mingpt_ddp.results.formats import NO_COMMAND, brief, command_line, short_names
from mingpt_ddp.results.groups import best_group, singles
from mingpt_ddp.results.report import report
from mingpt_ddp.results.runs import plain, read_jobs, varying

HOSTILE = "<script>alert('&\"')</script>\x1b[2J"


# Reading run directories


def test_jobs_by_objective_and_what_differs(tmp_path):
    fake_run(tmp_path / "a", {"optimizer.lr": 1e-3, "run.name": "x"}, val_loss=2.0)
    fake_run(tmp_path / "b" / "c", {"optimizer.lr": 3e-3}, val_loss=1.5, faults=2)
    fake_run(tmp_path / "d", {"optimizer.lr": 1e-2}, "preempted", 1.0, steps=60)
    jobs = read_jobs([tmp_path])
    assert [(job.name, job.status, job.objective) for job in jobs] == [
        ("b/c", "complete", 1.5),
        ("a", "complete", 2.0),
        ("d", "preempted", None),
    ]
    assert varying(jobs) == ["optimizer.lr"], "run.name does not make the training"
    assert best_group(singles(jobs)).name == "b/c"
    assert [(job.step, job.metrics.speed, job.metrics.faults) for job in jobs] == [
        (100, 4e4, 2),
        (100, 4e4, 0),
        (60, 4e4, 0),
    ]
    assert jobs[2].val_loss == pytest.approx(1.0), "the last validation loss"


def test_values_implied_by_a_preset_are_not_parameters(tmp_path):
    presets = {
        "adamw": {"eps": 1e-8, "lr": 1e-3},
        "muon": {"eps": 1e-10, "lr": 0.02, "momentum": 0.95},
    }
    for number, (name, lr) in enumerate(
        [("adamw", 1e-3), ("muon", 0.02), ("muon", 0.01), ("adamw", 1e-3)]
    ):
        keys = {
            f"optimizer.{key}": value
            for key, value in {"name": name, **presets[name], "lr": lr}.items()
        }
        fake_run(
            tmp_path / str(number), {**keys, "run.seed": number, "run.name": f"sweep/{number}"}
        )
    assert set(varying(read_jobs([tmp_path]))) == {"optimizer.name", "optimizer.lr", "run.seed"}


def test_a_directory_may_be_a_run_itself_and_several_may_be_named(tmp_path):
    fake_run(tmp_path / "one")
    fake_run(tmp_path / "sweep" / "job")
    assert [job.name for job in read_jobs([tmp_path / "one"])] == ["one"]
    assert [job.name for job in read_jobs([tmp_path / "sweep", tmp_path / "one", tmp_path])] == [
        "one",
        "sweep/job",
    ]


def test_the_newest_configuration_counts(tmp_path):
    run = fake_run(tmp_path / "run")
    for number, lr in ((2, 0.1), (10, 0.2)):
        (run / f"config.{number}.yaml").write_text(f"optimizer: {{lr: {lr}}}")
    assert read_jobs([run])[0].config["optimizer.lr"] == 0.2


def test_what_has_no_result(tmp_path):
    """A process that trains holds the lock."""
    running, stopped, copied = (
        fake_run(tmp_path / name, status=None) for name in ("running", "stopped", "copied")
    )
    (stopped / ".lock").touch()
    with open(running / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        statuses = {job.name: job.status for job in read_jobs([tmp_path])}
    assert statuses == {"running": "running", "stopped": "stopped", "copied": "unfinished"}
    assert copied.is_dir()


def test_a_complete_run_that_is_resumed_is_running(tmp_path):
    """Its result is that of the earlier limit: it has no objective, and is not the best."""
    fake_run(tmp_path / "done", {"optimizer.lr": 1}, val_loss=3.0)
    more = fake_run(tmp_path / "more", {"optimizer.lr": 2}, val_loss=2.0)
    with open(more / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = read_jobs([tmp_path])
    assert [(job.name, job.status, job.objective) for job in jobs] == [
        ("done", "complete", 3.0),
        ("more", "running", None),
    ]
    assert read_jobs([tmp_path])[0].name == "more", "no process trains it any more"


@pytest.mark.parametrize(
    "loss", ["NaN", "Infinity", "null", '"1"', "true", "1e999", "{}", "-1e200"]
)
def test_a_nonfinite_loss_is_never_the_best(tmp_path, loss):
    fake_run(tmp_path / "good", {"optimizer.lr": 0.5}, val_loss=3.0)
    run = fake_run(tmp_path / "bad", val_loss=2.0)
    (run / "result.json").write_text(f'{{"status": "complete", "val_loss": {loss}}}')
    jobs = read_jobs([tmp_path])
    assert [(job.name, job.objective) for job in jobs] == [("good", 3.0), ("bad", None)]
    best, bad = report([tmp_path], tmp_path / "page.html").splitlines()[1:3]
    assert best.split()[:2] == ["*", "3.0000"]
    assert bad.split()[0] == "-"


def test_keys_of_some_jobs_only(tmp_path):
    fake_run(tmp_path / "a", {"optimizer.name": "adamw"})
    fake_run(tmp_path / "b", {"optimizer.name": "sgd", "optimizer.momentum": 0.9})
    fake_run(
        tmp_path / "c", {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.lr": 1}
    )
    fake_run(
        tmp_path / "d", {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.lr": 1.0}
    )
    assert varying(read_jobs([tmp_path])) == ["optimizer.name", "optimizer.lr"]


def test_seeds_that_differ_in_the_last_digit_differ(tmp_path):
    for number in range(2):
        fake_run(tmp_path / f"{number}", {"run.seed": 2**62 + number})
    assert varying(read_jobs([tmp_path])) == ["run.seed"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", "a: [1"),
        ("config.yaml", "!!python/object/apply:os.system ['touch stolen']"),
        ("config.yaml", "[1, 2]"),
        ("config.yaml", "{" * 5000),
        ("config.yaml", "a: {b: &b [1], c: *b}"),
        ("config.yaml", "a: {b: 1" + ":1" * 200 + ".5}"),  # a number in base 60
        ("config.yaml", "x" * (1 << 20) + "y"),
        ("config.yaml", b"\xff\xfe\x00"),
        ("result.json", '{"status"'),
        ("result.json", "[" * 100_000),
        ("metrics.jsonl", '{"step": 1}\nnonsense\n{"step": 2}\n'),
    ],
)
def test_a_file_that_cannot_be_read_is_noted(tmp_path, monkeypatch, file, content):
    monkeypatch.chdir(tmp_path)
    fake_run(tmp_path / "sweep" / "good")
    run = fake_run(tmp_path / "sweep" / "run")
    (run / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    text = report([tmp_path / "sweep"], tmp_path / "page.html")
    assert file in next(line for line in text.splitlines() if line.startswith("note: "))
    assert "Notes" in (tmp_path / "page.html").read_text()
    assert not (tmp_path / "stolen").exists()


def test_nothing_blocks_the_report(tmp_path):
    """Neither a pipe, nor a device, nor a configuration of 2 kB that grows exponentially by
    merging.
    """
    fake_run(tmp_path / "good")
    for file in (
        "config.yaml",
        "result.json",
        "metrics.jsonl",
        ".lock",
        ".hydra/overrides.yaml",
        ".hydra/hydra.yaml",
    ):
        run = fake_run(
            tmp_path / file.replace("/", "_").strip("."), val_loss=1.0, overrides=["optimizer.lr=1"]
        )
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
    command = [sys.executable, "-m", "mingpt_ddp.report", str(tmp_path)]
    output = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout
    notes = [line for line in output.splitlines() if line.startswith("note: ")]
    bad = (
        "bomb/config.yaml",
        "config.yaml/config",
        "metrics.jsonl/m",
        "one_line/m",
        "result.json/r",
        "zeros/m",
    )
    assert len(notes) == len(bad) and all(any(name in note for note in notes) for name in bad), (
        notes
    )


def test_integers_of_any_length(tmp_path):
    """Python refuses to print them in decimal, although it reads them in hexadecimal."""
    giant = f"0x{'F' * 5000}"
    content = f"optimizer: {{code: a.py, betas: [{giant}, .inf], ? {giant} : 1}}\n"
    content += f"? {giant}\n: {{? {giant} : 1}}"
    (fake_run(tmp_path / "a") / "config.yaml").write_text(content)
    fake_run(tmp_path / "b")
    report([tmp_path], tmp_path / "page.html")
    config = next(job.config for job in read_jobs([tmp_path]) if job.name == "a")
    hostile = {"optimizer.betas": ["int", "inf"], "optimizer.int": 1}
    assert {key: config[key] for key in hostile} == hostile


def test_extreme_numbers_and_names_are_short(tmp_path):
    key = f"optimizer.{'k' * 500}"
    for number, loss in enumerate((1e99, 1e299)):
        run = fake_run(
            tmp_path / f"{number}",
            {"optimizer.code": "mine.py", key: 10**99 + number, "run.name": None},
            val_loss=loss,
            overrides=[],
        )
        record = {"step": 10**99, "tokens_per_s": 1e299, "val_loss": loss}
        (run / "metrics.jsonl").write_text(
            json.dumps({"start": 1, "step": 0}) + "\n" + json.dumps(record)
        )
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


def test_values_are_brief():
    assert [
        brief(v) for v in (0, 0.0003, 1e-3, 0.25, 1 / 3, 2, 123456, 12345.678, 1e12, -2e-5)
    ] == [
        "0",
        "3e-4",
        "0.001",
        "0.25",
        "0.3333",
        "2",
        "123456",
        "1.235e4",
        "1e12",
        "-2e-5",
    ]
    assert [plain(v) for v in ([0.9, 0.99], [[1]], {}, {"a": "b"}, 10**5000, float("inf"))] == [
        [0.9, 0.99],
        "[[1]]",
        "dict",
        '{"a": "b"}',
        "int",
        "inf",
    ]
    sources = [[f"/texts/{i:04d}.txt", 1.0] for i in range(800)]
    others = [*sources[:-1], ["/texts/other.txt", 1.0]]
    assert plain(sources) != plain(others) and plain(sources) == plain([*sources])
    keys = ["optimizer.lr", "model.name", "a.x", "b.x"]
    assert list(short_names(keys).values()) == ["lr", "model.name", "a.x", "b.x"]
    assert short_names(["my.step"]) == {"my.step": "my.step"}, "another column has this title"


# The table


def test_hostile_names_and_values_are_escaped(tmp_path):
    values = {"model.name": HOSTILE, "optimizer.lr": 1}
    fake_run(tmp_path / "a\udcff\n'", values, overrides=[f"model.name='{HOSTILE}'"])
    fake_run(tmp_path / "b", {f"model.{HOSTILE}": 1, "optimizer.lr": 2}, status=HOSTILE)
    text = report([tmp_path], tmp_path / "page.html")
    assert "\x1b" not in text
    assert all("note:" not in line for line in text.splitlines())


def test_many_parameters(tmp_path):
    for number in range(2):
        keys = {f"model.key{key}": number for key in range(40)}
        fake_run(tmp_path / f"{number}", {"model.code": "mine.py", **keys})
    assert "and 32 more parameters: model.key8, " in report([tmp_path], tmp_path / "page.html")


def test_columns_that_no_row_has_are_left_out(tmp_path):
    for number in range(2):
        fake_run(tmp_path / f"{number}", {"optimizer.lr": number}, None, None)
        (tmp_path / f"{number}" / "metrics.jsonl").unlink()
    head = report([tmp_path], tmp_path / "page.html").splitlines()[0]
    assert head.split() == ["status", "lr", "job"]


def test_results_of_old_code_are_marked(tmp_path, monkeypatch):
    for name, content in (("old", "1"), ("new", "2")):
        run = fake_run(tmp_path / "runs" / name, {"optimizer.lr": len(content + name)})
        sha256 = hashlib.sha256(content.encode()).hexdigest()
        code = {"files": {"recipe/mine.py": sha256}, "package": {"sha256": "p"}}
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, "code": code}))

    def marked(**more) -> list[str]:
        text = report([tmp_path / "runs"], tmp_path / "page.html", **more)
        assert ("note: old code: results from before" in text) == ("complete, old code" in text)
        return [line.split()[-1] for line in text.splitlines() if "complete, old code" in line]

    monkeypatch.chdir(tmp_path)
    assert marked() == [], "nothing is known without the files"
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.py").write_text("2")
    assert marked() == ["old"]
    assert marked(accept_code=True) == []


def test_without_plotly_the_table_is_printed(tmp_path, monkeypatch):
    fake_run(tmp_path / "a")
    with_page = report([tmp_path], tmp_path / "page.html").splitlines()
    (tmp_path / "page.html").unlink()
    monkeypatch.delitem(sys.modules, "mingpt_ddp.results.page.page")
    monkeypatch.setitem(sys.modules, "plotly", None)
    for name in [name for name in sys.modules if name.startswith("plotly.")]:
        monkeypatch.delitem(sys.modules, name)
    *table, last = report([tmp_path], tmp_path / "page.html").splitlines()
    assert table == with_page[:-1]
    assert "pip install 'mingpt_ddp[report]'" in last
    assert not (tmp_path / "page.html").exists()


def test_the_text_has_a_line_for_each_job(tmp_path):
    fake_run(tmp_path / "a", {"optimizer.lr": 3e-4}, val_loss=2.0, faults=1)
    fake_run(tmp_path / "b", {"optimizer.lr": 1e-3}, "pruned", 2.5, steps=40)
    fake_run(tmp_path / "c", {"optimizer.lr": 1e-2}, None, None)
    assert [
        line.split() for line in report([tmp_path], tmp_path / "page.html").splitlines()[:4]
    ] == [
        ["val", "loss", "status", "lr", "step", "tokens/s", "faults", "time", "job"],
        ["*", "2.0000", "complete", "3e-4", "100", "40,000", "1", "0:01:02", "a"],
        ["(2.5000)", "pruned", "0.001", "40", "40,000", "0", "0:01:02", "b"],
        ["-", "unfinished", "0.01", "-", "-", "0", "-", "c"],
    ]


# The command line

SWEEP = [
    "experiment=demo",
    "run.name=study",
    "optimizer=sgd",
    "optimizer.lr=0.003",
    "+trainer={}",
    "data.path='a b=$x'",
]


def compose_config(overrides: list[str]) -> dict:
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return from_mapping(to_plain(compose("config", overrides))).to_dict()


@pytest.mark.parametrize("recorded", [True, False])
def test_the_command_line_composes_to_the_configuration(tmp_path, recorded):
    overrides = [
        *SWEEP,
        "data.path='a b=\\'$x\\' \"é\"\\\\'",
        "data.name='{null}'",
        "model.name='true'",
        "data.sha256=null",
    ]
    config = compose_config(overrides)
    config["run"]["name"] = "study/optimizer.lr=0.003,a=b-0123abcd"
    run = fake_run(tmp_path / config["run"]["name"], overrides=overrides if recorded else None)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    command = command_line(read_jobs([tmp_path])[0])
    python, m, package, *again = shlex.split(command)
    assert (python, m, package) == ("python", "-m", "mingpt_ddp")
    output = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {shlex.join(again)}"], capture_output=True, text=True
    ).stdout
    assert output.splitlines() == again
    assert compose_config(again) == config


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("study", ["run.name=study"], "run.name=study"),
        # The last one counts.
        (None, ["optimizer.lr=2", "optimizer.lr=1"], "optimizer.lr=2 optimizer.lr=1"),
        # Local workers record the name that the user has given, and that of the directory.
        (
            "study",
            ["optimizer.lr=2", "run.name=study", 'run.name="study"'],
            "optimizer.lr=2 'run.name=\"study\"'",
        ),
        # The overrides of a job have the name of the sweep, and alone would train a plain run.
        ("study/job", ["run.name=study"], "'run.name=\"study/job\"'"),
    ],
    ids=str,
)
def test_the_command_line_names_the_run_once(tmp_path, name, overrides, words):
    run = fake_run(tmp_path / (name or "unnamed"), {"run.name": name}, overrides=overrides)
    assert command_line(read_jobs([run])[0]) == f"python -m mingpt_ddp {words}"


def test_no_command_line_without_a_configuration(tmp_path):
    run = fake_run(tmp_path / "study", overrides=["run.name=study"])
    (run / "config.yaml").write_text("a: [1")
    assert command_line(read_jobs([run])[0]) == NO_COMMAND
    text = report([run], tmp_path / "page.html")
    assert "python -m mingpt_ddp" not in text
    assert "no command line" in text.splitlines()[-2]


def test_a_user_config_directory_is_in_the_command(tmp_path):
    run = fake_run(tmp_path / "run", {"run.name": None}, overrides=["model=mine"])
    sources = [
        {"path": "/a conf", "provider": "main"},
        {"path": "/b presets", "provider": "command-line"},
    ]
    record = {"hydra": {"job": {"config_name": "config"}, "runtime": {"config_sources": sources}}}
    (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(record))
    assert (
        command_line(read_jobs([run])[0])
        == "python -m mingpt_ddp '--config-dir=/b presets' model=mine"
    )
    sources[0]["path"] = str(tmp_path)
    record["hydra"]["job"] = {"config_name": "mine"}
    (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(record))
    flags = f"--config-name=mine --config-path={tmp_path} '--config-dir=/b presets'"
    assert command_line(read_jobs([run])[0]) == f"python -m mingpt_ddp {flags} model=mine"
    sources[0]["path"] = "/" + "x" * 300  # a name that no filesystem takes
    (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(record))
    assert (
        command_line(read_jobs([run])[0])
        == "python -m mingpt_ddp --config-name=mine '--config-dir=/b presets' model=mine"
    )
    for broken in ("", "[]", "hydra: {runtime: 1}", "hydra: {runtime: {config_sources: [1]}}", "{"):
        (run / ".hydra" / "hydra.yaml").write_text(broken)
        assert command_line(read_jobs([run])[0]) == "python -m mingpt_ddp model=mine"


def test_any_text_survives_hydra():
    texts = [
        "a",
        "it's",
        "\\",
        "a\\'b",
        "\\'",
        "${run.name}",
        "\\${x}",
        "nUll",
        "1e3",
        "",
        " ",
        "a,b",
        "[1,2",
        "{",
        "x=y",
        "ü\n",
        "~/x:y",
        "[1, 2]",
        "x: y",
        "1_000",
        "$x `y`",
        "'",
        "''",
        "\\\\'\\\\",
    ]
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        overrides = [f"+probe.key{number}={hydra_value(text)}" for number, text in enumerate(texts)]
        assert list(compose("config", overrides).probe.values()) == texts


# The tool


@pytest.fixture
def call(monkeypatch, capsys):
    return call_tool(tool, monkeypatch, capsys)


def test_the_path_of_the_page_is_printed(tmp_path, call):
    fake_run(tmp_path / "sweep" / "a")
    code, out, error = call(tmp_path / "sweep")
    assert (code, error) == (0, "")
    assert out.splitlines()[-1] == f"the page is {tmp_path / 'sweep' / 'report.html'}"
    assert (tmp_path / "sweep" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert [job.name for job in read_jobs([tmp_path / "sweep"])] == ["a"], "the page is no run"


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("nothing", "nothing is not a directory"),
        ("--open", "open is not a key; use one of runs"),
        ("s3://bucket/run", "s3://bucket/run is not a local directory"),
        ("s3://key:hunter2@bucket/run", "runs holds credentials"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, call, arg, message):
    monkeypatch.chdir(tmp_path)
    code, out, error = call(arg)
    assert (code, out) == (2, "")
    kind = "config" if "credentials" in message or arg == "--open" else "run"
    assert error.startswith(
        f"{kind} error: {message}; " if arg == "nothing" else f"{kind} error: {message}"
    )
    assert "hunter2" not in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written(tmp_path, call):
    fake_run(tmp_path / "sweep" / "a")
    (tmp_path / "sweep" / "report.html").mkdir()
    code, out, error = call(tmp_path / "sweep")
    assert code == 2
    assert "2.0000  complete" in out and f"best: {tmp_path / 'sweep' / 'a'}" in out, (
        "the table is printed nevertheless"
    )
    assert re.match(r"run error: cannot write .*report.html: ", error)


def test_it_loads_neither_torch_nor_tensorboard(tmp_path):
    fake_run(tmp_path / "a")
    script = (
        "import json, sys; from pathlib import Path;"
        "from mingpt_ddp.results.report import report;"
        f"report([Path({str(tmp_path)!r})], Path({str(tmp_path)!r}) / 'page.html');"
        "print(json.dumps([name for name in ('torch', 'tensorboard', 'numpy') if name in "
        "sys.modules]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(output) == []
