"""The files of a directory that transformers loads: its configuration, weights and tokenizer.

The architecture `gpt` is a GPT-2 there: no code of ours is needed. `modern` brings its code in
modeling_modern.py.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from mingpt_ddp.config.keys.model_config import changed_parts
from mingpt_ddp.data.tokenizers.bpe import BYTE_NAMES, BPETokenizer
from mingpt_ddp.data.tokenizers.tokenizer import NoTokenizer, Tokenizer
from mingpt_ddp.data.tokenizers.tokenizer_base import END_NAME, END_NAMES, EXACT
from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.models.gpt import GPT
from mingpt_ddp.models.modern import Modern
from mingpt_ddp.snapshots.format import MODEL, Snapshot
from mingpt_ddp.snapshots.read.load_model import build_around, read_model_spec
from mingpt_ddp.snapshots.read.transformers_import import GPT2_NAMES, PADDING_BYTE
from mingpt_ddp.storage.storage import Content

ANY_CHARACTER = r"[\s\S]"  # line feeds too
# transformers' defaults are GPT-2's
NOT_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# What tokenizers call the token before a text; tokenizer.json does not say which it is.
BEGIN_NAMES = (
    "<s>",
    "<bos>",
    "<|bos|>",
    "[BOS]",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<|endoftext|>",  # GPT-2 has one token for both
)
MODELING = "modeling_modern.py"


@dataclass(frozen=True)
class Converted:
    """A model in the form of transformers."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    code: dict[str, Content] = field(default_factory=dict)  # files by name


def transformers_files(snapshot: Snapshot) -> dict[str, Content]:
    """Return the files by name.

    Raises:
        SnapshotError: transformers has no form of this model, or it is damaged.
    """
    architecture = _architecture(snapshot.state)
    unknown = changed_parts(snapshot.state["config"]["model"])
    if architecture not in CONVERTERS:
        unknown = [f"model.architecture={architecture}"]
    if unknown:
        raise SnapshotError(
            f"{unknown[0]} has no form that transformers loads; use format=safetensors or "
            "format=torch"
        )
    spec = read_model_spec(snapshot.state)
    model = build_around(spec.config(), spec.sizes, snapshot.model)
    converted = CONVERTERS[architecture](model)
    special = _special_tokens(spec.tokenizer)
    ends = _begin_and_end(special)
    files = {MODEL: safetensors.torch.save(converted.tensors, {"format": "pt"}), **converted.code}
    files["config.json"] = _json(
        {
            **converted.config,
            "vocab_size": spec.tokenizer.vocab_size,
            "dtype": "float32",
            "torch_dtype": "float32",
            **NOT_SPECIAL,
            **{f"{kind}_id": special[name] for kind, name in ends.items()},
        }
    )
    if isinstance(spec.tokenizer, NoTokenizer):
        return files
    files["tokenizer.json"] = tokenizer_json(spec.tokenizer)
    files["tokenizer_config.json"] = _json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_input_names": [
                "input_ids",
                "attention_mask",
            ],  # GPT-2 would embed token_type_ids
            "model_max_length": spec.block_size,
            "padding_side": "left",  # new tokens follow the last column
            **padding(spec.tokenizer),
            **ends,
        }
    )
    return files


def _architecture(state: Any) -> str:
    try:
        return str(state["config"]["model"]["architecture"])
    except (LookupError, TypeError) as error:
        raise SnapshotError("the snapshot has an invalid state: it names no model") from error


def padding(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what tokenizer_config.json says of the token that pads texts.

    It is one of the model's, which has no row more, and must not change any text. transformers
    drops a special token from what it decodes, and takes its name in a text for the token, unless
    split_special_tokens is set.
    """
    state = tokenizer.state()
    special = [*_special_tokens(tokenizer)]
    if special:  # as for GPT-2; prefer one that is meant for it
        named = [name for name in special if "pad" in name.lower()]
        is_text = {} if tokenizer.end is None else {"split_special_tokens": True}
        return {"pad_token": (named or special)[0], **is_text}
    # tokenizer_json declares it; the empty map keeps transformers from making it special
    if "vocabulary" in state:
        return {"pad_token": state["vocabulary"][-1:], "added_tokens_decoder": {}}
    return {"pad_token": PADDING_BYTE, "split_special_tokens": True}


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens by name.

    Characters and bytes have at most the one that ends a document.
    """
    if not isinstance(tokenizer, BPETokenizer):
        return {} if tokenizer.end is None else {END_NAME: tokenizer.end}
    added = json.loads(tokenizer.json).get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added if token.get("special")}


