"""Change the code in small ways, and see whether a test fails. `make mutation` runs this.

Mutants are drawn from the functions of the package, or of the files and folders on the command
line. A mutant changes one place: it alters a comparison, a number, a condition or a return value,
or it leaves out a statement. For each mutant, the unit tests that reach the line run first, the
most specific ones first, and then tests/contract. Each of the two may take 60 seconds. The output
says which of them noticed the mutant.

With `--against REVISION`, the code and the tests of another revision get the same mutants too, in
functions that are equal in both revisions.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 60  # for the unit tests of a mutant, and again for tests/contract
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """A change of one place in the code.

    Attributes:
        file: Path of the file.
        function: Name of the function.
        lines: First and last line of the code that is replaced.
        columns: First column in the first line and end column in the last line, in bytes of UTF-8.
        before: The code that is replaced.
        after: The code that replaces it.
        code: The code of the whole function.
        number: Number of this mutant among those of the function.
    """

    file: str
    function: str
    lines: tuple[int, int]
    columns: tuple[int, int]
    before: str
    after: str
    code: str
    number: int

    def __str__(self) -> str:
        """Describe the place and the change."""
        return f"{self.file}:{self.lines[0]} {self.function}: `{self.before}` -> `{self.after}`"

    def apply(self, source: bytes) -> bytes:
        """Make this change in the source of the file."""
        lines = source.split(b"\n")
        first, last = self.lines[0] - 1, self.lines[1] - 1
        end = lines[last][self.columns[1] :]
        lines[first : last + 1] = [
            lines[first][: self.columns[0]] + self.after.encode() + end,
            *[b""] * (last - first),  # empty lines, so that later lines keep their numbers
        ]
        return b"\n".join(lines)


def changed(node: ast.AST) -> ast.AST | str | None:
    """Make the node or the code that replaces a node. Return None to leave the node as it is."""
    made = copy.deepcopy(node)
    if isinstance(made, ast.Compare) and len(made.ops) == 1:
        made.ops = [COMPARISONS[type(made.ops[0])]()]
    elif isinstance(made, ast.BoolOp):
        made.op = ast.Or() if isinstance(made.op, ast.And) else ast.And()
    elif isinstance(made, ast.UnaryOp) and isinstance(made.op, ast.Not):
        return made.operand
    elif isinstance(made, ast.BinOp) and type(made.op) in ARITHMETIC:
        made.op = ARITHMETIC[type(made.op)]()
    elif isinstance(made, ast.Constant) and isinstance(made.value, bool):
        made.value = not made.value
    elif isinstance(made, ast.Constant) and isinstance(made.value, int | float):
        made.value += 1
    elif isinstance(made, ast.If | ast.While) and not isinstance(made.test, ast.Compare):
        return ast.UnaryOp(ast.Not(), made.test)
    elif isinstance(made, ast.Return) and made.value and ast.unparse(made.value) != "None":
        return "return None"
    elif isinstance(made, ast.Raise):
        return "pass"
    elif isinstance(made, ast.Expr) and isinstance(made.value, ast.Call):
        return None if ast.unparse(made.value.func).startswith("log.") else "pass"
    else:
        return None
    return made


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of the functions of a file."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for index, (place, after) in enumerate(changes(function)):
                yield Mutant(
                    file,
                    function.name,
                    (place.lineno, place.end_lineno or place.lineno),
                    (place.col_offset, place.end_col_offset or 0),
                    ast.unparse(place),
                    after,
                    ast.unparse(function),
                    index,
                )


def changes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[Any, str]]:
    """Yield each node of a function that can be changed, and the code that replaces it."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        # Inner functions get mutants of their own.
        if isinstance(node, ast.FunctionDef | ast.JoinedStr):
            continue
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "decorator_list"):
                children = value if isinstance(value, list) else [value]
                left += [child for child in children if isinstance(child, ast.AST)]
        made = changed(node)
        if isinstance(made, str):
            yield node, made
        elif made is not None:
            yield (
                node.test if isinstance(node, ast.If | ast.While) else node,
                f"({ast.unparse(made)})",
            )


