"""Check that examples/train.py gives the same bits and records as main.py, even after a kill."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import signal
import textwrap
from pathlib import Path

import pytest
import torch
from example_files import command_of, run_in_shell
from launching import ROOT, Job, call, is_running, python_main, wait_for
from runs import Record, curve, error_line, fail, read_result, succeed, tool
from safetensors.torch import load_file

import mingpt_ddp
from mingpt_ddp import loop

EXAMPLE = ROOT / "examples" / "train.py"
STEPS = 20
# A script with the example's loop that kills itself in the update of a step.
SCRIPT = f"""
import os, signal, sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import train
from mingpt_ddp.loop import TrainStep

update = TrainStep.update

def update_or_die(self, step):
    if step == int(os.environ.get("DIES_AT", 0)) and self.runtime.group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, step)

TrainStep.update = update_or_die
settings = train.SETTINGS
settings["trainer"]["max_steps"] = {STEPS}
train.LOG_EVERY = 5
train.EVAL_EVERY = 10
train.SAVE_EVERY = 5
with train.process_exit():
    train.train(train.from_mapping(settings))
"""


def launcher(ranks: int) -> list[str]:
    python = python_main()[0]
    if ranks == 1:
        return [python]
    return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]


def hashes(run: Path) -> dict[str, str]:
    """Return the SHA-256 of the model and the optimizer after the last step."""
    snapshot = run / "snapshots" / f"step_{STEPS:08}"
    return {
        name: hashlib.sha256((snapshot / f"{name}.safetensors").read_bytes()).hexdigest()
        for name in ("model", "optimizer")
    }


def losses(run: Path) -> list[tuple[float, ...]]:
    """Return the step and losses of each line of metrics.jsonl, without replaced lines."""
    keys = ("step", "train_loss", "val_loss", "lr", "grad_norm")
    return [tuple(row.get(key) for key in keys) for row in mingpt_ddp.history(run)]


def result(run: Path) -> Record:
    """Return the content of result.json without times and the code."""
    times = {"wall_seconds", "goodput", "code"}
    return {key: value for key, value in read_result(run).items() if key not in times}


def overrides() -> list[str]:
    """Return the settings of the example as overrides of main.py."""
    settings = runpy.run_path(str(EXAMPLE))["SETTINGS"]
    words = ["data=python_docs", "model=gpt_nano"]
    for group in ("optimizer", "trainer"):
        for key, value in settings[group].items():
            words.append(f"{group}.{key}={'null' if value is None else value}")
    model = settings["model"]
    words += [f"model.{key}={model[key]}" for key in ("n_layer", "n_head", "n_embd")]
    return [*words, f"data.block_size={settings['data']['block_size']}"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_has_the_bits_of_main(ranks, tmp_path, monkeypatch):
    """After a kill in step 13, the loop resumes from step 10.

    It resumes from step 5 if the snapshot of step 10 was still being written.
    """
    script = tmp_path / "own_loop.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("DIES_AT", "13")
    command = [*launcher(ranks), str(script)]
    killed = call(command, tmp_path, PYTHONPATH=str(ROOT))
    assert killed.returncode == (-signal.SIGKILL if ranks == 1 else 1), killed.stdout
    monkeypatch.delenv("DIES_AT")
    text = succeed(command, tmp_path)
    assert re.search(r"resuming from the snapshot of step (10|5) of 20\n", text), text

    every = ["trainer.log_every=5", "trainer.eval_every=10", "snapshot.every_steps=5"]
    limits = [f"trainer.max_steps={STEPS}", *every]
    words = [*overrides(), *limits, "run.name=main", f"ddp.nproc_per_node={ranks}"]
    succeed([*python_main(), *words], tmp_path)
    outputs = tmp_path / "outputs"
    assert hashes(outputs / "example") == hashes(outputs / "main")
    own, main = outputs / "example", outputs / "main"
    assert losses(own) == losses(main)
    assert result(own) == result(main)
    files = {path.name for path in main.iterdir()} - {".hydra", "code.patch"}
    of_script = {"script.py", "script.json"}
    assert {path.name for path in own.iterdir()} - {"code.patch"} == files | of_script
    assert (own / "script.py").read_text() == script.read_text()
    kept = {path: path.read_bytes() for path in own.iterdir() if path.suffix in (".json", ".jsonl")}
    again = succeed(command, tmp_path)
    assert "complete: the newest snapshot is from the last step, 20" in again
    done = "done: .* after 20 steps"
    assert re.findall(done, again) == re.findall(done, text) != []
    assert {path: path.read_bytes() for path in kept} == kept
    for rank in range(ranks):
        points = curve(own, rank=rank)
        assert [step for step, _ in points] == [5, 10, 15, 20]
        assert points == curve(main, rank=rank)


def test_the_ranks_die_with_torchrun(tmp_path):
    script = tmp_path / "own_loop.py"
    script.write_text(SCRIPT.replace(f"= {STEPS}", "= 10**6"))
    job = Job([*launcher(2), str(script)], tmp_path, PYTHONPATH=str(ROOT))
    wait_for(lambda: "step 10/" in job.text(), what="step 10")
    ranks = job.kill_agent()
    assert len(ranks) == 2
    wait_for(lambda: not any(map(is_running, ranks)), what="the end of the ranks")


def test_a_sweep_over_the_loop_as_the_page_says(tmp_path):
    """The sweep is killed in its second job. The same command continues it."""
    page = (ROOT / "docs" / "research.md").read_text()
    block = re.search(r"end the copy with\n\n```py\n(.*?)```", page, re.DOTALL)
    assert block is not None
    source, main, _ = EXAMPLE.read_text().partition('if __name__ == "__main__":')
    assert main
    script = tmp_path / "train.py"
    script.write_text(source.replace("SAVE_EVERY = 100", "SAVE_EVERY = 10") + block[1])
    words = [*overrides(), "trainer.max_steps=300", "run.name=rates", "optimizer.lr=0.01,0.02"]
    command = [*launcher(1), str(script), "-m", *words]
    job = Job(command, tmp_path, PYTHONPATH=str(ROOT))
    wait_for(lambda: "step 30/" in job.text().partition("job 2 of 2")[2], what="step 30 of job 2")
    job.kill_agent()
    first, _, second = succeed(command, tmp_path).partition("job 2 of 2: optimizer.lr=0.02")
    assert "step" not in first, "the first job was complete"
    assert re.search(r"resuming from the snapshot of step [1-9]\d* of 300\n", second)
    sweep = tmp_path / "outputs" / "rates"
    assert len([*sweep.glob("optimizer.lr=0.0[12]-*")]) == 2
    rows = mingpt_ddp.rows(sweep)
    assert [row["status"] for row in rows] == ["complete", "complete"]
    assert rows[0]["val_loss"] < rows[1]["val_loss"]
    text = succeed(tool("report", str(sweep)), tmp_path)
    best = Path(rows[0]["directory"])
    line = re.search(rf"trained by the script {best}/script.py, run with (.*)", text)
    assert line is not None, text
    lr = f"optimizer.lr={rows[0]['optimizer.lr']}"
    typed = {word.partition("=")[0]: word for word in [*words, lr, f"run.name=rates/{best.name}"]}
    assert sorted(line[1].split()) == sorted(typed.values())
    assert (sweep / "report.html").exists()
    again = error_line(fail(tool("again", rows[0]["directory"]), tmp_path), "config error: ")
    assert "was trained by the loop of train.py" in again


def small(tmp_path: Path, name: str = "own.py", changes: dict[str, str] | None = None) -> Path:
    """Write a script of six steps, which is the example with some lines replaced."""
    source = EXAMPLE.read_text()
    for old, new in {'"max_steps": 500': '"max_steps": 6', **(changes or {})}.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    script = tmp_path / name
    script.write_text(source)
    return script


def with_resolve(script: Path) -> Path:
    """Let a script take overrides from its command line, like main.py."""
    source = script.read_text()
    source = source.replace("    from_mapping,\n", "    resolve,\n")
    script.write_text(source.replace("from_mapping(SETTINGS)", "resolve().config"))
    return script


def content(directory: Path) -> dict[Path, bytes]:
    """Return the content of all files, except for locks, which contain the id of a process."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in files}


