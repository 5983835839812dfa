"""Start processes with the fake GPU and collect the results of their jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
GPT2_VOCABULARY = 50257


def job(function: str, **arguments: Any) -> dict[str, Any]:
    """Return a job: a function of jobs.py and its arguments."""
    return {"function": function, "arguments": arguments}


def answers(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run jobs one after the other in a process of their own.

    Return of each its `result`, or its `error`: a traceback.
    """
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "fake_gpu.child"],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    crash = f"the process has exited with {done.returncode}\n{done.stderr}"
    return [*found, *({"error": crash} for _ in jobs[len(found) :])]


def result_of(answer: dict[str, Any]) -> Any:
    assert "error" not in answer, answer["error"]
    return answer["result"]


def peak_bytes(overrides: list[str], world_size: int = 1, vocab_size: int = GPT2_VOCABULARY) -> int:
    """Return the peak memory of a rank in a training step on a fake H100, in bytes.

    Args:
        overrides: of the configuration, as on the command line; trainer.device=cuda and
            trainer.compile=false stand before them.
    """
    arguments = {"overrides": overrides, "world_size": world_size, "vocab_size": vocab_size}
    return result_of(answers([job("peak_bytes", **arguments)])[0])
