"""Check `at RUN step=N`, which repeats a step of a run and shows its text, losses and norms."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import yaml
from launching import TINY, WITH_DIGITS, call, python_main
from runs import error_line, read_history, succeed, tool
from snapshot_helpers import edit_state, flip_bit
from torch.nn import functional as F

import mingpt_ddp
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data.text.origins import find_origins
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.loop import Runtime, build_task, read_env

DOCUMENT_CHARACTERS = 512  # a document has four windows
STEPS = [
    *TINY,
    "trainer.max_steps=10",
    "trainer.eval_every=5",
    "snapshot.every_steps=4",
    "snapshot.keep_every=4",
    "snapshot.keep_best=false",
    "run.name=run",
]
ALL = ["model.dropout=0.1", "trainer.ema=0.9", "trainer.micro_batch_size=2"]  # accumulates


def train(cwd: Path, *words: str) -> Path:
    succeed([*python_main(), *STEPS, *words], cwd)
    return cwd / "outputs" / "run"


def at(cwd: Path, *words: str) -> dict[str, Any]:
    """Run the command. Return its JSON output."""
    done = call(tool("at", "outputs/run", *words, "format=json"), cwd, separate=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def logged(run: Path, step: int) -> dict[str, Any]:
    """Return the numbers that a run has logged for a step."""
    rows = read_history(run).rows
    [row] = [each for each in rows if each["step"] == step and "grad_norm" in each]
    return row


def refused(cwd: Path, *words: str) -> str:
    """Run the command, which must fail. Return its one line of output."""
    done = call(tool("at", "outputs/run", *words), cwd, separate=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    return error_line("\n".join(done.stderr.splitlines()[-1:]))


@pytest.fixture(scope="module")
def fast(tmp_path_factory) -> Path:
    """Train a run on two ranks with dropout. Return its working directory."""
    cwd = tmp_path_factory.mktemp("fast")
    train(cwd, "ddp.nproc_per_node=2", "model.dropout=0.1")
    return cwd


def plant(path: Path, corrupted: list[int]) -> None:
    """Write documents of 1 MB in total. The corrupted ones are random characters."""
    draw = random.Random(1)
    pages = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()
    characters = sorted({*pages} - {"\n"})
    with path.open("w") as file:
        for number in range(1, 2 * 1024 + 1):
            begin = number * DOCUMENT_CHARACTERS % (len(pages) - DOCUMENT_CHARACTERS)
            text = pages[begin : begin + DOCUMENT_CHARACTERS]
            if number in corrupted:
                text = "".join(draw.choices(characters, k=DOCUMENT_CHARACTERS))
            file.write(json.dumps({"text": text}) + "\n")


def steps_of(run: Path, documents: list[int]) -> dict[int, int]:
    """Return a late step for each document, in which a window lies inside the document."""
    config = from_mapping(yaml.safe_load((run / "config.yaml").read_text()))
    runtime = Runtime(config, read_env())
    task = build_task(config, runtime.group)
    loader = task.train_loader(runtime.device)
    steps = {}
    for step in range(60, 440):
        length = config.data.block_size + 1
        starts = loader.starts(step)
        for origins in find_origins(task.text, TextCache(config.data), starts, length):
            inside = {origin.document for origin in origins}
            if len(inside) == 1 and inside <= {*documents}:
                steps.setdefault(inside.pop(), step)
    return steps


def test_a_corrupted_document_is_listed_first(tmp_path):
    """The command finds the document in ten of ten steps, in a text of 1 MB."""
    corrupted = random.Random(2).sample(range(100, 1700), 10)
    plant(tmp_path / "documents.jsonl", corrupted)
    words = [
        *("model=gpt_nano", "model.n_layer=1", "model.n_embd=24", "trainer.precision=fp32"),
        *(f"data.path={tmp_path}/documents.jsonl", "data.column=text", "data.end_token=true"),
        *("data.block_size=128", "trainer.batch_size=16", "trainer.max_epochs=null"),
        *("trainer.max_steps=440", "trainer.eval_every=null", "trainer.log_every=1"),
        *(
            "snapshot.keep_every=20",
            "optimizer.lr=3e-3",
            "optimizer.warmup_steps=10",
            "run.name=run",
        ),
    ]
    succeed([*python_main(), *words], tmp_path)
    steps = steps_of(tmp_path / "outputs" / "run", corrupted)
    assert len(steps) == 10
    for document, step in steps.items():
        done = call(tool("at", "outputs/run", f"step={step}"), tmp_path, separate=True)
        first, second, *_, verdict = done.stdout.splitlines()
        assert re.match(rf" ?1\.  \d\.\d+  documents\.jsonl:{document} byte \d+ ", first), first
        assert float(first.split()[1]) > 1.1 * float(second.split()[1])
        assert verdict.startswith("the same bits as the run (compared: "), verdict


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (ALL, 1),
        (ALL, 2),
        ([], 3),
        ([*ALL, "ddp.reduction=canonical"], 2),
        ([*ALL, "ddp.strategy=zero1"], 2),
        ([*ALL, "ddp.strategy=fsdp"], 2),
        # One rank has a micro-batch less, and repeats one.
        (["trainer.micro_batch_size=4", "ddp.strategy=fsdp"], 2),
        (["task.label_smoothing=0.1", "optimizer=muon"], 2),
    ],
)
def test_a_step_has_the_same_bits_as_in_the_run(words, ranks, tmp_path):
    """The losses and norms of the repeated step equal those that the run has logged."""
    run = train(tmp_path, *words, f"ddp.nproc_per_node={ranks}")
    found = at(tmp_path, "step=8", "without=2")
    assert found["verdict"] == (
        "the same bits as the run (compared: 4 gradient norms, hashes of 1 step)"
    )
    row = logged(run, 8)
    losses = [sequence["loss"] for sequence in found["sequences"]]
    assert losses == sorted(losses, reverse=True) and len(losses) == 12
    assert math.isclose(sum(losses) / 12, row["train_loss"], rel_tol=1e-6)
    assert math.isclose(found["loss"], row["train_loss"], rel_tol=1e-6)
    assert math.isclose(found["grad_norm"], row["grad_norm"], rel_tol=1e-5)
    assert {"token_embedding", "blocks.0", "blocks.1"} <= found["layers"].keys()
    assert math.isclose(math.hypot(*found["layers"].values()), row["grad_norm"], rel_tol=1e-5)
    rest = [*losses[:1], *losses[2:]]
    assert math.isclose(found["without"]["loss"], sum(rest) / 11, rel_tol=1e-9)
    assert found["without"]["grad_norm"] != found["grad_norm"]


def test_from_python_the_losses_belong_to_the_model_before_the_step(tmp_path, monkeypatch):
    """The gradient norms too belong to that model, with all sequences and without one."""
    run = train(tmp_path, "ddp.nproc_per_node=2", "trainer.ema=0.9")
    monkeypatch.chdir(tmp_path)
    # The model before step 7 is in a snapshot of the repeated run, and before step 9 in the run's.
    for step in (7, 9):
        found = mingpt_ddp.at(run, step, without=3)
        before = found["before"]
        assert before.step == step - 1
        tokens = found["tokens"]
        for kept, norms in (([*range(12)], found), ([0, 1, *range(3, 12)], found["without"])):
            before.model.zero_grad()
            logits = before.model(tokens[kept, :-1])
            losses = F.cross_entropy(logits.mT, tokens[kept, 1:], reduction="none").mean(dim=1)
            torch.testing.assert_close(losses, found["losses"][kept], rtol=1e-5, atol=1e-5)
            losses.mean().backward()
            gradients = [parameter.grad for parameter in before.model.parameters()]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            assert math.isclose(norm, norms["grad_norm"], rel_tol=1e-4)
        texts = [sequence["text"] for sequence in found["sequences"]]
        assert texts == [before.tokenizer.decode(row) for row in tokens.tolist()]
    assert mingpt_ddp.at(run, 1)["before"] is None


def test_one_rank_is_close_to_several(fast):
    found = at(fast, "step=7", "nproc_per_node=1")
    assert found["verdict"].startswith("not the same bits, but equal within about 1e-6; ")
    assert "world_size was 2 and is 1" in found["verdict"]
    row = logged(fast / "outputs/run", 7)
    assert math.isclose(found["loss"], row["train_loss"], rel_tol=1e-5)


def test_the_worst_step_has_the_largest_logged_loss(fast):
    run = fast / "outputs/run"
    losses = dict(read_history(run).series("train_loss"))
    assert at(fast, "step=worst")["step"] == max(losses, key=losses.__getitem__)


def test_the_logging_interval_of_the_worst_step_is_named(tmp_path):
    train(tmp_path, "trainer.log_every=5")
    done = call(tool("at", "outputs/run", "step=worst"), tmp_path, separate=True)
    first, second, *_ = done.stderr.splitlines()
    assert first.startswith("the largest logged loss is the mean of steps 1 to 5; ")
    assert second.startswith("repeating 1 step from the snapshot of step 4, about 0:00:0")
    assert "compared: 1 gradient norm, hashes of 0 steps" in done.stdout


def test_a_step_whose_loss_is_not_finite_can_be_inspected(tmp_path):
    """The run has stopped at this step."""
    words = [*STEPS, "optimizer.lr=1e20", "optimizer.warmup_steps=0", "snapshot.every_steps=1"]
    assert call([*python_main(), *words], tmp_path).returncode == 2
    rows = read_history(tmp_path / "outputs/run").rows
    [worst] = [row["step"] for row in rows if row.get("train_loss", 0) is None]
    found = at(tmp_path, "step=worst")
    assert (found["step"], found["loss"]) == (worst, None)


def test_steps_that_cannot_be_repeated_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text("a text of some length\n" * 200)
    run = train(tmp_path, "data.path=text.txt", "data.truncate=1")
    assert "step=11 is beyond the end of the run; choose a step up to 10" in refused(
        tmp_path, "step=11"
    )
    assert "without=13 must be at most 12" in refused(tmp_path, "step=7", "without=13")
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(text.replace("a", "b", 1))
    for step in (3, 7):  # step 3 is repeated from the start, step 7 from a snapshot
        assert "SHA-256" in refused(tmp_path, f"step={step}")
    (tmp_path / "text.txt").write_text(text)
    for snapshot in (run / "snapshots").iterdir():
        edit_state(snapshot, environment={"world_size": 9999})
    assert "ddp.nproc_per_node=9999 must be at most" in refused(tmp_path, "step=7")


def test_a_run_on_samples_is_refused(tmp_path):
    words = [WITH_DIGITS, "task=classification", "data=digits", "model=convnet"]
    steps = ["trainer.max_epochs=null", "trainer.max_steps=2", "run.name=run"]
    succeed([*python_main(), *words, *steps], tmp_path)
    line = refused(tmp_path, "step=1", f"words='{words[0]}' {' '.join(words[1:])}")
    assert "task.name=classification does not train on sequences of a text" in line


def test_a_damaged_snapshot_gives_other_bits(tmp_path):
    run = train(tmp_path)
    flip_bit(run / "snapshots" / "step_00000004", bit=20)
    verdict = at(tmp_path, "step=6")["verdict"]
    assert verdict.startswith(
        "not the same bits as the run: the snapshot of step 4 holds another model"
    )
