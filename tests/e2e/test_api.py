"""Check training from Python: in a script without a main guard, as docs/python.md shows it, and
interrupted or killed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from launching import (
    PATIENCE_S,
    ROOT,
    TINY,
    Job,
    call,
    python_main,
    read,
    wait_for,
    workers,
    write_application,
)
from runs import fail, succeed

sys.path.append(str(ROOT / "scripts"))
from notebook import NOTEBOOK, PAGE, notebook

# This script trains in a thread. It has no `if __name__ == "__main__"`.
SCRIPT = """
import sys, threading
import mingpt_ddp
words = sys.argv[1:]
if "in-a-thread" in words:
    words.remove("in-a-thread")
    thread = threading.Thread(target=lambda: print(mingpt_ddp.train(words, nproc=2)))
    thread.start()
    thread.join()
else:
    try:
        mingpt_ddp.train(words, nproc=2)
    except KeyboardInterrupt:
        print("stopped by hand")
"""


def cells() -> list[str]:
    """Return the code of the notebook, which is the code in docs/python.md."""
    found = [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    return ["".join(cell["source"]) for cell in found]


def test_the_notebook_is_the_page():
    page = PAGE.read_text()
    assert NOTEBOOK.read_text() == notebook(page), "run python scripts/notebook.py"
    assert "\n\n".join(cells()) == "\n\n".join(
        re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    )


def check_page(printed: str, cwd: Path) -> None:
    assert f"{cwd}/outputs/python complete " in printed
    assert "config error: trainer.max_step is not a key; did you mean trainer.max_steps?" in printed
    assert re.search(r"torch.Size\(\[1, 9, \d+\]\) \d+ \d0\n", printed)
    [rows] = [line for line in printed.splitlines() if line.startswith("[(10, ")]
    assert re.findall(r"\((\d+), ", rows) == ["10", "20", "30"]
    jobs = re.findall(r"^(0\.\d+) complete 30 (\d\.\d+)$", printed, re.MULTILINE)
    assert sorted(rate for rate, _ in jobs) == ["0.001", "0.01"]
    best, other = (float(loss) for _, loss in jobs)
    assert best < other
    losses = re.findall(r"^nats per token: (.*)", printed, re.MULTILINE)
    first, second, of_mean = map(float, losses)
    assert of_mean < (first + second) / 2


@pytest.mark.slow  # the notebook, in the next test, runs the same lines
def test_the_page_as_a_script(tmp_path):
    (tmp_path / "page.py").write_text("\n".join(cells()))
    text = succeed([sys.executable, "page.py"], tmp_path, CUDA_VISIBLE_DEVICES="")
    check_page(text, tmp_path)


@pytest.mark.integration
def test_the_page_as_a_notebook(tmp_path, monkeypatch):
    if not (importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel")):
        pytest.skip("there is no Jupyter; pip install nbclient ipykernel")
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        book,
        timeout=PATIENCE_S,
        startup_timeout=PATIENCE_S,
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])
    )
    check_page(printed, tmp_path)


def test_a_users_application_in_a_checkout(tmp_path):
    """The application's own sweeper trains jobs, for which main.py uses the same names."""
    write_application(tmp_path)
    words = [f"gpt.{word}" for word in TINY[1:] if not word.startswith("trainer.max_epochs")]
    swept = succeed(
        [sys.executable, "app.py", "-m", "rate=1e-3,3e-4", *words],
        tmp_path,
        CUDA_VISIBLE_DEVICES="",
    )
    jobs = re.findall(r"^baseline (0\.\d+) (\S+) (\d\.\d+)$", swept, re.MULTILINE)
    assert [job[0] for job in jobs] == ["0.001", "0.0003"]
    assert len({job[2] for job in jobs}) == 2
    again = call([*python_main(), *TINY, "optimizer.lr=3e-4"], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert "complete: the newest snapshot is from the last step, 12" in again.stdout, again.stdout
    assert {Path(job[1]) for job in jobs} == {*tmp_path.glob("outputs/python_docs-*")}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+gpt.optimiser.lr=1", "gpt.optimiser is not a key; did you mean optimizer?"),
        ("+gpt.trainer.max_step=5", "trainer.max_step is not a key; did you mean trainer.max_"),
    ],
)
def test_an_error_in_a_users_application_is_reported_in_one_line(word, message, tmp_path):
    write_application(tmp_path)
    text = fail([sys.executable, "app.py", word], tmp_path)
    (line,) = text.splitlines()
    assert line.startswith(f"config error: {message}")


def start(cwd: Path, *words: str) -> tuple[Job, int]:
    """Start the script and wait until it has logged a step.

    Returns:
        The script, and the process id of its training process.
    """
    (cwd / "script.py").write_text(SCRIPT)
    job = Job([sys.executable, "script.py", *TINY, "run.name=a", *words], cwd, PYTHONPATH=str(ROOT))
    steps = lambda: len(re.findall(r"^step \d+/", job.text(), re.MULTILINE))  # noqa: E731
    wait_for(lambda: steps() >= 2 or job.process.poll() is not None, what="two steps")
    assert job.process.poll() is None, job.text()
    [training] = [
        int(pid)
        for thread in Path(f"/proc/{job.process.pid}/task").iterdir()
        for pid in (thread / "children").read_text().split()
    ]
    return job, training


def test_interrupted_then_killed_in_a_thread(tmp_path):
    long = ["trainer.max_steps=100000", "snapshot.every_steps=null", "trainer.eval_every=null"]
    job, training = start(tmp_path, *long)
    ranks = workers(training, False)
    assert len(ranks) == 2
    # As from a notebook's stop button, only this process gets the signal.
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait() == 0
    assert job.text().endswith("stopped by hand\n")
    assert len(list((tmp_path / "outputs" / "a" / "snapshots").iterdir())) == 1
    assert not any(read(pid, "comm").startswith("rank ") for pid in ranks)

    job, training = start(tmp_path, *long, "in-a-thread")
    ranks = [training, *workers(training, False)]
    assert len(ranks) == 3
    job.process.kill()
    are_gone = lambda: not any("python" in read(pid, "cmdline") for pid in ranks)  # noqa: E731
    wait_for(are_gone, what="the end of the ranks")
