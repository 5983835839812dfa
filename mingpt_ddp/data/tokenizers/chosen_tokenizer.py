"""The tokenizer that the configuration names, and whether it is that of a snapshot."""

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.download import exists
from mingpt_ddp.data.tokenizers.tokenizer import NoTokenizer, Tokenizer, read_tokenizer
from mingpt_ddp.data.tokenizers.tokenizer_base import END_NAME
from mingpt_ddp.errors import ConfigError, DataError

TRAINED = ("char", "byte", "bpe")  # other values of data.tokenizer are paths


def check_same_tokenizer(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer file that has changed since the snapshot, if it is still there."""
    path = config.tokenizer
    if path in TRAINED or not exists(path):
        return
    if with_end(read_tokenizer(path), config).state() != tokenizer.state():
        raise DataError(
            f"data.tokenizer={path} differs from that of the snapshot; restore it, or choose "
            "another run.name"
        )


def given_tokenizer(config: DataConfig) -> Tokenizer | None:
    """Return the tokenizer that the configuration names; None: it is learnt from the text.

    Raises:
        ConfigError: token ids come with another tokenizer, or without one and without the size of
            their vocabulary.
    """
    if config.tokenizer not in TRAINED:
        return read_tokenizer(config.tokenizer)
    if config.format != "tokens":
        return None
    if config.tokenizer != "char":  # the default, which stands for none here
        raise ConfigError(
            f"data.tokenizer={config.tokenizer} encodes texts; with data.format=tokens name the "
            "tokenizer.json that has made the tokens, or leave it out and give data.vocab_size"
        )
    if config.vocab_size is None:
        raise ConfigError(
            "data.format=tokens needs data.vocab_size=N, the number of token ids, or "
            "data.tokenizer=PATH, the tokenizer.json that has made them"
        )
    return NoTokenizer(config.vocab_size)


def with_end(tokenizer: Tokenizer, config: DataConfig) -> Tokenizer:
    """Return a tokenizer with the token that ends a document, if `data.end_token` says so.

    Raises:
        ConfigError: no token of given ids ends a document.
    """
    if not config.end_token:
        return tokenizer
    is_known = not isinstance(tokenizer, NoTokenizer)
    ended = tokenizer.with_end() if is_known else tokenizer
    is_own = is_known and ended.vocab_size == tokenizer.vocab_size
    if config.format == "tokens" and not is_own:
        raise ConfigError(
            "data.end_token=true: with data.format=tokens name a data.tokenizer that has "
            f"{END_NAME} or </s>, as the tokens have, or leave it out"
        )
    return ended
