"""Tell mutmut that these tests reach the process group, which runs in other processes."""

import json
import os
from pathlib import Path

import pytest

MODULE = Path("mingpt_ddp/distributed/group/process_group.py")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    if os.environ.get("MUTANT_UNDER_TEST") == "stats":
        from mutmut.state import state

        functions = json.loads(Path(f"{MODULE}.meta").read_text())["hash_by_function_name"]
        state()._stats |= {
            f"{MODULE.with_suffix('')}.{name}".replace("/", ".") for name in functions
        }
