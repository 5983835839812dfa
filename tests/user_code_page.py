"""Read the files and commands from docs/your-own-model.md."""

from __future__ import annotations

import re
import shlex

from launching import ROOT

PAGE = (ROOT / "docs" / "your-own-model.md").read_text()


def page_files(directory: str = "my_project") -> dict[str, str]:
    """Return the files that the page shows for a directory, by name."""
    return dict(
        re.findall(rf"^`({directory}/\S+)`\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    )


def page_commands(block: int = 0) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for line in blocks[block].splitlines()]
