"""Read a text from a file, from a user's reader, or from the documentation that Python contains.

A file is hashed while it is read.
"""

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mingpt_ddp.config.builders import BUILDERS, attribute_errors_to_user_code
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.file_kinds import HEAD_BYTES
from mingpt_ddp.errors import DataError

CHUNK_BYTES = HEAD_BYTES


class HashedFile(io.RawIOBase):
    """A file that is hashed while it is read from beginning to end."""

    def __init__(self, path: Path) -> None:
        self._file = io.FileIO(path)
        self._digest: Any = hashlib.sha256()
        self._hash = ""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._hash)

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        if not self._hash:
            self._digest.update(buffer[:count])
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def drain(self) -> None:
        """Read the rest of the file and complete the hash."""
        while piece := self._file.read(CHUNK_BYTES):
            self._digest.update(piece)
        self._hash = self._digest.hexdigest()

    def finish(self) -> str:
        """Close the file, and return the SHA-256 of all its bytes.

        A decompressor may call `close` too early. `close` therefore does not close the file itself.
        """
        if not self._hash:
            self.drain()
        self._file.close()
        return self._hash


def python_docs() -> str:
    """Return the language reference that CPython's help() shows.

    It has 460,000 to 600,000 characters, depending on the Python version.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_by_user_code(config: DataConfig, source: str) -> Iterator[str]:
    """Yield the strings of a user's reader.

    Args:
        config: The settings of the data, which the reader is called with.
        source: Name of the text in messages.

    Raises:
        CodeError: The reader raised an exception. The error names the line in its code.
        DataError: The reader yields something other than text, or cannot read its source.
    """
    name = f"data.reader={config.reader}"
    with attribute_errors_to_user_code():
        try:
            for piece in BUILDERS["data"][str(config.reader)](config):
                try:
                    piece.encode()
                except (AttributeError, UnicodeEncodeError) as error:
                    raise DataError(f"{name} must yield text: {error}") from error
                yield piece
        except OSError as error:
            text = "its text" if config.path is None else source
            raise DataError(f"{name} cannot read {text}: {error}") from error
