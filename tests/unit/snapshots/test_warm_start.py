"""Runs that start from existing weights (run.init_from)."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TINY
from multiprocess.ranks import configure
from safetensors.torch import load_file, save_file
from torch import Tensor

from mingpt_ddp.cli.commands.evaluate import EvaluateConfig, evaluate
from mingpt_ddp.cli.commands.export import ExportConfig, export
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.config.keys.model_config import GPTConfig
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError, DataError, SnapshotError, UserError
from mingpt_ddp.models import build_model
from mingpt_ddp.models.gpt import GPT
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.read.initial_weights import read_initial_weights
from mingpt_ddp.snapshots.read.load_model import load_model
from mingpt_ddp.snapshots.transformers_format.model_files import OUR_NAMES
from mingpt_ddp.storage.run_directory import read_result
from mingpt_ddp.training.run import train_run

# With these settings, a step changes nothing, so that a snapshot has the weights of the start.
FROZEN = [
    "trainer.max_steps=1",
    "optimizer.lr=1e-30",
    "optimizer.weight_decay=0",
    "trainer.eval_every=null",
]
OTHER_SIZES = ["model.n_layer=1", "model.n_embd=18", "data.block_size=8", "model.dropout=0.25"]


def train(root: Path, name: str, *overrides: str, command_line_keys: tuple[str, ...] = ()) -> Path:
    """Train in this process. Return the run directory."""
    words = [
        *TINY,
        "trainer.device=cpu",
        "data.truncate=1.0",
        f"run.root={root}",
        f"run.name={name}",
        *overrides,
    ]
    config = from_mapping(configure(*words, f"data.cache_dir={root / 'cache'}"))
    runtime = Runtime(config, DistEnv())
    try:
        train_run(Job(config, frozenset(command_line_keys)), runtime)
    finally:
        runtime.close()
    return root / name


def tune(root: Path, text: Path, source: Path, *overrides: str, name: str = "run", **more: Any):
    """Train from weights. The step changes nothing, unless `overrides` say otherwise."""
    words = [f"data.path={text}", f"run.init_from={source}", *FROZEN, *overrides]
    return train(root, name, *words, **more)


def refused(
    root: Path,
    text: Path,
    source: Path,
    message: str,
    *overrides: str,
    kind: type[UserError] = UserError,
    **more: Any,
) -> None:
    """Check that the weights are refused in one line before anything is written."""
    before = sorted(root.rglob("*"))
    with pytest.raises(kind, match=message) as caught:
        tune(root, text, source, *overrides, name="refused", **more)
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(root.rglob("*")) == before


def state_of(directory: Path, step: int = 1) -> dict[str, Any]:
    return json.loads((directory / "snapshots" / f"step_{step:08d}" / "state.json").read_text())


def weights_of(directory: Path, step: int = 1) -> dict[str, Tensor]:
    return load_file(directory / "snapshots" / f"step_{step:08d}" / "model.safetensors")


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    (directory / "first.txt").write_text("the sea and the shore\n" * 60)
    (directory / "second.txt").write_text("A new text: the sea, 1234 \u03b1\U0001f30a!\n" * 60)
    return directory


def train_source(model: str, texts: Path) -> Path:
    """Train a run with its own model sizes on the first text."""
    overrides = [f"model={model}", "model.n_head=4", "trainer.max_steps=2", "run.seed=5"]
    return train(texts / model, "source", f"data.path={texts / 'first.txt'}", *overrides)


@pytest.fixture(scope="module")
def source(texts) -> Path:
    return train_source("gpt_nano", texts)


@pytest.fixture(scope="module")
def modern(texts) -> Path:
    return train_source("modern_nano", texts)


def write_gpt2(directory: Path, model: GPT, **changed: Any) -> dict[str, Tensor]:
    """Write a model as transformers would.

    Linear weights are transposed, and the head is stored in addition to the embedding to which it
    is tied.
    """
    config = model.config
    their_names = {ours: theirs for theirs, ours in OUR_NAMES.items()}
    tensors = {}
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        prefix = ""
        if module.startswith("blocks."):
            block, _, module = module.removeprefix("blocks.").partition(".")
            prefix = f"h.{block}."
        is_linear = tensor.dim() == 2 and prefix
        full = f"transformer.{prefix}{their_names[module]}.{kind}"
        tensors[full] = (tensor.T if is_linear else tensor).contiguous()
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    values = {
        "model_type": "gpt2",
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "resid_pdrop": 0.0,
        "n_positions": model.block_size,
        "vocab_size": model.token_embedding.num_embeddings,
        **changed,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    save_file(tensors, directory / "model.safetensors")
    return tensors


def small_gpt2(vocab_size: int) -> GPT:
    config = GPTConfig(
        name="g",
        architecture="gpt",
        n_layer=2,
        n_head=2,
        n_embd=12,
        bias=True,
        activation="gelu_tanh",
        dropout=0.0,
    )
    seed_everything("gpt2")
    model = GPT(config, vocab_size, 32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def tokenizer_json(vocabulary: str) -> str:
    return json.dumps(
        {"model": {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(vocabulary)}}}
    )


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("source", "run"),
        ("source", "safetensors"),
        ("source", "hf"),
        ("modern", "hf"),
    ],
)
def test_weights_sizes_and_characters_come_from_the_source(model, kind, texts, request):
    """Only the rows of added characters are new. They depend on the run's own seed."""
    source = request.getfixturevalue(model)
    url = source if kind == "run" else source.parent / kind
    if not url.exists():
        export(ExportConfig(str(source), str(url), format=kind))  # type: ignore[arg-type]
    other = [*OTHER_SIZES, "trainer.batch_size=4", "optimizer=sgd"]
    runs = [
        tune(source.parent, texts / "second.txt", url, *other, name=f"{name}-{kind}")
        for name in (("one", "again") if kind == "run" else ("one",))
    ]
    before, after, state = weights_of(source, 2), weights_of(runs[0]), state_of(runs[0])
    # GPT-2 always has biases
    has_biases = kind == "hf" and "blocks.0.norm_1.weight" in after
    assert before.keys() == {name for name in after if not (has_biases and name.endswith("bias"))}
    first, second = ((texts / f"{name}.txt").read_text() for name in ("first", "second"))
    assert state["vocabulary"] == "".join([*sorted(set(first)), *sorted(set(second) - set(first))])
    old, new = len(set(first)), len(set(first + second))
    assert new > old + 5
    for name, tensor in before.items():
        torch.testing.assert_close(after[name][: len(tensor)], tensor, rtol=0, atol=1e-7)
        assert len(after[name]) == (new if len(tensor) == old else len(tensor))
    changed = {"name": state["config"]["model"]["name"], "bias": True} if kind == "hf" else {}
    theirs = state_of(source, 2)["config"]["model"]
    assert state["config"]["model"] == {
        **theirs,
        **{key: value for key, value in changed.items() if key in theirs},
    }
    config = from_mapping(state["config"])
    assert config.data.block_size == 16
    seed_everything("weights", config.run.seed)
    fresh = build_model(config.model, new, 16).state_dict()
    torch.testing.assert_close(
        after["token_embedding.weight"][old:], fresh["token_embedding.weight"][old:]
    )
    ids = torch.tensor([[0, 3, 5, 2]])
    logits = [load_model(str(run))[0].eval()(ids)[..., :old] for run in (source, runs[0])]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=0)
    again = weights_of(runs[-1])
    assert all(again[name].equal(tensor) for name, tensor in after.items())
    sources = {state_of(run)["config"]["run"]["init_sha256"] for run in runs}
    assert has_biases or sources == {read_initial_weights(str(source)).sha256()}, (
        "the same for every form"
    )


