"""Convert the configuration and weights of a model to those of transformers, and back.

The architecture `gpt` becomes a GPT-2. Its linear layers hold their weights transposed, and always
have biases.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from mingpt_ddp.models.gpt import GPT
from mingpt_ddp.models.modern import Modern

MODELING = Path(__file__).with_name("modeling_modern.py")  # part of each export of modern
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
NAMES = {theirs: ours for ours, theirs in GPT2_NAMES.items()}
LINEAR = ("attn.", "mlp.")
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
TENSOR_NAME = re.compile(r"(h\.(?P<block>\d+)\.)?(?P<module>[\w.]+)\.(?P<kind>weight|bias)")
SIZES = ("n_embd", "n_layer", "n_head")
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
# Values in a config.json that models/gpt.py can compute. The first one is the default.
ALLOWED = {
    "model_type": ("gpt2",),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "activation_function": ("gelu_new", *ACTIVATIONS),
}


def gpt2_values(model: GPT) -> dict[str, Any]:
    """Return the values of a GPT-2's config.json."""
    config = model.config
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": model.block_size,
        **{key: getattr(config, key) for key in SIZES},
        "activation_function": names[config.activation],
        **dict.fromkeys(DROPOUTS, config.dropout),
    }


def modern_values(model: Modern) -> dict[str, Any]:
    """Return the values of config.json for architecture modern. MODELING has its classes."""
    config = model.config
    code = MODELING.stem
    return {
        "model_type": "mingpt_modern",
        "architectures": ["ModernForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{code}.ModernConfig",
            "AutoModelForCausalLM": f"{code}.ModernForCausalLM",
        },
        "block_size": model.block_size,
        **{key: getattr(config, key) for key in SIZES},
        "dropout": config.dropout,
        "ngram_rows": config.ngram_rows,
        "tie_word_embeddings": False,
    }


def gpt2_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights by GPT-2's names."""
    by_their_name: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = "transformer."
        if name.startswith("blocks."):
            _, block, name = name.split(".", 2)
            prefix += f"h.{block}."
        part, _, kind = name.rpartition(".")
        module = GPT2_NAMES[part]
        if kind == "weight" and module not in ("wte", "wpe"):
            by_their_name.setdefault(f"{prefix}{module}.bias", tensor.new_zeros(len(tensor)))
        if kind == "weight" and module.startswith(LINEAR):
            tensor = tensor.T.contiguous()
        by_their_name[f"{prefix}{module}.{kind}"] = tensor
    return by_their_name


def model_values(config: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return the group `model`, and the vocabulary size and context length, of a config.json.

    Raises:
        ValueError: Architecture gpt cannot compute this model.
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
    """Return GPT-2's weights by our names.

    Raises:
        ValueError: GPT-2 has no tensor of a name, or the head is not the embedding.
    """
    if "head.weight" in tensors:  # architecture modern
        return tensors
    by_our_name = {}
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
        if kind == "weight" and module.startswith(LINEAR):
            tensor = tensor.T
        by_our_name[f"{prefix}{NAMES[module]}.{kind}"] = tensor.float()
    return by_our_name
