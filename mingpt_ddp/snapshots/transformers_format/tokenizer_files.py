"""Convert a tokenizer to the files of the transformers library, and back."""

import json
from typing import Any

from mingpt_ddp.data.tokenizers.bpe import BYTE_NAMES
from mingpt_ddp.data.tokenizers.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
)
from mingpt_ddp.data.tokenizers.tokenizer_base import END, END_NAME, EXACT
from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.snapshots.format import MAX_STATE_BYTES, load_json
from mingpt_ddp.storage.storage import Storage

PADDING_BYTE = BYTE_NAMES[0xFF]  # this byte never occurs in UTF-8
ANY_CHARACTER = r"[\s\S]"  # including line feeds
BYTE_LEVEL: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def padding(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the entries of tokenizer_config.json for the token that pads texts.

    The token must be in the vocabulary of the model, because the embedding has no row for a new
    token. Making it the padding token must not change how texts are encoded and decoded. But it
    does if transformers makes the token special. Then the token is dropped from decoded texts, and
    its name in a text is encoded as this token, unless split_special_tokens is set.
    """
    state = tokenizer.state()
    special = [*special_tokens(tokenizer)]
    if special:  # prefer a token whose name says that it is meant for padding
        named = [name for name in special if "pad" in name.lower()]
        encode_names_as_text = {} if tokenizer.end is None else {"split_special_tokens": True}
        return {"pad_token": (named or special)[0], **encode_names_as_text}
    # `tokenizer_json` declares the token. An empty added_tokens_decoder keeps transformers from
    # making it special.
    if "vocabulary" in state:
        return {"pad_token": state["vocabulary"][-1:], "added_tokens_decoder": {}}
    return {"pad_token": PADDING_BYTE, "split_special_tokens": True}


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens, by name.

    A tokenizer of characters or bytes has at most one special token, which ends a document.
    """
    if not isinstance(tokenizer, BPETokenizer):
        return {} if tokenizer.end is None else {END_NAME: tokenizer.end}
    added = json.loads(tokenizer.json).get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added if token.get("special")}


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Return a tokenizer.json, from which the `tokenizers` library builds the same tokenizer.

    Raises:
        SnapshotError: The vocabulary has characters that UTF-8 cannot encode.
    """
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.json.encode()
    special = [
        {"id": i, "content": name, **EXACT, "special": True}
        for name, i in special_tokens(tokenizer).items()
    ]
    if tokenizer.name == "byte":
        byte_level = {**BYTE_LEVEL, "use_regex": False}
        ids = {name: i for i, name in enumerate(BYTE_NAMES)}
        model = {"type": "BPE", "vocab": ids, "merges": []}
        return _tokenizer_file(special, byte_level, byte_level, model)
    vocabulary = tokenizer.state()["vocabulary"]
    try:
        vocabulary.encode()
    except UnicodeEncodeError as error:
        raise SnapshotError(
            "the snapshot has an invalid state: its vocabulary has half a character (a surrogate); "
            "use another snapshot"
        ) from error
    split = {
        "type": "Split",
        "pattern": {"Regex": ANY_CHARACTER},
        "behavior": "Isolated",
        "invert": False,
    }
    # Declare the last character, because `padding` makes it the padding token.
    last = {
        "id": len(vocabulary) - 1,
        "content": vocabulary[-1:],
        "special": False,
        **EXACT,
    }
    names = [*vocabulary]
    if tokenizer.end is not None:
        names.insert(tokenizer.end, END_NAME)
    ids = {name: i for i, name in enumerate(names)}
    # No token has an empty name, so encoding an unknown character is an error.
    model = {"type": "WordLevel", "vocab": ids, "unk_token": ""}
    return _tokenizer_file(special or [last], split, {"type": "Fuse"}, model)


def _tokenizer_file(
    added: list[dict[str, Any]],
    pre_tokenizer: dict[str, Any],
    decoder: dict[str, Any],
    model: dict[str, Any],
) -> bytes:
    """Encode a tokenizer.json with these sections. All other sections are null."""
    unused = ("truncation", "padding", "normalizer", "post_processor")
    return json_file(
        {
            "version": "1.0",
            "added_tokens": added,
            **dict.fromkeys(unused),
            "pre_tokenizer": pre_tokenizer,
            "decoder": decoder,
            "model": model,
        }
    )


def json_file(values: dict[str, Any]) -> bytes:
    """Encode the content of a JSON file in an export."""
    return (json.dumps(values, indent=1) + "\n").encode()


def read_tokenizer(storage: Storage, names: list[str]) -> Tokenizer | None:
    """Read the tokenizer in an untrusted directory. Return None if there is none.

    Args:
        names: Names of the files in the directory.

    Raises:
        LookupError, TypeError, ValueError: The tokens are not characters, bytes or byte-level BPE.
    """
    if "tokenizer.json" in names:
        text = storage.read("tokenizer.json", MAX_STATE_BYTES).decode()
        values = load_json(text.encode())
        if values["model"]["type"] == "WordLevel":  # exported by this package
            return _char_tokenizer(values["model"]["vocab"])
        text = _without_padding(text, values)
    elif {"vocab.json", "merges.txt"} <= {*names}:
        lines = storage.read("merges.txt", MAX_STATE_BYTES).decode().split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
        vocab = load_json(storage.read("vocab.json", MAX_STATE_BYTES))
        model = {"type": "BPE", "vocab": vocab, "merges": merges}
        values = {
            "version": "1.0",
            "model": model,
            "pre_tokenizer": BYTE_LEVEL,
            "decoder": BYTE_LEVEL,
        }
        # vocab.json and merges.txt do not say which tokens are special.
        if END_NAME in vocab:
            end = {"id": vocab[END_NAME], "content": END_NAME, "special": True, **EXACT}
            values["added_tokens"] = [end]
        text = json.dumps(values)
    else:
        return None
    tokenizer = BPETokenizer(text)
    is_bytes = tokenizer.tokens[:256] == [bytes([byte]) for byte in range(256)]
    further_tokens = tokenizer.tokens[256:]
    if is_bytes and further_tokens in ([], [END_NAME.encode()]):
        return ByteTokenizer(has_end=bool(further_tokens))
    return tokenizer


def _char_tokenizer(vocab: dict[str, Any]) -> CharTokenizer:
    """Build a tokenizer from a vocabulary of single characters, and END_NAME if it has one.

    Args:
        vocab: The id of each token.
    """
    character_of = {i: END if name == END_NAME else name for name, i in vocab.items()}
    has_words = any(len(character) != 1 for character in character_of.values())
    if has_words or character_of.keys() != {*range(len(vocab))}:
        raise ValueError(
            "the tokens in tokenizer.json are words; only characters, bytes and byte-level BPE are "
            "supported"
        )
    return CharTokenizer("".join(character_of[i] for i in range(len(vocab))))


def _without_padding(text: str, values: dict[str, Any]) -> str:
    """Remove the padding token from the added tokens of a tokenizer.json. Return its text.

    When transformers saves an export again, it lists the padding token there. For a tokenizer of
    bytes, the padding token is a byte, which is in the vocabulary already.

    Args:
        text: The content of tokenizer.json.
        values: The parsed content.
    """
    added = values.get("added_tokens") or []
    if not added:
        return text
    vocab = values["model"].get("vocab", {})
    kept = []
    for token in added:
        name_and_id = (token["content"], token["id"])
        if name_and_id != (PADDING_BYTE, vocab.get(PADDING_BYTE)):
            kept.append(token)
    if len(kept) == len(added):
        return text
    return json.dumps({**values, "added_tokens": kept})
