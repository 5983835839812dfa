"""Check the token ids of files, and say where those of each split lie; nothing is copied."""

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.text.encode_text import Source, divide
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.tokenizers.tokenizer import NoTokenizer, Tokenizer
from mingpt_ddp.data.tokens.token_files import Largest, TokenFile, cut, find_largest
from mingpt_ddp.errors import DataError


def locate(
    sources: list[Source], config: DataConfig, tokenizer: Tokenizer, cache: TextCache, sha256: str
) -> EncodedText:
    """Check token ids, and return where those of each split lie."""
    _check_types(sources)
    lengths = []
    for source in sources:
        tokens = source.text.tokens or []
        _check_ids(source, tokens, tokenizer, cache)
        lengths.append(sum(file.length for file in tokens))
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


def _check_types(sources: list[Source]) -> None:
    """Refuse tokens of several types."""
    found: dict[str, str] = {}  # a file of each type
    for source in sources:
        tokens = source.text.tokens or []
        for file in tokens:
            found.setdefault(file.dtype, source.config.source if len(tokens) == 1 else file.path)
    (dtype, name), *others = found.items()
    for other, path in others:
        raise DataError(f"{path} has tokens of {other}, {name} of {dtype}; write all of one type")


def _check_ids(
    source: Source, files: list[TokenFile], tokenizer: Tokenizer, cache: TextCache
) -> None:
    """Refuse token ids that the tokenizer does not have.

    Raises:
        DataError: names the largest.
    """
    size = tokenizer.vocab_size
    dtype = files[0].dtype
    if np.iinfo(f"u{files[0].itemsize}").max < size:
        return
    # to find it reads everything, once for each content
    key = ["largest id", source.sha256, dtype]
    largest = cache.records.get(key, lambda: dtype, lambda: find_largest(files), Largest)
    if largest.id < size:
        return
    advice = f"raise data.vocab_size={size} if they are meant"
    if not isinstance(tokenizer, NoTokenizer):
        advice = "give the tokenizer that has made the tokens, or none and data.vocab_size"
    raise DataError(
        f"{source.config.source} has an id that is none of 0 .. {size - 1}: "
        f"{np.uint64(largest.id).astype(dtype)} at token {largest.position:,} of "
        f"{files[largest.file].path}; {advice}"
    )
