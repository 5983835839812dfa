"""A value is converted without loss, or refused in one line that names its key."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from mingpt_ddp.config.keys.fields import LearningRate, PositiveInt
from mingpt_ddp.config.validation import build, is_supported
from mingpt_ddp.errors import ConfigError


def convert(value: object, hint: Any) -> object:
    """Convert a value to the type of a key."""
    return build(dataclasses.make_dataclass("Group", [("key", hint)]), {"key": value}, "").key


def refusal(value: object, hint: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        convert(value, hint)
    return str(refused.value).removeprefix("config error: ")


def same(got: object, expected: object) -> bool:
    return got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (7, int, 7),
        (1e3, int, 1000),
        (-0.0, int, 0),
        (7, float, 7.0),
        (1.5, float, 1.5),
        (10**30, float, 1e30),
        (True, bool, True),
        ("text", str, "text"),
        (7, str, "7"),
        (7, str | None, "7"),
        (None, int | None, None),
        (1e3, int | None, 1000),
        (1e3, PositiveInt | Literal["auto"] | None, 1000),
        (None, str | None, None),
        ([0.9, 1], tuple[float, float], (0.9, 1.0)),
        ([1e3, 2], list[int], [1000, 2]),
        ([7, "x"], list[str], ["7", "x"]),
        ("a", Literal["a", "b"], "a"),
        ("auto", bool | Literal["auto"], "auto"),
        (True, bool | Literal["auto"], True),
    ],
)
def test_accepted(value, hint, expected):
    assert same(convert(value, hint), expected)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (True, int, "key=True must be a whole number"),
        ("7", int, "key='7' must be a whole number"),
        (1.5, int, "key=1.5 must be a whole number"),
        (None, int, "key=null must be a whole number"),
        (math.inf, int, "key=inf must be a whole number"),
        (2**63, int, "key='9223372036854775808' must be a whole number"),
        (math.nan, float, "key=nan must be a finite number"),
        (math.inf, float, "key=inf must be a finite number"),
        (True, float, "key=True must be a number"),
        ("1e-3", float, "key='1e-3' must be a number"),
        (1, bool, "key=1 must be true or false"),
        ("true", bool, "key='true' must be true or false"),
        (True, str, "key=True must be a text"),
        (1.5, str, "key=1.5 must be a text"),
        (1e3, str, "key=1000.0 must be a text"),
        (None, str, "key=null must be a text"),
        ([], str, "key=[] must be a text"),
        ([7], str, "key=[7] must be a text"),
        ("x", int | None, "key='x' must be a whole number"),
        ([1.0], tuple[float, float], "key[1] is missing; give it a value"),
        (
            [1.0, 2, 3],
            tuple[float, float],
            "key=[1.0, 2, 3] must have at most 2 items after validation, not 3",
        ),
        ("ab", tuple[float, float], "key='ab' must be a valid array"),
        ([1.0, "x"], tuple[float, float], "key[1]='x' must be a number"),
        (["x"], tuple[float, float], "key[0]='x' must be a number"),
        ("ab", list[int], "key='ab' must be a valid array"),
        ("c", Literal["a", "b"], "key='c' must be 'a' or 'b'"),
        (None, Literal["a", "b"], "key=null must be 'a' or 'b'"),
        (["a"], Literal["a", "b"], "key=['a'] must be 'a' or 'b'"),
        (1, bool | Literal["auto", "on"], "key=1 must be true or false or 'auto' or 'on'"),
    ],
)
def test_refused(value, hint, message):
    assert refusal(value, hint) == message


def test_invalid_unicode():
    """Python represents a non-UTF-8 byte of the command line by this surrogate."""
    assert refusal("caf\udce9", str) == "key has bytes that are not UTF-8; use other characters"
    assert (
        refusal(["caf\udce9"], list[str])
        == "key has bytes that are not UTF-8; use other characters"
    )
    assert refusal({"caf\udce9": 1}, str).startswith("key has bytes that are not UTF-8")
    with pytest.raises(ConfigError, match="caf\udce9 has bytes that are not UTF-8"):
        build(dataclasses.make_dataclass("Group", []), {"caf\udce9": 1}, "")
    assert convert("\U0001f600", str) == "\U0001f600"


@dataclasses.dataclass(frozen=True)
class Cup:
    size: int
    label: str = "none"


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "message"),
    [
        (Field(ge=1), [1, 2], [0, 0.5], "must be greater than or equal to 1"),
        (Field(gt=0), [1e-9], [0, -1], "must be greater than 0"),
        (Field(le=1e6), [1e6], [1e6 + 1], "must be less than or equal to 1e+06"),
        (Field(le=10_000), [10_000], [10_001], "must be less than or equal to 10000"),
        (Field(lt=2), [1], [2], "must be less than 2"),
        (Field(ge=0, lt=1), [0, 0.5], [1], "must be less than 1"),
        (Field(gt=0, le=1), [0.5, 1], [0], "must be greater than 0"),
        (Field(ge=1e-30), [1], [1e-31], "must be greater than or equal to 1e-30"),
        (Field(le=1e30), [1], [1e31], "must be less than or equal to 1e+30"),
    ],
)
def test_bounds(bounds, inside, outside, message):
    for value in inside:
        assert convert(value, Annotated[float, bounds]) == value
    for value in outside:
        assert refusal(value, Annotated[float, bounds]) == f"key={value} {message}"


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (0, PositiveInt | None, "key=0 must be greater than or equal to 1"),
        (
            0,
            PositiveInt | Literal["auto"] | None,
            "key=0 must be greater than or equal to 1 or 'auto'",
        ),
        ([1, 0], tuple[PositiveInt, PositiveInt], "key[1]=0 must be greater than or equal to 1"),
        ([1, 0], list[PositiveInt], "key[1]=0 must be greater than or equal to 1"),
        (0, Annotated[PositiveInt, Field(le=9)], "key=0 must be greater than or equal to 1"),
        (10, Annotated[PositiveInt, Field(le=9)], "key=10 must be less than or equal to 9"),
        (-1, LearningRate, "key=-1 must be greater than or equal to 1e-30"),
        (1e-31, LearningRate, "key=1e-31 must be greater than or equal to 1e-30"),
    ],
)
def test_bounds_inside_other_types(value, hint, message):
    assert refusal(value, hint) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 3, "lable": "x"}, "cup.lable is not a key; did you mean cup.label?"),
        ({"size": 3, "qqq": "x"}, "cup.qqq is not a key; use one of size, label"),
        ({"size": "x", "qqq": "x"}, "cup.qqq is not a key; use one of size, label"),
        ({"label": "x"}, "cup.size is missing; give it a value"),
        ([1], "cup=[1] must be a group of keys"),
    ],
)
def test_a_group_has_exactly_its_keys(values, message):
    assert build(Cup, {"size": 3}, "cup") == Cup(3, "none")
    with pytest.raises(ConfigError) as refused:
        build(Cup, values, "cup")
    assert str(refused.value) == f"config error: {message}"


@pytest.mark.parametrize("error", [AssertionError, ValueError, KeyError])
def test_an_exception_in_a_user_check_is_not_converted(error):
    """It stays as it is, so that the report can show the line that raised it."""

    @dataclasses.dataclass(frozen=True)
    class Mine:
        size: int

        def __post_init__(self):
            raise error("mine")

    with pytest.raises(error, match="mine") as raised:
        build(Mine, {"size": 3}, "mine")
    assert raised.traceback[-1].name == "__post_init__"


@pytest.mark.parametrize(
    ("hint", "supported"),
    [
        (int, True),
        (tuple[float, float], True),
        (list[str] | None, True),
        (Annotated[int, Field(ge=1)], True),
        (Literal["a", 1], True),
        (dict[str, int], True),
        (set[int], False),
        (complex, False),
        (tuple[int, ...], False),
    ],
)
def test_types_of_yaml(hint, supported):
    assert is_supported(hint) == supported


def test_a_message_is_always_one_line():
    assert str(ConfigError("two\n  lines\tof text")) == "config error: two lines of text"
