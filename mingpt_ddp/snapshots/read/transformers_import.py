"""Read a directory of transformers: configuration, weights, tokenizer of a GPT-2 or our export."""

import json
import re
from typing import Any

from torch import Tensor

from mingpt_ddp.data.tokenizers.bpe import BYTE_NAMES
from mingpt_ddp.data.tokenizers.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
)
from mingpt_ddp.data.tokenizers.tokenizer_base import END, END_NAME, EXACT
from mingpt_ddp.snapshots.format import MAX_STATE_BYTES, load_json
from mingpt_ddp.storage.storage import Storage

PADDING_BYTE = BYTE_NAMES[0xFF]  # UTF-8 never has this byte
GPT2_NAMES = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "blocks": "h",
    "norm": "ln_f",
    "norm_1": "ln_1",
    "norm_2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}

NAMES = {theirs: ours for ours, theirs in GPT2_NAMES.items()}
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
TENSOR_NAME = re.compile(r"(h\.(?P<block>\d+)\.)?(?P<module>[\w.]+)\.(?P<kind>weight|bias)")
SIZES = ("n_layer", "n_head", "n_embd")
BYTE_LEVEL: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
ALLOWED = {  # values, the default first, that models/gpt.py computes
    "model_type": ("gpt2",),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "activation_function": ("gelu_new", *ACTIVATIONS),
}


def model_values(config: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return the group `model`, and the vocabulary size and context length, of a config.json.

    Raises:
        ValueError: it is of a model that architecture gpt cannot compute.
    """
    if config["model_type"] == "mingpt_modern":
        model = {"name": "modern", "architecture": "modern", "dropout": config["dropout"]}
        model |= {key: config[key] for key in SIZES}
        model["ngram_rows"] = config.get("ngram_rows", 0)
        return model, (config["vocab_size"], config["block_size"])
    for key, values in ALLOWED.items():
        value = config.get(key, values[0])
        if value not in values:
            known = " or ".join(map(str, dict.fromkeys(values)))
            raise ValueError(f"{key} is {str(value)[:100]}, not {known}")
    width = config["n_embd"]
    if config.get("n_inner") not in (None, 4 * width):
        raise ValueError(f"n_inner is {str(config['n_inner'])[:100]}, not 4 n_embd = {4 * width}")
    model = {
        "name": "gpt2",
        "architecture": "gpt",
        "bias": True,
        "dropout": config.get("resid_pdrop", 0.1),
    }
    model |= {key: config[key] for key in SIZES}
    model["activation"] = ACTIVATIONS[config.get("activation_function", "gelu_new")]
    return model, (config["vocab_size"], config.get("n_positions", 1024))


def our_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return GPT-2's weights by our names; its linear layers hold them transposed.

    Raises:
        ValueError: a name is not one of GPT-2's, or the head is not the embedding.
    """
    if "head.weight" in tensors:  # of architecture modern
        return tensors
    found = {}
    for full, tensor in tensors.items():
        name = full.removeprefix("transformer.")
        if re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", name):  # the causal mask
            continue
        if name == "lm_head.weight":
            embedding = tensors.get("transformer.wte.weight", tensors.get("wte.weight", tensor))
            if not tensor.equal(embedding):
                raise ValueError(
                    "lm_head.weight differs from wte.weight; gpt has one matrix for both"
                )
            continue
        match = TENSOR_NAME.fullmatch(name)
        if match is None or match["module"] not in NAMES:
            raise ValueError(f"{full[:100]} is not a tensor of GPT-2")
        if not tensor.is_floating_point():
            raise ValueError(f"{full[:100]} has whole numbers, not weights")
        block, module, kind = match.group("block", "module", "kind")
        prefix = "" if block is None else f"blocks.{block}."
        if kind == "weight" and module.startswith(("attn.", "mlp.")):
            tensor = tensor.T
        found[f"{prefix}{NAMES[module]}.{kind}"] = tensor.float()
    return found


def read_tokenizer(storage: Storage, names: list[str]) -> Tokenizer | None:
    """Return the tokenizer of the directory; None if there is none.

    Raises:
        LookupError, TypeError, ValueError: it is not one of characters, bytes or byte-level BPE.
    """
    if "tokenizer.json" in names:
        text = storage.read("tokenizer.json", MAX_STATE_BYTES).decode()
        values = load_json(text.encode())
        if values["model"]["type"] == "WordLevel":  # an export of ours
            return _of_characters(values["model"]["vocab"])
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
        if END_NAME in vocab:  # the files do not say that it is special
            end = {"id": vocab[END_NAME], "content": END_NAME, "special": True, **EXACT}
            values["added_tokens"] = [end]
        text = json.dumps(values)
    else:
        return None
    tokenizer = BPETokenizer(text)
    is_bytes = tokenizer.tokens[:256] == [bytes([byte]) for byte in range(256)]
    others = tokenizer.tokens[256:]
    if is_bytes and others in ([], [END_NAME.encode()]):
        return ByteTokenizer(has_end=bool(others))
    return tokenizer


def _of_characters(vocab: dict[str, Any]) -> CharTokenizer:
    """Return the tokenizer of a vocabulary of single characters, and of END_NAME if it has one.

    Args:
        vocab: ids by token.
    """
    character_of = {i: END if name == END_NAME else name for name, i in vocab.items()}
    has_words = any(len(character) != 1 for character in character_of.values())
    if has_words or character_of.keys() != {*range(len(vocab))}:
        raise ValueError("tokenizer.json has words; characters, bytes and byte-level BPE are known")
    return CharTokenizer("".join(character_of[i] for i in range(len(vocab))))


def _without_padding(text: str, values: dict[str, Any]) -> str:
    """Return a tokenizer.json without the added token for padding.

    transformers saves the padding of an export so, though its name is that of a byte.

    Args:
        values: of the text.
    """
    added = values.get("added_tokens") or []
    if not added:
        return text
    vocab = values["model"].get("vocab", {})
    others = []
    for token in added:
        name_and_id = (token["content"], token["id"])
        if name_and_id != (PADDING_BYTE, vocab.get(PADDING_BYTE)):
            others.append(token)
    if len(others) == len(added):
        return text
    return json.dumps({**values, "added_tokens": others})