def test_a_directory_belongs_to_one_loop(tmp_path):
    """Another script and main.py are refused, and change nothing. An edited script continues."""
    python = launcher(1)
    first = small(tmp_path, "first.py")
    succeed([*python, str(first)], tmp_path)
    before = content(tmp_path / "outputs")
    second = small(tmp_path, "second.py")
    line = error_line(fail([*python, str(second)], tmp_path), "config error: ")
    assert "trained by the loop of first.py, not by the loop of second.py" in line
    assert line.endswith("or choose another run.name")
    main = [*python_main(), *overrides(), "run.root=outputs", "trainer.max_steps=6"]
    line = error_line(fail([*main, "run.name=example"], tmp_path), "config error: ")
    assert "trained by the loop of first.py, not by the loop of mingpt_ddp's main.py" in line
    assert content(tmp_path / "outputs") == before

    first.write_text(first.read_text() + "# another line\n")
    text = succeed([*python, str(first)], tmp_path)
    assert "the run is complete; it was trained before these files were edited: first.py; " in text
    succeed([*main, "run.name=by_main"], tmp_path)
    first.write_text(first.read_text().replace('"example"', '"by_main"'))
    line = error_line(fail([*python, str(first)], tmp_path), "config error: ")
    assert "by_main was trained by the loop of mingpt_ddp's main.py, not by the loop of fir" in line


