"""docs/parity.md: its tests exist, and its commands run (`make test-slow` runs all of them)."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from launching import ROOT

sys.path.append(str(ROOT / "scripts"))
from parity import rows


@pytest.mark.parametrize("test", sorted({test for _, _, tests in rows() for test in tests}))
def test_a_test_that_the_page_names_exists(test):
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text()
    assert not name or re.search(rf"^def {name}\(", text, flags=re.MULTILINE), test


def test_every_row_has_a_command_and_a_test():
    assert len(rows()) >= 30
    for what, command, tests in rows():
        assert command, what
        assert tests or "benchmarks/" in command, what


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_commands_run():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "parity.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
