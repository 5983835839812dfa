"""Run the cases of a module's tests in one process, which takes seconds to start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fake_gpu.guard import missing_requirement
from fake_gpu.process import answers


@pytest.fixture(scope="module")
def answer_of(request):
    """Return a function from a job to its answer.

    The jobs are the parameters `run` of the chosen tests, one or a list; all run at once.
    """
    reason = missing_requirement()
    if reason:
        pytest.skip(reason)
    jobs: list[dict[str, Any]] = []
    for item in request.session.items:
        if item.module is request.module and hasattr(item, "callspec"):
            run = item.callspec.params.get("run", [])
            wanted = run if isinstance(run, list) else [run]
            jobs += [job for job in wanted if job not in jobs]
    found = answers(jobs)

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        return found[jobs.index(job)]

    return answer


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A text of 800,000 characters, for plans."""
    path = tmp_path_factory.mktemp("plan") / "a.txt"
    path.write_text("abcdefgh" * 100_000)
    return path
