"""Run the commands of docs/parity.md, each in a directory of its own, and print which succeed.

    python scripts/parity.py [PART OF A NAME]

Commands of rows marked GPU are skipped without a GPU, and mpirun where it is not installed. Exit
code 1 if any other fails.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(
    r"^\| (?P<what>[^|]+) \| (?P<command>`[^`]+`|[^|]+) \| (?P<tests>[^|]*) \|$", re.MULTILINE
)
SLOW = "benchmarks/"  # measured by hand


def rows() -> list[tuple[str, str, list[str]]]:
    """Return what each row shows, its command ("" if it has none), and its tests."""
    found = []
    for match in ROW.finditer((ROOT / "docs" / "parity.md").read_text()):
        command = re.fullmatch(r"`([^`]+)`", match["command"].strip())
        tests = re.findall(r"`(tests/[^`]+)`", match["tests"])
        if tests or command:
            found.append((match["what"].strip(), command[1] if command else "", tests))
    return found


def write_files(directory: Path) -> None:
    """Write a small MNIST, and the files of the example in docs/your-own-model.md."""
    images = directory / "DIGITS"
    images.mkdir()
    for split, n in (("train", 200), ("t10k", 50)):
        pixels = bytes((label * 25 + pixel) % 256 for label in range(n) for pixel in range(28 * 28))
        head = struct.pack(">HBB3I", 0, 8, 3, n, 28, 28)
        (images / f"{split}-images-idx3-ubyte").write_bytes(head + pixels)
        labels = bytes(label % 10 for label in range(n))
        head = struct.pack(">HBBI", 0, 8, 1, n)
        (images / f"{split}-labels-idx1-ubyte").write_bytes(head + labels)
    page = (ROOT / "docs" / "your-own-model.md").read_text()
    block = r"^`(my_task/\S+)`\n\n```\w+\n(.*?)^```$"
    for name, content in re.findall(block, page, re.DOTALL | re.MULTILINE):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)


def words_of(command: str, run: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command for this interpreter and checkout, and its environment."""
    words = shlex.split(command)
    variables = dict(os.environ, PYTHONPATH=str(ROOT))
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    programs = {
        "python": [sys.executable],
        "mpirun": ["mpirun"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    }
    known = {"main.py": str(ROOT / "main.py"), "python": sys.executable, "RUN": str(run)}
    found = [*programs[words[0]]]
    for word in words[1:]:
        word = re.sub(r"(\$PWD/)?\bexamples(?=/|$)", f"{ROOT}/examples", word)
        found.append(known.get(word, word.replace("=RUN", f"={run}")))
    return found, variables


def main() -> int:
    wanted = " ".join(sys.argv[1:])
    failed = 0
    run = Path()  # of the last command that trained
    has_gpu = sees_gpu()
    with tempfile.TemporaryDirectory(prefix="parity-") as name:
        write_files(Path(name))
        for what, command, _ in rows():
            lacks = "(GPU)" in what and not has_gpu
            lacks |= command.startswith("mpirun") and shutil.which("mpirun") is None
            if not command or SLOW in command or wanted not in what or lacks:
                print(f"skipped    {what}")
                continue
            words, variables = words_of(command, run)
            begin = time.monotonic()
            done = subprocess.run(
                words, cwd=name, env=variables, capture_output=True, text=True, check=False
            )
            verdict = "ok    " if done.returncode == 0 else "FAILED"
            print(f"{verdict} {time.monotonic() - begin:3.0f} s  {what}", flush=True)
            if done.returncode != 0:
                failed += 1
                print(f"{command}\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
            run = next(Path(name).glob("outputs/digits-*"), run)
    return int(failed > 0)


def sees_gpu() -> bool:
    """Return whether nvidia-smi is here and finds a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
