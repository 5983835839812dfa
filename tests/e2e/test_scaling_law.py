"""Check examples/scaling_law.py: the fitted law, its exponent and the exponent's interval."""

from __future__ import annotations

import importlib.util
import re

import numpy as np
import pytest
from example_files import EXAMPLES, command_of, run_in_shell
from fake_runs import fake_run

EXAMPLE = EXAMPLES / "scaling_law.py"
SIZES = (1e4, 4e4, 1.6e5, 6.4e5, 2.56e6)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("scaling_law", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_of_the_example(tmp_path):
    done = run_in_shell(command_of(EXAMPLE), tmp_path)
    assert done.returncode == 0, done.stdout
    last = done.stdout[done.stdout.index("val_loss = ") :].splitlines()
    assert re.fullmatch(r"val_loss = \S+ \+ \S+ \* parameters\^-\d\.\d{3}", last[0])
    assert re.fullmatch(
        r"exponent \d\.\d{3}, 95% interval \d\.\d{3} to \d\.\d{3}, of 8 runs", last[1]
    )


def test_an_exact_law_is_found(example):
    losses = [1.5 + 20 * x**-0.3 for x in SIZES]
    law = example.fit(SIZES, losses)
    assert law[:3] == pytest.approx((1.5, 20, 0.3), rel=1e-3)
    assert law.low == pytest.approx(0.3, rel=1e-2) and law.high == pytest.approx(0.3, rel=1e-2)
    of_three = example.fit(SIZES[:3], [20 * x**-0.3 for x in SIZES[:3]])
    assert of_three[:3] == pytest.approx((0, 20, 0.3), rel=1e-3)


@pytest.mark.parametrize("exponent", [0.1, 0.3])
def test_the_interval_covers_the_exponent_in_19_of_20_sweeps(example, exponent):
    rng = np.random.default_rng(1)
    x = np.repeat(SIZES, 2)
    covered = 0
    for _ in range(200):
        losses = (1.5 + 20 * x**-exponent) * (1 + 0.003 * rng.standard_normal(len(x)))
        law = example.fit([*x], [*losses])
        covered += law.low <= exponent <= law.high
    assert 182 <= covered <= 198, "190 of 200, and three standard deviations to both sides"


@pytest.mark.parametrize("sizes", [(1e4, 4e4), (1e4, 2e4, 3e4), (0.0, 1.0, 9.0)])
def test_too_few_sizes_are_an_error(tmp_path, example, sizes):
    for number, size in enumerate(sizes):
        fake_run(tmp_path / f"{number}", {"data.truncate": size}, val_loss=3.0 - number / 9)
    fake_run(tmp_path / "killed", {"data.truncate": 1e6}, "preempted", 1.0)
    with pytest.raises(SystemExit, match="three or more values of x, the largest at least"):
        example.main(str(tmp_path), "data.truncate")
    with pytest.raises(SystemExit, match="no run has parameters"):
        example.main(str(tmp_path))