def test_the_end_token_and_new_characters_are_added(source, texts):
    words = [*OTHER_SIZES, "trainer.batch_size=4", "data.end_token=true"]
    state = state_of(tune(source.parent, texts / "second.txt", source, *words, name="ended"))
    first, second = ({*(texts / f"{name}.txt").read_text()} for name in ("first", "second"))
    assert state["end_token"] == len(first)
    assert state["vocabulary"] == "".join([*sorted(first), *sorted(second - first)])


def test_a_run_and_the_measurement_of_its_snapshot_agree(source, texts):
    """In the model, characters have other ids than in a vocabulary of this text alone.

    The evaluated text may lack some characters.
    """
    words = ["trainer.max_steps=30", "optimizer.lr=0.01", "trainer.eval_every=10"]
    tuned = tune(source.parent, texts / "second.txt", source, *words, name="measured")
    result = read_result(tuned)
    assert result["val_loss"] < 2.0, "it has learnt its text"
    [found] = evaluate(EvaluateConfig([str(tuned)], device="cpu", precision="fp32")).values()
    assert found["loss"] == pytest.approx(result["val_loss"], abs=1e-5)
    text = texts / "part.txt"
    text.write_text("the sea, 1234 the sea\n" * 9)
    [other] = evaluate(
        EvaluateConfig([str(tuned)], device="cpu", precision="fp32", data_path=str(text))
    ).values()
    assert other["loss"] < 3
    with pytest.raises(DataError, match="the model does not know '5'"):
        text.write_text("5 the sea\n")
        evaluate(EvaluateConfig([str(tuned)], device="cpu", precision="fp32", data_path=str(text)))


