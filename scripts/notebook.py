"""Write docs/python.ipynb from docs/python.md. Each Python block becomes a code cell."""

from __future__ import annotations

import json
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")


def notebook(page: str) -> str:
    """Turn a page into a notebook, as JSON."""
    cells = []
    parts = re.split(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    # Texts and code blocks alternate.
    for number, part in enumerate(parts):
        cell: dict[str, object] = {
            "id": f"cell-{number}",
            "metadata": {},
            "source": part.strip().splitlines(keepends=True),
        }
        if number % 2 == 1:
            cell.update(cell_type="code", execution_count=None, outputs=[])
        else:
            cell["cell_type"] = "markdown"
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    values = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text()))
