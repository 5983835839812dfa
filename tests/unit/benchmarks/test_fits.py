"""The fitted power laws and lower bounds that benchmarks/scaling.py draws.

Also the number of steps that fit into a given time.
"""

import math

import pytest
from benchmarking import modules


@pytest.fixture(scope="module")
def benchmarks():
    yield from modules("fits", "limits", "time_to_loss")


@pytest.mark.parametrize(
    ("constant", "factor", "exponent"), [(0.02, 0.003, 1.0), (5.0, 0.01, 2.0), (0.0, 3.0, 0.5)]
)
def test_a_power_law_is_recovered(benchmarks, constant, factor, exponent):
    xs = [1, 2, 4, 8, 16, 32]
    law = benchmarks.fits.fit(xs, [constant + factor * x**exponent for x in xs])
    assert law.exponent == pytest.approx(exponent)
    assert (law.constant, law.factor) == (pytest.approx(constant, abs=1e-9), pytest.approx(factor))
    assert law.error < 1e-9
    assert law(64) == pytest.approx(constant + factor * 64**exponent)


def test_coefficients_are_not_negative_and_flat_data_is_a_constant(benchmarks):
    falling = benchmarks.fits.fit([1, 2, 4], [5.0, 4.0, 3.0], exponent=1.0)
    assert falling.factor == 0 and 3 < falling.constant < 5
    steep = benchmarks.fits.fit([1, 2, 4], [1.0, 4.0, 16.0], exponent=1.0)
    assert steep.constant == 0 and steep.factor > 1


def test_the_error_is_relative_so_small_points_count_as_much_as_large_ones(benchmarks):
    law = benchmarks.fits.fit([1, 10], [1.1, 1000.0], exponent=3.0)
    assert law.constant + law.factor == pytest.approx(1.1) and law.error < 1e-9
    off = benchmarks.fits.fit([1, 1, 10, 10], [0.9, 1.1, 900.0, 1100.0], exponent=3.0)
    assert off.error == pytest.approx(math.sqrt(0.01), rel=0.1)


def test_too_few_points_are_refused(benchmarks):
    for xs, exponent in (([1, 2, 3], None), ([1, 1, 1, 1], None), ([3], 1.0)):
        with pytest.raises(ValueError, match="different points"):
            benchmarks.fits.fit(xs, [1.0] * len(xs), exponent)


def test_the_steps_that_fit_leave_time_for_fixed_costs(benchmarks):
    run = lambda steps, cpu: benchmarks.time_to_loss.Run(steps, 2.0, 99.0, cpu)  # noqa: E731
    assert benchmarks.time_to_loss.steps_that_fit(run(40, 5.0), run(160, 11.0), 101.0) == 40 + int(
        96 / 0.05
    )
    with pytest.raises(SystemExit, match="--long-steps"):
        benchmarks.time_to_loss.steps_that_fit(run(40, 5.0), run(160, 4.0), 100.0)
    with pytest.raises(SystemExit, match="--long-steps"):
        benchmarks.time_to_loss.steps_that_fit(run(40, 5.0), run(160, 11.0), 1.0)


def test_the_lower_bound_of_a_step_by_hand(benchmarks):
    limits = benchmarks.limits
    weights = 2 * 12 * 64**2 + (65 + 32) * 64 + 5 * 64  # matrices, embeddings, layer norms
    characters, activations = 3 * 32, 4 * 10 * 2 * 64
    need = limits.needed(limits.Point(layers=2, width=64, context=32, batch=5, ranks=2))
    assert need.held == 16 * weights + activations * characters
    assert need.traffic == 44 * weights + 2 * activations * characters
    assert need.flops == pytest.approx(characters * (6 * (weights - 32 * 64) + 12 * 2 * 64 * 32))

    machine = limits.Machine(flops_per_s=need.flops, bytes_per_s=need.traffic / 2, imports_mb=100)
    least = limits.limits(limits.Point(layers=2, width=64, context=32, batch=5, ranks=2), machine)
    assert least == pytest.approx(
        {"flops_ms": 1000, "bytes_ms": 2000, "held_mb": 300 + 2e-6 * need.held}
    )
