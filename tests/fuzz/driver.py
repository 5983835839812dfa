"""Start tests/fuzz/worker.py, which runs the cases, and check their outcomes.

    python tests/fuzz/driver.py SEED NUMBER

makes the directory of one case and prints its command.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuzz.cases import Case

ROOT = Path(__file__).resolve().parents[2]
# Even a slow machine finishes a case in this time, unless its work grows without bounds.
LIMIT_S = 40
LIMIT_MB = 1024
# Cases use one thread, and no network, credentials, GPU or compiler.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": str(ROOT),
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_MAX_ATTEMPTS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TERM": "dumb",
}
# Log lines that may precede an error.
NOTICES = r"these recorded values of .* are not used|damaged snapshot .* is ignored|.* was never finished and is ignored|retrying: "  # noqa: E501
NOTICES += r"|sweep\..* has no effect on a single run"
# Exceptions that are bugs of the program. No mistake of a user may cause them.
INTERNAL = r"\b(Type|Key|Attribute|Assertion|Index|Recursion|Name|UnboundLocal|ZeroDivision|Overflow)Error\b"  # noqa: E501


class Worker:
    """A process that runs cases in its own directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        kept = {
            key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LC_ALL")
        }
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=kept | ENVIRONMENT,
            text=True,
        )

    def run(self, seed: int, number: int) -> dict[str, Any]:
        """Run a case. Return its exit code, output, resource use and changed files."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps([seed, number]), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        for name in ("stdout", "stderr"):
            answer[name] = (self.directory / name).read_text(errors="backslashreplace")
        return dict(answer)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def faults(case: Case, done: dict[str, Any]) -> list[str]:
    """Return the faults in the outcome of a case, or an empty list."""
    found, lines = [], [line for line in done["stderr"].splitlines() if not re.match(NOTICES, line)]
    allowed = {"snapshots verify": (0, 1, 2), "replay": (0, 1, 2, 3)}.get(case.command, (0, 2))
    if done["code"] not in allowed:
        found.append(f"exit code {done['code']}")
    if re.search(r"Traceback \(most recent|Stack \(most|panicked", done["stderr"] + done["stdout"]):
        found.append("a traceback")
    if done["code"] == 2 and len(lines) != 1:
        found.append(f"{len(lines)} lines of error")
    if done["code"] == 2 and lines and not re.match(r"(\w+ )?error: ", lines[-1]):
        found.append("a line that is no error")
    if lines and not lines[-1].startswith("code error: ") and re.search(INTERNAL, lines[-1]):
        found.append("an exception that is no explanation")
    # If a lock file exists before the command, the command takes and writes it before it refuses.
    locks = {f"cwd/{step[-1]}" for step in case.steps if str(step[-1]).endswith("/.lock")}
    left = [name for name in done["changed"] if name not in locks]
    if done["code"] == 2 and left:
        found.append(f"left behind: {', '.join(left[:5])}")
    # An accepted command is stopped before its workers start, which leaves the directory for their
    # sockets.
    sockets = r"tmp/mingpt-[0-9a-f]{8}-" if done["accepted"] else "$^"
    temporary = [name for name in done["changed"] if name.startswith("tmp/")]
    temporary = [name for name in temporary if not re.match(sockets, name)]
    if done["code"] != 2 and temporary:
        found.append(f"left in TMPDIR: {', '.join(temporary[:5])}")
    if done["seconds"] >= LIMIT_S:
        found.append(f"{done['seconds']} s")
    if done["megabytes"] > LIMIT_MB:
        found.append(f"{done['megabytes']} MB more memory")
    return found


def main() -> None:
    """Make the directory of one case and run it. Print its command, its outcome and its steps."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from fuzz.cases import draw

    seed, number = map(int, sys.argv[1:])
    directory, case = Path(tempfile.mkdtemp(prefix=f"fuzz-{seed}-{number}-")), draw(seed, number)
    worker = Worker(directory)
    done = worker.run(seed, number)
    worker.close()
    print(f"cd {directory}/cwd; {case.shell()}".encode(errors="backslashreplace").decode())
    print({**done, "steps": case.steps})


if __name__ == "__main__":
    main()
