"""Read a directory of transformers: the configuration, weights and tokenizer of a GPT-2, or of an
export of ours.
"""

import json
import re
from typing import Any

from torch import Tensor

from mingpt_ddp.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from mingpt_ddp.snapshots.format import MAX_STATE_BYTES, load_json
from mingpt_ddp.snapshots.transformers_export import GPT2_NAMES, PADDING_BYTE
from mingpt_ddp.storage.storage import Storage

NAMES = {theirs: ours for ours, theirs in GPT2_NAMES.items()}
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
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
        return model, (config["vocab_size"], config["block_size"])
    for key, values in ALLOWED.items():
        if (value := config.get(key, values[0])) not in values:
            raise ValueError(
                f"{key} is {str(value)[:100]}, not {' or '.join(map(str, dict.fromkeys(values)))}"
            )
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
        match = re.fullmatch(r"(h\.(\d+)\.)?([\w.]+)\.(weight|bias)", name)
        if match is None or match[3] not in NAMES:
            raise ValueError(f"{full[:100]} is not a tensor of GPT-2")
        if not tensor.is_floating_point():
            raise ValueError(f"{full[:100]} has whole numbers, not weights")
        block = "" if match[2] is None else f"blocks.{match[2]}."
        is_linear = match[3].startswith(("attn.", "mlp.")) and match[4] == "weight"
        found[f"{block}{NAMES[match[3]]}.{match[4]}"] = (tensor.T if is_linear else tensor).float()
    return found


def read_tokenizer(storage: Storage, names: list[str]) -> Tokenizer | None:
    """Return the tokenizer of the directory; None if there is none.

    Raises:
        LookupError, TypeError, ValueError: it is not one of characters, bytes or byte-level BPE.
    """
    if "tokenizer.json" in names:
        text = storage.read("tokenizer.json", MAX_STATE_BYTES).decode()
        values = load_json(text.encode())
        model = values["model"]
        if model["type"] == "WordLevel":  # an export of ours
            ids = {i: character for character, i in model["vocab"].items()}
            if ids.keys() != {*range(len(model["vocab"]))} or any(
                len(character) != 1 for character in ids.values()
            ):
                raise ValueError(
                    "tokenizer.json has words; characters, bytes and byte-level BPE are known"
                )
            return CharTokenizer("".join(ids[i] for i in range(len(ids))))
        # transformers saves the padding of an export as an added token, though its name is that of
        # a byte.
        added = values.get("added_tokens") or []
        others = [
            t
            for t in added
            if (t["content"], t["id"]) != (PADDING_BYTE, model["vocab"].get(PADDING_BYTE))
        ]
        if len(others) < len(added):
            text = json.dumps({**values, "added_tokens": others})
    elif {"vocab.json", "merges.txt"} <= {*names}:
        lines = storage.read("merges.txt", MAX_STATE_BYTES).decode().split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
        vocab = load_json(storage.read("vocab.json", MAX_STATE_BYTES))
        model = {"type": "BPE", "vocab": vocab, "merges": merges}
        text = json.dumps(
            {"version": "1.0", "model": model, "pre_tokenizer": BYTE_LEVEL, "decoder": BYTE_LEVEL}
        )
    else:
        return None
    tokenizer = BPETokenizer(text)
    return ByteTokenizer() if tokenizer.tokens == [bytes([i]) for i in range(256)] else tokenizer
