"""A job sees the names that its own user files register, and none from other jobs of the sweep."""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

import mingpt_ddp.models  # noqa: F401  registers the built-in models
from mingpt_ddp.config.builders import BUILDERS, register, run_code, run_file
from mingpt_ddp.config.hook_decorators import acts
from mingpt_ddp.config.keys.schema import BASES, GROUPS, DDPConfig
from mingpt_ddp.errors import CodeError, ConfigError

FILE = """
from dataclasses import dataclass
from mingpt_ddp.registry import ModelConfig, register

@dataclass(frozen=True)
class Mine(ModelConfig):
    {key}: int

@register("model", "mine", Mine)
def build(config, vocab_size, block_size):
    return "{key}"
"""


@pytest.fixture
def directory(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(FILE.format(key=name))
    yield tmp_path
    run_code({}, [])


def known(directory, code: str | None) -> tuple[str, list[str]] | None:
    """Run this user file. Return the result of its model builder and the builder's keys.

    Return None if no model called "mine" is registered.
    """
    run_code({"model": {"code": code}}, [directory])
    if "mine" not in BUILDERS["model"]:
        assert "mine" not in GROUPS["model"][1]
        return None
    return BUILDERS["model"]["mine"](None, 0, 0), sorted(GROUPS["model"][1]["mine"].__annotations__)


def test_two_files_may_register_the_same_name(directory):
    for code in ("one", "two", "one", "two"):
        assert known(directory, f"{code}.py") == (code, [code])


@pytest.mark.parametrize("group", sorted(BASES))
def test_every_base_can_be_extended(group):
    """Keys of a base class can have any type: optimizer.schedule_settings is a mapping."""
    fields = [("width", int, dataclasses.field(default=1))]
    mine = dataclasses.make_dataclass("Mine", fields, bases=(BASES[group],), frozen=True)
    register(group, "extended", mine)  # only makes a decorator: nothing is registered


def test_names_of_another_job_are_not_registered(directory):
    assert known(directory, "one.py") is not None
    assert known(directory, None) is None
    assert {"gpt", "modern"} <= set(BUILDERS["model"]), "the built-in models are missing"
    assert known(directory, "one.py") == ("one", ["one"])


def test_a_builder_of_another_module(directory):
    """A name belongs to the file that registers it, even if another module defines the builder."""
    (directory / "own_parts.py").write_text(
        "def build(config, vocab_size, block_size):\n    return 'parts'\n"
    )
    (directory / "three.py").write_text(
        "import own_parts\n"
        + FILE.format(key="three").split("@register")[0]
        + 'register("model", "mine", Mine)(own_parts.build)\n'
    )
    assert known(directory, "three.py") == ("parts", ["three"])
    assert known(directory, None) is None
    assert known(directory, "one.py") == ("one", ["one"])
    assert known(directory, "three.py") == ("parts", ["three"])


def test_a_file_is_searched_next_to_the_preset_then_the_experiment_then_at_the_top(
    tmp_path, monkeypatch
):
    """If several preset directories have the file, the first one wins, as it does for presets."""
    places = ("a/model", "b/model", "b/model/deep", "a/experiment", "b/experiment", "a", "b")
    for place in places:
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "mine.py").write_text(FILE.format(key=place.replace("/", "_")))
    directories = [tmp_path / "a", tmp_path / "b"]

    def found(**presets: str | None) -> str:
        run_code({"model": {"code": "mine.py"}}, directories, presets)
        return BUILDERS["model"]["mine"](None, 0, 0)

    assert found(model="deep/mine") == "b_model_deep"
    looked = []
    for place in ("a/model", "b/model", "a/experiment", "b/experiment", "a", "b"):
        assert found(model="mine", experiment="recipe") == place.replace("/", "_")
        looked.append(tmp_path / place)
        (looked[-1] / "mine.py").unlink()
    with pytest.raises(ConfigError) as refused:
        found(model="mine", experiment=None)
    assert f"was not found in {', '.join(map(str, looked))}; put it" in str(refused.value)
    monkeypatch.chdir(tmp_path)
    Path("my recipe").mkdir()
    Path("my recipe/mine.py").touch()
    advice = r"; write '--config-dir=my recipe' model.code=mine.py$"
    with pytest.raises(ConfigError, match=advice):
        run_code({"model": {"code": "my recipe/mine.py"}}, directories)
    run_code({}, [])


