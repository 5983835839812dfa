"""Start one process with the fake GPU, which runs the jobs of all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_gpu.guard import missing_requirement
from fake_gpu.process import Process


@pytest.fixture(scope="session")
def result_of() -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Return a function that runs a job and returns its result."""
    reason = missing_requirement()
    if reason:
        pytest.skip(reason)
    process = Process()
    yield process.result_of
    process.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Write a text of 800,000 characters, which plans need."""
    path = tmp_path_factory.mktemp("plan") / "a.txt"
    path.write_text("abcdefgh" * 100_000)
    return path
