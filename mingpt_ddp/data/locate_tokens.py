"""Check the token ids of files, and say where those of each split lie; nothing is copied."""

from dataclasses import dataclass

import numpy as np

from mingpt_ddp.config.components import DataConfig
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.encode_text import Source, divide
from mingpt_ddp.data.text_cache import TextCache
from mingpt_ddp.data.token_files import (
    TokenFile,
    check_same_type,
    cut,
    largest_id,
    unknown_id,
)
from mingpt_ddp.data.tokenizer import NoTokenizer, Tokenizer
from mingpt_ddp.errors import DataError


@dataclass(frozen=True)
class Largest:
    """The largest token id of files."""

    id: int


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
    """Return the largest token id; finding it reads everything, once for each content."""
    dtype = files[0].dtype
    key = ["largest id", source.sha256, dtype]
    return cache.records.get(key, lambda: dtype, lambda: Largest(largest_id(files)), Largest).id
