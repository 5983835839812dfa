"""Create the files from which the transformers library loads a model and its tokenizer.

A model of architecture `gpt` becomes a GPT-2, for which transformers has the code. transformers has
no code for the architecture `modern`, so the export contains that code, in modeling_modern.py.
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
from mingpt_ddp.snapshots.read.load_model import build_from_tensors, read_model_spec
from mingpt_ddp.snapshots.transformers_format.model_files import (
    MODELING_FILE,
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

# Without these values, transformers would assume the special tokens of GPT-2.
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Usual names of the token that begins a text. tokenizer.json does not say which token it is.
BEGIN_NAMES = (
    "<s>",
    "<bos>",
    "<|bos|>",
    "[BOS]",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<|endoftext|>",  # in GPT-2, the same token begins and ends a text
)
ARCHITECTURES = ("gpt", "modern")


def transformers_files(snapshot: Snapshot) -> dict[str, Content]:
    """Create the files of an export for transformers, by name.

    Raises:
        SnapshotError: transformers cannot load this architecture, or the snapshot is damaged.
    """
    architecture = _architecture(snapshot.state)
    unsupported = changed_parts(snapshot.state["config"]["model"])
    if architecture not in ARCHITECTURES:
        unsupported = [f"model.architecture={architecture}"]
    if unsupported:
        raise SnapshotError(
            f"{unsupported[0]} cannot be exported for transformers; use format=safetensors"
        )
    spec = read_model_spec(snapshot.state)
    model = build_from_tensors(spec.config(), spec.sizes, snapshot.model)
    code: dict[str, Content] = {}  # Python files in the export, by name
    if isinstance(model, GPT):
        values = gpt2_values(model)
        tensors = gpt2_tensors(snapshot.model)
    else:
        assert isinstance(model, Modern)
        values = modern_values(model)
        tensors = snapshot.model
        code[MODELING_FILE.name] = MODELING_FILE.read_bytes()
    special = special_tokens(spec.tokenizer)
    begin_and_end = _begin_and_end(special)
    files = {MODEL: safetensors.torch.save(tensors, {"format": "pt"}), **code}
    files["config.json"] = json_file(
        {
            **values,
            "vocab_size": spec.tokenizer.vocab_size,
            "dtype": "float32",
            "torch_dtype": "float32",
            **NO_SPECIAL_TOKENS,
            **{f"{kind}_id": special[name] for kind, name in begin_and_end.items()},
        }
    )
    if isinstance(spec.tokenizer, NoTokenizer):
        return files
    files["tokenizer.json"] = tokenizer_json(spec.tokenizer)
    files["tokenizer_config.json"] = json_file(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            # Leave out token_type_ids, which GPT-2 would embed.
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": spec.block_size,
            # `generate` adds new tokens after the last column, which must not be padding.
            "padding_side": "left",
            **padding(spec.tokenizer),
            **begin_and_end,
        }
    )
    return files


def _architecture(state: Any) -> str:
    try:
        return str(state["config"]["model"]["architecture"])
    except (LookupError, TypeError) as error:
        raise SnapshotError(
            "the snapshot has an invalid state: it does not name the architecture of the model; "
            "use another snapshot"
        ) from error


def _begin_and_end(special: dict[str, int]) -> dict[str, str]:
    """Find the tokens that begin and end a text. Return their names, as bos_token and eos_token.

    Args:
        special: Ids of the special tokens, by name.
    """
    token_names = {}
    for kind, names in (("bos_token", BEGIN_NAMES), ("eos_token", END_NAMES)):
        known = [name for name in names if name in special]
        if known:
            token_names[kind] = known[0]
    return token_names
