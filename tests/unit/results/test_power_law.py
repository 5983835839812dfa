"""Power laws: known exponents are found, too few points are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fake_runs import fake_run

from mingpt_ddp.results.analysis.laws import scalings
from mingpt_ddp.results.groups import replicates
from mingpt_ddp.results.page.plots import Plots
from mingpt_ddp.results.report import report
from mingpt_ddp.results.results import read_results
from mingpt_ddp.results.runs import read_jobs
from mingpt_ddp.results.stats.power_law import fit

pytestmark = pytest.mark.core
SIZES = [1e4, 4e4, 1.6e5, 6.4e5, 2.56e6]


def noisy(xs, law, noise=0.003, seed=0):
    rng = np.random.default_rng(seed)
    return [law(x) * (1 + noise * rng.standard_normal()) for x in xs]


def with_offset(x):
    return 1.5 + 20 * x**-0.3


def without_offset(x):
    return 8 * x**-0.1


@pytest.mark.parametrize(("law", "exponent"), [(with_offset, 0.3), (without_offset, 0.1)])
def test_an_exact_law_is_found(law, exponent):
    xs = SIZES if law is with_offset else SIZES[:3]
    found = fit(xs, [law(x) for x in xs])
    assert found.exponent == pytest.approx(exponent, rel=1e-3)
    assert found.offset == pytest.approx(1.5 if law is with_offset else 0.0, rel=1e-3)
    assert found.at(1e5) == pytest.approx(law(1e5), rel=1e-4)
    assert found.why_poor is None


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_interval_has_the_exponent_and_no_other(replicas):
    xs = [*SIZES * replicas]
    found = fit(xs, noisy(xs, with_offset))
    assert found.low < 0.3 < found.high
    assert found.high < 0.5
    precise = fit(xs, noisy(xs, with_offset, noise=0.0003))
    assert precise.high - precise.low < (found.high - found.low) / 3


def test_an_interval_holds_the_exponent_as_often_as_it_says():
    """Of 100 laws 95%, with four binomial deviations of room."""
    hits = 0
    for seed in range(100):
        xs = SIZES * 3
        found = fit(xs, noisy(xs, with_offset, seed=seed))
        hits += found.low <= 0.3 <= found.high
    assert hits >= 0.95 * 100 - 4 * (100 * 0.95 * 0.05) ** 0.5


def test_the_unit_of_x_does_not_matter():
    one = fit(SIZES, [with_offset(x) for x in SIZES])
    other = fit([x / 1e9 for x in SIZES], [with_offset(x) for x in SIZES])
    assert other.exponent == pytest.approx(one.exponent, rel=1e-6)
    assert other.at(1e-4) == pytest.approx(one.at(1e5))


@pytest.mark.parametrize(
    ("xs", "has_law"),
    [
        ([1, 10, 10], False),
        ([1, 2, 3], False),
        ([0, 1, 10], False),
        ([1, 2, float("nan")], False),
        ([1, 2, 4], True),
    ],
)
def test_too_few_or_too_close_values_have_no_law(xs, has_law):
    assert (fit(xs, [1.0] * len(xs)) is not None) == has_law


@pytest.mark.parametrize(
    "ys", [[2.0, 2.5, 2.1, 2.6, 2.2], [2.0] * 5, [2.0, 2.1, 2.2, 2.3, 2.4]], ids=str
)
def test_a_poor_fit_is_said(ys):
    assert fit(SIZES, ys).why_poor is not None


def lines_of(root):
    return [law.sentence for law in scalings(replicates(read_jobs([root])))]


def sized(root, lr=1e-3, sizes=(1_000, 4_000, 16_000, 64_000), seeds=(1, 2)):
    """Write runs of several sizes whose losses follow a law, with parameters in the result."""
    for size in sizes:
        for seed in seeds:
            run = root / f"{lr}-{size}-{seed}"
            loss = (1 + 10 * size**-0.25) * (1 + seed / 1000)
            keys = {"model.n_embd": size // 100, "run.seed": seed, "optimizer.lr": lr}
            fake_run(run, keys, val_loss=loss)
            result = json.loads((run / "result.json").read_text())
            (run / "result.json").write_text(json.dumps({**result, "parameters": size}))


def test_a_sweep_over_sizes_has_a_line_and_a_plot(tmp_path):
    sized(tmp_path)
    (line,) = lines_of(tmp_path)
    assert line.startswith("validation loss = 1.00")
    assert "* parameters^-0.25" in line
    assert "95% interval, 8 jobs)" in line
    assert "poor" not in line
    plots = Plots(read_results([tmp_path]))
    plots.laws()
    (figure,) = plots.figures
    assert figure["layout"]["xaxis"]["type"] == figure["layout"]["yaxis"]["type"] == "log"
    assert sorted(figure["data"][1]["x"]) == sorted([1_000, 4_000, 16_000, 64_000] * 2)
    json.dumps(figure, allow_nan=False)


def test_the_report_has_the_line_and_the_plot(tmp_path):
    sized(tmp_path)
    text = report([tmp_path], tmp_path / "report.html")
    assert lines_of(tmp_path)[0] in text.splitlines()
    assert "<h2>Power laws</h2>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("extreme", [1e-300, 1e90])
def test_absurd_numbers_have_no_law(tmp_path, extreme):
    """Files of runs are untrusted."""
    for number, value in enumerate((1, 4, 16, extreme)):
        fake_run(tmp_path / f"x{number}", {"data.truncate": value}, val_loss=2 / (1 + number))
    assert lines_of(tmp_path) == []
    for number, loss in enumerate((3.0, 2.0, extreme)):
        keys = {"data.truncate": 0.1 * 4**number, "optimizer.lr": 1}
        fake_run(tmp_path / f"y{number}", keys, val_loss=loss)
    assert lines_of(tmp_path) == []


def test_each_other_setting_has_its_own_law(tmp_path):
    sized(tmp_path, lr=1e-3)
    sized(tmp_path, lr=3e-3)
    lines = lines_of(tmp_path)
    assert {line.partition(" for ")[2] for line in lines} == {"lr=0.001", "lr=0.003"}


@pytest.mark.parametrize("axis", ["data.truncate", "trainer.max_steps"])
def test_data_and_steps_are_axes_too(tmp_path, axis):
    for value in (20, 40, 80, 160):
        x = value / 200 if axis == "data.truncate" else value
        loss = 1 + 10 * value**-0.25
        steps = value if axis == "trainer.max_steps" else 100
        fake_run(tmp_path / str(value), {axis: x}, val_loss=loss, steps=steps)
    (line,) = lines_of(tmp_path)
    assert f"* {'steps' if axis == 'trainer.max_steps' else axis}^-0.25" in line


@pytest.mark.parametrize("is_law", [True, False])
def test_any_other_number_is_an_axis_if_it_has_a_good_fit(tmp_path, is_law):
    for number, lr in enumerate((1e-4, 1e-3, 1e-2, 1e-1)):
        loss = 1 + lr**-0.25 if is_law else (3.0, 2.0, 2.1, 3.1)[number]
        fake_run(tmp_path / str(lr), {"optimizer.lr": lr}, val_loss=loss)
    lines = lines_of(tmp_path)
    assert ["* optimizer.lr^-0.25" in line for line in lines] == [True] * is_law
    plots = Plots(read_results([tmp_path]))
    plots.laws()
    assert len(plots.figures) == is_law


@pytest.mark.parametrize("sizes", [(1_000, 2_000, 3_000), (1_000, 64_000)])
def test_sweeps_without_a_scale_have_none(tmp_path, sizes):
    sized(tmp_path, sizes=sizes)
    assert lines_of(tmp_path) == []


def test_results_without_a_number_of_parameters_have_none(tmp_path):
    """As of runs of earlier versions, or edited."""
    sized(tmp_path)
    for path in tmp_path.glob("*/result.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "parameters": "many"}))
    assert lines_of(tmp_path) == []
