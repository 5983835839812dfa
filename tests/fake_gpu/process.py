"""Start the process with the fake GPU, and give it jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def job(function: str, **arguments: Any) -> dict[str, Any]:
    """Describe a job: the name of a function in jobs.py and its arguments."""
    return {"function": function, "arguments": arguments}


class Process:
    """A process that runs jobs one after another. It starts once, which takes seconds."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        self._results: dict[str, Any] = {}  # results by the JSON of the job
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fake_gpu.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def result_of(self, job: dict[str, Any]) -> Any:
        """Return the result of a job. Equal jobs run once. An error in a job fails the test."""
        line = json.dumps(job)
        if line not in self._results:
            assert self._process.stdin is not None and self._process.stdout is not None
            print(line, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            assert answer, f"the process with the fake GPU has exited with {self._process.wait()}"
            self._results[line] = json.loads(answer)
        assert "error" not in self._results[line], self._results[line]["error"]
        return self._results[line]["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
