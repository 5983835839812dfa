"""transformers loads an export: the same logits, the same text, the same continuation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import ROOT, TINY, call, environment, python_main

from mingpt_ddp.inference.generate import SamplingParams, generate
from mingpt_ddp.snapshots.load_model import load_model

pytestmark = pytest.mark.integration

# Line ends, spaces of every width, a combining accent, astral characters, and what tokenizers treat as special.
CYCLE = "\n\r\tthe quick  brown\u00a0\u3000fox e\u0301é😀\u200d\x00\x85\"'<|/>#[]Ġ▁ jumps\n\n over,"
TEXT = CYCLE * 200
PROMPT = 8  # tokens
SCRIPT = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
directory, text = sys.argv[1], open(sys.argv[2], encoding="utf-8", newline="").read()
trust = json.loads(sys.argv[3])
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


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt_nano", ["optimizer.lr=1e-2"]),
        ("gpt_nano", ["optimizer.lr=1e-2", "model.bias=true", "model.activation=gelu_tanh"]),
        ("gpt_nano", ["optimizer.lr=1e-2", "data.tokenizer=bpe", "data.vocab_size=300"]),
        ("modern_nano", ["optimizer=muon"]),
        ("modern_nano", ["optimizer=muon", "data.tokenizer=byte"]),
    ],
)
def test_transformers_gives_the_same(model, words, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8", newline="")
    small = ["data=text_file", "data.path=text.txt", "data.truncate=1", "data.block_size=208", "trainer.max_steps=80"]
    limits = ["trainer.batch_size=4", "trainer.eval_every=null", "snapshot.every_steps=null"]
    done = call([*python_main(), *TINY, f"model={model}", *small, *limits, *words, "run.name=a"], tmp_path)
    assert done.returncode == 0, done.stdout
    export = [sys.executable, "-m", "mingpt_ddp.snapshots", "export", "outputs/a", "to=exported", "format=hf"]
    done = call(export, tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout

    found = load_by_transformers(tmp_path, trust=model.startswith("modern"))
    assert found["ours"] == []
    assert found["model"] == ("ModernForCausalLM" if model.startswith("modern") else "GPT2LMHeadModel")
    ours, tokenizer = load_model(str(tmp_path / "outputs" / "a"))
    ours.eval()
    assert found["tokens"] == tokenizer.encode(TEXT) and found["text"] == TEXT
    x = torch.tensor([found["tokens"][:100]])
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found["logits"]), ours(x)[0], atol=1e-4, rtol=0)
    new = [int(token) for token in generate(ours, x[:, :PROMPT], 200, SamplingParams(temperature=0))]
    assert len({*new}) > 3  # it has learnt the text
    assert found["new"] == new and found["continuation"] == tokenizer.decode(new)


def load_by_transformers(tmp_path: Path, trust: bool) -> dict:
    """Return what transformers makes of the export and of the text, in a process without our code."""
    arguments = ["-c", SCRIPT, "exported", "text.txt", json.dumps({"trust_remote_code": True} if trust else {})]
    env = environment(tmp_path, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1", PYTHONPATH="")
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
