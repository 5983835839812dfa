"""The cases have every pair of values that the program accepts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from multiprocess.ranks import configure

from fake_gpu.cases import (
    CONSTRAINED,
    FACTORS,
    FREE,
    Case,
    combinations,
    has_fake_kernels,
    is_allowed,
    pairwise,
)
from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.distributed.strategies import check_strategy
from mingpt_ddp.distributed.strategies.tensor_split import check_tensor_parallel
from mingpt_ddp.errors import ConfigError


def test_every_possible_pair_is_in_a_case():
    runnable = [case for case in combinations() if is_allowed(case) and has_fake_kernels(case)]
    chosen = pairwise()
    for first, second in itertools.combinations(FACTORS, 2):
        for a, b in itertools.product(FACTORS[first], FACTORS[second]):
            wanted = {first: a, second: b}
            constrained = {name: value for name, value in wanted.items() if name in CONSTRAINED}
            is_possible = any(constrained.items() <= vars(case).items() for case in runnable)
            is_covered = any(wanted.items() <= vars(case).items() for case in chosen)
            assert is_covered == is_possible, wanted


def test_the_cases_run_and_are_few():
    chosen = pairwise()
    assert len(set(map(str, chosen))) == len(chosen) < 30
    assert all(is_allowed(case) and has_fake_kernels(case) for case in chosen)
    assert pairwise() == chosen


def test_the_factors_are_the_fields_of_a_case():
    fields = {field.name: field.default for field in dataclasses.fields(Case)}
    assert fields == {name: values[0] for name, values in {**CONSTRAINED, **FREE}.items()}


def accepts(config: Config, ranks: int) -> bool:
    try:
        check_strategy(config, ranks)
        check_tensor_parallel(config)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("strategy", CONSTRAINED["strategy"])
def test_the_program_refuses_what_is_left_out(strategy):
    """On one rank it accepts every strategy, but then trains as `single` does."""
    for case in combinations():
        if case.strategy != strategy or (strategy != "single" and case.ranks == 1):
            continue
        config = from_mapping(configure(*case.overrides()))
        assert accepts(config, case.ranks) == is_allowed(case), case
