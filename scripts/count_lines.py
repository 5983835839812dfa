"""Count the lines of code of mingpt_ddp, without blank lines, comments and docstrings, per module and subpackage.

Usage: python scripts/count_lines.py, from the root of the checkout; `make lines` does it.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path("mingpt_ddp")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(source: str) -> set[int]:
    """Return the numbers of the lines that docstrings take."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            found.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return found


def code_lines(source: str) -> int:
    """Count the lines that hold at least one token of code; every line of a multi-line string counts."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstring_lines(source))


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        inner = path.relative_to(PACKAGE)
        name = inner.name if len(inner.parts) == 1 else f"{inner.parts[0]}/"
        counts[name] += code_lines(path.read_text(encoding="utf-8"))
    for name, count in counts.most_common():
        print(f"{count:6} {name}")
    print(f"{counts.total():6} {PACKAGE} in all")
