"""sweep.until=decided trains only the jobs that a decision still needs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from multiprocess.ranks import configure, typed

from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.study.results.sequential_record import SequentialRecord, read_sequential
from mingpt_ddp.study.sweeps.until_decided import NeededJobs, sequential_rule

SETTINGS = ["lr=1", "lr=2", "lr=3"]
SEEDS = [*map(str, range(1, 13))]


def start(root, seeds=SEEDS, care=None):
    rule = SequentialRecord([*SETTINGS], [*seeds], None, care)
    return NeededJobs(root, SweepFile(root), rule)


def end(jobs, root, number, loss):
    """Write the result of a job that ends with this loss."""
    directory = root / f"job{number}"
    directory.mkdir(exist_ok=True)
    (directory / "result.json").write_text(json.dumps({"val_loss": loss}))
    jobs.add(number, directory)


def loss_of(number):
    """Return the loss of a job. The second of three settings is much worse than the first.

    The third is as good as the first, with noise.
    """
    seed, setting = divmod(number, 3)
    return seed + [0.0, 1.0 + seed / 50, (-1) ** seed / 10][setting]


def needed(jobs, failed=()):
    return [number for number in range(3 * len(SEEDS)) if jobs.is_needed(number, failed)]


def test_a_decided_setting_gets_no_more_seeds_even_after_a_restart(tmp_path):
    jobs = start(tmp_path)
    assert len(needed(jobs)) == 36 and jobs.n_needed_settings(()) == 3
    for number in range(3 * 6):
        end(jobs, tmp_path, number, loss_of(number))
    for each in (jobs, start(tmp_path)):
        assert {number % 3 for number in needed(each)} == {0, 2} and each.n_needed_settings(()) == 2
        assert each.directory_of(4) == tmp_path / "job4" and each.directory_of(34) is None
    assert [*read_sequential(tmp_path).decided] == ["lr=2"]


def test_a_difference_too_small_to_matter_is_decided_too(tmp_path, caplog):
    caplog.set_level("INFO")
    jobs = start(tmp_path, care=0.5)
    for number in range(3 * len(SEEDS)):
        if jobs.is_needed(number, ()):
            end(jobs, tmp_path, number, loss_of(number))
    assert {*read_sequential(tmp_path).decided} == {"lr=2", "lr=3"} and needed(jobs) == []
    assert "lr=2 is worse than lr=1" in caplog.text
    assert "lr=3 differs from lr=1 by less than 0.5" in caplog.text


def test_pairs_count_in_the_order_of_their_seeds(tmp_path):
    """If jobs with later seeds end first, their results wait."""
    jobs = start(tmp_path)
    for number in range(3, 3 * 9):
        end(jobs, tmp_path, number, loss_of(number))
    assert not read_sequential(tmp_path).decided
    for number in range(3):
        end(jobs, tmp_path, number, loss_of(number))
    in_order = tmp_path / "in order"
    in_order.mkdir()
    others = start(in_order)
    for number in range(3 * 9):
        end(others, in_order, number, loss_of(number))
    assert read_sequential(tmp_path).decided == read_sequential(in_order).decided != {}


def test_a_failed_job_ends_the_comparisons_of_its_setting(tmp_path):
    jobs = start(tmp_path)
    assert {number % 3 for number in needed(jobs, failed=[4])} == {0, 2}
    assert needed(jobs, failed=[3]) == [], "nothing can be compared without the first setting"
    assert needed(jobs, failed=[1, 2]) == []


def test_a_result_without_the_metric_ends_the_comparisons_of_its_setting(tmp_path):
    jobs = start(tmp_path)
    end(jobs, tmp_path, 0, 1.0)
    end(jobs, tmp_path, 1, None)
    assert {number % 3 for number in needed(jobs)} == {0, 2}


def test_seeds_may_be_added_only_at_the_end(tmp_path):
    start(tmp_path)
    start(tmp_path, [*SEEDS, "13"])
    start(tmp_path, SEEDS[:6])
    assert read_sequential(tmp_path).seeds == [*SEEDS, "13"], "the order of seeds stays"
    for seeds, care in ((["2", "1", *SEEDS[2:]], None), (SEEDS, 0.1)):
        with pytest.raises(ConfigError, match="was begun with until=decided"):
            start(tmp_path, seeds, care)


def test_a_damaged_record_counts_as_missing(tmp_path):
    whole = {"settings": SETTINGS, "seeds": SEEDS, "metric": None, "care": None, "runs": {}}
    for record in (
        None,
        1,
        {"settings": 3},
        {**whole, "settings": [], "decided": {}},
        {**whole, "decided": {"lr=2": [["nan", 1]]}},
        {**whole, "decided": {"lr=2": [[1e308, -1e308]] * 6}},
    ):
        (tmp_path / "sweep.json").write_text(json.dumps({"until_decided": record}))
        assert read_sequential(tmp_path) is None


RULE = ["run.name=lr"]


def rule(*words):
    """Return the stopping rule of a sweep with these words."""
    parser = OverridesParser.create()
    constant = [word for word in words if "," not in word and "(" not in word]
    config = replace(typed(configure(*constant)), sweep=SweepConfig(until="decided"))
    return sequential_rule(config, parser.parse_overrides([*words]))


def test_shuffled_values_keep_their_order_when_restarted():
    words = [*RULE, "run.seed=shuffle(range(1,13))", "optimizer.lr=shuffle(1,2,3,4,5)"]
    first, second = rule(*words), rule(*words)
    assert (first.seeds, first.settings) == (second.seeds, second.settings)
    assert first.seeds != sorted(first.seeds, key=int), "this order is no shuffled one"


def test_another_recipe_under_the_same_name_is_refused(tmp_path):
    words = [*RULE, "run.seed=range(1,13)", "optimizer.lr=0.1,0.2"]
    NeededJobs(tmp_path, SweepFile(tmp_path), rule(*words))
    NeededJobs(tmp_path, SweepFile(tmp_path), rule(*words))
    with pytest.raises(
        ConfigError, match=r"and model\.n_layer=\d, but now model\.n_layer is 7; restore"
    ):
        NeededJobs(tmp_path, SweepFile(tmp_path), rule(*words, "model.n_layer=7"))


@pytest.mark.parametrize(
    "words",
    [["optimizer.lr=0.1,0.1"], ["optimizer.lr=0.1,0.2", "++run.seed=20,21"]],
)
def test_a_value_or_the_seeds_given_twice_are_refused(words):
    with pytest.raises(ConfigError, match=r"sweep\.until=decided"):
        rule(*RULE, "run.seed=range(1,13)", *words)
