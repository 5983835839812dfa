"""Execute the tutorials as they are written, each page in a directory of its own.

In these pages a block marked `sh` is run, and the block marked `text` after it is what it printed.
A block below a line that is only a path in backticks is that file. A block marked `diff` changes
that file. Other blocks are only read.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from launching import PATIENCE_S, ROOT, call

PAGES = ("quickstart", "your-text", "your-attention")
BLOCK = re.compile(
    r"(?:^`(?P<file>[^`\n]+)`\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
SHA256 = re.compile(r"\b[0-9a-f]{64}\b")
# What differs from machine to machine: hashes, numbers, and the sign before a p value.
VARIABLE = re.compile(r"(\b[0-9a-f]{8,}\b|-?\d[\d,]*|\bp [=<] |\.\.\.)")
MINUTES = 60
BLOCK_S = 20 * MINUTES
# `make train` in a checkout would install, and the tests have an environment.
PRELUDE = """
make() { command make -f "$ROOT/Makefile" -o "$VENV/.train" VENV="$VENV" "$@"; }
"""


class Command(NamedTuple):
    """A block of a page that is run."""

    files: dict[str, str]  # all files that the page has shown so far, by path
    script: str
    shown: str  # the output that the page shows, or ""


def changed(text: str, diff: str) -> str:
    """Return a text in which the lines marked with - are replaced by those marked with +."""
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] == mark) for mark in "-+")
    assert text.count(old) == 1, old
    return text.replace(old, new)


def commands_of(page: str) -> list[Command]:
    commands: list[Command] = []
    files: dict[str, str] = {}
    for block in BLOCK.finditer((ROOT / "docs" / f"{page}.md").read_text()):
        if block["file"]:
            before = files.get(block["file"], "")
            is_diff = block["language"] == "diff"
            text = changed(before, block["text"]) if is_diff else block["text"]
            files = {**files, block["file"]: text}
        elif block["language"] == "sh":
            commands.append(Command(files, block["text"], ""))
        elif block["language"] == "text":
            commands[-1] = commands[-1]._replace(shown=block["text"])
    return commands


def pattern_of(line: str) -> str:
    """Return a pattern of a shown line, in which numbers and hashes may be others."""
    parts = VARIABLE.split(line.strip())
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.escape(part)
        elif part == "...":
            parts[i] = ".*"
        elif part.startswith("p "):
            parts[i] = "p [=<] "
        elif re.fullmatch(r"-?\d[\d,]*", part) and len(part) < 12:
            parts[i] = r"-?\d[\d,]*"
        else:
            parts[i] = "[0-9a-f]{8,}"
    return "".join(parts)


def which_are_equal(text: str) -> list[int]:
    """Return, for each SHA-256 in a text, the index of its first occurrence."""
    hashes = SHA256.findall(text)
    return [hashes.index(each) for each in hashes]


def execute(page: str, cwd: Path, n_commands: int | None = None) -> None:
    for name in ("main.py", "sample.py"):
        (cwd / name).symlink_to(ROOT / name)
    extra = {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "ROOT": str(ROOT),
        "VENV": sys.prefix,
    }
    for command in commands_of(page)[:n_commands]:
        for name, text in command.files.items():
            (cwd / name).parent.mkdir(exist_ok=True)
            (cwd / name).write_text(text)
        # `timeout` kills all processes of the block, also those in the background.
        words = ["timeout", "--signal=KILL", str(BLOCK_S), "bash", "-ec", PRELUDE + command.script]
        done = call(words, cwd, BLOCK_S + PATIENCE_S, **extra)
        printed = f"{command.script}\n{done.stdout}"
        assert (done.returncode != 0) == (" error: " in command.shown), printed
        for line in command.shown.splitlines():
            assert re.search(rf"^\s*{pattern_of(line)}\s*$", done.stdout, re.MULTILINE), (
                f"{line!r} is not in the output of {printed}"
            )
        if hashes := which_are_equal(command.shown):
            assert which_are_equal(done.stdout) == hashes, printed


def test_the_first_block_of_a_tutorial(tmp_path):
    """The dry run refuses an attention that sees the future."""
    execute("your-attention", tmp_path, n_commands=1)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial(page, tmp_path):
    execute(page, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_shown_or_a_file(page):
    """A misspelt mark would leave a block out."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for block in BLOCK.finditer(text):
        assert block["file"] or block["language"] in ("sh", "text"), block[0]
    assert len(commands_of(page)) >= 3


def test_numbers_may_differ_but_not_words_or_equal_hashes():
    line = (
        "lr=0.04 is better than lr=0.02 by 0.049 ± 0.011 (5 paired seeds, p = 0.00027) at 894efb92"
    )
    pattern = pattern_of(line)
    other = "lr=0.04 is better than lr=0.02 by 1,0.1 ± 0.2 (5 paired seeds, p < 0.1) at 0123abcd9"
    assert re.fullmatch(pattern, other)
    assert not re.fullmatch(pattern, other.replace("better", "worse"))
    assert which_are_equal(f"{'a' * 64} x\n{'b' * 64} y\n{'a' * 64}") == [0, 1, 0]
