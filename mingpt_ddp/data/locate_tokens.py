"""Check the token ids of files, and say where those of each split lie; nothing is copied."""

from pathlib import Path

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.text.encode import divide
from mingpt_ddp.data.text.text import Text, sha256_of_all
from mingpt_ddp.data.tokenizers.tokenizer import NoTokenizer, Tokenizer
from mingpt_ddp.data.tokens.token_files import TokenFile, cut, find_largest
from mingpt_ddp.errors import DataError


def locate(
    texts: list[Text], config: DataConfig, tokenizer: Tokenizer | None, directory: Path
) -> EncodedText:
    """Check token ids, and return where those of each split lie."""
    assert tokenizer is not None
    _check_types(texts)
    lengths = []
    for text in texts:
        _check_ids(text, tokenizer)
        lengths.append(sum(file.length for file in text.tokens))
    files: list[TokenFile] = []
    sizes = []
    for split in divide(texts, lengths, config):
        for part in split:
            files += cut(part.text.tokens, part.begin, part.end)
        sizes.append([part.end - part.begin for part in split])
    return EncodedText(
        directory=str(directory),
        sha256=sha256_of_all(texts),
        length=sum(map(sum, sizes)),
        tokenizer=tokenizer.state(),
        dtype=files[0].dtype,
        tokens_sha256="",
        parts=sizes,
        form="tokens",
        files=files,
    )


def _check_types(texts: list[Text]) -> None:
    """Refuse tokens of several types."""
    names: dict[str, str] = {}  # a file, or a text of one, of each type
    for text in texts:
        for file in text.tokens:
            names.setdefault(file.dtype, text.source if len(text.tokens) == 1 else file.path)
    (dtype, name), *others = names.items()
    for other, path in others:
        raise DataError(f"{path} has tokens of {other}, {name} of {dtype}; write all of one type")


def _check_ids(text: Text, tokenizer: Tokenizer) -> None:
    """Refuse token ids that the tokenizer does not have.

    Raises:
        DataError: names the largest.
    """
    files = text.tokens
    size = tokenizer.vocab_size
    dtype = files[0].dtype
    if np.iinfo(f"u{files[0].itemsize}").max < size:
        return
    largest = find_largest(files)  # reads everything
    if largest.id < size:
        return
    advice = f"raise data.vocab_size={size} if they are meant"
    if not isinstance(tokenizer, NoTokenizer):
        advice = "give the tokenizer that has made the tokens, or none and data.vocab_size"
    raise DataError(
        f"{text.source} has an id that is none of 0 .. {size - 1}: "
        f"{np.uint64(largest.id).astype(dtype)} at token {largest.position:,} of "
        f"{files[largest.file].path}; {advice}"
    )
