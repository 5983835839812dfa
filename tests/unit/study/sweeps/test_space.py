"""Hydra's sweep syntax becomes Optuna's distributions. Drawn values become overrides."""

from __future__ import annotations

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.study.sweeps.search.space import describe, rounded, search_space

Float = optuna.distributions.FloatDistribution
Int = optuna.distributions.IntDistribution
Categorical = optuna.distributions.CategoricalDistribution


def space(*overrides: str):
    return search_space(OverridesParser.create().parse_overrides([*overrides]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("interval(1,5)", Float(1, 5)),
        ("tag(log,interval(1e-5,1))", Float(1e-5, 1, log=True)),
        ("int(interval(1,5))", Int(1, 5)),
        ("int(tag(log,interval(1,5)))", Int(1, 5, log=True)),
        ("range(1,6,2)", Int(1, 5, step=2)),
        ("range(0.1,0.5,0.1)", Float(0.1, 0.4, step=0.1)),
        ("range(0.1,0.4,0.1)", Float(0.1, 0.3, step=0.1)),
        ("range(0.5,0.1,-0.1)", Float(0.2, 0.5, step=0.1)),
        ("sort(range(0.1,0.5,0.1),reverse=true)", Float(0.1, 0.4, step=0.1)),
        ("float(range(1,5))", Float(1, 4, step=1)),
        ("int(range(0.5,3.5))", Int(0, 2)),
        ("b,a,b,1,1.5,true,null", Categorical(["1", "1.5", "True", "a", "b", "null"])),
        ("choice(2,1,2)", Categorical(["1", "2"])),
        ("[1,2],{a:b}", Categorical(["[1,2]", "{a:b}"])),
        ("'1','a b','a,b'", Categorical(["'1'", "'a b'", "'a,b'"])),
    ],
)
def test_distributions(text, expected):
    assert space("fixed=1", f"a.b={text}") == {"a.b": expected}


def test_different_distributions_have_different_descriptions():
    """A search records the descriptions, and refuses to start with others."""
    texts = {
        "interval(1,5)": "interval(1.0,5.0)",
        "tag(log,interval(1,5))": "tag(log,interval(1.0,5.0))",
        "float(range(1,6))": "interval(1.0,5.0) in steps of 1.0",
        "int(interval(1,5))": "int(interval(1,5))",
        "int(tag(log,interval(1,5)))": "tag(log,int(interval(1,5)))",
        "range(1,6,2)": "int(interval(1,5)) in steps of 2",
        "choice(1)": "choice(1)",
        "1,5": "choice(1,5)",
        "'1,5',2": "choice('1,5',2)",
    }
    assert {text: describe(space(f"a={text}")["a"]) for text in texts} == texts


def test_the_last_override_of_a_key_counts_and_the_order_does_not():
    found = space("b=1,2", "c=1,2", "b=interval(0,1)", "c=1", "a=3,4")
    assert [*found.items()] == [("a", Categorical(["3", "4"])), ("b", Float(0, 1))]


@pytest.mark.parametrize(
    "text",
    [
        "interval(5,1)",
        "interval(0,inf)",
        "interval(nan,1)",
        "interval(-1e308,1e308)",
        "tag(log,interval(0,1))",
        "tag(log,interval(-1,1))",
        "tag(other,interval(0,1))",
        "tag(log,range(1,5))",
        "tag(log,choice(1,2))",
        "range(1,1)",
        "range(5,1)",
        "range(1,5,0)",
        "int(interval(0,1e300))",
    ],
)
def test_an_invalid_space_gives_one_line(text):
    with pytest.raises(ConfigError) as caught:
        space(f"a.b={text}")
    line = str(caught.value)
    assert line.startswith(f"config error: a.b={text}") and "\n" not in line


@pytest.mark.parametrize("text", ["'1'", "[1,2]", "{b:c}", "true", "'a b'", '"a,b"'])
def test_a_drawn_choice_is_the_original_override(text):
    parser = OverridesParser.create()
    (typed,) = parser.parse_overrides([f"a={text}"])
    (drawn,) = set(space(f"a={text},other")["a"].choices) - {"other"}
    (again,) = parser.parse_overrides([f"a={drawn}"])
    assert again.value() == typed.value() and type(again.value()) is type(typed.value())


@pytest.mark.parametrize(
    ("value", "low", "high", "expected"),
    [
        (0.0012345678, 1e-5, 1, 0.001235),
        (9.9999999, 0, 10, 10.0),
        (0.99999999, 0, 0.99999, 0.99999),
        (1.000012345, 1, 1.0001, 1.00001235),
        (-123456.7, -1e6, 1e6, -123500.0),
        (0.0, -1, 1, 0.0),
        (2.0, 2.0, 2.0, 2.0),
    ],
)
def test_drawn_floats_are_short(value, low, high, expected):
    assert rounded(value, Float(low, high)) == expected


def test_a_drawn_number_with_a_step_is_an_exact_decimal():
    stepped = Float(0.1, 0.4, step=0.1)
    assert 0.1 + 2 * 0.1 != 0.3
    assert [rounded(0.1 + k * 0.1, stepped) for k in range(4)] == [0.1, 0.2, 0.3, 0.4]
