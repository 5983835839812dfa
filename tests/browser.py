"""A headless Chromium, driven over a pipe by the DevTools protocol: no port, no driver."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

from launching import PATIENCE_S

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


def chromium() -> str | None:
    """Return the path of the program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser with an empty profile."""

    def __init__(self, profile: Path, width: int = 1200, height: int = 900) -> None:
        program = chromium()
        assert program is not None
        command = [
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        command_in, self._to = os.pipe()
        self._from, answers_out = os.pipe()
        # It reads from descriptor 3 and writes to 4; 10 and 11 keep the two from overwriting each
        # other.
        script = f'exec 10<&{command_in} 11>&{answers_out}; exec 3<&10 4>&11 10<&- 11>&-; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=[command_in, answers_out],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_in)
        os.close(answers_out)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.getTargets")["targetInfos"]
        page = next(info["targetId"] for info in target if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its answer; events received meanwhile are
        kept.
        """
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._to,
            json.dumps({"id": number, "method": method, "params": params, **session}).encode()
            + b"\0",
        )
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self.events.append(message)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], PATIENCE_S)[0], "the browser does not answer"
            chunk = os.read(self._from, 1 << 16)
            assert chunk, "the browser has exited"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path | str) -> None:
        """Open a file or a URL, and wait until it is loaded."""
        url = page.absolute().as_uri() if isinstance(page, Path) else page
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, converted to JSON."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def errors(self) -> list[str]:
        """Return exceptions and console messages, such as violations of the content security
        policy.
        """
        self.evaluate("0")  # all events until now arrive before this answer
        reporting = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [
            json.dumps(event["params"])[:1000]
            for event in self.events
            if event["method"] in reporting
        ]

    def requested(self) -> list[str]:
        """Return the URLs requested since the page was opened."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def point_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._to)
        os.close(self._from)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