def test_a_sweep_does_not_take_results_of_another_loop(tmp_path):
    python = launcher(1)
    words = ["-m", *overrides(), "trainer.max_steps=6", "run.name=sweep", "run.seed=1"]
    succeed([*python, str(with_resolve(small(tmp_path))), *words], tmp_path)
    before = content(tmp_path / "outputs")
    other = with_resolve(small(tmp_path, "other.py"))
    for command in [*python, str(other)], python_main():
        line = error_line(fail([*command, *words], tmp_path), "config error: ")
        assert "was trained by the loop of own.py, not by the loop of" in line
    assert content(tmp_path / "outputs") == before


def test_a_loop_that_breaks_is_complete_alone_and_in_a_sweep(tmp_path):
    """It continues only if its limit is raised."""
    step = "            lr = step.update(n)\n"
    stop = "            if n == 4:\n                break\n"
    script = with_resolve(small(tmp_path, changes={step: stop + step}))
    limit = "trainer.max_steps=6"
    words = [*overrides(), limit, "run.name=sweep", "run.seed=1"]
    command = [*launcher(1), str(script)]
    assert "stopped early: the loop has ended at step 3 of 6" in succeed(
        [*command, "-m", *words], tmp_path
    )
    [job] = (path.parent for path in (tmp_path / "outputs" / "sweep").glob("*/script.json"))
    assert read_result(job) | {"status": "complete", "stopped_early": True, "step": 3} == (
        read_result(job)
    )
    typed = json.loads((job / "script.json").read_text())["words"]
    text = succeed([*command, *typed], tmp_path)
    assert "complete: the newest snapshot is from the last step, 3" in text
    assert "after 3 steps" in text
    typed[typed.index(limit)] = "trainer.max_steps=7"
    text = succeed([*command, *typed], tmp_path)
    assert "resuming from the snapshot of step 3 of 7" in text