def test_a_resume_refuses_other_weights_to_start_from(source, texts, tmp_path):
    """e2e/test_warm_start.py resumes when the weights no longer exist."""
    text, other = texts / "second.txt", texts / "first.txt"
    two_steps = "trainer.max_steps=2"
    tune(tmp_path, text, source)
    shutil.copytree(source, tmp_path / "moved")
    tune(tmp_path, text, tmp_path / "moved", two_steps)  # the same weights at another path
    trained = tune(tmp_path, text, source, "optimizer.lr=0.01", name="trained")
    with pytest.raises(SnapshotError, match="the run did not start from run"):
        tune(tmp_path, text, trained, two_steps)
    with pytest.raises(
        SnapshotError, match=r"nothing does not exist; .* because nothing is downloaded"
    ):
        tune(tmp_path, text, tmp_path / "nothing", two_steps)
    sizes = ["model=gpt_nano", "model.n_head=4", *FROZEN]
    with pytest.raises(SnapshotError, match=r"run.init_sha256 \(\w+ in the snapshot, None now\)"):
        train(tmp_path, "run", f"data.path={other}", *sizes, two_steps)
    words = [f"data.path={text}", *sizes, "run.seed=5", f"run.resume={source}"]
    with pytest.raises(
        SnapshotError, match=r"or write run.init_from=.* to start from its weights alone"
    ):
        train(tmp_path, "new", *words)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("from_weights", [False, True])
def test_a_resume_reads_all_texts_as_the_first_start_did(from_weights, texts, tmp_path):
    """It does so for further validation texts too, at every resume, whatever data.format says."""
    lines = "".join(f'{{"text": "the sea {i}"}}\n' for i in range(200))
    (tmp_path / "a.txt").write_text("the sea and the shore\n" * 20)
    (tmp_path / "docs.jsonl").write_text(lines)
    val = tmp_path / "val"
    shutil.copytree(tmp_path, val, ignore=shutil.ignore_patterns("val"))
    words = [
        f"data.path={tmp_path / 'docs.jsonl'}",
        f"data.val_paths={{other: {val}}}",
        *FROZEN,
        "data.tokenizer=byte",
        "trainer.eval_every=1",
    ]
    if from_weights:
        first = f"data.path={texts / 'first.txt'}"
        source = train(tmp_path, "source", first, "data.tokenizer=byte", "trainer.max_steps=1")
        words.append(f"run.init_from={source}")
    for step, form in ((1, "text"), (2, "auto"), (3, "auto")):
        limit = f"trainer.max_steps={step}"
        directory = train(tmp_path, "run", *words, f"data.format={form}", limit)
        assert state_of(directory, step)["config"]["data"]["format"] == "text"
    metrics = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    losses = [line["val_other_loss"] for line in metrics if "val_other_loss" in line]
    assert len(losses) == 3
    assert losses[1:] == pytest.approx(losses[:1] * 2, abs=1e-6)


@pytest.mark.parametrize(
    ("override", "command_line_keys", "message"),
    [
        ("model.n_layer=1", "model.n_layer", "model.n_layer=1 differs from run.init_from="),
        ("model=gpt_mini", "model", "differs from run.init_from="),
        (
            "data.block_size=32",
            "data.block_size",
            "data.block_size=32 is more than 16, the context",
        ),
        ("run.init_sha256=abc", "", "not run.init_sha256=abc; set run.init_sha256=null to use it"),
    ],
)
def test_model_sizes_from_the_command_line_that_differ_are_refused(
    override, command_line_keys, message, source, tmp_path, texts
):
    refused(
        tmp_path,
        texts / "first.txt",
        source,
        message,
        override,
        kind=ConfigError,
        command_line_keys=(command_line_keys,),
    )


