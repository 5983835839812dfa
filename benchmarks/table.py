"""Write the tables of docs/benchmarks.md from `benchmarks/results/*.json`.

No figure is copied by hand. A benchmark declares its rows: the `readme` argument of
`common.report`, pairs of what and figure, is stored in its JSON file with the raw figures, the
machine and the date. This script collects them, one table per machine, with scripts in the order of
benchmarks/README.md, and writes them between two marks in the page.

    python benchmarks/table.py
"""

from __future__ import annotations

import json
from typing import Any

from common import RESULTS, ROOT

BEGIN = "<!-- figures: written by benchmarks/table.py -->"
END = "<!-- end of figures -->"
PAGE = ROOT / "docs" / "benchmarks.md"


def describe_machine(machine: dict[str, Any]) -> str:
    """Describe the machine and the software of a result."""
    cores = f"{machine['cores']} cores of {machine['cpu']}"
    return ", ".join(
        [*([machine["gpu"]] if machine.get("gpu") else []), cores, f"torch {machine['torch']}"]
    )


def in_order(results: dict[str, dict[str, Any]], index: str) -> list[dict[str, Any]]:
    """Return the results that have rows, in the order of their scripts in the index.

    Those of unlisted scripts are last.
    """
    shown = {name: result for name, result in results.items() if result.get("readme")}
    mentioned = {name: index.find(f"({result['script']})") for name, result in shown.items()}
    order = sorted(shown, key=lambda name: (mentioned[name] < 0, mentioned[name], name))
    return [shown[name] for name in order]


def tables(results: dict[str, dict[str, Any]], index: str) -> str:
    """Return Markdown: per machine its name and a table of what, figure, script and date.

    Args:
        results: the JSON files by name.
        index: the text of benchmarks/README.md.
    """
    machines: dict[str, list[str]] = {}
    for result in in_order(results, index):
        script, date = result["script"], result["machine"]["date"]
        for what, figure in result["readme"]:
            cells = [what, figure, f"[{script}](../benchmarks/{script})", date]
            line = " | ".join(cell.replace("|", "\\|").replace("](docs/", "](") for cell in cells)
            machines.setdefault(describe_machine(result["machine"]), []).append(f"| {line} |")
    header = ["| what | figure | script | measured |", "| --- | --- | --- | --- |"]
    return "\n\n".join(
        "\n".join([f"{name}:", "", *header, *rows]) for name, rows in machines.items()
    )


def filled(page: str, table: str) -> str:
    """Return the page with the table between the marks.

    Raises:
        ValueError: the page does not have each mark exactly once, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"{PAGE.name} needs {BEGIN} and {END}, once each and in this order")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def current() -> str:
    """Return the page for the current results."""
    results = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    return filled(
        PAGE.read_text(), tables(results, (ROOT / "benchmarks" / "README.md").read_text())
    )


if __name__ == "__main__":
    PAGE.write_text(current())
