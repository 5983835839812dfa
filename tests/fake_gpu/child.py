"""Run jobs on the fake GPU: read one job from each line, and answer with one line of JSON.

A job is the name of a function in jobs.py and its arguments. This process has to load the guard
before it imports torch, so the jobs cannot run in the process of the tests.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from fake_gpu import guard


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a job, or the traceback of its error."""
    from fake_gpu import jobs

    try:
        return {"result": getattr(jobs, job["function"])(**job["arguments"])}
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of other code must not mix with the results
    guard.load()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=results, flush=True)


if __name__ == "__main__":
    main()
