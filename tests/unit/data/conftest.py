"""Fixtures for data tests: configurations for small texts, and a web server."""

from __future__ import annotations

import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mingpt_ddp.config.keys.components import DataConfig


@pytest.fixture
def settings(tmp_path):
    """Return a function that makes a data configuration. It takes a path, or a text to write."""

    def make(content: str | bytes | Path, **changes) -> DataConfig:
        path = content if isinstance(content, Path) else tmp_path / "text.txt"
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8", newline="")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        config = DataConfig(
            name="text",
            path=str(path),
            sha256=None,
            block_size=8,
            stride=None,
            train_split=0.9,
            truncate=1.0,
            cache_dir=str(tmp_path / "cache"),
        )
        return replace(config, **changes)

    return make


@pytest.fixture
def server(monkeypatch):
    """Start a web server that serves one text, `content`, at `url`.

    `loads` counts the downloads. The server answers HEAD requests if `etag` is set.
    """
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        content = b""
        etag = ""
        loads = 0

        def do_HEAD(self):
            if not self.etag:
                return self.send_error(405)
            self.head()

        def do_GET(self):
            Handler.loads += 1
            if self.path != "/text.txt":
                return self.send_error(404)
            self.head()
            self.wfile.write(self.content)

        def head(self):
            self.send_response(200)
            if self.etag:
                self.send_header("ETag", self.etag)
            self.send_header("Content-Length", str(len(self.content)))
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.02,))
        thread.start()
        Handler.url = f"http://127.0.0.1:{web.server_port}/text.txt"
        Handler.close = lambda: (web.shutdown(), web.server_close())
        yield Handler
        web.shutdown()
        thread.join()
