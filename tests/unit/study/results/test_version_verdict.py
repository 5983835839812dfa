"""Each version of the code is compared with the first: losses, speed, and bits."""

from __future__ import annotations

import json
import math
import re

import pytest
from fake_runs import fake_run

from mingpt_ddp.study.results.analysis.compare import Setting
from mingpt_ddp.study.results.analysis.version_verdict import SAME, version_verdict
from mingpt_ddp.study.results.runs import read_jobs

LOSSES = [1.0, 2.0, 3.0]


def setting(directory, losses, step_ms=10.0, last=108):
    """Write the runs of a version that has trained seeds 1, 2 and 3. Return its setting."""
    for seed, loss in enumerate(losses, 1):
        run = fake_run(directory / f"{seed}", {"run.seed": seed}, val_loss=loss)
        lines = [{"step": 100 + n, "step_ms": step_ms * (1 + n % 2)} for n in range(last - 99)]
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    jobs = read_jobs([directory])
    return Setting(jobs, jobs[0].config, directory.name)


def compare_versions(*settings, same=False):
    """Return the verdicts, the JSON document, and the lines of the text."""
    jobs = [job for each in settings for job in each.jobs]
    digests = {job.directory: "same" if same else str(job.directory) for job in jobs}
    found, document, text = version_verdict([*settings], digests)
    json.dumps(document, allow_nan=False)
    return found, document, text.splitlines()


def test_the_same_code_is_neither_better_nor_faster(tmp_path):
    settings = [setting(tmp_path / name, LOSSES) for name in "ab"]
    (found,), document, lines = compare_versions(*settings, same=True)
    speed = "times as fast (95% interval 1.000 to 1.000: no difference shown)"
    assert lines[-3:] == [
        "b against a: the same validation loss at each seed",
        f"b against a, speed: a step is 1.000 {speed}, the whole run is 1.000 {speed}",
        "b against a: the same bits with seed 1, 2, 3",
    ]
    assert found.has_same_bits and not found.is_worse
    (comparison,) = document["comparisons"]
    assert comparison["bits"] == dict.fromkeys("123", SAME)
    assert comparison["sentence"] == "; ".join(lines[-3:])


def test_a_version_with_a_higher_loss_is_worse_and_slower(tmp_path):
    a = setting(tmp_path / "a", LOSSES)
    b = setting(tmp_path / "b", [1.2, 2.21, 3.19], step_ms=10.3)
    (found,), _, (*_, better, speed, bits) = compare_versions(a, b)
    assert better.startswith("a is better than b by 0.200 ± 0.025 (95% interval 0.175 to 0.225")
    assert (
        "a step is 0.971 times as fast (95% interval 0.971 to 0.971: slower), the whole run is 1.0"
        in speed
    )
    assert bits == "b against a: different bits, first seen at step 5 with seed 1, 2, 3"
    assert found.is_worse and not found.has_same_bits
    (found,), document, (*_, better, speed, _) = compare_versions(b, a)
    assert "a is better than b by 0.200" in better and not found.is_worse
    assert document["best"] == "a"
    assert "a step is 1.030 times as fast (95% interval 1.030 to 1.030: faster)" in speed


def test_runs_of_different_lengths_are_compared_up_to_the_shorter_one(tmp_path):
    a = setting(tmp_path / "a", LOSSES[:1])
    b = setting(tmp_path / "b", LOSSES[:1], last=104)
    line = "b against a: different bits, different lengths (104 steps against 108) with seed 1"
    assert compare_versions(a, b)[2][-1] == line
    (found,), _, lines = compare_versions(a, b, same=True)
    assert found.has_same_bits and "a step is of unknown speed" in lines[-2], (
        "one seed is enough for bits"
    )


def test_p_is_corrected_for_the_comparisons_with_the_first_version(tmp_path):
    """There are two comparisons, although three settings have three pairs."""
    settings = [setting(tmp_path / "a", LOSSES), setting(tmp_path / "b", [1.1, 2.2, 3.3])]
    alone = compare_versions(*settings)[1]["comparisons"][0]["p_corrected"]
    settings.append(setting(tmp_path / "c", [1.1, 2.2, 3.4]))
    found, document, lines = compare_versions(*settings)
    first, second = document["comparisons"]
    assert first["p"] == alone and first["p_corrected"] == second["p_corrected"]
    assert max(first["p"], second["p"]) < first["p_corrected"] == 2 * min(first["p"], second["p"])
    assert any("p is corrected for all 2 pairs" in line for line in lines)
    assert [each.comparison.reference.label for each in found] == ["a", "a"]
    assert [each["version"] for each in document["comparisons"]] == ["b", "c"]


def test_bits_and_speed_are_compared_at_steps_that_both_have_recorded(tmp_path):
    """One job has lost lines of its metrics. The clock of another has not moved during a step."""
    a, b = setting(tmp_path / "a", LOSSES), setting(tmp_path / "b", LOSSES)
    for seed, lost in ((1, '"step": 5,'), (2, "train_loss")):
        file = tmp_path / "b" / str(seed) / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if lost not in line))
    file = tmp_path / "b" / "3" / "metrics.jsonl"
    file.write_text(re.sub('"step_ms": [0-9.]+', '"step_ms": 0.0', file.read_text()))
    b = Setting(read_jobs([tmp_path / "b"]), b.config, "b")
    (found,), document, _ = compare_versions(a, b)
    assert {*found.bits.values()} == {"different bits"}
    assert document["comparisons"][0]["speed"]["step"] == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        # The other seeds of the second version are better, by more than chance.
        ([1.0, 2.0, 3.0, 1.0], [0.8, 1.79, 2.81, float("nan")], "it has a loss that is not finite"),
        ([1.0, 2.0, 3.0, float("nan")], [1.2, 2.21, 3.19, 1.1], "a has a loss that is not finite"),
        # With a constant difference of exactly 1, chance cannot be measured.
        ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], "each seed has the same difference"),
    ],
)
def test_an_impossible_comparison_does_not_prove_that_a_version_is_not_worse(tmp_path, a, b, why):
    (found,), _, lines = compare_versions(setting(tmp_path / "a", a), setting(tmp_path / "b", b))
    assert any(line.startswith(f"nothing can be said of b against a: {why}") for line in lines)
    assert found.is_worse


def test_a_version_that_diverges_until_decided_is_not_called_not_worse(tmp_path):
    """Five pairs have an interval, but the comparison has ended without a decision."""
    losses = {"a": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "b": [1.1, 1.9, 3.2, 3.9, 5.1, math.nan]}
    runs = {}
    for name, each in losses.items():
        runs[name] = {str(seed): f"{name},run.seed={seed}" for seed in range(1, 7)}
        for seed, loss in enumerate(each, 1):
            fake_run(tmp_path / runs[name][str(seed)], {"run.seed": seed}, val_loss=loss)
    record = {"settings": ["a", "b"], "seeds": [*map(str, range(1, 13))], "metric": None}
    record |= {"care": None, "runs": runs, "decided": {}}
    (tmp_path / "sweep.json").write_text(json.dumps({"until_decided": record}))
    settings = []
    for name in losses:
        jobs = read_jobs([tmp_path / directory for directory in runs[name].values()])
        settings.append(Setting(jobs, jobs[0].config, name))
    (found,), _, lines = compare_versions(*settings)
    assert found.comparison.difference is not None and found.is_worse
    assert any("not decided between" in line and "seed 6 of b diverged" in line for line in lines)
