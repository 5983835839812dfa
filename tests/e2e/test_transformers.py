"""Check that transformers loads an export, and gives the same logits, texts and continuations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import PATIENCE_S, TINY, environment, python_main
from runs import succeed, tool

from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state
from mingpt_ddp.inference.generate import SamplingParams, generate
from mingpt_ddp.snapshots.read.initial_weights import read_initial_weights
from mingpt_ddp.snapshots.read.load_model import load_model

# The first test trains all models.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(3 * PATIENCE_S)]

# The text has line ends, spaces of every width, a combining accent, astral characters, and
# characters that tokenizers treat as special.
CYCLE = "\n\r\tthe quick  brown\u00a0\u3000fox e\u0301é😀\u200d\x00\x85\"'<|/>#[]Ġ▁ jumps\n\n over,"
TEXT = CYCLE * 200
PROMPT_TOKENS = 8
# The overrides of a run by the name of the case. One process loads all exports, since transformers
# takes long to import.
CASES = {
    "gpt": ["model=gpt_nano", "optimizer.lr=1e-2"],
    "biases": [
        "model=gpt_nano",
        "optimizer.lr=1e-2",
        "model.bias=true",
        "model.activation=gelu_tanh",
        "data.end_token=true",
    ],
    "bpe": ["model=gpt_nano", "optimizer.lr=1e-2", "data.tokenizer=bpe", "data.vocab_size=300"],
    "modern": ["model=modern_nano", "optimizer=muon"],
    "modern_ngrams": ["model=modern_nano", "model.ngram_rows=512", "optimizer=muon"],
    "modern_bytes": [
        "model=modern_nano",
        "optimizer=muon",
        "data.tokenizer=byte",
        "data.end_token=true",
    ],
}
SCRIPT = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
text = open("text.txt", encoding="utf-8", newline="").read()
for directory in sys.argv[1:]:
    trust = {"trust_remote_code": True} if "modern" in directory else {}
    tokenizer = AutoTokenizer.from_pretrained(directory, **trust)
    model = AutoModelForCausalLM.from_pretrained(directory, **trust)
    tokens = tokenizer(text)["input_ids"]
    x = torch.tensor([tokens[:100]])
    with torch.no_grad():
        logits = model(x).logits[0]
    new = model.generate(x[:, :8], max_new_tokens=200, do_sample=False)[0, 8:].tolist()
    found = {"tokens": tokens, "text": tokenizer.decode(tokens), "logits": logits.tolist(), "new": new}
    found["continuation"] = tokenizer.decode(new)
    found["kept"] = [tokenizer.decode(tokens, skip_special_tokens=skip) == text for skip in (True, False)]
    prompts = [text[:9], text[3:30], text[11:12]]
    alone, differences = [tokenizer([prompt], return_tensors="pt") for prompt in prompts], []
    for side in ("left", "right"):
        tokenizer.padding_side = side
        batch = tokenizer(prompts, padding=True, return_tensors="pt")
        mask = batch["attention_mask"].bool()
        positions = (mask.cumsum(-1) - 1).clamp_min(0)  # GPT-2 would count the padding
        with torch.no_grad():
            logits = model(**batch, position_ids=positions).logits
            pairs = [(logits[i][mask[i]], model(**one).logits[0]) for i, one in enumerate(alone)]
        differences += [float((row - one).abs().max()) for row, one in pairs]
    found["difference"], found["rows"] = max(differences), len(model.get_input_embeddings().weight)
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    width, new = batch["input_ids"].shape[1], {"max_new_tokens": 220 if trust else 60, "do_sample": False}
    together = model.generate(**batch, **new)[:, width:].tolist()
    found["generated"] = [
        together[i] == model.generate(**one, **new)[0, one["input_ids"].shape[1] :].tolist()
        for i, one in enumerate(alone)
    ]
    for part in (model, tokenizer):
        part.save_pretrained(f"saved/{directory}")
    found["ours"] = [name for name in sys.modules if name.split(".")[0] == "mingpt_ddp"]
    found["model"] = type(model).__name__
    print(json.dumps(found))
"""  # noqa: E501


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Train and export all cases. Load the exports with transformers, in a process that cannot
    import the package.

    Returns:
        The run and the results of transformers by the name of the case.
    """
    cwd = tmp_path_factory.mktemp("exports")
    (cwd / "text.txt").write_text(TEXT, encoding="utf-8", newline="")
    small = [
        "data=text_file",
        "data.path=text.txt",
        "data.format=text",  # needed because the text has NUL characters
        "data.truncate=1",
        "data.block_size=208",
        "trainer.max_steps=80",
    ]
    limits = ["trainer.batch_size=4", "trainer.eval_every=null", "snapshot.every_steps=null"]
    for name, words in CASES.items():
        run = f"outputs/{name}"
        succeed([*python_main(), *TINY, *small, *limits, *words, f"run.name={name}"], cwd)
        export = tool("snapshots", "export", run, f"to=exports/{name}", "format=hf")
        succeed(export, cwd)
    env = environment(cwd, HF_HOME=str(cwd / "hf"), HF_HUB_OFFLINE="1", PYTHONPATH="")
    command = [sys.executable, "-c", SCRIPT, *(f"exports/{name}" for name in CASES)]
    loaded = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    lines = [json.loads(line) for line in loaded.stdout.splitlines()]
    return {name: (cwd / "outputs" / name, line) for name, line in zip(CASES, lines, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_texts_of_unequal_length(name, found):
    """Padding changes no logits, continuations or texts, and adds no row to the embedding."""
    run, theirs = found[name]
    assert theirs["difference"] < 1e-5
    assert theirs["generated"] == [True] * 3
    assert theirs["kept"] == [True, True]
    assert theirs["rows"] == load_model(str(run))[1].vocab_size


@pytest.mark.parametrize("name", CASES)
def test_files_saved_by_transformers_are_read_again(name, found):
    run, theirs = found[name]
    weights = read_initial_weights(str(run.parents[1] / "saved" / "exports" / name))
    assert tokenizer_from_state(weights.tokenizer_state).encode(TEXT) == theirs["tokens"]
    exported = read_initial_weights(str(run.parents[1] / "exports" / name))
    assert (weights.model, weights.sizes, weights.sha256()) == (
        exported.model,
        exported.sizes,
        exported.sha256(),
    )


@pytest.mark.parametrize("name", CASES)
def test_transformers_gives_the_same_results(name, found):
    run, theirs = found[name]
    assert theirs["ours"] == []
    assert theirs["model"] == ("ModernForCausalLM" if "modern" in name else "GPT2LMHeadModel")
    ours, tokenizer = load_model(str(run))
    ours.eval()
    assert theirs["tokens"] == tokenizer.encode(TEXT) and theirs["text"] == TEXT
    x = torch.tensor([theirs["tokens"][:100]])
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(theirs["logits"]), ours(x)[0], atol=1e-4, rtol=0)
    new = [
        int(token)
        for token in generate(ours, x[:, :PROMPT_TOKENS], 200, SamplingParams(temperature=0))
    ]
    assert len({*new}) > 3  # the model has learnt the text
    assert theirs["new"] == new and theirs["continuation"] == tokenizer.decode(new)
