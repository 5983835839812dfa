"""Train on BPE tokens of two weighted sources, and use the run in other commands.

SIGKILL does not change the bits.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from holding import kill_before
from launching import ROOT, TINY, call, committed, python_main
from runs import fail, read_result, succeed, tensor_files, tool

pytest.importorskip("tokenizers")
STEPS = 30
SETTINGS = [
    *TINY,
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=10",
    "data.truncate=1",
    "ddp.nproc_per_node=2",
    "data.tokenizer=bpe",
    "data.vocab_size=300",
    "data.sources=[[a.txt,3],[more,1]]",
    "run.name=run",
    "data.val_paths={wiki:wiki.txt}",
    "data.cache_dir=cache",
    "snapshot.every_steps=5",
]


def texts(cwd: Path) -> Path:
    (cwd / "more").mkdir(parents=True)
    (cwd / "a.txt").write_text(
        "".join(f"line {i} of the grüne book, {i * i}.\n" for i in range(400))
    )
    (cwd / "more/b.txt").write_text("other words — “quoted” 😀\n" * 200)
    (cwd / "wiki.txt").write_text("an article of the encyclopedia\n" * 20)
    return cwd


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    cwd = texts(tmp_path_factory.mktemp("tokens") / "whole")
    succeed([*python_main(), *SETTINGS], cwd)
    return cwd


def test_a_killed_run_resumes_to_the_same_bytes(trained, tmp_path):
    """The encoded text and the tokenizer's file may be gone. The snapshot has the tokenizer."""
    cwd = texts(tmp_path / "killed")
    run = cwd / "outputs/run"
    kill_before(8, [*python_main(), *SETTINGS], cwd, lambda: committed(run))
    assert not (run / "result.json").exists()
    shutil.rmtree(cwd / "cache")
    printed = succeed([*python_main(), *SETTINGS], cwd)
    assert "resuming from the snapshot" in printed, printed
    assert tensor_files(run, STEPS) == tensor_files(trained / "outputs/run", STEPS)
    assert (run / "tokenizer.json").read_bytes() == (
        trained / "outputs/run/tokenizer.json"
    ).read_bytes()


def test_the_result_compares_tokenizers(trained):
    result = read_result(trained / "outputs/run")
    assert result["bits_per_byte"] == result["val_bits_per_byte"] < result["bits_per_char"]
    assert math.isfinite(result["val_wiki_loss"])
    # The text is ASCII, so a byte is a character.
    assert result["val_wiki_bits_per_byte"] == pytest.approx(result["val_wiki_bits_per_char"])
    values = json.loads((trained / "outputs/run/tokenizer.json").read_text())
    assert len(values["model"]["vocab"]) == 300


def test_the_commands_use_the_tokenizer_of_the_run(trained):
    command = tool("sample", "outputs/run", "prompt=grün 😀", "max_new_tokens=20")
    done = call(command, trained, separate=True)
    assert done.returncode == 0 and done.stdout.startswith("grün 😀"), done.stderr
    command = tool("evaluate", "outputs/run", "device=cpu", "precision=fp32")
    own = json.loads(call(command, trained, separate=True, PYTHONPATH=str(ROOT)).stdout)
    assert own["loss"] == pytest.approx(read_result(trained / "outputs/run")["val_loss"], rel=1e-5)
    other = json.loads(
        call([*command, "data.path=wiki.txt"], trained, separate=True, PYTHONPATH=str(ROOT)).stdout
    )
    assert other["loss"] == pytest.approx(own["wiki_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.vocab_size=301", "data.vocab_size (300 in the snapshot, 301 now)"),
        ("data.sources=[[a.txt,1],[more,1]]", "data.sources"),
        ("data.tokenizer=nowhere.json", "data.tokenizer"),
    ],
)
def test_another_tokenizer_or_mixture_is_refused(override, message, trained):
    settings = [s for s in SETTINGS if not s.startswith(override.partition("=")[0])]
    settings = [
        s for s in settings if not (s.startswith("data.vocab_size") and "tokenizer" in override)
    ]
    printed = fail(
        [*python_main(), *settings, override, "trainer.max_steps=40", "ddp.nproc_per_node=null"],
        trained,
    )
    assert message in printed, printed
