"""Keep finished measurements for gpu.py, so that a later call can continue a part."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from common import log


class Kept:
    """Measurements by name, in a JSON file that is replaced after each measurement."""

    def __init__(self, path: Path | None = None, about: dict[str, Any] | None = None) -> None:
        """Read the file, unless it has measurements with another device, text or version of torch.

        Args:
            path: The JSON file. None keeps nothing beyond this process.
            about: Properties that all measurements in the file share.
        """
        self._path = path
        self._about = about or {}
        self._found: dict[str, dict[str, Any]] = {}  # value and seconds of each, by name
        if path is None or not path.is_file():
            return
        read: dict[str, Any] = {}
        # If the file is damaged, measure everything again.
        with contextlib.suppress(ValueError):
            read = json.loads(path.read_text())
        if read.get("about") == self._about:
            self._found = read["measurements"]
            log(f"{path.name}: keeping {len(self._found)} measurements of earlier calls")
        else:
            log(f"{path.name} has another device, text or torch; measuring everything again")

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def value(self, name: str) -> Any:
        return self._found[name]["value"]

    def seconds(self, name: str) -> float:
        """Return the duration of a measurement in seconds."""
        return float(self._found[name]["seconds"])

    def put(self, name: str, value: Any, seconds: float) -> None:
        self._found[name] = {"value": value, "seconds": round(seconds, 2)}
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"about": self._about, "measurements": self._found}))
        os.replace(new, self._path)
