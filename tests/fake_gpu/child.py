"""The process with the fake GPU: reads a job of one line, and answers with a line of JSON.

A job is the name of a function below and its arguments. The process has imported torch after the
guard, so no process of the tests can take its place.
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
    os.dup2(2, 1)  # what anything else prints is no result
    guard.load()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=results, flush=True)


if __name__ == "__main__":
    main()
