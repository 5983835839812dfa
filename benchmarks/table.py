"""Write the tables of figures from `benchmarks/results/*.json`. No figure is copied by hand.

    python benchmarks/table.py

A benchmark passes its rows, pairs of a description and a figure, to `common.report`, which stores
them in a JSON file with the raw figures, the machine and the date. This script writes all rows to
benchmarks/results/README.md, and the rows that answer a user's question to docs/benchmarks.md.
Each has one table per machine, with scripts in the order of benchmarks/README.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT

BEGIN = "<!-- figures: written by benchmarks/table.py -->"
END = "<!-- end of figures -->"
PAGE = ROOT / "docs" / "benchmarks.md"
ALL_ROWS = RESULTS / "README.md"
# Rows of docs/benchmarks.md: for each result file, a pattern that matches their descriptions.
ON_PAGE = {
    "throughput_16_bit.json": "6 layers",
    "throughput_avx2.json": "6 layers",
    "time_to_loss_16_bit.json": "",
    "time_to_loss_16_bit_2_cores.json": "",
    "time_to_loss_avx2.json": "",
    "time_to_loss_avx2_2_cores.json": "",
    "recipe.json": "",
    "recipe_bpe.json": "",
    "recipe_fast.json": "",
    "ideas.json": "",
    "ideas_later.json": "",
    "ideas_tokens.json": "",
    "sampling.json": "`gpt`, one stream",
    "communication.json": "6 layers",
    "canonical.json": "mid, 2 ranks, 2 micro",
    "strategies.json": "small model in fp32 on 2 ranks",
    "startup.json": "first step, `python main.py",
    "large_corpus.json": "peak memory",
    "snapshots.json": "stall",
    "goodput_measured.json": "auto`, 20 times",
    "goodput_measured_runs.json": "30 minutes",
    "chaos.json": "",
    "faulted_saves.json": "",
    "report_statistics.json": "against itself",
    "sequential.json": "",
    "gpu_3.json": "10.7M, gpt|10.7M, nanoGPT|GPT-2's shape, gpt",
    "gpu_5.json": "",
}


def describe_machine(machine: dict[str, Any]) -> str:
    """Describe the machine and the software of a result."""
    cores = f"{machine['cores']} cores of {machine['cpu']}"
    return ", ".join(
        [*([machine["gpu"]] if machine.get("gpu") else []), cores, f"torch {machine['torch']}"]
    )


def in_order(results: dict[str, dict[str, Any]], index: str) -> list[dict[str, Any]]:
    """Return the results that have rows, in the order in which the index lists their scripts.

    Results of scripts that are not listed come last.
    """
    shown = {name: result for name, result in results.items() if result.get("readme")}
    mentioned = {name: index.find(f"({result['script']})") for name, result in shown.items()}
    order = sorted(shown, key=lambda name: (mentioned[name] < 0, mentioned[name], name))
    return [shown[name] for name in order]


def selected(
    results: dict[str, dict[str, Any]], patterns: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the results with the rows whose description matches the pattern of their file."""
    found = {}
    for name, pattern in patterns.items():
        rows = [row for row in results[name]["readme"] if re.search(pattern, row[0])]
        found[name] = results[name] | {"readme": rows}
    return found


def tables(results: dict[str, dict[str, Any]], index: str, folder: str) -> str:
    """Return Markdown: for each machine its name and a table of what, figure, script and date.

    Args:
        results: The contents of the JSON files, by file name.
        index: The text of benchmarks/README.md.
        folder: Folder of the page, relative to the project. Links are relative to it.
    """
    up = "../" * len(folder.split("/"))
    machines: dict[str, list[str]] = {}
    for result in in_order(results, index):
        script, date = result["script"], result["machine"]["date"]
        for what, figure in result["readme"]:
            cells = [what, figure, f"[{script}]({up}benchmarks/{script})", date]
            line = " | ".join(cell.replace("|", "\\|") for cell in cells)
            line = line.replace("](docs/", f"]({up}docs/")
            machines.setdefault(describe_machine(result["machine"]), []).append(f"| {line} |")
    header = ["| what | figure | script | measured |", "| --- | --- | --- | --- |"]
    return "\n\n".join(
        "\n".join([f"{name}:", "", *header, *rows]) for name, rows in machines.items()
    )


def filled(page: str, table: str) -> str:
    """Return the page with the table between its two marks.

    Raises:
        ValueError: The page does not have each mark exactly once, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"a page needs {BEGIN} and {END}, once each and in this order")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def current() -> dict[Path, str]:
    """Return the text of both pages for the current results."""
    results = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    index = (ROOT / "benchmarks" / "README.md").read_text()
    all_rows = tables(results, index, "benchmarks/results")
    page_rows = tables(selected(results, ON_PAGE), index, "docs")
    return {
        ALL_ROWS: filled(ALL_ROWS.read_text(), all_rows),
        PAGE: filled(PAGE.read_text(), page_rows),
    }


if __name__ == "__main__":
    for path, text in current().items():
        path.write_text(text)
