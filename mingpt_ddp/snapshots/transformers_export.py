"""The files of a directory that transformers loads: its configuration, weights and tokenizer.

The architecture `gpt` is a GPT-2 there: no code of ours is needed. `modern` brings its code in
modeling_modern.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from mingpt_ddp.data.bpe import BYTE_NAMES
from mingpt_ddp.data.tokenizer_base import Tokenizer
from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.models.gpt import GPT
from mingpt_ddp.models.modern import Modern
from mingpt_ddp.snapshots.format import MODEL, Snapshot
from mingpt_ddp.snapshots.load_model import build_around, read_model_spec
from mingpt_ddp.storage.storage import Content

ANY_CHARACTER = r"[\s\S]"  # line feeds too
# no token ends a text
NOT_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODELING = "modeling_modern.py"
PADDING_BYTE = BYTE_NAMES[0xFF]  # UTF-8 never has this byte
GPT2_NAMES = {
    **{"token_embedding": "wte", "position_embedding": "wpe", "blocks": "h", "norm": "ln_f"},
    **{
        "norm_1": "ln_1",
        "norm_2": "ln_2",
        "attention.qkv": "attn.c_attn",
        "attention.proj": "attn.c_proj",
    },
    **{"up": "mlp.c_fc", "down": "mlp.c_proj"},
}


def transformers_files(snapshot: Snapshot) -> dict[str, Content]:
    """Return the files by name.

    Raises:
        SnapshotError: transformers has no form of this model, or it is damaged.
    """
    architecture = _architecture(snapshot.state)
    if architecture not in CONVERTERS:
        raise SnapshotError(
            f"model.architecture={architecture} has no form that transformers loads; use "
            "format=safetensors or "
            "format=torch"
        )
    spec = read_model_spec(snapshot.state)
    model = build_around(
        spec.config(), (spec.tokenizer.vocab_size, spec.block_size), snapshot.model
    )
    config, tensors, files = CONVERTERS[architecture](model)
    config |= {
        "vocab_size": spec.tokenizer.vocab_size,
        "dtype": "float32",
        "torch_dtype": "float32",
        **NOT_SPECIAL,
    }
    return {
        "config.json": _json(config),
        MODEL: safetensors.torch.save(tensors, {"format": "pt"}),
        "tokenizer.json": tokenizer_json(spec.tokenizer),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                # GPT-2 would embed token_type_ids
                "model_input_names": ["input_ids", "attention_mask"],
                "model_max_length": spec.block_size,
                "padding_side": "left",  # new tokens follow the last column
                **padding(spec.tokenizer),
            }
        ),
        **files,
    }


def _architecture(state: Any) -> str:
    try:
        return str(state["config"]["model"]["architecture"])
    except (LookupError, TypeError) as error:
        raise SnapshotError("the snapshot has an invalid state: it names no model") from error


def padding(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what tokenizer_config.json says of the token that pads texts: one of the model's,
    which has no row more.

    It must not change any text. transformers drops a special token from what it decodes, and takes
    its name in a text for the token, unless split_special_tokens is set.
    """
    state = tokenizer.state()
    # tokenizer_json declares it; the empty map keeps transformers from making it special
    if "vocabulary" in state:
        return {"pad_token": state["vocabulary"][-1:], "added_tokens_decoder": {}}
    tokens = json.loads(state["tokenizer"].get("json", "{}")).get("added_tokens") or ()
    special = [token["content"] for token in tokens if token.get("special")]
    if special:  # as for GPT-2; prefer one that is meant for it
        return {"pad_token": next((name for name in special if "pad" in name.lower()), special[0])}
    return {"pad_token": PADDING_BYTE, "split_special_tokens": True}


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Return a tokenizer of the `tokenizers` library with the same tokens.

    Raises:
        SnapshotError: the vocabulary is not text.
    """
    state = tokenizer.state()
    if tokenizer.name == "bpe":
        return str(state["tokenizer"]["json"]).encode()
    values: dict[str, Any] = {"version": "1.0", "added_tokens": []}
    values |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    if tokenizer.name == "byte":
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        model = {
            "type": "BPE",
            "vocab": {name: i for i, name in enumerate(BYTE_NAMES)},
            "merges": [],
        }
        return _json({**values, "pre_tokenizer": byte_level, "decoder": byte_level, "model": model})
    vocabulary = state["vocabulary"]
    try:
        vocabulary.encode()
    except UnicodeEncodeError as error:
        raise SnapshotError(
            "the snapshot has an invalid state: its vocabulary has half a character"
        ) from error
    split = {
        "type": "Split",
        "pattern": {"Regex": ANY_CHARACTER},
        "behavior": "Isolated",
        "invert": False,
    }
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    # see `padding`
    values["added_tokens"] = [{"id": len(vocabulary) - 1, "content": vocabulary[-1:], **flags}]
    # No token has the empty name, so that a character that the model does not know is an error.
    model = {
        "type": "WordLevel",
        "vocab": {c: i for i, c in enumerate(vocabulary)},
        "unk_token": "",
    }
    return _json({**values, "pre_tokenizer": split, "decoder": {"type": "Fuse"}, "model": model})


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def _gpt2(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Content]]:
    assert isinstance(model, GPT)
    c = model.config
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **{
            "n_positions": model.block_size,
            "n_embd": c.n_embd,
            "n_layer": c.n_layer,
            "n_head": c.n_head,
        },
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[c.activation],
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), c.dropout),
    }
    return config, gpt2_tensors(model), {}


def gpt2_tensors(model: GPT) -> dict[str, Tensor]:
    """Return the weights by GPT-2's names.

    Its linear layers hold them transposed, and its biases are never missing.
    """
    tensors = {}
    for name, module in model.named_modules():
        weight = vars(module)["_parameters"].get("weight")
        if weight is None:
            continue
        first, _, rest = name.partition(".")
        block, _, part = rest.partition(".")
        full = (
            f"transformer.h.{block}.{GPT2_NAMES[part]}"
            if first == "blocks"
            else f"transformer.{GPT2_NAMES[name]}"
        )
        linear = isinstance(module, nn.Linear)
        tensors[f"{full}.weight"] = (weight.T if linear else weight).detach().contiguous()
        if linear or isinstance(module, nn.LayerNorm):
            bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias
            tensors[f"{full}.bias"] = bias.detach()
    return tensors


def _modern(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Content]]:
    assert isinstance(model, Modern)
    c = model.config
    code = Path(__file__).with_name(MODELING)
    config = {
        "model_type": "mingpt_modern",
        "architectures": ["ModernForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{code.stem}.ModernConfig",
            "AutoModelForCausalLM": f"{code.stem}.ModernForCausalLM",
        },
        **{
            "block_size": model.block_size,
            "n_embd": c.n_embd,
            "n_layer": c.n_layer,
            "n_head": c.n_head,
        },
        **{"dropout": c.dropout, "tie_word_embeddings": False},
    }
    return config, dict(model.state_dict()), {MODELING: code.read_bytes()}


CONVERTERS: dict[
    str, Callable[[nn.Module], tuple[dict[str, Any], dict[str, Tensor], dict[str, Content]]]
] = {
    "gpt": _gpt2,
    "modern": _modern,
}
