"""Run exports in three versions of transformers.

They are the lowest version that setup.cfg allows, the installed version and the newest one. The
models are random. tests/e2e/test_transformers.py uses trained models.
"""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, call, environment
from packaging.requirements import Requirement
from snapshot_helpers import bpe_with_special, random_snapshot

from mingpt_ddp.data.tokenizers.tokenizer import CharTokenizer
from mingpt_ddp.snapshots.exports.transformers_export import transformers_files

END = "<|endoftext|>"
MODELS = {
    "gpt": ["model=gpt_nano"],
    "modern": ["model=modern_nano"],
    "ngrams": ["model=modern_nano", "model.ngram_rows=64"],
}
# Contexts have 16 tokens. `lengths` are the lengths of the inputs of `forward` during `generate`.
SCRIPT = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

def load(name):
    return AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()

def lengths_of(generate):
    lengths = []
    note = lambda module, args, given: lengths.append(given["input_ids"].shape[1])
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    tokens = generate()
    hook.remove()
    return lengths, tokens

def refusal(generate):
    try:
        generate()
    except ValueError as error:
        return str(error)

found = {"version": transformers.__version__}
tokens, greedy = torch.arange(11)[None], {"max_new_tokens": 5, "do_sample": False}
gpt = load("gpt")
for name in ("gpt", "modern", "ngrams"):
    model, new = load(name), {}
    new["lengths"], _ = lengths_of(lambda: model.generate(tokens, **greedy))
    new["same"] = []
    for beams in (1, 3):
        with_cache, without = [
            model.generate(tokens, **greedy, num_beams=beams, use_cache=use) for use in (True, False)
        ]
        new["same"].append(torch.equal(with_cache, without))
    found[name] = new
    if name == "gpt":
        continue
    longer = {**greedy, "max_new_tokens": 25}
    new["moving"], _ = lengths_of(lambda: model.generate(tokens, **longer))
    if not transformers.__version__.startswith("4."):  # version 4 accepts no other cache
        start = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
        begun = model.generate(tokens[:, :5], **start)
        key = "cache" if "cache" in begun else "past_key_values"
        more = torch.cat([begun.sequences, tokens[:, :3]], dim=1)
        again = lambda: model.generate(more, **greedy, **{key: begun[key]})
        new["again"], text = lengths_of(again)
        new["same"].append(torch.equal(text, model.generate(more, **greedy)))
    new["refused"] = [
        refusal(lambda: model.generate(tokens, **greedy, prompt_lookup_num_tokens=2)),
        refusal(lambda: model.generate(tokens, **greedy, assistant_model=gpt)),
        refusal(lambda: gpt.generate(tokens, **greedy, assistant_model=model)),
    ]
    mask = torch.ones(2, 7, dtype=torch.long)
    given = {"input_ids": tokens[:, :7].repeat(2, 1), "attention_mask": mask}
    sizes = {0: torch.export.Dim("B", min=1), 1: torch.export.Dim("T", min=1, max=16)}
    program = torch.export.export(model, (), given, dynamic_shapes=dict.fromkeys(given, sizes))
    new["differences"] = []
    for length in (1, 2, 5, 16):
        mask = torch.ones(3, length, dtype=torch.long)
        mask[0, : length // 2] = 0
        given = {"input_ids": torch.randint(20, (3, length)), "attention_mask": mask}
        difference = program.module()(**given).logits - model(**given).logits
        new["differences"].append(float(difference.abs().max()))
tokenizer, model = AutoTokenizer.from_pretrained("ends"), load("ends")
config, generation = model.config, model.generation_config
found["names"] = [tokenizer.bos_token, tokenizer.eos_token]
found["ids"] = [tokenizer.bos_token_id, tokenizer.eos_token_id, config.bos_token_id, config.eos_token_id]
found["ids"] += [generation.bos_token_id, generation.eos_token_id]
found["tokens"] = tokenizer("to <|endoftext|>be")["input_ids"]
print(json.dumps(found))
"""  # noqa: E501
ONNX = """
import sys, numpy, onnxruntime, torch
from transformers import AutoModelForCausalLM

for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    model.config.use_cache = False  # the graph returns only logits
    tokens = torch.arange(7).repeat(2, 1)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    sizes = {0: "batch", 1: "length"}
    program = torch.onnx.export(
        model, kwargs=given, dynamic_shapes=dict.fromkeys(given, sizes), dynamo=True
    )
    program.save(f"{name}.onnx")
    session, differences = onnxruntime.InferenceSession(f"{name}.onnx"), []
    for length in (1, 2, 5, 16):
        mask = torch.ones(3, length, dtype=torch.long)
        mask[0, : length // 2] = 0
        given = {"input_ids": torch.randint(20, (3, length)), "attention_mask": mask}
        [logits] = session.run(None, {key: x.numpy() for key, x in given.items()})
        with torch.no_grad():
            expected = model(**given).logits
        difference = (torch.tensor(logits) - expected).abs()[mask.bool()]
        differences.append(float(difference.max()))
    print("difference", name, *differences)
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with the exports."""
    directory = tmp_path_factory.mktemp("exports")
    snapshots = {
        name: random_snapshot(CharTokenizer("abcdefghijklmnopqrstuvwxyz\n"), *words)
        for name, words in MODELS.items()
    }
    snapshots["ends"] = random_snapshot(bpe_with_special(END), "model=gpt_nano")
    for name, snapshot in snapshots.items():
        (directory / name).mkdir()
        for file, content in transformers_files(snapshot).items():
            (directory / name / file).write_bytes(content)
    return directory


def run(script: str, exports: Path, *args: str, packages: str = "") -> str:
    """Run a script in a process that cannot import the package. Return its output.

    Args:
        packages: Directory of packages that take precedence over the installed ones.
    """
    home = str(exports / "hf")
    env = environment(exports, HF_HOME=home, HF_HUB_OFFLINE="1", PYTHONPATH=packages)
    done = subprocess.run(
        [sys.executable, "-c", script, *args], cwd=exports, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def lowest() -> str:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    [bound] = Requirement(setup["options.extras_require"]["export"].strip()).specifier
    return f"transformers=={bound.version}"


# Other versions come from a package index, and a new version may appear any day.
VERSIONS = [
    pytest.param("lowest", marks=pytest.mark.slow),
    pytest.param("installed", marks=pytest.mark.integration),
    pytest.param("newest", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=VERSIONS)
def found(request, exports, tmp_path_factory) -> dict[str, Any]:
    """Load the exports with a version of transformers. pip does not install torch with it."""
    if request.param == "installed":
        return json.loads(run(SCRIPT, exports))
    wanted = lowest() if request.param == "lowest" else "transformers"
    packages = tmp_path_factory.mktemp(request.param)
    options = ["--quiet", "--no-compile", "--only-binary=:all:", "--retries=0"]
    done = call(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(packages), wanted],
        packages,
        PIP_CONSTRAINT="",
    )
    if "No matching distribution" in done.stdout:
        pytest.skip(f"pip finds no {wanted}: {done.stdout.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout
    return json.loads(run(SCRIPT, exports, packages=str(packages)))


@pytest.mark.parametrize("model", MODELS)
def test_each_token_is_read_once(model, found):
    """The model reads the prompt, then one token at a time. The cache holds all earlier tokens."""
    assert found[model]["lengths"] == [11, 1, 1, 1, 1]
    assert all(found[model]["same"])


@pytest.mark.parametrize("model", ["modern", "ngrams"])
def test_a_full_context_is_shifted(model, found):
    ones = [1] * 7
    assert found[model]["moving"] == [11, 1, 1, 1, 1, 1, 8, *ones, 1, 8, *ones, 1, 8]
    assert found[model].get("again", [11])[0] == 11  # a longer text is read from its beginning


@pytest.mark.parametrize("model", ["modern", "ngrams"])
def test_drafts_are_refused_in_one_line(model, found):
    lookup, assisted, drafting = found[model]["refused"]
    assert lookup == assisted
    assert "ModernForCausalLM" in lookup and "not supported" in lookup and "\n" not in lookup
    assert drafting == "ModernForCausalLM cannot be an assistant_model: its cache cannot be cropped"


@pytest.mark.parametrize("model", ["modern", "ngrams"])
def test_a_graph_of_torch_export_takes_any_length(model, found):
    assert max(found[model]["differences"]) < 1e-5


def test_generation_stops_at_the_end_token(found):
    assert found["names"] == [END, END]
    end = bpe_with_special(END).vocab_size - 1
    assert found["ids"] == [end] * 6
    assert found["tokens"].count(end) == 1


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("ngrams", marks=pytest.mark.integration),
        # The first uses the same file of code as ngrams, and the second uses code of transformers.
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("modern", "gpt")),
    ],
)
def test_onnx_runtime_gives_the_same_logits(model, exports):
    pytest.importorskip("onnxruntime")
    printed = run(ONNX, exports, model).splitlines()
    [line] = [line for line in printed if line.startswith("difference")]
    assert max(map(float, line.split()[2:])) < 1e-4, line
