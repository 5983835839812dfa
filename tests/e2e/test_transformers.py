"""transformers loads an export: the same logits, the same text, the same continuation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, TINY, call, environment, python_main

from mingpt_ddp.inference.generate import SamplingParams, generate
from mingpt_ddp.snapshots.load_model import load_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # the first test trains all models

# Line ends, spaces of every width, a combining accent, astral characters, and what tokenizers treat as special.
CYCLE = "\n\r\tthe quick  brown\u00a0\u3000fox e\u0301é😀\u200d\x00\x85\"'<|/>#[]Ġ▁ jumps\n\n over,"
TEXT = CYCLE * 200
PROMPT = 8  # tokens
# By case: the overrides of a run. All exports are loaded by one process, since transformers takes long to import.
CASES = {
    "gpt": ["model=gpt_nano", "optimizer.lr=1e-2"],
    "biases": ["model=gpt_nano", "optimizer.lr=1e-2", "model.bias=true", "model.activation=gelu_tanh"],
    "bpe": ["model=gpt_nano", "optimizer.lr=1e-2", "data.tokenizer=bpe", "data.vocab_size=300"],
    "modern": ["model=modern_nano", "optimizer=muon"],
    "modern_bytes": ["model=modern_nano", "optimizer=muon", "data.tokenizer=byte"],
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
    found["ours"] = [name for name in sys.modules if name.split(".")[0] == "mingpt_ddp"]
    found["model"] = type(model).__name__
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return by case the run, and what transformers makes of its export and of the text, in a process without ours."""
    cwd = tmp_path_factory.mktemp("exports")
    (cwd / "text.txt").write_text(TEXT, encoding="utf-8", newline="")
    small = ["data=text_file", "data.path=text.txt", "data.truncate=1", "data.block_size=208", "trainer.max_steps=80"]
    limits = ["trainer.batch_size=4", "trainer.eval_every=null", "snapshot.every_steps=null"]
    for name, words in CASES.items():
        run = f"outputs/{name}"
        done = call([*python_main(), *TINY, *small, *limits, *words, f"run.name={name}"], cwd)
        assert done.returncode == 0, done.stdout
        export = [sys.executable, "-m", "mingpt_ddp.snapshots", "export", run, f"to=exports/{name}", "format=hf"]
        done = call(export, cwd, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stdout
    env = environment(cwd, HF_HOME=str(cwd / "hf"), HF_HUB_OFFLINE="1", PYTHONPATH="")
    command = [sys.executable, "-c", SCRIPT, *(f"exports/{name}" for name in CASES)]
    loaded = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    lines = [json.loads(line) for line in loaded.stdout.splitlines()]
    return {name: (cwd / "outputs" / name, line) for name, line in zip(CASES, lines, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_transformers_gives_the_same(name, found):
    run, theirs = found[name]
    assert theirs["ours"] == []
    assert theirs["model"] == ("ModernForCausalLM" if "modern" in name else "GPT2LMHeadModel")
    ours, tokenizer = load_model(str(run))
    ours.eval()
    assert theirs["tokens"] == tokenizer.encode(TEXT) and theirs["text"] == TEXT
    x = torch.tensor([theirs["tokens"][:100]])
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(theirs["logits"]), ours(x)[0], atol=1e-4, rtol=0)
    new = [int(token) for token in generate(ours, x[:, :PROMPT], 200, SamplingParams(temperature=0))]
    assert len({*new}) > 3  # it has learnt the text
    assert theirs["new"] == new and theirs["continuation"] == tokenizer.decode(new)
