"""Call the command line tools in this process."""

from __future__ import annotations

import sys


def call_tool(tool, monkeypatch, capsys):
    """Return a function that calls a tool with the given arguments.

    That function returns the exit code, the standard output and the standard error.
    """

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [tool.__name__, *map(str, args)])
        code = 0
        try:
            tool.main()
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return call
