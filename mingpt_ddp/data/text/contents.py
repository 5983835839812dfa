"""Count what a text consists of while it is read, and say what is read and what is skipped."""

import logging
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mingpt_ddp.config.keys.components import Form
from mingpt_ddp.data.file_kinds import HIDDEN, NOT_UTF8, Kind
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
    advice: str = ""  # what to do with files that are skipped

    def add(self, name: str, size: int) -> None:
        self.count += 1
        self.size += size
        if len(self.names) < MAX_NAMES:
            self.names.append(name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}...")

    def shown(self, kind: str) -> str:
        """Return the share as in `12 of .md ('a.md', 'b.md', 'c.md', ...)`."""
        more = ", ..." if self.count > len(self.names) else ""
        return f"{self.count:,} {kind} ({', '.join(map(repr, self.names))}{more})"


@dataclass
class Counts:
    """What the files of a text are, as JSON has it."""

    kind: Kind | None = None  # of the whole; None: a text, or files of their own kinds
    texts: dict[str, Share] = field(default_factory=dict)  # by the ends of their names
    skipped: dict[str, Share] = field(default_factory=dict)  # by the names of their kinds


@dataclass
class Records:
    """What rows of tables have been read."""

    column: str | None = None  # that has the texts
    count: int = 0  # texts
    empty: int = 0  # rows that have null or no characters


class Contents:
    """What a text consists of, counted while it is read."""

    def __init__(self, source: str, kind: Kind | None = None, form: Form = "text") -> None:
        """
        Args:
            source: the key that names the text, with its value.
            kind: of the whole.
            form: in which it is read, as data.format.
        """
        self.source = source
        self.part = ""  # which split of several the text is, for the log
        self.form = form
        self.counts = Counts(kind)
        self.records = Records()
        self.note = ""  # for the log

    @property
    def label(self) -> str:
        return self.source + self.part

    def add_text(self, name: str, size: int) -> None:
        suffix = PurePosixPath(name).suffix[:MAX_NAME]
        if not suffix or not suffix.isprintable():
            suffix = "without an extension"
        self.counts.texts.setdefault(suffix, Share()).add(name, size)

    def skip(self, name: str, size: int, kind: Kind) -> None:
        share = self.counts.skipped.setdefault(kind.name, Share(advice=kind.advice))
        share.add(name, size)

    def none_left(self) -> DataError:
        """Return the error of files that have no text among them."""
        wanted = "texts" if self.form == "text" else f"files of data.format={self.form}"
        why = f"{self.label} has no {wanted}"
        if self.counts.skipped:
            why = f"{why}: skipped {_shown(self.counts.skipped)}"
        advice = self._advice()
        return DataError(f"{why}; {advice}" if advice else why)

    def refuse(self) -> None:
        """Refuse what is no text.

        Raises:
            DataError: says what it looks like, and what to do.
        """
        kind = self.counts.kind
        if kind is not None and kind != NOT_UTF8:  # the decoder finds the byte
            raise refusal(self.label, kind)
        skipped = sum(share.size for share in self._skipped())
        total = skipped + sum(share.size for share in self.counts.texts.values())
        if 2 * skipped > total:
            advice = self._advice()
            raise DataError(
                f"{self.label} is mostly no {self.form}: skipped {_shown(self.counts.skipped)}, "
                f"{skipped:,} of {total:,} bytes; name its texts alone by a glob"
                + (advice and f", or {advice}")
            )

    def log_summary(self) -> None:
        """Log which files are read, and which are skipped."""
        texts = self.counts.texts
        if texts:
            count = sum(share.count for share in texts.values())
            size = sum(share.size for share in texts.values())
            files = f"{counted(count, 'file')} of {counted(size, 'byte')}"
            log.info("%s: reads %s: %s", self.label, files, _shown(texts))
        if self.counts.skipped:
            log.warning("%s: skipped %s", self.label, _shown(self.counts.skipped))
        if self.note:
            log.warning("%s: %s", self.label, self.note)

    def report_form(self) -> None:
        """Log in which format the files have been read, and what of their rows."""
        line = f"{self.label}: read with data.format={self.form}"
        if self.records.column is not None:  # they have been encoded now
            texts = counted(self.records.count, "text")
            line = f"{line}, {texts} of data.column={self.records.column}"
        if self.records.empty:
            line = f"{line}; skipped {counted(self.records.empty, 'row')} without text"
        log.info("%s", line)

    def _skipped(self) -> list[Share]:
        """Return the shares of what is skipped, but for hidden files."""
        return [share for name, share in self.counts.skipped.items() if name != HIDDEN.name]

    def _advice(self) -> str:
        """Return what to do with the largest share of what is skipped."""
        return max(self._skipped(), key=lambda share: share.size, default=Share()).advice


def refusal(source: str, kind: Kind) -> DataError:
    return DataError(f"{source} looks like {kind.name}, not text; {kind.advice}")


def _shown(shares: dict[str, Share]) -> str:
    """Return the largest shares by kind, and how many more kinds there are."""
    ordered = sorted(shares.items(), key=lambda item: -item[1].size)
    texts = [share.shown(kind) for kind, share in ordered[:MAX_KINDS]]
    if len(ordered) > MAX_KINDS:
        texts.append(f"{len(ordered) - MAX_KINDS:,} more kinds")
    return ", ".join(texts)