def test_words_without_an_effect_are_refused(tmp_path):
    """Each is refused with one line, before anything is written."""
    fixed = [*launcher(1), str(small(tmp_path, "fixed.py"))]
    line = fail([*fixed, "trainer.max_steps=5"], tmp_path)
    assert "trainer.max_steps=5 has no effect, because fixed.py does not read its command l" in line
    command = [*launcher(1), str(with_resolve(small(tmp_path)))]
    for words, told in {
        "trainer.eval_every=5": "trainer.eval_every is a key for the training loop of main.py",
        "-m trainer.log_every=5,6": "trainer.log_every is a key for the training loop of main.py",
        "ddp.nproc_per_node=2": "ddp.nproc_per_node=2 is for main.py and for sweeps; start a",
        "model.n_head=5": "must be divisible by model.n_head=5",
        "-m sweep.parallel=2 run.seed=1,2": "runs its jobs one after another on this machine",
        "-m sweep=optuna sweep.pruner=median optimizer.lr=interval(1,2)": (
            "sweep.pruner does not work with a script of your own"
        ),
    }.items():
        text = fail([*command, *overrides(), "run.name=x", *words.split()], tmp_path)
        assert text.startswith("config error: ") and text.count("\n") == 1, text
        assert told in text
    assert not (tmp_path / "outputs").exists()


def test_a_users_idea_has_a_key_as_the_page_says(tmp_path):
    page = (ROOT / "docs" / "research.md").read_text()
    block = re.search(r"above `train`:\n\n```py\n(.*?)```", page, re.DOTALL)
    assert block is not None
    step = "            norm = step.clip()\n"
    use = '            print(f"noise {config.task.noise}")\n'
    changes = {step: use + step, "def train(": f"{block[1]}\n\ndef train("}
    command = [*launcher(1), str(with_resolve(small(tmp_path, changes=changes)))]
    words = [*overrides(), "trainer.max_steps=1", "run.name=a"]
    assert "noise 0.25\n" in succeed(
        [*command, *words, "task.name=noisy", "task.noise=0.25"], tmp_path
    )
    assert "task.noisy is not a key" in fail(
        [*command, *words, "task.name=noisy", "task.noisy=1"], tmp_path
    )


def test_a_sweep_reports_why_a_job_has_failed(tmp_path):
    """The sweep also gives the reason if the job was killed."""
    bug = """            if config.run.seed == 1:
                raise ValueError("mine")
            import os
            os.kill(os.getpid(), 9)
"""
    step = "            norm = step.clip()\n"
    script = with_resolve(small(tmp_path, changes={step: bug + step}))
    words = ["-m", *overrides(), "run.name=sweep", "run.seed=1,2"]
    text = fail([*launcher(1), str(script), *words], tmp_path, code=1)
    assert "2 of 2 jobs failed" in text.splitlines()[-1]
    rows = (tmp_path / "outputs" / "sweep" / "failures.jsonl").read_text().splitlines()
    reasons = [json.loads(row)["reason"] for row in rows]
    assert re.fullmatch(r"error: rank 0: ValueError: mine \(own.py:\d+\)", reasons[0]), reasons
    assert reasons[1] == "job error: the script was killed by SIGKILL"
    assert text.count("ValueError: mine") == 1
    assert text.count("was killed by SIGKILL") == 1


def test_the_best_step_is_kept(tmp_path):
    """The best step is saved although no save is due, with the weights and not their average."""
    record = "            run.record_step(n, losses, norm, lr)\n"
    keep = "            torch.save(trained.model.state_dict(), f'{n}.pt')\n"
    changes = {
        '"micro_batch_size": 8': '"micro_batch_size": 8, "ema": 0.5',
        "EVAL_EVERY = 100": "EVAL_EVERY = 2",
        'evaluator.run(trained.model, "val")': '{"loss": {2: 2.5, 4: 2.0, 6: 2.25}[n]}',
        "from typing import Any\n": "from typing import Any\nimport torch\n",
        record: record + keep,
    }
    succeed([*launcher(1), str(small(tmp_path, changes=changes))], tmp_path)
    run = tmp_path / "outputs" / "example"
    assert mingpt_ddp.load(run, step="best").step == 4
    saved = load_file(run / "snapshots" / "step_00000004" / "model.safetensors")
    own = torch.load(tmp_path / "4.pt")
    assert own and all(torch.equal(own[name], saved[name]) for name in own)


