"""Hydra's sweeps as Optuna's distributions, and values as overrides."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.sweeps.search.optuna_trials import optuna
from mingpt_ddp.sweeps.search.space import override_text, search_space
from tests.unit.sweeps.studies import parse

Float = optuna.distributions.FloatDistribution
Int = optuna.distributions.IntDistribution
Categorical = optuna.distributions.CategoricalDistribution


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("interval(1,5)", Float(1, 5)),
        ("tag(log,interval(1e-5,1))", Float(1e-5, 1, log=True)),
        ("int(interval(1,5))", Int(1, 5)),
        ("int(tag(log,interval(1,5)))", Int(1, 5, log=True)),
        ("range(1,6,2)", Int(1, 5, step=2)),
        ("range(5,0,-2)", Int(1, 5, step=2)),
        ("range(0,1,0.25)", Float(0, 0.75, step=0.25)),
        ("range(0.1,0.5,0.1)", Float(0.1, 0.4, step=0.1)),
        ("range(0,1,0.3)", Float(0, 0.9, step=0.3)),
        ("range(0.1,0.4,0.1)", Float(0.1, 0.3, step=0.1)),
        ("range(0.5,0.1,-0.1)", Float(0.2, 0.5, step=0.1)),
        ("sort(range(0.1,0.5,0.1),reverse=true)", Float(0.1, 0.4, step=0.1)),
        ("range(1e-5,5e-5,1e-5)", Float(1e-5, 4e-5, step=1e-5)),
        ("float(range(1,5))", Float(1, 4, step=1)),
        ("int(range(0.5,3.5))", Int(0, 2)),
        ("a,b,1,1.5,true,null", Categorical(["a", "b", "1", 1.5, "True", None])),
        ("choice(2,1,2)", Categorical([2, 1])),
        ("shuffle(2,1)", Categorical([2, 1])),
        ("1,true", Categorical(["1", "True"])),
        ("[1,2],{a:b}", Categorical(["[1,2]", "{a:b}"])),
        ("'1','a b','a,b'", Categorical(["'1'", "a b", "'a,b'"])),
    ],
)
def test_distributions(text, expected):
    assert search_space(parse("fixed=1", f"a.b={text}")) == {"a.b": expected}


def test_the_last_override_of_a_key_counts():
    assert search_space(parse("a=1,2", "b=1,2", "a=interval(0,1)", "b=1")) == {"a": Float(0, 1)}


@pytest.mark.parametrize(
    "text",
    [
        "interval(5,1)",
        "interval(1,1)",
        "interval(0,inf)",
        "interval(nan,1)",
        "interval(-1e308,1e308)",
        "tag(log,interval(0,1))",
        "tag(log,interval(-1,1))",
        "tag(other,interval(0,1))",
        "tag(log,range(1,5))",
        "tag(log,choice(1,2))",
        "range(1,1)",
        "range(1,2)",
        "range(5,1)",
        "range(1,5,0)",
        "range(0,1,1e-9)",
        "choice(a)",
        "1,1",
        "int(interval(0,1e300))",
    ],
)
def test_an_invalid_space_is_one_line(text):
    with pytest.raises(ConfigError) as caught:
        search_space(parse(f"a.b={text}"))
    assert str(caught.value).startswith(f"config error: a.b={text}") and "\n" not in str(
        caught.value
    )


@pytest.mark.parametrize(
    "value",
    [
        *(1, -3, 0.00123, 1e-5, 1.234e-05, 1e22, True, False, None),
        *("adam", "a b", "a,b", "it's", 'say "x"', "interval(1,2)", "x=y", "[1", "${", "\\", "'"),
    ],
    ids=str,
)
def test_an_override_is_parsed_back(value):
    parsed = OverridesParser.create().parse_override(override_text("optimizer.lr", value))
    assert not parsed.is_sweep_override()
    assert parsed.value() == value and type(parsed.value()) is type(value)


def test_values_of_a_choice_are_parsed_back():
    space = search_space(parse("a='1',[1,2],{b:c},true,1"))
    texts = [override_text("a", value) for value in space["a"].choices]
    assert texts[:3] == ["a='1'", "a=[1,2]", "a={b:c}"]
    assert [each.value() for each in parse(*texts)] == ["1", [1, 2], {"b": "c"}, True, 1]
