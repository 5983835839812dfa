"""Check that Optuna's own tools can read the study of a running sweep.

The tools are optuna-dashboard, in headless Chromium, and Optuna's Python functions.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser
from launching import TINY, Job, environment, python_main, wait_for
from ports import free_port

pytestmark = pytest.mark.integration
DASHBOARD = Path(sysconfig.get_path("scripts"), "optuna-dashboard")
# The sweep does not end before the test has looked. It has pruned trials between complete ones.
SWEEP = [
    *python_main(),
    "-m",
    "sweep=optuna_lr",
    *TINY,
    "sweep.trials=1000",
    "sweep.pruner=asha",
    "trainer.max_steps=6",
    "trainer.eval_every=2",
    "trainer.sample_every=null",
    "tracker=[]",
]
MIN_ENDED_TRIALS = 8  # the tests look at the sweep once this many trials have ended
KEYS = {"optimizer.lr", "optimizer.weight_decay"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """Start a sweep and return its directory. At the end, the sweep is preempted."""
    job = Job(SWEEP, tmp_path)
    directory = tmp_path / "outputs" / "optuna_lr"
    wait_for(lambda: len(results(directory)) >= MIN_ENDED_TRIALS, what="the first trials")
    yield directory
    assert job.process.poll() is None, f"the sweep has ended:\n{job.text()[-2000:]}"
    job.process.send_signal(signal.SIGTERM)
    # The exit code is 0 if the signal came during a job, and 143 if it came between two jobs.
    assert job.wait() in (0, 128 + signal.SIGTERM), job.text()[-2000:]


def results(directory: Path) -> dict[str, dict[str, object]]:
    """Return the result.json of each job that has ended, by the name of its directory."""
    return {
        path.parent.name: json.loads(path.read_text()) for path in directory.glob("*/result.json")
    }


def losses(directory: Path) -> list[float]:
    """Return the losses of the complete trials."""
    ended = results(directory).values()
    return [float(str(each["val_loss"])) for each in ended if each["status"] == "complete"]


@contextlib.contextmanager
def dashboard(directory: Path) -> Iterator[str]:
    """Serve a study as `optuna-dashboard study.journal` does. Yield the URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(DASHBOARD), "study.journal", "--port", str(port)]
    output = directory.parent / "dashboard.txt"
    with open(output, "w") as file:
        server = subprocess.Popen(
            command, cwd=directory, env=environment(directory), stdout=file, stderr=file
        )
    try:
        wait_for(lambda: answers(url) or server.poll() is not None, what="optuna-dashboard")
        assert server.poll() is None, output.read_text()
        yield url
    finally:
        server.terminate()
        server.wait()


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=100).close()
    except OSError:
        return False
    return True


def text(browser: Browser) -> str:
    shown: str = browser.evaluate("document.body.innerText")
    return shown


def number_of_trials(browser: Browser) -> int:
    """Return the number of trials that the page lists, or 0 while it loads."""
    found = re.search(r"^(\d+) Trials$", text(browser), re.MULTILINE)
    return int(found[1]) if found else 0


def test_the_dashboard_follows_a_sweep_while_it_runs(browser, running):
    if not DASHBOARD.exists():
        pytest.skip("there is no optuna-dashboard; pip install 'mingpt_ddp[integrations]'")
    with dashboard(running) as url:
        browser.open(f"{url}/dashboard")
        wait_for(lambda: ". optuna_lr\n" in text(browser), what="the list of studies")
        with urllib.request.urlopen(f"{url}/api/studies") as answer:
            (study,) = json.load(answer)["study_summaries"]
        page = f"{url}/dashboard/studies/{study['study_id']}"
        browser.open(page)
        best = r"Best Trial \(number=\d+\)\n([\d.]+)"
        wait_for(lambda: re.search(best, text(browser)), what="the best trial")
        assert set(re.findall(r"optimizer\.\w+", text(browser))) >= KEYS
        shown = float(re.search(best, text(browser))[1])
        assert shown in losses(running)
        browser.open(f"{page}/trials")
        wait_for(lambda: number_of_trials(browser) > MIN_ENDED_TRIALS, what="the trials")
        assert {"Complete", "Pruned"} <= set(text(browser).splitlines())
        assert "Trial 0\nComplete" in text(browser)
        before = number_of_trials(browser)
        wait_for(lambda: number_of_trials(browser) > before, what="trials that have begun since")
        assert browser.errors() == []
        assert all(each.startswith((url, "data:")) for each in browser.requested())


def test_optunas_functions_read_a_study_while_it_runs(running):
    optuna = pytest.importorskip("optuna")
    backend = optuna.storages.journal.JournalFileBackend(str(running / "study.journal"))
    storage = optuna.storages.JournalStorage(backend)
    before = losses(running)
    study = optuna.load_study(study_name="optuna_lr", storage=storage)
    best = study.best_trial
    assert best.value <= min(before)
    assert results(running)[best.user_attrs["job"]]["val_loss"] == best.value
    assert best.intermediate_values[6] == best.value
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    importances = optuna.importance.get_param_importances(study, evaluator=evaluator)
    assert importances.keys() == KEYS
    assert sum(importances.values()) == pytest.approx(1)