def test_two_processes_do_not_train_in_one_directory(tmp_path):
    script = tmp_path / "own_loop.py"
    script.write_text(SCRIPT.replace(f"= {STEPS}", "= 10**6") + "\n")
    job = Job([*launcher(1), str(script)], tmp_path, PYTHONPATH=str(ROOT))
    wait_for(lambda: "step 10/" in job.text(), what="step 10")
    second = fail([*launcher(1), str(script)], tmp_path)
    assert "outputs/example" in second.splitlines()[-1]
    assert "is locked by process" in second.splitlines()[-1]
    reached = job.text().count("step")
    wait_for(lambda: job.text().count("step") > reached, what="another step of the first")
    job.kill_agent()


def test_a_sweep_over_a_script_after_the_text_has_changed(tmp_path):
    """The complete jobs were trained on another text, so the sweep fails and trains nothing."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import json, yaml
        from mingpt_ddp.loop import process_exit, resolve

        with process_exit():
            job = resolve()
            result = {"status": "complete", "val_loss": 1.0, "data": {"sha256": 64 * "0"}}
            job.directory.mkdir(parents=True)
            (job.directory / "config.yaml").write_text(yaml.safe_dump(job.config.to_dict()))
            (job.directory / "script.json").write_text('{"name": "script.py"}')
            (job.directory / "result.json").write_text(json.dumps(result))
        """)
    )
    command = [*launcher(1), str(script), "-m", *overrides(), "run.name=sweep", "run.seed=1,2"]
    assert "0 failed" in succeed(command, tmp_path)
    assert "is not the text that" in fail(command, tmp_path).splitlines()[-1]


def test_the_page_documents_what_the_loop_may_import():
    page = (ROOT / "docs" / "python.md").read_text()
    documented = set(re.findall(r"\b(\w+)[(`]", page))
    assert set(loop.__all__) <= documented


def test_the_page_changes_the_loss(tmp_path):
    """The page trains with a weighted loss, and has a metric for the unweighted loss."""
    page = (ROOT / "docs" / "python.md").read_text()
    block = re.search(r"another loss .*?```py\n(.*?)```", page, re.DOTALL)
    assert block is not None
    source = EXAMPLE.read_text()
    build = re.search(r"    task = build_task.*\n", source)
    assert build is not None
    for old, new in {
        build[0]: build[0] + textwrap.indent(block[1], " " * 4),
        '"max_steps": 500': '"max_steps": 10',
    }.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    script = tmp_path / "own_loop.py"
    script.write_text(source)
    text = succeed([*launcher(2), str(script)], tmp_path)
    line = re.search(r"step 10/10: loss (\S+), .* unweighted (\S+),", text)
    assert line is not None, text
    weighted, unweighted = map(float, line.groups())
    assert weighted != unweighted
    assert weighted == pytest.approx(unweighted, rel=0.05)


def test_a_mistake_is_reported_in_one_line(tmp_path):
    script = tmp_path / "own_loop.py"
    script.write_text(
        SCRIPT.replace("train.train", 'settings["model"]["n_head"] = 5\n    train.train')
    )
    text = fail([*launcher(1), str(script)], tmp_path)
    assert text == "config error: model.n_embd=48 must be divisible by model.n_head=5\n"
    assert not (tmp_path / "outputs").exists()