class Checkout:
    """A revision of the project, checked out once for each lane, with the coverage of its tests.

    A lane is one of the processes that run tests at the same time.
    """

    def __init__(self, revision: str, lanes: int, folder: Path) -> None:
        """Check the revision out and run its unit tests once, with coverage."""
        self.free: SimpleQueue[Path] = SimpleQueue()
        for lane in range(lanes):
            place = folder / f"{revision}-{lane}"
            if not place.exists():
                git("worktree", "add", "--detach", "--force", str(place), revision)
            self.free.put(place)
        self.place = place
        if not (place / ".coverage").exists():
            print(f"coverage of the unit tests of {revision}", file=sys.stderr)
            words = [f"-n{lanes}", "--dist=loadfile", "--cov=mingpt_ddp", "--cov-context=test"]
            environment = {**os.environ, "COVERAGE_FILE": str(place / ".coverage")}
            pytest(place, [*words, "--cov-report=", "tests/unit"], None, environment)
        # Each process has written a file. The test processes themselves wrote the largest ones.
        paths = sorted(place.glob(".coverage*"), key=lambda path: -path.stat().st_size)
        self.coverage = [CoverageData(str(path)) for path in paths[:lanes]]
        for data in self.coverage:
            data.read()

    def tests(self, mutant: Mutant) -> list[str]:
        """List the unit tests that reach the mutant's lines, the most specific first."""
        reached: dict[int, list[str]] = {}
        for data in self.coverage:
            for line, names in data.contexts_by_lineno(str(self.place / mutant.file)).items():
                reached.setdefault(line, []).extend(names)
        sizes: dict[str, int] = {}
        for names in reached.values():
            for name in names:
                sizes[name] = sizes.get(name, 0) + 1
        first, last = mutant.lines
        found = {name for line in range(first, last + 1) for name in reached.get(line, ())}
        nodes = [name.partition("|")[0] for name in sorted(found, key=lambda name: sizes[name])]
        return [node for node in dict.fromkeys(nodes) if node]

    def noticed_by(self, mutant: Mutant) -> str:
        """Run the tests with a mutant.

        Return "unit" or "contract" if a test of this kind fails, and "" if the mutant survives.
        """
        place = self.free.get()
        path = place / mutant.file
        source = path.read_bytes()
        try:
            path.write_bytes(mutant.apply(source))
            if nodes := self.tests(mutant):
                (place / "tests.txt").write_text("\n".join(nodes))
                if pytest(place, ["-x", "--timeout=30", "@tests.txt"], TIMEOUT_S):
                    return "unit"
            words = ["-x", "--timeout=40", "tests/contract"]
            return "contract" if pytest(place, words, TIMEOUT_S) else ""
        finally:
            path.write_bytes(source)
            self.free.put(place)


def pytest(
    place: Path, words: list[str], seconds: float | None, environment: dict[str, str] | None = None
) -> bool:
    """Run tests in a checkout. Return True if one of them has failed within the time."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = {**(environment or os.environ), "PYTHONPATH": str(place)}
    with subprocess.Popen(
        command,
        cwd=place,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(seconds) == 1
        except subprocess.TimeoutExpired:
            return False
        finally:
            os.killpg(process.pid, 9) if process.poll() is None else None


def git(*words: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    """Draw mutants, run the tests with each, and print the results.

    Exit with code 1 if the tests notice fewer than 85% of them.
    """
    parser = argparse.ArgumentParser(description="Mutation tests.")
    parser.add_argument(
        "files", nargs="*", default=["mingpt_ddp"], help="files and folders to draw mutants from"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw")
    parser.add_argument("--number", type=int, default=120, help="number of mutants")
    parser.add_argument("--lanes", type=int, default=2, help="number of concurrent test processes")
    parser.add_argument("--against", metavar="REVISION", help="revision to compare with")
    parser.add_argument("--folder", type=Path, help="folder that keeps checkouts and coverage")
    options = parser.parse_args()

    names = git("ls-files", "--", *options.files).split()
    sources = {name: (ROOT / name).read_text() for name in names if name.endswith(".py")}
    drawn = [mutant for name, source in sources.items() for mutant in mutants(name, source)]
    random.Random(options.seed).shuffle(drawn)

    def earlier(file: str) -> str:
        found = git("ls-tree", "-r", "--name-only", options.against, "--", file)
        return git("show", f"{options.against}:{file}") if found else ""

    revisions = ["HEAD", *([options.against] if options.against else [])]
    rows: list[dict[str, Mutant]] = []
    for mutant in drawn:
        row = {"HEAD": mutant}
        if options.against:
            key = (mutant.code, mutant.number)
            there = {(m.code, m.number): m for m in mutants(mutant.file, earlier(mutant.file))}
            if key not in there:
                continue
            row[options.against] = there[key]
        rows.append(row)
        if len(rows) == options.number:
            break

    results: dict[str, dict[int, str]] = {revision: {} for revision in revisions}
    order: Sequence[int] = range(len(rows))
    with tempfile.TemporaryDirectory() as scratch:
        for revision in revisions:
            checkout = Checkout(revision, options.lanes, options.folder or Path(scratch))
            with ThreadPoolExecutor(options.lanes) as pool:
                ends = pool.map(checkout.noticed_by, [rows[index][revision] for index in order])
                for number, (index, end) in enumerate(zip(order, ends, strict=True), 1):
                    results[revision][index] = end
                    print(f"{revision} {number}: {rows[index]['HEAD']}: {end or 'survives'}")
            # The other revision begins with the mutants that the tests of HEAD have missed.
            order = sorted(order, key=lambda index: bool(results["HEAD"][index]))
    git("worktree", "prune")
    for revision in revisions:
        noticed = sum(map(bool, results[revision].values()))
        print(f"{revision}: {noticed} of {len(rows)} mutants are noticed, seed {options.seed}")
    sys.exit(sum(map(bool, results["HEAD"].values())) < 0.85 * len(rows))


if __name__ == "__main__":
    main()
