"""Check files of token ids, and find the tokens of each split in them. Nothing is copied."""

from pathlib import Path

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.text.encode import split_texts
from mingpt_ddp.data.text.text import Text, sha256_of_all
from mingpt_ddp.data.tokenizers.tokenizer import NoTokenizer, Tokenizer
from mingpt_ddp.data.tokens.token_files import TokenFile, cut, find_largest
from mingpt_ddp.errors import DataError


def locate(
    texts: list[Text], config: DataConfig, tokenizer: Tokenizer | None, directory: Path
) -> EncodedText:
    """Check the token ids of all texts, and find the tokens of each split in their files.

    Args:
        texts: Texts in the format tokens.
        config: The settings that split the texts.
        tokenizer: The tokenizer that made the tokens, or a stand-in that only knows the
            size of the vocabulary.
        directory: Directory of the texts in the cache.

    Raises:
        DataError: The files have tokens of several types, or an id that is not in the vocabulary.
    """
    assert tokenizer is not None
    _check_types(texts)
    lengths = []
    for text in texts:
        _check_ids(text, tokenizer)
        lengths.append(sum(file.length for file in text.tokens))
    files: list[TokenFile] = []
    sizes = []
    for split in split_texts(texts, lengths, config):
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
    """Refuse files whose tokens have different types.

    Raises:
        DataError: The files have tokens of several types.
    """
    # By type, the name of the first file that has tokens of this type.
    names: dict[str, str] = {}
    for text in texts:
        for file in text.tokens:
            names.setdefault(file.dtype, text.source if len(text.tokens) == 1 else file.path)
    (dtype, name), *others = names.items()
    for other, path in others:
        raise DataError(
            f"{path} has tokens of {other}, but {name} has tokens of {dtype}; write all files with "
            "the same type"
        )


def _check_ids(text: Text, tokenizer: Tokenizer) -> None:
    """Refuse token ids that are not in the tokenizer's vocabulary.

    Raises:
        DataError: An id is negative or too large. The error names the largest one.
    """
    files = text.tokens
    size = tokenizer.vocab_size
    dtype = files[0].dtype
    if np.iinfo(f"u{files[0].itemsize}").max < size:
        return
    largest = find_largest(files)  # reads all tokens
    if largest.id < size:
        return
    advice = f"if this id is right, raise data.vocab_size, which is {size}"
    if not isinstance(tokenizer, NoTokenizer):
        advice = (
            "set data.tokenizer to the tokenizer that made the tokens, or leave it out and give "
            "data.vocab_size"
        )
    raise DataError(
        f"{text.source} has a token id that is not in 0 .. {size - 1}: "
        f"{np.uint64(largest.id).astype(dtype)} at token {largest.position:,} of "
        f"{files[largest.file].path}; {advice}"
    )
