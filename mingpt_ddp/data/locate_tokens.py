"""Check the token ids of files, and say where those of each split lie; nothing is copied."""

import contextlib
import json

import numpy as np

from mingpt_ddp.config.components import DataConfig
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.encode_text import Source, divide
from mingpt_ddp.data.text_cache import MAX_META_BYTES, TextCache, digest_of
from mingpt_ddp.data.token_files import (
    TokenFile,
    check_same_type,
    cut,
    largest_id,
    unknown_id,
)
from mingpt_ddp.data.tokenizer import NoTokenizer, Tokenizer
from mingpt_ddp.errors import DataError
from mingpt_ddp.storage.storage import atomic_write, read_regular


def locate(
    sources: list[Source], config: DataConfig, tokenizer: Tokenizer, cache: TextCache, sha256: str
) -> EncodedText:
    """Check token ids, and return where those of each split lie."""
    lengths = []
    first: list[TokenFile] = []
    for source in sources:
        tokens = source.text.tokens or []
        check_same_type(first, tokens[0], source.config.source)
        _check_ids(source, tokens, tokenizer, cache)
        lengths.append(sum(file.length for file in tokens))
        first = first or tokens[:1]
    files: list[TokenFile] = []
    sizes = []
    for split in divide(sources, lengths, config):
        for part in split:
            files += cut(part.source.text.tokens or [], part.begin, part.end)
        sizes.append([part.end - part.begin for part in split])
    return EncodedText(
        directory="",
        sha256=sha256,
        length=sum(map(sum, sizes)),
        tokenizer=tokenizer.state(),
        dtype=files[0].dtype,
        tokens_sha256="",
        parts=sizes,
        form="tokens",
        files=files,
    )


def _check_ids(
    source: Source, files: list[TokenFile], tokenizer: Tokenizer, cache: TextCache
) -> None:
    """Refuse token ids that the tokenizer does not have.

    Raises:
        DataError: names the first.
    """
    size = tokenizer.vocab_size
    if np.iinfo(f"u{files[0].itemsize}").max < size or _largest_id(source, files, cache) < size:
        return
    advice = f"raise data.vocab_size={size} if they are meant"
    if not isinstance(tokenizer, NoTokenizer):
        advice = "give the tokenizer that has made the tokens, or none and data.vocab_size"
    raise DataError(
        f"{source.config.source} has an id that is none of 0 .. {size - 1}: "
        f"{unknown_id(files, size)}; {advice}"
    )


def _largest_id(source: Source, files: list[TokenFile], cache: TextCache) -> int:
    """Return the largest token id, which the cache keeps: finding it reads everything."""
    key = digest_of([source.sha256, files[0].dtype, "largest id"])
    path = cache.directory(key) / "meta.json"
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        largest, digest = json.loads(read_regular(path, MAX_META_BYTES)).values()
        if digest == digest_of([key, largest]):
            return int(largest)
    largest = largest_id(files)
    content = {"largest": largest, "digest": digest_of([key, largest])}
    with cache.locked(), cache.adding(path.parent):
        atomic_write(path, json.dumps(content).encode())
    return largest