def test_model_settings_from_the_command_line_that_weights_allow(source, tmp_path, texts):
    """A shorter context drops positions. Dropout does not change any size."""
    words, command_line_keys = (
        ["data.block_size=8", "model.dropout=0.5"],
        ("data.block_size", "model.dropout"),
    )
    tuned = tune(tmp_path, texts / "first.txt", source, *words, command_line_keys=command_line_keys)
    config = state_of(tuned)["config"]
    assert (config["data"]["block_size"], config["model"]["dropout"]) == (8, 0.5)
    ids = torch.tensor([[1, 2, 3, 4]])
    one, other = (load_model(str(run))[0].eval()(ids) for run in (source, tuned))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "words", [["data.tokenizer=byte"], ["data.tokenizer=bpe", "data.vocab_size=280"]]
)
def test_a_tokenizer_of_bytes_is_kept(words, texts, tmp_path):
    """The source is a run, or an export with tokenizer.json or the two files of older versions."""
    pytest.importorskip("tokenizers")
    source = train(
        tmp_path, "source", f"data.path={texts / 'first.txt'}", *words, "trainer.max_steps=2"
    )
    export(ExportConfig(str(source), str(tmp_path / "hf"), format="hf"))
    tokenizer, urls = load_model(str(source))[1], [source, tmp_path / "hf"]
    if "data.tokenizer=bpe" in words:
        shutil.copytree(tmp_path / "hf", tmp_path / "files")
        model = json.loads((tmp_path / "files" / "tokenizer.json").read_text())["model"]
        (tmp_path / "files" / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        (tmp_path / "files" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
        (tmp_path / "files" / "tokenizer.json").unlink()
        urls.append(tmp_path / "files")
    sentence = "A new \u03b1 sea, \U0001f30a!"
    for i, url in enumerate(urls):
        tuned = tune(tmp_path, texts / "second.txt", url, name=f"tuned-{i}")
        kept = load_model(str(tuned))[1]
        assert kept.encode(sentence) == tokenizer.encode(sentence)
        assert kept.decode(kept.encode(sentence)) == sentence
        assert state_of(tuned)["config"]["data"]["tokenizer"] == tokenizer.name
        assert weights_of(tuned)["token_embedding.weight"].shape == (tokenizer.vocab_size, 24)
    message = r"data.tokenizer=char differs from run.init_from=.*, where it is \w+; leave"
    refused(tmp_path, texts / "second.txt", source, message, command_line_keys=("data.tokenizer",))


def bad_weight(kind: str, tensor: Tensor) -> Tensor:
    """Return a tensor with which a model cannot start."""
    if kind == "whole numbers":
        return tensor.round().to(torch.int64)
    if kind == "booleans":
        return tensor > 0
    values = tensor.double() if kind == "beyond fp32" else tensor.clone()
    values.view(-1)[3] = {"nan": math.nan, "beyond fp32": 1e300}[kind]
    return values


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("gpt2", "nan"),
        ("gpt2", "beyond fp32"),
        ("gpt2", "booleans"),
        ("export", "whole numbers"),
    ],
)
def test_weights_with_invalid_numbers_are_refused(form, kind, source, texts, tmp_path):
    """Nothing is written, not even to the cache of texts."""
    directory = tmp_path / form
    if form == "gpt2":
        write_gpt2(directory, small_gpt2(40))
    else:
        export(ExportConfig(str(source), str(directory)))
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in sorted(tensors) if "c_fc.weight" in name or "up.weight" in name)
    save_file({**tensors, name: bad_weight(kind, tensors[name])}, directory / "model.safetensors")
    message = "cannot be used: .*not finite|has whole numbers|fit the model: .* type, (int64|bool)"
    refused(tmp_path, texts / "first.txt", directory, message, kind=SnapshotError)


def test_weights_without_a_tokenizer_are_named(texts, tmp_path, log_lines):
    write_gpt2(tmp_path / "gpt2", small_gpt2(40))
    tune(tmp_path, texts / "first.txt", tmp_path / "gpt2")
    (line,) = [line for line in log_lines if "has no tokenizer" in line]
    assert (
        line.startswith("WARNING run.init_from=") and "uses the tokens of data.tokenizer," in line
    )


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "mingpt_modern", "block_size": "32"},
        {"model_type": "mingpt_modern", "block_size": True},
        {"model_type": "mingpt_modern", "vocab_size": {"a": 1}},
        {"data": 1, "model": [1]},  # a task that trains on samples instead of text
        {"vocabulary": "a\ud800", "model": {"architecture": "gpt"}, "block_size": 8},
    ],
)
def test_values_of_another_type_are_refused(values, tmp_path):
    write_gpt2(tmp_path, small_gpt2(40))
    known = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 12,
        "dropout": 0.0,
        "vocab_size": 40,
        "block_size": 32,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**(known if "model_type" in values else {}), **values})
    )
    with pytest.raises(SnapshotError, match=r"cannot be used: |has an invalid state: "):
        read_initial_weights(str(tmp_path))


