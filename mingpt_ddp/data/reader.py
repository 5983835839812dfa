"""The text of a user's own reader, as the bytes that a file of it would have."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from mingpt_ddp.config.registry import BUILDERS, attribute_errors_to_user_code
from mingpt_ddp.config.schema import DataConfig
from mingpt_ddp.errors import DataError

_END = object()


class TextIteratorIO(io.RawIOBase):
    """The pieces of text that a user's reader yields, as a file of UTF-8 that is never whole in memory."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self._pieces: Iterator[str] | None = None
        self._left = memoryview(b"")  # of the last piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """
        Raises:
            CodeError: naming the line of the reader that goes wrong.
            DataError: it yields something else than text, or cannot read its source.
        """
        while not self._left:
            piece = self._next()
            if piece is _END:
                return 0
            try:
                self._left = memoryview(piece.encode())
            except (AttributeError, UnicodeEncodeError) as error:
                raise DataError(f"data.reader={self.config.reader} must yield text: {error}") from error
        part, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def _next(self) -> Any:
        with attribute_errors_to_user_code():
            try:
                if self._pieces is None:
                    self._pieces = iter(BUILDERS["data"][str(self.config.reader)](self.config))
                return next(self._pieces, _END)
            except OSError as error:
                reader, path = self.config.reader, self.config.path
                raise DataError(f"data.reader={reader} cannot read data.path={path}: {error}") from error
