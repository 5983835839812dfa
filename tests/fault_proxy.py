"""A proxy for an HTTP server that injects faults: error statuses, resets, stalls and delays."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from dataclasses import dataclass
from enum import Enum

CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}  # error codes of S3
FOREVER = 3600.0  # seconds; longer than any test takes


class Fault(Enum):
    STATUS = "answer with `status` and forward nothing"
    RESET_BEFORE = "reset the connection and forward nothing"
    RESET_SENDING = "reset both connections after `after` bytes of the request's content"
    RESET_UNANSWERED = "let the server carry the request out, then reset instead of answering"
    RESET_ANSWERING = "reset after `after` bytes of the answer's content"
    STALL = "do not send 100 Continue for `seconds`"
    STALL_SENDING = "take `after` bytes of the content and no more, for `seconds`"
    DELAY = "forward after `seconds`"


@dataclass
class Rule:
    """A fault for each request whose first line matches, such as `PUT /bucket/key HTTP/1.1`."""

    match: str  # a regular expression
    fault: Fault
    times: float = 1  # number of requests that get the fault, at most
    probability: float = 1.0
    status: int = 503
    after: int = 0  # bytes that are forwarded before the fault
    seconds: float = FOREVER
    hits: int = 0


class ConnectionCut(Exception):
    """Raised to cut the connection at this point."""


class Header:
    """The header of an HTTP request or response."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.first, *rest = raw.decode("latin-1").split("\r\n")
        self.fields = {
            k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in rest)
        }

    @property
    def status(self) -> int:
        return int(self.first.split()[1])

    @property
    def expects_continue(self) -> bool:
        """True if the client waits for 100 Continue before it sends its content."""
        return "expect" in self.fields


class FaultProxy:
    """Forward requests to a local port, from a thread.

    `rules` and `down` may be changed at any time.
    """

    def __init__(self, upstream: int, seed: int = 0) -> None:
        self.upstream = upstream
        self.rules: list[Rule] = []
        self.down = False  # True resets every connection
        self.request_lines: list[str] = []  # the first line of each request
        self.generator = random.Random(seed)
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def listen() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
            self.port: int = server.sockets[0].getsockname()[1]
            ready.set()
            await asyncio.Event().wait()

        self._main = self.loop.create_task(listen())
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert ready.wait(100)

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            remaining = asyncio.all_tasks(self.loop)
            for task in remaining:
                task.cancel()

            async def wait() -> None:
                await asyncio.gather(*remaining, return_exceptions=True)

            self.loop.run_until_complete(wait())
        finally:
            self.loop.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._main.cancel)
        self.thread.join(10)

    def heal(self) -> None:
        """Remove all rules."""
        self.rules, self.down = [], False

    def _rule(self, line: str) -> Rule | None:
        for rule in self.rules:
            if (
                rule.hits < rule.times
                and re.search(rule.match, line)
                and self.generator.random() < rule.probability
            ):
                rule.hits += 1
                return rule
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client connection.

        Its requests are served one at a time, each on a new connection to the server.
        """
        try:
            while True:
                request = Header(await reader.readuntil(b"\r\n\r\n"))
                self.request_lines.append(request.first)
                await self._exchange(request, reader, writer)
        except (ConnectionCut, asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            _reset(writer)
        finally:
            writer.close()

    async def _exchange(
        self, request: Header, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        rule = self._rule(request.first)
        fault = rule.fault if rule else None
        if self.down or fault is Fault.RESET_BEFORE:
            raise ConnectionCut
        if rule and fault is Fault.STATUS:
            await _send_error(rule.status, request, reader, writer)
            raise ConnectionCut
        if rule and fault in (Fault.STALL, Fault.DELAY):
            await asyncio.sleep(rule.seconds)
        if rule and fault is Fault.STALL_SENDING:
            await _send_continue(request, writer)
            await _copy(request, reader, None, rule.after)
            await asyncio.sleep(rule.seconds)
            raise ConnectionCut
        upstream_reader, upstream_writer = await asyncio.open_connection(
            "127.0.0.1", self.upstream, limit=1 << 20
        )
        try:
            await self._forward(rule, request, (reader, writer), (upstream_reader, upstream_writer))
        finally:
            upstream_writer.close()

    async def _forward(
        self,
        rule: Rule | None,
        request: Header,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        (reader, writer), (upstream_reader, upstream_writer) = client, server
        fault, after = (rule.fault, rule.after) if rule else (None, 0)
        upstream_writer.write(request.raw)
        if fault is Fault.RESET_SENDING:
            await _send_continue(request, writer)
            await _copy(request, reader, upstream_writer, after)
            _reset(upstream_writer)
            raise ConnectionCut
        sending = asyncio.ensure_future(_copy(request, reader, upstream_writer))
        try:
            response = Header(await upstream_reader.readuntil(b"\r\n\r\n"))
            while response.status < 200:  # 100 Continue
                writer.write(response.raw)
                response = Header(await upstream_reader.readuntil(b"\r\n\r\n"))
            empty = request.first.startswith("HEAD") or response.status in (204, 304)
            if fault is Fault.RESET_UNANSWERED:
                raise ConnectionCut
            writer.write(response.raw)
            if not empty:
                await _copy(
                    response,
                    upstream_reader,
                    writer,
                    after if fault is Fault.RESET_ANSWERING else None,
                    to_end=True,
                )
            await writer.drain()
            if fault is Fault.RESET_ANSWERING or not sending.done():
                await asyncio.sleep(0.05)  # let the bytes that were written leave
                raise ConnectionCut
        finally:
            sending.cancel()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST instead of FIN."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _send_continue(request: Header, writer: asyncio.StreamWriter) -> None:
    if request.expects_continue:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()


async def _send_error(
    status: int, request: Header, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if not request.expects_continue:
        await _copy(request, reader, None)
    text = f"<Error><Code>{CODES[status]}</Code><Message>injected {status}</Message></Error>"
    head = (
        f"HTTP/1.1 {status} {CODES[status]}\r\nContent-Type: "
        "application/xml\r\nConnection: close\r\n"
    )
    content = "" if request.first.startswith("HEAD") else text
    writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n{content}".encode())
    await writer.drain()
    await asyncio.sleep(0.05)


async def _copy(
    header: Header,
    source: asyncio.StreamReader,
    target: asyncio.StreamWriter | None,
    limit: int | None = None,
    to_end: bool = False,
) -> None:
    """Copy the body of a message, or its first `limit` bytes.

    If the header has no length, the body is empty, or with `to_end` it ends with the connection.
    """
    if "chunked" in header.fields.get("transfer-encoding", "").lower():
        await _copy_chunks(source, target, limit)
        return
    length = header.fields.get("content-length")
    remaining = int(length) if length is not None else (1 << 62 if to_end else 0)
    remaining = remaining if limit is None else min(remaining, limit)
    while remaining and (data := await source.read(min(remaining, 1 << 16))):
        remaining -= len(data)
        if target:
            target.write(data)
            await target.drain()


async def _copy_chunks(
    source: asyncio.StreamReader, target: asyncio.StreamWriter | None, limit: int | None
) -> None:
    moved, size = 0, 1
    while size and (limit is None or moved < limit):
        line = await source.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        data = await source.readexactly(size + 2) if size else await _trailer(source)
        moved += size
        if target:
            target.write(line + data)
            await target.drain()


async def _trailer(source: asyncio.StreamReader) -> bytes:
    lines = [await source.readuntil(b"\r\n")]
    while lines[-1] != b"\r\n":
        lines.append(await source.readuntil(b"\r\n"))
    return b"".join(lines)
