"""Encode texts into a directory of the cache: write tokens.bin and sources.bin.

`Text.measure` has already read each text, to hash it and to count its characters. Here each text is
read once more, in bounded memory. A BPE tokenizer is first trained on the training parts.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataset import EncodedText, split_bounds
from mingpt_ddp.data.text.text import Text, TextPiece, gathered, sha256_of_all
from mingpt_ddp.data.text.text_cache import TOKENS, sha256_of_file
from mingpt_ddp.data.tokenizers.bpe import DEFAULT_VOCAB_SIZE, train_bpe
from mingpt_ddp.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from mingpt_ddp.data.tokenizers.tokenizer_base import END
from mingpt_ddp.errors import DataError

SPLITS = ("train", "val", "test")
SOURCES = "sources.bin"
COPY_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class TextRange:
    """A range of a text, in characters or in tokens: from `begin` up to, but without, `end`."""

    text: Text
    begin: int
    end: int


class SplitPiece(NamedTuple):
    """The share of a piece that belongs to one split.

    Attributes:
        split: Index of the split in SPLITS.
        piece: The piece of the text, shortened to this share.
        byte: Offset of the share in its document, in bytes of UTF-8.
        size: Length of the share, in bytes of UTF-8.
    """

    split: int
    piece: TextPiece
    byte: int
    size: int


def is_split_before_encoding(
    texts: list[Text], config: DataConfig, tokenizer: Tokenizer | None
) -> bool:
    """Return True if each text is split into train and validation before encoding.

    A single text with the tokenizer `char` is encoded first, and its tokens are split by position.
    """
    name = tokenizer.name if tokenizer else config.tokenizer
    return name != CharTokenizer.name or bool(config.sources) or len(texts) > 1


def encode(
    texts: list[Text], config: DataConfig, tokenizer: Tokenizer | None, directory: Path
) -> EncodedText:
    """Write the tokens of measured texts to a directory, all training parts first.

    A second file, sources.bin, records the document that each token comes from. It has a row of
    four int64 for each place where the document changes: the index of the first token, the index of
    the file (in `CachedText.files`), the line or row in that file (0 if the file is one document),
    and the token's offset in the document, in bytes of UTF-8.

    Args:
        texts: Texts whose `measure` has been called.
        config: The settings that split and encode the texts.
        tokenizer: The tokenizer, or None if it is learnt from the texts.
        directory: An empty directory for the files.

    Raises:
        DataError: A text cannot be encoded, or has changed since it was measured.
    """
    is_split = is_split_before_encoding(texts, config, tokenizer)
    splits = [[TextRange(texts[0], 0, texts[0].length)], [], []]
    if is_split:
        splits = split_texts(texts, [text.length for text in texts], config)
    if tokenizer is None:
        distinct = np.unique(np.concatenate([text.characters for text in texts]))
        if len(distinct) < 2:
            raise DataError(
                f"{texts[0].source} has one distinct character; there is nothing to learn, so "
                "use another text"
            )
        tokenizer = _make_tokenizer(config, "".join(map(chr, distinct)), splits[0])
        if config.end_token:
            tokenizer = tokenizer.with_end()
    # Choose the smallest unsigned type that holds every token.
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    sizes: list[list[int]] = [[], [], []]
    with ExitStack() as opened:
        tokens: list[IO[bytes]] = []
        sources: list[IO[bytes]] = []
        for files, name in ((tokens, TOKENS), (sources, SOURCES)):
            files.append(opened.enter_context(open(directory / name, "wb")))
            for _ in SPLITS[1:]:
                files.append(opened.enter_context(tempfile.TemporaryFile(dir=directory)))
        first_file = 0
        for text in texts:
            parts = [[part for part in split if part.text is text] for split in splits]
            written = dict.fromkeys(range(3), 0)
            for split, pieces in groupby(_cut(text.pieces(), parts), key=lambda cut: cut.split):
                written[split] = _write(
                    pieces, tokenizer, dtype, (tokens[split], sources[split]), first_file
                )
            if text.read_sha256 != text.sha256:
                raise DataError(f"{text.source} changed while being read; run again")
            for split in range(3):
                sizes[split] += [written[split]] * len(parts[split])
            first_file += max(1, len(text.files or []))
        _append(tokens, sources, dtype.itemsize)
    return EncodedText(
        directory=str(directory),
        sha256=sha256_of_all(texts),
        length=sum(map(sum, sizes)),
        tokenizer=tokenizer.state(),
        dtype=str(dtype),
        tokens_sha256=sha256_of_file(directory / TOKENS),
        parts=sizes if is_split else [],
        form=texts[0].form,
    )


def _make_tokenizer(config: DataConfig, distinct: str, training: list[TextRange]) -> Tokenizer:
    """Make the tokenizer that `data.tokenizer` names. BPE learns from the training parts.

    Args:
        config: The settings of the tokenizer.
        distinct: The distinct characters of all texts.
        training: The training parts of the texts.
    """
    if config.tokenizer == "char":
        return CharTokenizer(distinct)
    if config.tokenizer == "byte":
        return ByteTokenizer()
    pieces = (cut.piece for part in training for cut in _cut(part.text.pieces(), [[part], [], []]))
    size = config.vocab_size or DEFAULT_VOCAB_SIZE
    return train_bpe(gathered(pieces), size - config.end_token)


def _cut(pieces: Iterator[TextPiece], parts: list[list[TextRange]]) -> Iterator[SplitPiece]:
    """Cut the pieces of a text at the bounds of its splits, and yield the share of each split.

    Args:
        pieces: The pieces of the text.
        parts: For each split, a list with its part of the text, or an empty list.
    """
    ranges = [(split, part) for split, of_split in enumerate(parts) for part in of_split]
    position = 0
    document = (-1, -1)
    byte = 0
    for piece in pieces:
        end = position + len(piece.text)
        if piece[:2] != document:
            document = piece[:2]
            byte = 0
        for split, part in ranges:
            if position < part.end and part.begin < end:
                inside = piece
                if position < part.begin or part.end < end:
                    text = piece.text[max(0, part.begin - position) : part.end - position]
                    inside = piece._replace(text=text)
                size = len(inside.text)
                if not inside.text.isascii():
                    size = len(inside.text.replace(END, "").encode())
                yield SplitPiece(split, inside, byte, size)
                byte += size
        position = end


def _write(
    cuts: Iterator[SplitPiece],
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
    files: tuple[IO[bytes], IO[bytes]],
    first_file: int,
) -> int:
    """Write the tokens of one part of a text, and the documents that they come from.

    Args:
        cuts: The pieces of the part.
        tokenizer: The tokenizer that encodes the part.
        dtype: Type of a token on disk.
        files: The open files for the tokens and for the rows of sources.bin.
        first_file: Index of the text's first file in `CachedText.files`.

    Returns:
        The number of tokens.
    """
    tokens_file, sources_file = files
    before = tokens_file.tell() // dtype.itemsize
    # The documents whose first token is not written yet. Each entry has the byte of this part at
    # which the document begins, the index of its file, the number of the document in the file, and
    # the byte of the document at which this part begins.
    begins: list[tuple[int, int, int, int]] = []

    def note_documents() -> Iterator[TextPiece]:
        position = 0
        document = (-1, -1)
        for _, piece, byte, size in cuts:
            if piece[:2] != document:
                document = piece[:2]
                begins.append((position, first_file + piece.file, piece.number, byte))
            position += size
            yield piece

    position = 0
    written = before
    for tokens in tokenizer.encode_stream(gathered(note_documents())):
        tokens_file.write(tokens.astype(dtype, copy=False).tobytes())
        ends = position + np.cumsum(tokenizer.token_sizes[tokens])
        done = 0
        if len(tokens):
            position = int(ends[-1])
            done = next((i for i, each in enumerate(begins) if each[0] >= position), len(begins))
        rows = np.array(begins[:done], np.int64).reshape(-1, 4)
        rows[:, 0] = written + np.searchsorted(ends, rows[:, 0], side="right")
        sources_file.write(rows.tobytes())
        del begins[:done]
        written += len(tokens)
    return written - before


def _append(tokens: list[IO[bytes]], sources: list[IO[bytes]], itemsize: int) -> None:
    """Append the files of the validation and test parts to the files of the training part.

    Args:
        tokens: The open files of the tokens of each split.
        sources: The open files of the rows of sources.bin, for each split.
        itemsize: Size of a token in bytes.
    """
    for part, rows in zip(tokens[1:], sources[1:], strict=True):
        begin = tokens[0].tell() // itemsize
        part.seek(0)
        while piece := part.read(COPY_CHUNK_BYTES):
            tokens[0].write(piece)
        rows.seek(0)
        while piece := rows.read(COPY_CHUNK_BYTES):
            moved = np.frombuffer(piece, np.int64).reshape(-1, 4) + np.array([begin, 0, 0, 0])
            sources[0].write(moved.tobytes())
    tokens[0].flush()
    os.fsync(tokens[0].fileno())


def split_texts(texts: list[Text], lengths: list[int], config: DataConfig) -> list[list[TextRange]]:
    """Split all texts into training, validation and test parts, after `data.truncate`.

    Args:
        texts: The texts. A text that `data.split_paths` assigns to validation or test is neither
            split nor truncated.
        lengths: Length of each text, in characters or in tokens.
        config: The settings that split and truncate the texts.

    Raises:
        DataError: Nothing is left to train on.
    """
    splits: dict[str, list[TextRange]] = {"train": [], "val": [], "test": []}
    is_left = False
    for text, length in zip(texts, lengths, strict=True):
        bounds = split_bounds(length, config)
        if text.split in ("", "train") and bounds[-1]:
            is_left = True
        if text.split:
            end = bounds[-1] if text.split == "train" else length
            splits[text.split].append(TextRange(text, 0, end))
            continue
        for split, (begin, end) in zip(splits.values(), pairwise(bounds), strict=True):
            split.append(TextRange(text, begin, end))
    if not is_left:
        raise DataError(f"data.truncate={config.truncate} leaves nothing to train on; raise it")
    return [*splits.values()]