def _begin_and_end(special: dict[str, int]) -> dict[str, str]:
    """Return the names of the tokens before and after a text, as bos_token and eos_token.

    Args:
        special: ids by name.
    """
    found = {}
    for kind, names in (("bos_token", BEGIN_NAMES), ("eos_token", END_NAMES)):
        known = [name for name in names if name in special]
        if known:
            found[kind] = known[0]
    return found


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Return a tokenizer of the `tokenizers` library with the same tokens.

    Raises:
        SnapshotError: the vocabulary is not text.
    """
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.json.encode()
    special = [
        {"id": i, "content": name, **EXACT, "special": True}
        for name, i in _special_tokens(tokenizer).items()
    ]
    if tokenizer.name == "byte":
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        ids = {name: i for i, name in enumerate(BYTE_NAMES)}
        model = {"type": "BPE", "vocab": ids, "merges": []}
        return _tokenizer_file(special, byte_level, byte_level, model)
    vocabulary = tokenizer.state()["vocabulary"]
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
    last = {  # see `padding`
        "id": len(vocabulary) - 1,
        "content": vocabulary[-1:],
        "special": False,
        **EXACT,
    }
    names = [*vocabulary]
    if tokenizer.end is not None:
        names.insert(tokenizer.end, END_NAME)
    ids = {name: i for i, name in enumerate(names)}
    # No token has the empty name, so that a character that the model does not know is an error.
    model = {"type": "WordLevel", "vocab": ids, "unk_token": ""}
    return _tokenizer_file(special or [last], split, {"type": "Fuse"}, model)


def _tokenizer_file(
    added: list[dict[str, Any]],
    pre_tokenizer: dict[str, Any],
    decoder: dict[str, Any],
    model: dict[str, Any],
) -> bytes:
    return _json(
        {
            "version": "1.0",
            "added_tokens": added,
            "truncation": None,
            "padding": None,
            "normalizer": None,
            "post_processor": None,
            "pre_tokenizer": pre_tokenizer,
            "decoder": decoder,
            "model": model,
        }
    )


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def _gpt2(model: nn.Module) -> Converted:
    assert isinstance(model, GPT)
    c = model.config
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": model.block_size,
        "n_embd": c.n_embd,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[c.activation],
        "attn_pdrop": c.dropout,
        "embd_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
    }
    return Converted(config, gpt2_tensors(model))


def gpt2_tensors(model: GPT) -> dict[str, Tensor]:
    """Return the weights by GPT-2's names.

    Its linear layers hold them transposed, and its biases are never missing.
    """
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.Linear, nn.LayerNorm)):
            continue
        prefix = f"transformer.{_gpt2_name(name)}"
        weight = module.weight.detach()
        is_linear = isinstance(module, nn.Linear)
        tensors[f"{prefix}.weight"] = (weight.T if is_linear else weight).contiguous()
        if isinstance(module, nn.Embedding):
            continue
        bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias
        tensors[f"{prefix}.bias"] = bias.detach()
    return tensors


def _gpt2_name(name: str) -> str:
    """Return GPT-2's name of a module."""
    first, _, rest = name.partition(".")
    if first != "blocks":
        return GPT2_NAMES[name]
    block, _, part = rest.partition(".")
    return f"h.{block}.{GPT2_NAMES[part]}"


def _modern(model: nn.Module) -> Converted:
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
        "block_size": model.block_size,
        "n_embd": c.n_embd,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "dropout": c.dropout,
        "ngram_rows": c.ngram_rows,
        "tie_word_embeddings": False,
    }
    return Converted(config, dict(model.state_dict()), {MODELING: code.read_bytes()})


CONVERTERS: dict[str, Callable[[nn.Module], Converted]] = {"gpt": _gpt2, "modern": _modern}
