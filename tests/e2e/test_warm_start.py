"""Check warm starts: a run on two ranks is killed, and resumes without the source of its weights.

Another source is a GPT-2 that the real transformers library has saved.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from holding import kill_before
from launching import TINY, environment, python_main
from runs import fail, succeed, tensor_files

import mingpt_ddp

STEPS = 40
MORE = [
    "trainer.batch_size=24",
    "model.dropout=0.1",
    f"trainer.max_steps={STEPS}",
    "snapshot.every_steps=8",
]
SIZES = ["model.n_layer", "model.n_embd", "data.block_size"]
# The command leaves out the settings that the weights determine.
TUNE = [
    word
    for word in TINY
    if word.partition("=")[0] not in ("model", *SIZES, "trainer.max_steps", "data.truncate")
]
GPT2 = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(1)
none = {"bos_token_id": None, "eos_token_id": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=90, n_positions=32, n_embd=24, n_layer=2, n_head=3, **none)).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
model.save_pretrained(sys.argv[1])
ids = torch.arange(32)[None] * 2
with torch.no_grad():
    torch.save({"ids": ids, "logits": model(ids).logits}, "theirs.pt")
"""  # noqa: E501


def test_killed_and_resumed_without_the_source(tmp_path):
    """The run has no name, and its text has characters that the source does not know."""
    sizes = [
        "model.n_embd=48",
        "data.block_size=64",
        "data.truncate=0.05",
        "trainer.max_steps=4",
        "trainer.batch_size=4",
    ]
    succeed([*python_main(), *TINY, *sizes, "run.name=source"], tmp_path)
    (tmp_path / "text.txt").write_text("The sea \u03b1\u03b2\u03b3, the shore.\n" * 400)
    command = [
        *python_main(),
        *TUNE,
        *MORE,
        "data=text_file",
        "data.path=text.txt",
        "run.init_from=outputs/source",
        "ddp.nproc_per_node=2",
    ]
    whole = succeed([*command, "run.name=whole"], tmp_path)
    started = "starting from the weights of run.init_from=outputs/source"
    assert whole.count(started) == 1

    saved = "outputs/text_file-from_source-*/snapshots/*/manifest.json"
    kill_before(13, command, tmp_path, lambda: any(tmp_path.glob(saved)))
    [run] = tmp_path.glob("outputs/text_file-from_source-*")
    shutil.rmtree(tmp_path / "outputs" / "source")
    printed = succeed(command, tmp_path)
    assert "resuming from the snapshot" in printed and started not in printed
    assert tensor_files(run, STEPS) == tensor_files(tmp_path / "outputs" / "whole", STEPS)
    fail([*command, "model.n_embd=24"], tmp_path)
    loaded = mingpt_ddp.load(str(run))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("\u03b1 sea")) == "\u03b1 sea"
    assert len(loaded.model.state_dict()["position_embedding.weight"]) == 64


@pytest.mark.integration
def test_a_gpt2_of_transformers(tmp_path):
    """The logits equal those before the first step, since the only step changes nothing."""
    words = [sys.executable, "-c", GPT2, "gpt2"]
    subprocess.run(words, cwd=tmp_path, env=environment(tmp_path), check=True, capture_output=True)
    frozen = ["trainer.max_steps=1", "optimizer.lr=1e-30", "optimizer.weight_decay=0", "run.name=a"]
    succeed([*python_main(), *TUNE, *frozen, "run.init_from=gpt2", "data.truncate=0.05"], tmp_path)
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    ours = mingpt_ddp.load(str(tmp_path / "outputs" / "a"))
    with torch.no_grad():
        logits = ours.model.eval()(theirs["ids"])
    n = min(90, ours.tokenizer.vocab_size)
    torch.testing.assert_close(logits[..., :n], theirs["logits"][..., :n], atol=1e-4, rtol=0)
