"""Call the tools of the command line in this process."""

from __future__ import annotations

import sys


def call_tool(tool, monkeypatch, capsys):
    """Calls a tool of the command line with words: its exit code, standard output and standard error."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [tool.__name__, *map(str, words)])
        code = 0
        try:
            tool.main()
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return call
