"""Convert the configuration and weights of a model to the format of transformers, and back.

A model of architecture `gpt` becomes a GPT-2. In a GPT-2, the weights of linear layers are
transposed, and every linear layer and norm has a bias.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from mingpt_ddp.models.gpt import GPT
from mingpt_ddp.models.modern import Modern

# This file is copied into every export of a model of architecture modern.
MODELING_FILE = Path(__file__).with_name("modeling_modern.py")
# Name of a module in our gpt -> its name in GPT-2.
GPT2_NAMES = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "norm": "ln_f",
    "norm_1": "ln_1",
    "norm_2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
OUR_NAMES = {theirs: ours for ours, theirs in GPT2_NAMES.items()}
LINEAR_PREFIXES = ("attn.", "mlp.")  # GPT-2 stores the weights of these layers transposed
# Name of an activation in transformers -> our name.
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
TENSOR_NAME = re.compile(r"(h\.(?P<block>\d+)\.)?(?P<module>[\w.]+)\.(?P<kind>weight|bias)")
SIZE_KEYS = ("n_embd", "n_layer", "n_head")
DROPOUT_KEYS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
# The values in a GPT-2's config.json with which models/gpt.py computes the same function. The first
# value of each key is the default in transformers.
SUPPORTED_VALUES = {
    "model_type": ("gpt2",),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "activation_function": ("gelu_new", *ACTIVATIONS),
}


def gpt2_values(model: GPT) -> dict[str, Any]:
    """Return the values of config.json for a model of architecture gpt, as a GPT-2."""
    config = model.config
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": model.block_size,
        **{key: getattr(config, key) for key in SIZE_KEYS},
        "activation_function": names[config.activation],
        **dict.fromkeys(DROPOUT_KEYS, config.dropout),
    }


def modern_values(model: Modern) -> dict[str, Any]:
    """Return the values of config.json for a model of architecture modern.

    `auto_map` names its classes, which are in MODELING_FILE.
    """
    config = model.config
    code = MODELING_FILE.stem
    return {
        "model_type": "mingpt_modern",
        "architectures": ["ModernForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{code}.ModernConfig",
            "AutoModelForCausalLM": f"{code}.ModernForCausalLM",
        },
        "block_size": model.block_size,
        **{key: getattr(config, key) for key in SIZE_KEYS},
        "dropout": config.dropout,
        "ngram_rows": config.ngram_rows,
        "tie_word_embeddings": False,
    }


def gpt2_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the weights of a model of architecture gpt to the names and shapes of a GPT-2."""
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = "transformer."
        if name.startswith("blocks."):
            _, block, name = name.split(".", 2)
            prefix += f"h.{block}."
        part, _, kind = name.rpartition(".")
        module = GPT2_NAMES[part]
        if kind == "weight" and module not in ("wte", "wpe"):
            converted.setdefault(f"{prefix}{module}.bias", tensor.new_zeros(len(tensor)))
        if kind == "weight" and module.startswith(LINEAR_PREFIXES):
            tensor = tensor.T.contiguous()
        converted[f"{prefix}{module}.{kind}"] = tensor
    return converted


def model_values(config: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, int]]:
    """Convert the values of an untrusted config.json to our configuration of the model.

    Returns:
        The values of the group `model`, and a pair of the vocabulary size and the context length.

    Raises:
        ValueError: No model of architecture gpt computes the same function as the model in
            config.json.
    """
    if config["model_type"] == "mingpt_modern":
        model = {"name": "modern", "architecture": "modern", "dropout": config["dropout"]}
        model |= {key: config[key] for key in SIZE_KEYS}
        model["ngram_rows"] = config.get("ngram_rows", 0)
        return model, (config["vocab_size"], config["block_size"])
    for key, values in SUPPORTED_VALUES.items():
        value = config.get(key, values[0])
        if value not in values:
            known = " or ".join(map(str, dict.fromkeys(values)))
            raise ValueError(f"{key} is {str(value)[:100]}, but must be {known}")
    width = config["n_embd"]
    if config.get("n_inner") not in (None, 4 * width):
        raise ValueError(
            f"n_inner is {str(config['n_inner'])[:100]}, but must be 4 n_embd = {4 * width}"
        )
    model = {
        "name": "gpt2",
        "architecture": "gpt",
        "bias": True,
        "dropout": config.get("resid_pdrop", 0.1),
    }
    model |= {key: config[key] for key in SIZE_KEYS}
    model["activation"] = ACTIVATIONS[config.get("activation_function", "gelu_new")]
    return model, (config["vocab_size"], config.get("n_positions", 1024))


def our_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the weights of a GPT-2 to the names and shapes of architecture gpt.

    Return the weights of a model of architecture modern as they are.

    Raises:
        ValueError: A tensor does not belong to a GPT-2, or the weights of the head differ from the
            embedding.
    """
    if "head.weight" in tensors:  # architecture modern
        return tensors
    converted = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix("transformer.")
        if re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", name):  # the causal mask
            continue
        if name == "lm_head.weight":
            embedding = tensors.get("transformer.wte.weight", tensors.get("wte.weight", tensor))
            if not tensor.equal(embedding):
                raise ValueError(
                    "lm_head.weight differs from wte.weight, but the architecture gpt uses one "
                    "matrix for both"
                )
            continue
        match = TENSOR_NAME.fullmatch(name)
        if match is None or match["module"] not in OUR_NAMES:
            raise ValueError(f"{full_name[:100]} is not a tensor of GPT-2")
        if not tensor.is_floating_point():
            raise ValueError(f"{full_name[:100]} has whole numbers, not weights")
        block, module, kind = match.group("block", "module", "kind")
        prefix = "" if block is None else f"blocks.{block}."
        if kind == "weight" and module.startswith(LINEAR_PREFIXES):
            tensor = tensor.T
        converted[f"{prefix}{OUR_NAMES[module]}.{kind}"] = tensor.float()
    return converted
