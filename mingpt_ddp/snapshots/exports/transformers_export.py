"""The files of a directory that transformers loads: its configuration, weights and tokenizer.

The architecture `gpt` is a GPT-2 there: no code of ours is needed. `modern` brings its code in
modeling_modern.py.
"""

from typing import Any

import safetensors.torch

from mingpt_ddp.config.keys.model_config import changed_parts
from mingpt_ddp.data.tokenizers.tokenizer import NoTokenizer
from mingpt_ddp.data.tokenizers.tokenizer_base import END_NAMES
from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.models.gpt import GPT
from mingpt_ddp.models.modern import Modern
from mingpt_ddp.snapshots.format import MODEL, Snapshot
from mingpt_ddp.snapshots.read.load_model import build_around, read_model_spec
from mingpt_ddp.snapshots.transformers_format.model_files import (
    MODELING,
    gpt2_tensors,
    gpt2_values,
    modern_values,
)
from mingpt_ddp.snapshots.transformers_format.tokenizer_files import (
    json_file,
    padding,
    special_tokens,
    tokenizer_json,
)
from mingpt_ddp.storage.storage import Content

# transformers' defaults are GPT-2's
NOT_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Usual names of the token before a text. tokenizer.json does not say which token it is.
BEGIN_NAMES = (
    "<s>",
    "<bos>",
    "<|bos|>",
    "[BOS]",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<|endoftext|>",  # GPT-2 has one token for both
)
ARCHITECTURES = ("gpt", "modern")


def transformers_files(snapshot: Snapshot) -> dict[str, Content]:
    """Return the files by name.

    Raises:
        SnapshotError: transformers cannot load such a model, or the snapshot is damaged.
    """
    architecture = _architecture(snapshot.state)
    unknown = changed_parts(snapshot.state["config"]["model"])
    if architecture not in ARCHITECTURES:
        unknown = [f"model.architecture={architecture}"]
    if unknown:
        raise SnapshotError(
            f"{unknown[0]} has no form that transformers loads; use format=safetensors"
        )
    spec = read_model_spec(snapshot.state)
    model = build_around(spec.config(), spec.sizes, snapshot.model)
    code: dict[str, Content] = {}  # Python files for transformers, by name
    if isinstance(model, GPT):
        values = gpt2_values(model)
        tensors = gpt2_tensors(snapshot.model)
    else:
        assert isinstance(model, Modern)
        values = modern_values(model)
        tensors = snapshot.model
        code[MODELING.name] = MODELING.read_bytes()
    special = special_tokens(spec.tokenizer)
    ends = _begin_and_end(special)
    files = {MODEL: safetensors.torch.save(tensors, {"format": "pt"}), **code}
    files["config.json"] = json_file(
        {
            **values,
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
    files["tokenizer_config.json"] = json_file(
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


def _begin_and_end(special: dict[str, int]) -> dict[str, str]:
    """Return the names of the tokens before and after a text, as bos_token and eos_token.

    Args:
        special: Ids by name.
    """
    token_names = {}
    for kind, names in (("bos_token", BEGIN_NAMES), ("eos_token", END_NAMES)):
        known = [name for name in names if name in special]
        if known:
            token_names[kind] = known[0]
    return token_names
