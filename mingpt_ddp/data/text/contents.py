"""Count what a text consists of while it is read, and say what is read and what is skipped."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mingpt_ddp.data.content import HIDDEN, NOT_UTF8, Kind
from mingpt_ddp.errors import DataError, counted

log = logging.getLogger(__name__)

MAX_KINDS = 5  # in a line of the log
MAX_NAMES = 3  # of a kind
MAX_NAME = 100  # characters


@dataclass
class Share:
    """The files of one kind."""

    count: int = 0
    size: int = 0  # bytes, as Member.size
    names: list[str] = field(default_factory=list)  # the first

    def add(self, name: str, size: int) -> None:
        self.count += 1
        self.size += size
        if len(self.names) < MAX_NAMES:
            self.names.append(name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}...")

    def shown(self, kind: str) -> str:
        """Return the share as in `12 of .md ('a.md', 'b.md', 'c.md', ...)`."""
        more = ", ..." if self.count > len(self.names) else ""
        return f"{self.count:,} {kind} ({', '.join(map(repr, self.names))}{more})"


@dataclass(frozen=True)
class Counts:
    """What a text consists of, as JSON has it."""

    kind: Kind | None
    texts: dict[str, Share]
    skipped: list[tuple[Kind, Share]]


@dataclass
class Records:
    """What rows of tables have been read."""

    column: str | None = None  # that has the texts
    count: int = 0  # texts
    empty: int = 0  # rows that have null or no characters


class Contents:
    """What a text consists of, counted while it is read."""

    def __init__(self, source: str, kind: Kind | None = None, form: str = "text") -> None:
        """
        Args:
            source: the key that names the text, with its value.
            kind: of the whole; None: a text, or files of their own kinds.
            form: in which it is read, as data.format.
        """
        self.source = source
        self.kind = kind
        self.form = form
        self.records = Records()
        self.note = ""  # for the log
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self.texts: dict[str, Share] = {}  # by the ends of their names
        self.skipped: dict[Kind, Share] = {}

    def counts(self) -> Counts:
        return Counts(self.kind, self.texts, [*self.skipped.items()])

    def restore(self, counts: Counts) -> None:
        """Take what was counted when the same files were read."""
        self.kind = counts.kind
        self.texts = counts.texts
        self.skipped = dict(counts.skipped)

    def add_text(self, name: str, size: int) -> None:
        suffix = PurePosixPath(name).suffix[:MAX_NAME]
        if not suffix or not suffix.isprintable():
            suffix = "without an extension"
        self.texts.setdefault(suffix, Share()).add(name, size)

    def skip(self, name: str, size: int, kind: Kind) -> None:
        self.skipped.setdefault(kind, Share()).add(name, size)

    def none_left(self) -> DataError:
        """Return the error of files that have no text among them."""
        wanted = "texts" if self.form == "text" else f"files of data.format={self.form}"
        why = f"{self.source} has no {wanted}"
        if self.skipped:
            why = f"{why}: skipped {self._shown_skipped()}"
        largest = self._largest()
        return DataError(f"{why}; {largest.advice}" if largest.advice else why)

    def refuse(self) -> None:
        """Refuse what is no text.

        Raises:
            DataError: says what it looks like, and what to do.
        """
        if self.kind is not None and self.kind != NOT_UTF8:  # the decoder finds the byte
            raise refusal(self.source, self.kind)
        size = sum(share.size for kind, share in self.skipped.items() if kind != HIDDEN)
        total = size + sum(share.size for share in self.texts.values())
        if 2 * size > total:
            advice = self._largest().advice
            raise DataError(
                f"{self.source} is mostly no {self.form}: skipped {self._shown_skipped()}, "
                f"{size:,} of {total:,} bytes; name its texts alone by a glob"
                + (advice and f", or {advice}")
            )

    def report(self) -> None:
        """Log which files are read, and which are skipped."""
        if self.texts:
            count = sum(share.count for share in self.texts.values())
            size = sum(share.size for share in self.texts.values())
            files = f"{counted(count, 'file')} of {counted(size, 'byte')}"
            log.info("%s: reads %s: %s", self.source, files, _shown(self.texts.items()))
        if self.skipped:
            log.warning("%s: skipped %s", self.source, self._shown_skipped())
        if self.note:
            log.warning("%s: %s", self.source, self.note)

    def report_form(self) -> None:
        """Log in which format files have been read, and what of their rows."""
        if self.form == "text":
            return
        line = f"{self.source}: read with data.format={self.form}"
        if self.records.column is not None:  # they have been encoded now
            texts = counted(self.records.count, "text")
            line = f"{line}, {texts} of data.column={self.records.column}"
        if self.records.empty:
            line = f"{line}; skipped {counted(self.records.empty, 'row')} without text"
        log.info("%s", line)

    def _largest(self) -> Kind:
        """Return the kind that has most of the skipped bytes, but for hidden files."""
        sizes = {kind: share.size for kind, share in self.skipped.items() if kind != HIDDEN}
        return max(sizes, key=sizes.__getitem__, default=HIDDEN)

    def _shown_skipped(self) -> str:
        return _shown((kind.name, share) for kind, share in self.skipped.items())


def refusal(source: str, kind: Kind) -> DataError:
    return DataError(f"{source} looks like {kind.name}, not text; {kind.advice}")


def _shown(shares: Iterable[tuple[str, Share]]) -> str:
    """Return the largest shares by kind, and how many more kinds there are."""
    ordered = sorted(shares, key=lambda item: -item[1].size)
    texts = [share.shown(kind) for kind, share in ordered[:MAX_KINDS]]
    if len(ordered) > MAX_KINDS:
        texts.append(f"{len(ordered) - MAX_KINDS:,} more kinds")
    return ", ".join(texts)
