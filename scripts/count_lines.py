"""Count the tokens and lines of code of mingpt_ddp, for each room and for the reading path.

A room is a folder or module of the package. The reading path is the code of a training step.
Comments, docstrings, blank lines, line ends and indents do not count. An f-string counts as one
token on every version of Python.

Usage: python scripts/count_lines.py, from the root of the checkout, or `make lines`.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path("mingpt_ddp")
READING_PATH = ("training/", "models/", "optim/", "tasks/", "distributed/strategies/")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
FSTRING_START = getattr(tokenize, "FSTRING_START", None)  # Python 3.12 splits f-strings
FSTRING_END = getattr(tokenize, "FSTRING_END", None)


def docstring_lines(source: str) -> set[int]:
    """Find the numbers of all lines that belong to docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            found.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return found


def code_tokens(source: str) -> int:
    """Count the tokens of code."""
    docstrings = docstring_lines(source)
    count = 0
    depth = 0  # nesting depth of f-strings
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == FSTRING_END:
            depth -= 1
        if depth == 0 and token.type not in NOT_CODE and token.start[0] not in docstrings:
            count += 1
        if token.type == FSTRING_START:
            depth += 1
            count -= depth == 1  # the f-string is counted at its end instead
    return count


def code_lines(source: str) -> int:
    """Count the lines that hold at least one token of code.

    Every line of a multi-line string counts.
    """
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstring_lines(source))


if __name__ == "__main__":
    lines: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        inner = path.relative_to(PACKAGE)
        source = path.read_text(encoding="utf-8")
        names = [inner.name if len(inner.parts) == 1 else f"{inner.parts[0]}/", "in all"]
        if inner.as_posix().startswith(READING_PATH):
            names.append("the reading path")
        for name in names:
            lines[name] += code_lines(source)
            tokens[name] += code_tokens(source)
    print("tokens  lines  tokens per line")
    for name, count in sorted(tokens.items(), key=lambda item: (item[0] == "in all", -item[1])):
        print(f"{count:6} {lines[name]:6} {count / max(1, lines[name]):16.1f}  {name}")
