"""Every test that the documents name in their tables of promises exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = (
    "docs/fault-tolerance.md",
    "docs/multi-node.md",
    "docs/sweeps.md",
    "docs/your-own-model.md",
    "docs/security.md",
    "docs/s3.md",
    "docs/slurm.md",
    "docs/compatibility.md",
)


def named_tests() -> list[tuple[str, str]]:
    """Return pairs of a document and a test that it names in code quotes (a path or function)."""
    found = []
    for document in TABLES:
        text = (ROOT / document).read_text()
        found += [
            (document, name)
            for name in re.findall(
                r"`((?:tests/)?(?:unit|multiprocess|e2e)/[\w/]+\.py|test_\w+)", text
            )
        ]
    return sorted(set(found))


@pytest.mark.parametrize(("document", "name"), named_tests())
def test_named_test_exists(document, name):
    if name.endswith(".py"):
        assert (ROOT / "tests" / name.removeprefix("tests/")).is_file()
    else:
        sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
        assert any(f"def {name}(" in source for source in sources)


def test_documents_name_tests():
    assert {document for document, _ in named_tests()} >= {
        "docs/fault-tolerance.md",
        "docs/multi-node.md",
    }


def test_the_core_tests_of_make_test_exist():
    names = re.findall(
        r'"(tests/(?:contract|fake_gpu)/\w+\.py)::(\w+)', (ROOT / "tests/conftest.py").read_text()
    )
    assert len(names) >= 7
    for path, name in names:
        assert f"def {name}(" in (ROOT / path).read_text(), name
