"""The formats of data as users launch runs: decided by content, named, and kept on resume."""

from __future__ import annotations

import json
import sys

from launching import TINY, call, python_main
from pause_points import PausedJob, patches
from user_code_page import page_commands, page_files

SMALL = [*TINY, "data.truncate=1"]
TEXTS = [f"to be {i}, or not" for i in range(400)]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
CHATS = "".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS)


def test_a_run_on_data_as_text_goes_on_without_saying_so_again(tmp_path):
    """Also one that starts from the weights of another run."""
    (tmp_path / "docs.jsonl").write_text(JSONL)
    text = ["data=text_file", "data.path=docs.jsonl"]
    for name, source in (("first", []), ("second", ["run.init_from=outputs/first"])):
        command = [*python_main(), *SMALL, *text, *source, f"run.name={name}"]
        begun = call([*command, "trainer.max_steps=2", "data.format=text"], tmp_path)
        assert begun.returncode == 0, begun.stdout
        done = call([*command, "trainer.max_steps=4"], tmp_path)
        assert done.returncode == 0, done.stdout
        assert "resuming from the snapshot" in done.stdout
        result = json.loads((tmp_path / "outputs" / name / "result.json").read_text())
        assert result["step"] == 4


def test_a_run_keeps_the_format_that_its_first_start_has_decided(tmp_path):
    """The typed configuration says auto: what it stood for is in the snapshot."""
    (tmp_path / "docs.jsonl").write_text(JSONL)
    (tmp_path / "other.txt").write_text(TEXTS[0] * 9)
    command = [*python_main(), *SMALL, "data=text_file", "data.path=docs.jsonl", "run.name=a"]
    begun = call([*command, "trainer.max_steps=2"], tmp_path)
    assert begun.returncode == 0, begun.stdout
    line = "data.path=docs.jsonl: read with data.format=jsonl, 400 texts of data.column=text"
    assert line in begun.stdout
    refused = call([*command, "trainer.max_steps=4", "data.format=text"], tmp_path)
    assert refused.returncode == 2
    line = "config error: data.format=text: the run has read its texts before with data.format=json"
    assert line in refused.stdout
    done = call([*command, "trainer.max_steps=4", "data.format=auto"], tmp_path)
    assert done.returncode == 0, done.stdout
    assert "resuming from the snapshot" in done.stdout
    other = [sys.executable, "-m", "mingpt_ddp.evaluate", "outputs/a", "data_path=other.txt"]
    measured = call(other, tmp_path)
    assert measured.returncode == 0, measured.stdout


def test_sources_need_no_path(tmp_path):
    (tmp_path / "a.txt").write_text("to be, or not to be\n" * 200)
    sources = ["data=text_file", "data.sources=[[a.txt,1]]", "trainer.max_steps=1"]
    done = call([*python_main(), *SMALL, *sources, "run.name=mixed"], tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_reader_of_json_lines_on_the_page(tmp_path):
    """With data.path, and with a constant of its own instead of one."""
    files = page_files("my_reader")
    code = files["my_reader/mine.py"]
    lines = files["my_reader/data/chats.yaml"]
    files["my_reader/fixed.py"] = code.replace("config.path", "'chats.jsonl'")
    files["my_reader/data/fixed.yaml"] = lines.replace("mine.py", "fixed.py")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "chats.jsonl").write_text(CHATS)
    [words] = [command[2:] for command in page_commands(-1)]
    for each in (words, [words[0], "data=fixed"]):
        done = call([*python_main(), *SMALL, *each, "trainer.max_steps=1"], tmp_path)
        assert done.returncode == 0, done.stdout
        # the digits, "tobe,rn", a space and a line feed
        assert ", 19 distinct" in done.stdout, done.stdout


SLOW_RANK = """
def delay(dataset):
    opened = dataset.EncodedText.memmap
    def memmap(self):
        deadline = time.monotonic() + 2
        while os.environ.get("RANK") == "1" and time.monotonic() < deadline:
            if not Path(self.directory).exists():
                break
            time.sleep(0.001)
        return opened(self)
    dataset.EncodedText.memmap = memmap
PATCHES["mingpt_ddp.data.dataset"] = delay
"""


def test_a_refused_text_is_one_line_on_ranks_of_any_speed(tmp_path):
    """The refused text leaves the cache. A slower rank must not miss its files before."""
    (tmp_path / "short.txt").write_text("too short")
    words = ["ddp.nproc_per_node=2", "data=text_file", "data.path=short.txt", "data.truncate=1.0"]
    job = PausedJob(python_main(), tmp_path, patches(SLOW_RANK), *words)
    assert job.wait() == 2
    [line] = job.job.text().splitlines()
    assert line.startswith("data error: the training text has 8 tokens")
