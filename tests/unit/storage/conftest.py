"""A fixture that simulates a full disk."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def limited_files() -> Callable:
    """Return a context manager that limits the size of all files, in bytes, like a full disk."""

    @contextlib.contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)

    return limited
