"""Exports in the format of transformers, checked without that library.

GPT-2 is computed by its formulas, and tokenizers are read by the tokenizers library.
"""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
import safetensors.torch
import torch
from snapshot_helpers import bpe_with_special, random_snapshot
from tokenizers import Tokenizer as TokenizersTokenizer
from torch.nn import functional as F

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data.tokenizers.bpe import train_bpe
from mingpt_ddp.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer
from mingpt_ddp.data.tokenizers.tokenizer_base import END, END_NAME, Tokenizer
from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.models import build_model
from mingpt_ddp.snapshots.exports.transformers_export import transformers_files
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.transformers_format.model_files import MODELING_FILE
from mingpt_ddp.snapshots.transformers_format.tokenizer_files import tokenizer_json

# Line ends, spaces of every width, a combining accent, an astral character, a joiner, control
# characters, and characters that are special in tokenizers and JSON.
ODD = "\n\r\t a\u00a0\u3000e\u0301é😀\u200d\x00\x85\ufeff\"\\'<|/>#[]Ġ▁"
BLOCK_SIZE = 16


def gpt2(config: dict[str, Any], t: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Return GPT-2's logits for one text (T,). Linear layers are x W + b; epsilon is 1e-5."""
    C, H = config["n_embd"], config["n_head"]
    approximate = {"gelu": "none", "gelu_new": "tanh"}[config["activation_function"]]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (C,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)

    x = t["transformer.wte.weight"][tokens] + t["transformer.wpe.weight"][: len(tokens)]
    for i in range(config["n_layer"]):
        h = f"transformer.h.{i}"
        q, k, v = (
            part.view(-1, H, C // H).transpose(0, 1)
            for part in linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(C, dim=1)
        )
        future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        weights = (
            (q @ k.transpose(1, 2) / (C // H) ** 0.5).masked_fill(future, -torch.inf).softmax(-1)
        )
        x = x + linear((weights @ v).transpose(0, 1).reshape(-1, C), f"{h}.attn.c_proj")
        hidden = F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate=approximate)
        x = x + linear(hidden, f"{h}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ t["transformer.wte.weight"].T


@pytest.mark.parametrize(
    "how", [["model.bias=false"], ["model.bias=true", "model.activation=gelu_tanh"]]
)
def test_an_exported_gpt_computes_what_gpt2_computes(how):
    saved = random_snapshot(CharTokenizer(ODD), "model=gpt_nano", *how)
    files = transformers_files(saved)
    assert {*files} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config, tensors = (
        json.loads(files["config.json"]),
        safetensors.torch.load(files["model.safetensors"]),
    )
    assert (config["model_type"], config["vocab_size"], config["n_positions"]) == (
        "gpt2",
        len(ODD),
        BLOCK_SIZE,
    )
    assert config["eos_token_id"] is None  # transformers' default is 50256
    tokens = torch.arange(BLOCK_SIZE) % len(ODD)
    model = build_model(from_mapping(saved.state["config"]).model, len(ODD), BLOCK_SIZE)
    model.load_state_dict(saved.model)
    with torch.no_grad():
        expected = model(tokens[None])[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(gpt2(config, tensors, tokens), expected, atol=1e-4, rtol=0)


def test_an_exported_modern_model_includes_its_code():
    """tests/e2e/test_transformers.py runs that code."""
    saved = random_snapshot(CharTokenizer(ODD), "model=modern_nano")
    files = transformers_files(saved)
    names = {
        node.name
        for node in ast.parse(files[MODELING_FILE.name]).body
        if isinstance(node, ast.ClassDef)
    }
    modules = {
        tuple(name.split(".")) for name in json.loads(files["config.json"])["auto_map"].values()
    }
    assert {f"{module}.py" for module, _ in modules} == {MODELING_FILE.name} and {
        name for _, name in modules
    } <= names
    assert safetensors.torch.load(files["model.safetensors"]).keys() == saved.model.keys()


@pytest.mark.parametrize("name", ["convnet", "mine"])
def test_other_architectures_are_refused(name):
    state = {"config": {"model": {"architecture": name}}, "data": {"sha256": ""}}
    with pytest.raises(
        SnapshotError,
        match=f"error: model.architecture={name} cannot be exported for transformers; use for",
    ):
        transformers_files(Snapshot(4, {}, {}, state))
    with pytest.raises(SnapshotError, match="it does not name the archi"):
        transformers_files(Snapshot(4, {}, {}, {"config": 3}))


def test_weights_of_another_model_are_refused():
    saved = random_snapshot(CharTokenizer(ODD), "model=gpt_nano", vocabulary=ODD + "x")
    with pytest.raises(SnapshotError, match="the snapshot's weights do not fit the model"):
        transformers_files(saved)


def check_round_trip(tokenizer: Tokenizer, texts: list[str]) -> TokenizersTokenizer:
    theirs = TokenizersTokenizer.from_str(tokenizer_json(tokenizer).decode())
    assert theirs.get_vocab_size() == tokenizer.vocab_size
    for text in texts:
        tokens = theirs.encode(text).ids
        assert tokens == tokenizer.encode(text)
        assert theirs.decode(tokens) == text
    return theirs


def test_a_character_tokenizer_round_trips():
    text = "".join(a + b for a in ODD for b in ODD)
    theirs = check_round_trip(CharTokenizer(ODD), [*ODD, text, "  \n\n ", ""])
    with pytest.raises(Exception, match="Missing"):  # like our error, it names the character
        theirs.encode("z")


def test_half_a_character_is_refused():
    with pytest.raises(SnapshotError, match="half a character"):
        tokenizer_json(CharTokenizer("a\ud83d"))


def test_a_byte_tokenizer_round_trips():
    check_round_trip(
        ByteTokenizer(),
        [*ODD, "".join(a + b for a in ODD for b in ODD), "".join(map(chr, range(0x250)))],
    )


def test_a_bpe_tokenizer_round_trips():
    tokenizer = train_bpe(iter([f"the quick brown fox {ODD}" * 20]), 300)
    assert tokenizer.vocab_size == 300
    check_round_trip(
        tokenizer, [*ODD, "the quick  brown fox\n\n", "".join(a + b for a in ODD for b in ODD)]
    )


@pytest.mark.parametrize(
    ("special", "begin", "end"),
    [
        (["<|endoftext|>"], "<|endoftext|>", "<|endoftext|>"),
        (["<pad>", "</s>", "<s>", "<|endoftext|>"], "<s>", "</s>"),
        (["<pad>", "</s>"], None, "</s>"),
        (["<|python|>"], None, None),
        ([], None, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["gpt_nano", "modern_nano"])
def test_the_tokens_that_begin_and_end_a_text_are_named(model, special, begin, end):
    tokenizer = bpe_with_special(*special)
    files = transformers_files(random_snapshot(tokenizer, f"model={model}"))
    config = json.loads(files["config.json"])
    named = json.loads(files["tokenizer_config.json"])
    for kind, name in (("bos_token", begin), ("eos_token", end)):
        assert named.get(kind) == name
        expected = None if name is None else tokenizer.encode(name)
        found = config[f"{kind}_id"]
        assert expected == (None if found is None else [found])


@pytest.mark.parametrize(
    "tokenizer",
    [CharTokenizer(f"\n {END}abß<|>"), ByteTokenizer(has_end=True), bpe_with_special().with_end()],
    ids=["char", "byte", "bpe"],
)
def test_the_end_token_of_documents_is_the_end_of_text_token(tokenizer):
    """If its name occurs in a text, it is ordinary text."""
    files = transformers_files(random_snapshot(tokenizer, "model=gpt_nano"))
    config = json.loads(files["config.json"])
    named = json.loads(files["tokenizer_config.json"])
    assert (config["eos_token_id"], config["vocab_size"]) == (tokenizer.end, tokenizer.vocab_size)
    assert (named["eos_token"], named["pad_token"]) == (END_NAME, END_NAME)
    assert named["split_special_tokens"] is True
    theirs = TokenizersTokenizer.from_str(bytes(files["tokenizer.json"]).decode())
    assert theirs.token_to_id(END_NAME) == tokenizer.end
    assert theirs.get_vocab_size() == tokenizer.vocab_size
    theirs.encode_special_tokens = True  # transformers sets this too
    for text in ("ab", "<|>ß", "" if tokenizer.name == "char" else f"a{END_NAME}b"):
        tokens = theirs.encode(text).ids
        assert tokens == tokenizer.encode(text)
        assert theirs.decode([*tokens, tokenizer.end]) == text