def test_the_readme_shows_the_loop_as_it_is():
    """The README shows the loop from its first line to the save."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    loop = re.search(
        r"^    with RunLog.*?run\.save\(\).*?\n",
        EXAMPLE.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert loop is not None
    assert blocks == [textwrap.dedent(loop[0])]


def last_loss(example: str, cwd: Path) -> float:
    """Run the command of an example. Return the training loss of its last step."""
    done = run_in_shell(command_of(ROOT / "examples" / example), cwd)
    assert done.returncode == 0, done.stdout
    return float(re.findall(r"^step 100/100: loss (\S+),", done.stdout, re.MULTILINE)[0])


@pytest.fixture(scope="module")
def loss_of_ddp(tmp_path_factory) -> float:
    """Return the loss of examples/train.py at step 100, trained by one process."""
    cwd = tmp_path_factory.mktemp("ddp")
    script = cwd / "own_loop.py"
    script.write_text(EXAMPLE.read_text().replace('"max_steps": 500', '"max_steps": 100'))
    text = succeed([*launcher(1), str(script)], cwd)
    return float(re.findall(r"^step 100/100: loss (\S+),", text, re.MULTILINE)[0])


def test_gradients_averaged_by_hand(loss_of_ddp, tmp_path):
    """Two ranks reach the loss of one process. Without averaging, they would use half batches."""
    assert last_loss("manual_averaging.py", tmp_path) == pytest.approx(loss_of_ddp, abs=2e-3)


def test_data_parallel(loss_of_ddp, tmp_path):
    assert last_loss("data_parallel.py", tmp_path) == pytest.approx(loss_of_ddp, abs=2e-3)


@pytest.mark.parametrize("example", ["manual_averaging.py", "data_parallel.py"])
def test_an_example_is_a_copy_of_the_loop(example):
    """All other lines of the example equal those of examples/train.py."""
    lines = EXAMPLE.read_text().partition('"""\n\n')[2].splitlines()
    copied = (ROOT / "examples" / example).read_text().splitlines()
    assert len({*lines} - {*copied}) <= 3  # the name, the number of steps, and the passes differ


EDGES = """
        if n == 6 and CASE == "bug":
            raise ValueError("mine")
        if n == 6 and CASE == "nan":
            losses["loss"] = losses["loss"] * float("nan")
"""


def edge(case: str, tmp_path: Path) -> list[str]:
    """Return the command of a 12-step loop that fails in step 6, or that never evaluates."""
    lines = []
    for line in EXAMPLE.read_text().replace('"max_steps": 500', '"max_steps": 12').splitlines():
        if case == "no evaluation" and "EVAL_EVERY ==" in line:
            line = line.split("if ")[0] + "if False:"
        if case == "never" and line.startswith("SETTINGS"):
            line = 'NEVER = {"resume": "never"}\n' + line
        lines.append(line.replace("LOG_EVERY = 10", "LOG_EVERY = 4"))
        if "losses = step.passes(n)" in line:
            lines.append(textwrap.indent(EDGES.replace("CASE", repr(case)), " " * 4))
    text = "\n".join(lines)
    if case == "never":
        text = text.replace('"seed": 1337}', '"seed": 1337, **NEVER}')
    script = tmp_path / "own_loop.py"
    script.write_text(text)
    return [*launcher(1), str(script)]


@pytest.mark.parametrize(
    ("case", "code", "last"),
    [
        ("bug", 1, r"error: rank 0: ValueError: mine \(own_loop.py:\d+\)"),
        ("nan", 2, "training error: step 8, or a step shortly before it, has loss nan .*"),
        ("never", 2, "config error: run.resume=never is for main.py; .*"),
    ],
)
def test_a_loop_that_goes_wrong_leaves_no_result(case, code, last, tmp_path):
    text = fail(edge(case, tmp_path), tmp_path, code)
    assert re.fullmatch(last, text.splitlines()[-1]), text
    assert not (tmp_path / "outputs" / "example" / "result.json").exists()


def test_a_loop_need_not_evaluate(tmp_path):
    text = succeed(edge("no evaluation", tmp_path), tmp_path)
    assert "done: not evaluated after 12 steps" in text
    run = tmp_path / "outputs" / "example"
    assert "val_loss" not in read_result(run)
    assert mingpt_ddp.rows(run)[0]["status"] == "complete"