def test_a_tokenizer_of_words_is_refused(texts, tmp_path):
    write_gpt2(tmp_path / "gpt2", small_gpt2(40))
    for model in (
        {"type": "WordLevel", "vocab": {"sea": 0}},
        {"type": "WordLevel", "vocab": {"a": 3}},
        {"type": "WordPiece"},
    ):
        (tmp_path / "gpt2" / "tokenizer.json").write_text(
            json.dumps({"model": model, "pre_tokenizer": {"type": "x"}})
        )
        with pytest.raises(
            SnapshotError,
            match=r"cannot be used: (the tokens in tokenizer.json are words|it does not decode)",
        ):
            read_initial_weights(str(tmp_path / "gpt2"))


# GPT-2 in Hugging Face's format


def test_a_gpt2_is_read_without_transformers(texts, tmp_path):
    known = "".join(sorted(set((texts / "first.txt").read_text()) | set("qz")))
    theirs = small_gpt2(len(known) + 3)  # with padding, as vocabularies often have
    write_gpt2(tmp_path / "gpt2", theirs)
    (tmp_path / "gpt2" / "tokenizer.json").write_text(tokenizer_json(known))
    tuned = tune(tmp_path, texts / "first.txt", tmp_path / "gpt2")
    model, tokenizer = load_model(str(tuned))
    assert tokenizer.state() == {"vocabulary": known}
    ids = torch.tensor([tokenizer.encode("the sea and the shore\nqz")])
    torch.testing.assert_close(model.eval()(ids), theirs(ids)[..., : len(known)], atol=1e-5, rtol=0)
    expected = {"name": "gpt2", "bias": True, "activation": "gelu_tanh", "n_layer": 2}
    assert state_of(tuned)["config"]["model"].items() >= expected.items()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "llama"}, "model_type is llama, but must be gpt2"),
        (
            {"activation_function": "relu"},
            "activation_function is relu, but must be gelu_new or gelu_pytorch_tanh or gelu",
        ),
        ({"n_inner": 5}, "n_inner is 5, but must be 4 n_embd = 48"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06, but must be 1e-05"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, but must be True"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True, but must be False",
        ),
        ({"n_positions": -1}, "vocabulary size and context length are"),
        ({"n_layer": 9999}, "n_layer is 9999, but there are"),
        ({"n_embd": "many"}, "n_inner|vocab_size|can only|n_embd"),
    ],
)
def test_settings_that_gpt_does_not_compute_are_refused(changed, message, tmp_path):
    write_gpt2(tmp_path, small_gpt2(40), **{"n_inner": 48, **changed})
    with pytest.raises(SnapshotError, match=message) as caught:
        read_initial_weights(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "changed", [{"n_embd": 24}, {"n_layer": 10_000_000}, {"vocab_size": 10**12}]
)
def test_a_configuration_that_does_not_fit_the_weights_is_refused(changed, texts, tmp_path):
    write_gpt2(tmp_path / "gpt2", small_gpt2(40), **changed)
    refused(tmp_path, texts / "first.txt", tmp_path / "gpt2", "do not fit the model|n_layer")


def test_tensor_names_that_gpt2_does_not_have_are_refused(tmp_path):
    tensors = write_gpt2(tmp_path, small_gpt2(40))
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    head, other = (
        {"lm_head.weight": torch.zeros(40, 12)},
        {"transformer.h.0.attn.c_other.weight": torch.zeros(2)},
    )
    for changed, message in (
        ({**tensors, **other}, "transformer.h.0.attn.c_other.weight is not a tensor of GPT-2"),
        ({**tensors, **head}, "lm_head.weight differs from wte.weight"),
        ({**short, **head}, "lm_head.weight differs from wte.weight"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(SnapshotError, match=message):
            read_initial_weights(str(tmp_path))


def test_hostile_files_are_refused(texts, tmp_path):
    """They are pickles, half a file, and a configuration that is not a JSON object."""
    text, directory = texts / "first.txt", tmp_path / "gpt2"
    for name in ("pytorch_model.bin", "model.pt"):
        write_gpt2(tmp_path / name, small_gpt2(40))
        (tmp_path / name / "model.safetensors").rename(tmp_path / name / name)
        message = f"{name} is a pickle, which is never read; save the weights as model.safetensors"
        refused(tmp_path, text, tmp_path / name, message)
    write_gpt2(directory, small_gpt2(40))
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])
    refused(tmp_path, text, directory, "cannot be used")
    for config, message in (("[1]", "cannot be used"), ("[" * 100_000, "nested too deeply")):
        (directory / "config.json").write_text(config)
        refused(tmp_path, text, directory, message)
