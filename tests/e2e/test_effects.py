"""Check what docs/configuration.md says about the effect of each key on the weights.

A key changes either no weights, or only their last bits.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from launching import ROOT
from multiprocess.ranks import configure, train_in_turn
from safetensors.torch import load_file
from torch import Tensor

TOLERANCE = 1e-4
STEPS = 6
TEXT = ["data.path={texts}/text.txt", "model=gpt_nano", "data.block_size=16"]
TOY = ["experiment=toy"]
DIGITS = ["task=classification", "model=convnet", "data=digits"]
DEFAULTS = ["run.root={tmp}/runs", "run.name=run", "tracker.tensorboard=false"]
# A non-default value for each key. Other keys change only if the value is invalid without them.
OTHER_VALUES = {
    "run.name": ["run.name=other"],
    "run.root": ["run.root={tmp}/elsewhere"],
    "model.name": ["model.name=label"],
    "data.name": ["data.name=label"],
    "data.cache_dir": ["data.cache_dir={tmp}/cache"],
    "data.verify": ["data.verify=always"],
    "data.val_paths": ["data.val_paths={{other: {texts}/other.txt}}"],
    "data.num_workers": ["data.num_workers=1"],
    "data.pin_memory": ["data.pin_memory=false"],
    "ddp.strategy": ["ddp.strategy=ddp"],
    "ddp.reduction": ["ddp.reduction=canonical"],
    "ddp.launcher": ["ddp.launcher=spawn"],
    "ddp.backend": ["ddp.backend=gloo"],
    "ddp.timeout_s": ["ddp.timeout_s=30"],
    "ddp.max_restarts": ["ddp.max_restarts=0"],
    "ddp.preempted_exit_code": ["ddp.preempted_exit_code=143"],
    "ddp.bucket_cap_mb": ["ddp.bucket_cap_mb=0.01"],
    "ddp.gradient_as_bucket_view": ["ddp.gradient_as_bucket_view=false"],
    "ddp.static_graph": ["ddp.static_graph=true"],
    "ddp.find_unused_parameters": ["ddp.find_unused_parameters=true"],
    "trainer.compile": ["trainer.compile=true"],
    "trainer.log_every": ["trainer.log_every=1"],
    "trainer.eval_every": ["trainer.eval_every=2"],
    "trainer.eval_steps": ["trainer.eval_steps=1"],
    "trainer.profile": ["trainer.profile=[2,3]"],
    "trainer.sample_every": ["trainer.sample_every=2"],
    "trainer.deterministic": ["trainer.deterministic=true"],
    "trainer.activation_checkpointing": ["trainer.activation_checkpointing=true"],
    "snapshot.path": ["snapshot.path={tmp}/snapshots"],
    "snapshot.every_steps": ["snapshot.every_steps=2"],
    "snapshot.mtbf_hours": ["snapshot.mtbf_hours=1"],
    "snapshot.every_epochs": ["snapshot.every_epochs=1"],
    "snapshot.every_minutes": ["snapshot.every_minutes=0.001"],
    "snapshot.keep_last": ["snapshot.keep_last=1"],
    "snapshot.keep_best": ["snapshot.keep_best=false"],
    "snapshot.keep_every": ["snapshot.keep_every=2"],
    "snapshot.background": ["snapshot.background=false"],
    "snapshot.max_failures": ["snapshot.max_failures=0"],
    "snapshot.grace_seconds": ["snapshot.grace_seconds=1"],
    "tracker.tensorboard": ["tracker.tensorboard=true"],
    "tracker.project": ["tracker.project=other"],
    "tracker.entity": ["tracker.entity=other"],
    "tracker.uri": ["tracker.uri=file:{tmp}/mlruns"],
}
# Settings for both runs of a key, if the key has no effect with the default settings.
SHARED_SETTINGS = {
    "snapshot.mtbf_hours": ["snapshot.every_steps=auto"],
    "ddp.reduction": ["trainer.micro_batch_size=3"],
    "ddp.bucket_cap_mb": ["ddp.strategy=ddp"],
    "ddp.gradient_as_bucket_view": ["ddp.strategy=ddp"],
    "ddp.static_graph": ["ddp.strategy=ddp"],
    "ddp.find_unused_parameters": ["ddp.strategy=ddp"],
}
# Keys that other tests cover, since they need more processes, accounts or a user's files.
TESTED_ELSEWHERE = {
    "ddp.nproc_per_node": "tests/contract/test_resume.py",
    "ddp.tensor_parallel": "tests/multiprocess/test_tensor_parallel.py",
    "tracker.wandb": "tests/e2e/test_trackers.py",
    "tracker.mlflow": "tests/e2e/test_trackers.py",
    "tracker.trackio": "tests/e2e/test_trackers.py",
    **{
        f"{group}.code": "tests/e2e/test_user_code.py"
        for group in ("task", "model", "optimizer", "data")
    },
    "run.accept_code": "tests/e2e/test_old_results.py",
}


def train(words: Iterable[str], directory: Path) -> dict[str, Tensor]:
    """Train in this process. Return the tensors of the last snapshot by kind and name."""
    values = configure(f"trainer.max_steps={STEPS}", "trainer.max_epochs=null", *words)
    train_in_turn([values])
    (manifest,) = directory.rglob(f"step_{STEPS:08d}/manifest.json")
    return {
        f"{path.stem} {name}": tensor
        for path in manifest.parent.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def documented_effects() -> dict[str, str]:
    """Return the documented effect of each key, from the tables of docs/configuration.md."""
    effects = {}
    for line in (ROOT / "docs" / "configuration.md").read_text().splitlines():
        if line.startswith("## "):
            group = re.match(r"## (\w+)", line)[1]
        elif key := re.match(r"\| `(\w+)` \|", line):
            effects[f"{group}.{key[1]}"] = line.split("|")[-2].strip()
    return effects


def settings(key: str) -> tuple[str, ...]:
    """Return the settings of both runs of a key, with and without its other value."""
    if key in ("data.num_workers", "data.pin_memory"):
        return (*DIGITS, *DEFAULTS)
    if key == "trainer.compile":  # compiling a layer of a text model takes half a minute longer
        return (*TOY, *DEFAULTS)
    return (*TEXT, *DEFAULTS, *SHARED_SETTINGS.get(key, []))


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    (directory / "text.txt").write_text("To be, or not to be: that is the question.\n" * 100)
    (directory / "other.txt").write_text("to be is the question\n" * 20)
    return directory


@pytest.fixture(scope="module")
def undisturbed(texts, tmp_path_factory) -> Callable[[tuple[str, ...]], dict[str, Tensor]]:
    """Return a function that trains a run with these words once and returns its tensors."""

    @functools.cache
    def trained(words: tuple[str, ...]) -> dict[str, Tensor]:
        tmp = tmp_path_factory.mktemp("undisturbed")
        return train([word.format(texts=texts, tmp=tmp) for word in words], tmp)

    return trained


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_another_value_changes_no_weights_or_only_their_last_bits(
    key, texts, undisturbed, tmp_path
):
    changes = documented_effects()[key]
    assert changes in ("nothing", "measurement", "rounding")
    if key == "trainer.compile" and not shutil.which("g++"):
        pytest.skip("torch.compile needs g++")
    words = [*settings(key), *OTHER_VALUES[key]]
    found = train([word.format(texts=texts, tmp=tmp_path) for word in words], tmp_path)
    check_same(found, undisturbed(settings(key)), TOLERANCE if changes == "rounding" else 0.0)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++")
def test_a_text_model_is_compiled(texts, undisturbed, tmp_path):
    settings = (*TEXT, *DEFAULTS, "model.n_layer=1")
    words = [*settings, "trainer.compile=true"]
    found = train([word.format(texts=texts, tmp=tmp_path) for word in words], tmp_path)
    check_same(found, undisturbed(settings), TOLERANCE)


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def test_every_key_without_an_effect_is_tested():
    """The keys of a sweep are excepted, since a single run does not have them."""
    effects = documented_effects().items()
    no_end = ("nothing", "measurement", "rounding")
    found = {key for key, effect in effects if effect in no_end and not key.startswith("sweep.")}
    assert found == {*OTHER_VALUES, *TESTED_ELSEWHERE}
    for path in {*TESTED_ELSEWHERE.values()}:
        assert (ROOT / path).is_file(), path