@pytest.mark.parametrize("known_before", [False, True])
def test_a_name_registered_twice_in_a_configuration(known_before, directory):
    if known_before:
        known(directory, "one.py")
        known(directory, "two.py")
    with pytest.raises(
        CodeError, match=r"two.py:.*@register\('model', 'mine', ...\): the name is taken"
    ):
        run_code({"model": {"code": "one.py"}, "optimizer": {"code": "two.py"}}, [directory])


HOOK = """
from mingpt_ddp.registry import register_comm_hook

@register_comm_hook({name!r})
def average(state, bucket):
    return {result!r}
"""


def test_a_communication_hook_belongs_to_its_job(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(HOOK.format(name="mine", result=name))
    for name in ("one", "two", "one"):
        run_code({"data": {"code": f"{name}.py"}}, [tmp_path])
        assert BUILDERS["comm_hook"]["mine"](None, None) == name
        assert DDPConfig(comm_hook="mine").comm_hook == "mine"
    run_code({}, [])
    with pytest.raises(ConfigError, match=r"comm_hook=mine must be one of none, fp16, bf16$"):
        DDPConfig(comm_hook="mine")


def test_the_name_of_a_communication_hook_is_taken(tmp_path):
    (tmp_path / "mine.py").write_text(HOOK.format(name="fp16", result=""))
    with pytest.raises(
        CodeError,
        match=r"mine.py:4: ValueError: @register\('comm_hook', 'fp16', ...\): the name is taken",
    ):
        run_code({"data": {"code": "mine.py"}}, [tmp_path])


TWO_HOOKS = """
from mingpt_ddp.registry import acts, on

@acts("update")
@acts("gradients")
def _(step, tensors):
    return {}

@DECORATOR
def _(*values):
    return {}
"""


@pytest.mark.parametrize(
    ("decorator", "is_refused"),
    [('acts("gradients")', True), ('acts("evaluation")', False), ('on("step")', False)],
)
def test_two_hooks_of_an_event_have_two_names(decorator, is_refused, tmp_path):
    """Every job of a sweep detects the clash, because each one runs the file again."""
    (tmp_path / "mine.py").write_text(TWO_HOOKS.replace("DECORATOR", decorator))
    refused = (
        r"mine\.py:9: ValueError: @acts\('gradients'\) has two hooks named _; rename one of them$"
    )
    for _ in range(2):
        with pytest.raises(CodeError, match=refused) if is_refused else nullcontext():
            run_code({"task": {"code": "mine.py"}}, [tmp_path])
        assert len(BUILDERS["action"]) + len(BUILDERS["hook"]) == (0 if is_refused else 3)
    run_code({}, [])


def test_an_unknown_event():
    with pytest.raises(
        ValueError, match=r"@acts\('gradient'\): the event must be one of gradients,"
    ):
        acts("gradient")


@pytest.mark.parametrize(
    "content",
    [b"a = 1\0\n", b"\x89PNG\r\n\x1a\n\0\0", b"(" * 5000, b"a = " + b"-" * 100_000 + b"1"],
)
def test_a_file_that_is_not_python(content, tmp_path):
    (tmp_path / "mine.py").write_bytes(content)
    with pytest.raises(CodeError, match=r"mine\.py(:1)?"):
        run_code({"model": {"code": "mine.py"}}, [tmp_path])


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["pipe", "sparse", "device"])
def test_code_that_is_not_a_file_or_is_too_large(kind, tmp_path):
    path = tmp_path / "mine.py"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(
        ConfigError, match="cannot be read: it is not a file of at most 16,777,216 bytes"
    ):
        run_file(path, "code")
