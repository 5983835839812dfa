"""The two pages of figures agree with the recorded result files."""

import json

import pytest
from benchmarking import modules

MACHINE = {"cpu": "Some CPU", "cores": 2, "torch": "2.13.0", "python": "3.11", "date": "2026-01-31"}
INDEX = "| [b.py](b.py) | first | [a.py](a.py) | second |"


@pytest.fixture(scope="module")
def table():
    for loaded in modules("table"):
        yield loaded.table


def result(script, *rows, **machine):
    return {"machine": MACHINE | machine, "script": script, "readme": [list(row) for row in rows]}


def test_the_page_agrees_with_the_results(table):
    for page, text in table.current().items():
        assert page.read_text() == text, "run: python benchmarks/table.py"


def test_each_pattern_of_the_page_matches_a_row(table):
    results = {"a.json": result("a.py", ("fast", "2 s"), ("slow", "9 s"))}
    found = table.selected(results, {"a.json": "fa"})
    assert found["a.json"]["readme"] == [["fast", "2 s"]]
    recorded = {path.name: json.loads(path.read_text()) for path in table.RESULTS.glob("*.json")}
    for name, chosen in table.selected(recorded, table.ON_PAGE).items():
        assert chosen["readme"], name


def test_rows_are_in_index_order_and_results_without_rows_are_left_out(table):
    results = {
        "a.json": result("a.py", ("speed", "2 times")),
        "b.json": result("b.py", ("memory", "3 MB"), ("x | y", "1"), date="2026-02-01"),
        "c.json": result("c.py", ("new", "7")),
        "d.json": result("d.py"),
        "e.json": {"machine": MACHINE},
    }
    assert table.tables(results, INDEX, "docs").splitlines() == [
        "2 cores of Some CPU, torch 2.13.0:",
        "",
        "| what | figure | script | measured |",
        "| --- | --- | --- | --- |",
        "| memory | 3 MB | [b.py](../benchmarks/b.py) | 2026-02-01 |",
        "| x \\| y | 1 | [b.py](../benchmarks/b.py) | 2026-02-01 |",
        "| speed | 2 times | [a.py](../benchmarks/a.py) | 2026-01-31 |",
        "| new | 7 | [c.py](../benchmarks/c.py) | 2026-01-31 |",
    ]


def test_each_machine_has_a_table_of_its_own(table):
    results = {
        "a.json": result("a.py", ("speed", "2 times")),
        "a_gpu.json": result("a.py", ("speed", "9 times"), gpu="Some GPU"),
    }
    text = table.tables(results, INDEX, "docs")
    assert text.count("| what |") == 2
    assert "Some GPU, 2 cores of Some CPU, torch 2.13.0:\n\n" in text.partition("2 times")[2]


def test_only_text_between_the_markers_is_replaced(table):
    readme = f"above\n{table.BEGIN}\nold\n{table.END}\nbelow\n"
    once = table.filled(readme, "new")
    assert once == f"above\n{table.BEGIN}\n\nnew\n\n{table.END}\nbelow\n"
    assert table.filled(once, "new") == once
    for broken in ("no marks", f"{table.END} {table.BEGIN}", readme + readme):
        with pytest.raises(ValueError, match="once each"):
            table.filled(broken, "new")
