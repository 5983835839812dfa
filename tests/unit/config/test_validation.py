"""Conversion of single values: lossless, or refused in one line that names the key."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal

import pytest

from mingpt_ddp.config.validation import Bounds, build, convert
from mingpt_ddp.errors import ConfigError


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
        (True, bool, True),
        ("text", str, "text"),
        (7, str, "7"),
        (None, int | None, None),
        (1e3, int | None, 1000),
        (None, str | None, None),
        ([0.9, 1], tuple[float, float], (0.9, 1.0)),
        ("a", Literal["a", "b"], "a"),
    ],
)
def test_accepted(value, hint, expected):
    assert same(convert(value, hint, "key"), expected)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (True, int, "key=True must be a whole number"),
        ("7", int, "key='7' must be a whole number"),
        (1.5, int, "key=1.5 must be a whole number"),
        (None, int, "key=null must be a whole number"),
        (math.inf, int, "key=inf must be a whole number"),
        (math.nan, float, "key=nan must be a finite number"),
        (math.inf, float, "key=inf must be a finite number"),
        (True, float, "key=True must be a finite number"),
        ("1e-3", float, "key='1e-3' must be a finite number"),
        (1, bool, "key=1 must be true or false"),
        ("true", bool, "key='true' must be true or false"),
        (True, str, "key=True must be text"),
        (1.5, str, "key=1.5 must be text"),
        (None, str, "key=null must be text"),
        ([], str, "key=[] must be text"),
        ("x", int | None, "key='x' must be a whole number"),
        ([1.0], tuple[float, float], "key=[1.0] must be a list of 2 values"),
        ([1.0, 2.0, 3.0], tuple[float, float], "key=[1.0, 2.0, 3.0] must be a list of 2 values"),
        ("ab", tuple[float, float], "key='ab' must be a list of 2 values"),
        ([1.0, "x"], tuple[float, float], "key[1]='x' must be a finite number"),
        ("c", Literal["a", "b"], "key='c' must be one of a, b"),
        (None, Literal["a", "b"], "key=null must be one of a, b"),
        (["a"], Literal["a", "b"], "key=['a'] must be one of a, b"),
    ],
)
def test_refused(value, hint, message):
    with pytest.raises(ConfigError) as refused:
        convert(value, hint, "key")
    assert str(refused.value) == f"config error: {message}"


@dataclasses.dataclass(frozen=True)
class Cup:
    size: int
    label: str = "none"


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "message"),
    [
        (Bounds(ge=1), [1, 2], [0, 0.5], "must be at least 1"),
        (Bounds(gt=0), [1e-9], [0, -1], "must be greater than 0"),
        (Bounds(le=1e6), [1e6], [1e6 + 1], "must be at most 1e6"),
        (Bounds(le=10_000), [10_000], [10_001], "must be at most 10,000"),
        (Bounds(lt=2), [1], [2], "must be less than 2"),
        (Bounds(ge=0, lt=1), [0, 0.5], [-1, 1], "must lie in [0, 1)"),
        (Bounds(gt=0, le=1), [0.5, 1], [0, 2], "must lie in (0, 1]"),
        (Bounds(ge=1e-30, le=1e30), [1], [1e-31, 1e31], "must lie in [1e-30, 1e30]"),
    ],
)
def test_bounds(bounds, inside, outside, message):
    for value in inside:
        assert convert(value, Annotated[float, bounds], "key") == value
    for value in outside:
        with pytest.raises(ConfigError) as refused:
            convert(value, Annotated[float, bounds], "key")
        assert str(refused.value) == f"config error: key={float(value)} {message}"


def test_bounds_inside_other_types():
    positive = Annotated[int, Bounds(ge=1)]
    small = Annotated[positive, Bounds(le=9)]
    assert convert(None, positive | None, "key") is None
    assert convert("auto", positive | Literal["auto"], "key") == "auto"
    assert convert([1, 2], tuple[positive, positive], "key") == (1, 2)
    for value, hint, message in (
        (0, positive | None, "key=0 must be at least 1"),
        (0, positive | Literal["auto"] | None, "key=0 must be at least 1 or auto"),
        ([1, 0], tuple[positive, positive], "key[1]=0 must be at least 1"),
        ([1, 0], list[positive], "key[1]=0 must be at least 1"),
        (0, small, "key=0 must be at least 1"),
        (10, small, "key=10 must be at most 9"),
    ):
        with pytest.raises(ConfigError) as refused:
            convert(value, hint, "key")
        assert str(refused.value) == f"config error: {message}"


def test_a_group_has_exactly_its_keys():
    assert build(Cup, {"size": 3}, "cup") == Cup(3, "none")
    for values, message in (
        ({"size": 3, "lable": "x"}, "cup.lable is not a key; did you mean cup.label?"),
        ({"size": 3, "qqq": "x"}, "cup.qqq is not a key; there are size, label"),
        ({"label": "x"}, "cup.size is missing; give it a value"),
        ([1], "cup=[1] must be a group of keys"),
    ):
        with pytest.raises(ConfigError) as refused:
            build(Cup, values, "cup")
        assert str(refused.value) == f"config error: {message}"


def test_a_message_is_always_one_line():
    assert str(ConfigError("two\n  lines\tof text")) == "config error: two lines of text"
