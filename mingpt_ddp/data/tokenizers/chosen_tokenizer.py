"""Get the tokenizer that the configuration names, and compare it with a snapshot's tokenizer."""

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.download import exists
from mingpt_ddp.data.tokenizers.tokenizer import NoTokenizer, Tokenizer, read_tokenizer
from mingpt_ddp.data.tokenizers.tokenizer_base import END_NAME
from mingpt_ddp.errors import ConfigError, DataError

BUILT_IN = ("char", "byte", "bpe")  # all other values of data.tokenizer are paths


def check_same_tokenizer(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer file that has changed since the snapshot. A deleted file is accepted.

    Args:
        config: The settings of the data.
        tokenizer: The tokenizer of the snapshot.

    Raises:
        DataError: The file has another tokenizer.
    """
    path = config.tokenizer
    if path in BUILT_IN or not exists(path):
        return
    if with_end(read_tokenizer(path), config).state() != tokenizer.state():
        raise DataError(
            f"data.tokenizer={path} differs from the tokenizer of the snapshot; restore the file, "
            "or choose another run.name"
        )


def given_tokenizer(config: DataConfig) -> Tokenizer | None:
    """Get the tokenizer that the configuration names. Return None if it is learnt from the text.

    Raises:
        ConfigError: With data.format=tokens, data.tokenizer is byte or bpe, which encode texts and
            cannot describe given tokens. Or the configuration has neither the file of a tokenizer
            nor data.vocab_size.
    """
    if config.tokenizer not in BUILT_IN:
        return read_tokenizer(config.tokenizer)
    if config.format != "tokens":
        return None
    # "char" is the default, so here it means that no tokenizer is named.
    if config.tokenizer != "char":
        raise ConfigError(
            f"data.tokenizer={config.tokenizer} encodes texts; with data.format=tokens name the "
            "tokenizer.json that made the tokens, or leave it out and give data.vocab_size"
        )
    if config.vocab_size is None:
        raise ConfigError(
            "data.format=tokens needs data.vocab_size=N, the number of token ids, or "
            "data.tokenizer=PATH, the tokenizer.json that made them"
        )
    return NoTokenizer(config.vocab_size)


def with_end(tokenizer: Tokenizer, config: DataConfig) -> Tokenizer:
    """Give a tokenizer the token that ends a document, if `data.end_token` asks for it.

    Raises:
        ConfigError: With data.format=tokens, no token can be added to the vocabulary, and the
            tokenizer does not have such a token yet.
    """
    if not config.end_token:
        return tokenizer
    is_known = not isinstance(tokenizer, NoTokenizer)
    tokenizer_with_end = tokenizer.with_end() if is_known else tokenizer
    had_end_token = is_known and tokenizer_with_end.vocab_size == tokenizer.vocab_size
    if config.format == "tokens" and not had_end_token:
        raise ConfigError(
            "data.end_token=true needs a token that ends documents; with data.format=tokens, set "
            f"data.tokenizer to the tokenizer that made the tokens, which must have {END_NAME} or "
            "</s>, or leave data.end_token out"
        )
    return tokenizer_with_end
