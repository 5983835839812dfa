"""`report A B compare`: which of several settings is better, and how sure that is."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from html import unescape
from pathlib import Path

import pytest
import yaml
from fake_runs import fake_run
from tools import call_tool

from mingpt_ddp.cli.commands import report as tool
from mingpt_ddp.results.analysis.compare import Setting, compare, compare_with_first
from mingpt_ddp.results.analysis.verdict import sentence
from mingpt_ddp.results.runs import Job, MetricsSummary, by_objective

pytestmark = pytest.mark.core


@pytest.fixture
def call(monkeypatch, capsys):
    return call_tool(tool, monkeypatch, capsys)


def replicate(root, losses, first=1, **values):
    """Write a run for each loss, with seeds from `first` on."""
    for seed, loss in enumerate(losses, first):
        keys = {"run.seed": seed, **{f"optimizer.{key}": value for key, value in values.items()}}
        name = ",".join(f"{key}={value}" for key, value in keys.items())
        fake_run(root / name, keys, val_loss=loss)


def strict(out):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(out, parse_constant=refuse)


def test_two_directories_are_compared_seed_by_seed(tmp_path, call):
    replicate(tmp_path / "a", [1.0, 2.0, 3.0], lr=1e-3)
    replicate(tmp_path / "b", [1.1, 2.2, 3.3], lr=3e-3)
    code, out, _ = call(tmp_path / "a", tmp_path / "b", "compare")
    assert code == 0
    assert out.splitlines()[-1] == (
        "no difference shown between lr=0.001 and lr=0.003: 0.20 ± 0.25 (95% interval -0.05 to "
        "0.45, 3 paired seeds, p = 0.074)"
    )


@pytest.fixture
def vowels(tmp_path):
    """Return runs of two settings: lr=0.001 has the lower loss, lr=0.003 has more vowels."""
    replicate(tmp_path, [1.0, 1.1, 1.2], lr=1e-3)
    replicate(tmp_path, [2.0, 2.1, 2.3], lr=3e-3)
    for result in tmp_path.glob("*/result.json"):
        record = json.loads(result.read_text())
        wins = "lr=0.003" in result.parent.name
        record["val_vowels"] = record["val_loss"] / 10 + 0.3 * wins
        result.write_text(json.dumps(record))
    return tmp_path


def test_a_metric_of_the_users_own(vowels, call):
    """The order, the verdict and the document follow it, whichever way is better."""
    high, low = "lr=0.003", "lr=0.001"
    for metric, better, best, other in (
        ("-val_vowels", "higher", high, low),
        ("val_vowels", "lower", low, high),
    ):
        out = call(vowels, "compare", f"metric={metric}")[1].splitlines()
        assert out[0] == f"compared by val_vowels: {better} is better"
        assert [line.split()[-1] for line in out[2:4]] == [best, other]
        assert out[-1].startswith(f"{best} is better than {other} by 0.403 ± 0.0")
        document = strict(call(vowels, "compare", f"metric={metric}", "format=json")[1])
        assert (document["objective"], document["better"]) == ("val_vowels", better)
        assert document["best"] == best and document["comparisons"][0]["difference"] > 0.4
    assert f"{low} is better than {high} by 1.0" in call(vowels, "compare")[1], "the loss"


def test_the_table_of_a_metric_of_the_users_own(vowels, call):
    lines = call(vowels, "metric=-val_vowels")[1].splitlines()
    assert lines[0].split()[0] == "val_vowels" and "val loss" in lines[0]
    assert lines[1].startswith("*") and "0.003" in lines[1]
    assert "note: ranked by val_vowels: higher is better" in lines
    assert any(line.startswith("best: 0.5133 ± ") for line in lines)
    assert any("compare metric=-val_vowels` tests whether others" in line for line in lines)
    document = strict(call(vowels, "metric=-val_vowels", "format=json")[1])
    assert (document["objective"], document["better"]) == ("val_vowels", "higher")
    assert document["groups"][0]["parameters"] == {"optimizer.lr": 0.003}


@pytest.mark.parametrize(
    ("metric", "hint"),
    [
        ("val_vowel", "did you mean val_vowels?"),
        ("-x", "use one of step, val_loss, wall_seconds, val_vowels"),
    ],
)
@pytest.mark.parametrize("words", [["compare"], ["format=json"], []])
def test_a_metric_that_no_run_has(words, metric, hint, vowels, call):
    code, out, err = call(vowels, *words, f"metric={metric}")
    assert (code, out) == (2, "")
    assert err == f"run error: metric={metric}: no run has this number; {hint}\n"


def trained_with(run, content="1", package="p", commit="a" * 40, text="t", earlier=(), **keys):
    """Add to a fake run what it has recorded of its code and its text."""
    code = {"files": {"recipe/mine.py": content}, "package": {"sha256": package, "commit": commit}}
    recorded = {"code": {**code, "earlier": [*earlier]}, "data": {"sha256": text * 64}}
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, **recorded}))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["run"] |= keys
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def halves(root, *recorded):
    """Write two settings of six seeds, of which the last three have recorded other things."""
    for lr in (1e-3, 3e-3):
        replicate(root, [1.0 + lr, 2.0 + lr, 3.0 + lr, 1.1, 2.3, 3.2], lr=lr)
    for run in sorted(root.iterdir()):
        seed = int(re.search(r"seed=(\d)", run.name)[1])
        trained_with(run, **recorded[seed > 3])


@pytest.mark.parametrize(
    ("recorded", "settings", "note"),
    [
        (({}, {}), 2, None),
        (
            ({}, {"content": "2"}),
            4,
            "the jobs were trained with several versions of recipe/mine.py: seeds of different "
            "versions are not taken together",
        ),
        (({}, {"earlier": ["12345678"]}), 4, "trained with more than one version of its code: "),
        (
            ({}, {"content": "2", "accept_code": True}),
            2,
            "the jobs were trained with several versions of recipe/mine.py: run.accept_code=true "
            "takes their seeds together",
        ),
        (
            ({}, {"package": "q", "commit": f"{'b' * 40}-dirty"}),
            2,
            f"the jobs were trained with several versions of mingpt_ddp, {'a' * 12} and "
            f"{'b' * 12}-dirty: their seeds are taken together",
        ),
        (
            ({}, {"text": "u"}),
            4,
            "the jobs were measured on different texts (data.sha256): their results do not compare",
        ),
    ],
    ids=["the same", "file", "earlier file", "accepted", "package", "text"],
)
def test_seeds_of_other_code_or_text_are_another_setting(recorded, settings, note, tmp_path, call):
    halves(tmp_path, *recorded)
    found = strict(call(tmp_path, "compare", "format=json")[1])
    assert len(found["settings"]) == settings
    assert {each["n"] for each in found["settings"]} == {12 // settings}
    versions = [each for each in found["notes"] if "version" in each or "different texts" in each]
    assert [each[: len(note or "")] for each in versions] == ([note] if note else [])
    assert [
        each for each in strict(call(tmp_path, "format=json")[1])["notes"] if each in versions
    ] == versions


def test_other_code_is_accepted_by_a_word(tmp_path, call):
    halves(tmp_path, {}, {"content": "2"})
    code, out, _ = call(tmp_path, "compare", "accept_code=true")
    assert code == 0 and "6 paired seeds" in out
    assert "run.accept_code=true takes their seeds together" in out
    labels = {
        each["name"] for each in strict(call(tmp_path, "compare", "format=json")[1])["settings"]
    }
    assert len({label.rpartition("code=")[2] for label in labels}) == 2, labels


def test_a_job_that_has_not_ended_is_with_the_others_of_its_setting(tmp_path, call):
    halves(tmp_path, {}, {})
    fake_run(tmp_path / "more", {"run.seed": 9, "optimizer.lr": 1e-3}, status=None)
    groups = strict(call(tmp_path, "format=json")[1])["groups"]
    assert sorted(len(group["jobs"]) for group in groups) == [6, 7]


def test_each_verdict_is_recorded_next_to_the_runs(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "outputs"
    for name, losses in (("a", [1.0, 2.0, 3.0]), ("b", [1.1, 2.2, 3.3])):
        replicate(root / "lr" / name, losses, lr=1 if name == "a" else 3)
    for config in root.rglob("config.yaml"):
        values = yaml.safe_load(config.read_text())
        values["run"]["name"] = str(config.parent.relative_to(root))
        config.write_text(yaml.safe_dump(values))
    _, out, err = call("outputs/lr/a", "outputs/lr/b", "compare", "format=json")
    assert err == ""
    record = json.loads((root / "experiments.jsonl").read_text())
    assert record.pop("when").startswith("20")
    assert record == {"runs": ["outputs/lr/a", "outputs/lr/b"], **strict(out)}
    with (root / "experiments.jsonl").open("a") as file:
        file.write('{"runs": 1')  # a process was killed
    call("outputs/lr/b", "outputs/lr/a", "compare")
    lines = (root / "experiments.jsonl").read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[2])["runs"] == ["outputs/lr/b", "outputs/lr/a"]
    (root / "experiments.jsonl").unlink()
    (root / "experiments.jsonl").mkdir()
    code, out, err = call("outputs/lr/a", "outputs/lr/b", "compare")
    assert code == 0 and "no difference shown" in out and err.count("note: cannot write") == 1


def test_seeds_that_were_watched_otherwise_are_replicates(tmp_path, call):
    """Trackers, checks, evaluations and further texts change no result."""
    watched = {
        2: {"tracker.mlflow": True},
        3: {"trainer.sample_every": 20},
        4: {"trainer.eval_every": 5},
        5: {"data.val_paths": {"wiki": "wiki.txt"}},
        6: {"tracker.mlflow": True, "snapshot.every_steps": 7},
    }
    for lr, mean in ((1e-3, 2.0), (3e-3, 2.1)):
        for seed in range(1, 8):
            keys = {"run.seed": seed, "optimizer.lr": lr}
            if lr == 1e-3:
                keys |= watched.get(seed, {})
            fake_run(tmp_path / f"{lr}-{seed}", keys, val_loss=mean + 0.01 * seed + lr * (seed % 2))
    fake_run(tmp_path / "again", {"run.seed": 1, "optimizer.lr": 1e-3, "tracker.mlflow": True})
    code, out, _ = call(tmp_path, "compare")
    assert code == 0
    table = [line.split() for line in out.splitlines() if line.split()[-1].startswith("lr=")]
    assert [row[1] for row in table if row[0][0].isdigit()] == ["7", "7"]
    assert "lr=0.001 is better than lr=0.003" in out.splitlines()[-1]
    (note,) = [line for line in out.splitlines() if "replicates differ in" in line]
    assert note.endswith(": no loss depends on that")
    for key in ("tracker.mlflow", "trainer.sample_every", "trainer.eval_every", "data.val_paths"):
        assert key in note


def test_losses_of_different_parts_of_the_split_are_not_compared(tmp_path, call):
    """One of them would be called better: it was measured on easier windows."""
    for lr in (1e-3, 3e-3):
        for seed in range(1, 7):
            steps = 2 if seed > 4 else None
            keys = {"run.seed": seed, "optimizer.lr": lr, "trainer.eval_steps": steps}
            loss = 2.0 + 30 * lr + 0.01 * seed - 0.5 * (seed > 4) + lr * (seed % 2)
            fake_run(tmp_path / f"{lr}-{seed}", keys, val_loss=loss)
    code, out, _ = call(tmp_path, "compare")
    assert code == 0
    verdicts = [line for line in out.splitlines() if " better than " in line or "nothing" in line]
    (better,) = [line for line in verdicts if " better than " in line]
    assert "lr=0.001, eval_steps=2 is better than lr=0.003, eval_steps=2 by" in better
    others = [line for line in verdicts if line != better]
    assert len(others) == 2
    for line in others:
        assert "they were measured on different parts of the validation split" in line


def test_a_difference_that_is_shown(tmp_path, call):
    replicate(tmp_path / "s", [1.0, 2.0, 3.0, 4.0], lr=1e-3)
    replicate(tmp_path / "s", [1.1, 2.12, 3.1, 4.12], lr=3e-3)
    code, out, _ = call("compare", tmp_path / "s")
    assert code == 0
    assert "compared by validation loss, in nats per token" in out
    assert out.splitlines()[-1] == (
        "lr=0.001 is better than lr=0.003 by 0.110 ± 0.018 (95% interval 0.092 to 0.128, "
        "4 paired seeds, p = 0.00032)"
    )
    assert not list(tmp_path.rglob("*.html")), "compare writes no page"


def test_other_seeds_are_compared_by_their_means(tmp_path, call):
    replicate(tmp_path / "a", [1.0, 1.1, 1.2], lr=1e-3)
    replicate(tmp_path / "b", [2.0, 2.1, 2.2, 2.3], first=7, lr=3e-3)
    _, out, _ = call(tmp_path / "a", tmp_path / "b", "compare", "format=json")
    (comparison,) = strict(out)["comparisons"]
    assert (comparison["test"], comparison["seeds"]) == ("Welch", [3, 4])
    assert comparison["difference"] == pytest.approx(1.05)


def test_the_numbers_as_json(tmp_path, call):
    replicate(tmp_path / "s", [1.0, 2.0, 3.0], lr=1e-3)
    replicate(tmp_path / "s", [1.1, 2.2, 3.3], lr=3e-3)
    fake_run(tmp_path / "s" / "killed", {"run.seed": 9, "optimizer.lr": 3e-3}, status=None)
    code, out, _ = call(tmp_path / "s", "compare", "format=json")
    found = strict(out)
    assert code == 0
    assert found["best"] == "lr=0.001"
    assert found["settings"][0]["by_seed"] == {"1": 1.0, "2": 2.0, "3": 3.0}
    assert found["settings"][1]["unfinished"] == 1
    (comparison,) = found["comparisons"]
    assert (comparison["reference"], comparison["other"]) == ("lr=0.001", "lr=0.003")
    assert comparison["better"] is None
    assert comparison["p"] == comparison["p_corrected"]
    assert any("1 job of lr=0.003 not counted" in note for note in found["notes"])


def test_several_settings_are_corrected_for_all_pairs(tmp_path, call):
    for lr, shift in ((1e-3, 0.0), (2e-3, 0.1), (3e-3, 0.2)):
        losses = [1.0 + shift, 2.01 + 1.1 * shift, 3.0 + 1.2 * shift]
        replicate(tmp_path / "s", losses, lr=lr)
    _, out, _ = call(tmp_path / "s", "compare", "format=json")
    found = strict(out)
    assert found["pairs_corrected_for"] == 3
    first, second = found["comparisons"]
    assert (first["other"], second["other"]) == ("lr=0.002", "lr=0.003")
    # the differences are proportional, so their p are equal: Holm multiplies the first by 3
    assert first["p"] == pytest.approx(second["p"], rel=1e-6)
    assert first["p_corrected"] == pytest.approx(3 * first["p"], rel=1e-6)
    assert second["p_corrected"] == pytest.approx(first["p_corrected"], rel=1e-6)
    _, out, _ = call(tmp_path / "s", "compare")
    assert "note: p is corrected for all 3 pairs of settings (Holm)" in out


def test_one_seed_each_says_nothing(tmp_path, call):
    replicate(tmp_path / "s", [1.0], lr=1e-3)
    replicate(tmp_path / "s", [2.0], lr=3e-3)
    code, out, _ = call(tmp_path / "s", "compare")
    assert (code, out) == (
        0,
        "nothing can be said: each setting has one seed, which says nothing about chance; train "
        "more of them in a grid, not in a search: -m run.seed=1,2,3\n",
    )
    _, out, _ = call(tmp_path / "s", "compare", "format=json")
    assert strict(out)["comparisons"] == []


def test_a_setting_with_one_seed_among_others(tmp_path, call):
    replicate(tmp_path / "s", [1.5, 1.6], lr=1e-3)
    replicate(tmp_path / "s", [1.0], lr=3e-3)
    _, out, _ = call(tmp_path / "s", "compare")
    assert out.splitlines()[-1].startswith("nothing can be said of lr=0.003 against lr=0.001: it")
    assert "is better" not in out


def test_runs_of_the_same_recipe_in_two_directories_are_compared(tmp_path, call):
    """As before and after a change of the code."""
    replicate(tmp_path / "before", [1.0, 2.0, 3.0], lr=1e-3)
    replicate(tmp_path / "after", [1.1, 2.11, 3.1], lr=1e-3)
    _, out, _ = call(tmp_path / "before", tmp_path / "after", "compare")
    assert out.splitlines()[-1].startswith("before is better than after by 0.103 ± 0.014")


def test_seeds_in_several_directories_are_one_setting(tmp_path, call):
    runs = []
    for name, lr, seed, loss in (
        ("a", 1, 1, 1.0),
        ("b", 1, 2, 1.1),
        ("c", 2, 1, 2.0),
        ("d", 2, 2, 2.2),
    ):
        runs.append(
            fake_run(tmp_path / name, {"run.seed": seed, "optimizer.lr": lr}, val_loss=loss)
        )
    _, out, _ = call(*runs, "compare", "format=json")
    assert [len(side["by_seed"]) for side in strict(out)["settings"]] == [2, 2]


def test_one_setting_is_refused(tmp_path, call):
    replicate(tmp_path / "s", [1.0, 1.1], lr=1e-3)
    code, _, err = call(tmp_path / "s", "compare")
    assert code == 2
    assert err.count("\n") == 1
    assert "there is one setting to compare" in err


def test_different_tokenizers_are_compared_by_bits_per_byte(tmp_path, call):
    for kind, loss, bits in (("char", 1.0, 2.5), ("byte", 2.0, 2.0)):
        for seed in (1, 2):
            keys = {"run.seed": seed, "data.tokenizer": kind}
            run = tmp_path / f"{kind}{seed}"
            fake_run(run, keys, val_loss=loss, bits_per_byte=bits + seed / 1000)
    _, out, _ = call(tmp_path, "compare", "format=json")
    found = strict(out)
    assert (found["objective"], found["best"]) == ("val_bits_per_byte", "tokenizer=byte")


# The sign of a verdict

UNEQUAL = {1e-2: [1.10, 1.113, 1.121, 0.80, 0.81], 2e-2: [1.00, 1.01, 1.02]}


def shown_on_page(directory, heading):
    section = re.search(f"<h2>{heading}</h2>(.*?)<h2>", (directory / "report.html").read_text())
    return unescape(section[1])


def test_the_better_setting_is_better_over_the_tested_seeds(tmp_path, call):
    """Two more seeds, which the test leaves out, give the other setting the lower mean."""
    for lr, losses in UNEQUAL.items():
        replicate(tmp_path / "s", losses, lr=lr)
    verdict = (
        "lr=0.02 is better than lr=0.01 by 0.1013 ± 0.0038 (95% interval 0.0975 to 0.1051, "
        "3 paired seeds, 2 unpaired seeds left out, p < 0.0001)"
    )
    order = (
        "lr=0.01 has the better mean over all of its seeds, but lr=0.02 is better at the 3 seeds "
        "that both have: 2 seeds left out"
    )
    lines = call(tmp_path / "s", "compare")[1].splitlines()
    assert [line.split()[-1] for line in lines[2:4]] == ["lr=0.01", "lr=0.02"], "by the mean"
    assert lines[4:] == [f"note: {order}", verdict]
    found = strict(call(tmp_path / "s", "compare", "format=json")[1])
    (comparison,) = found["comparisons"]
    assert (found["best"], comparison["better"]) == ("lr=0.02", "lr=0.02")
    assert (comparison["reference"], comparison["other"]) == ("lr=0.02", "lr=0.01")
    assert comparison["difference"] == pytest.approx(0.1013, abs=1e-4)
    assert (comparison["seeds"], comparison["left_out"]) == ([3, 3], 2)
    table = call(tmp_path / "s")[1]
    assert "best: 1.0100 ± 0.0248, mean of 3 seeds; its best seed is " in table
    assert "but run.seed=*,optimizer.lr=0.02 has it over the 3 seeds that all" in table
    assert table.splitlines()[2].split()[:2] == ["*", "1.0100"]
    assert verdict in shown_on_page(tmp_path / "s", "Comparison")
    assert order in shown_on_page(tmp_path / "s", "Comparison")
    assert "learning rate: 0.02" in shown_on_page(tmp_path / "s", "Best configuration")


def test_no_best_is_named_against_a_verdict(tmp_path, call):
    """The best at the three shared seeds is worse at the twelve that two settings have."""
    usual = {seed: 2 + 0.3 * math.sin(7 * seed) for seed in range(1, 13)}
    better = [value + (0.001 if seed < 4 else -0.1 - 0.001 * seed) for seed, value in usual.items()]
    replicate(tmp_path / "s", [*usual.values()], lr=1)
    replicate(tmp_path / "s", better, lr=2)
    replicate(tmp_path / "s", [usual[seed] + 0.2 + 0.01 * seed for seed in (1, 2, 3)], lr=3)
    found = strict(call(tmp_path / "s", "compare", "format=json")[1])
    assert (found["best"], found["comparisons"][0]["better"]) == (None, "lr=2")
    note = "lr=1 is the best over the seeds that all settings have, but lr=2 is better than it"
    assert any(each.startswith(note) for each in found["notes"])


def test_a_metric_that_a_setting_lacks_is_named(tmp_path, call):
    replicate(tmp_path / "s", [1.0, 1.1, 1.2], lr=1)
    replicate(tmp_path / "s", [1.3, 1.4, 1.6], lr=2)
    for seed in (1, 2, 3):
        (result,) = (tmp_path / "s").glob(f"run.seed={seed},optimizer.lr=1/result.json")
        record = {**json.loads(result.read_text()), "accuracy": 0.5 + 0.01 * seed}
        result.write_text(json.dumps(record))
    lines = call(tmp_path / "s", "compare", "metric=-accuracy")[1].splitlines()
    assert lines[-1] == (
        "nothing can be said of lr=2 against lr=1: it has complete jobs, but none of them has "
        "recorded accuracy"
    )
    assert not any("not complete" in line for line in lines)


def test_where_each_setting_has_a_diverged_seed_they_have_two(tmp_path, call):
    replicate(tmp_path / "s", [1.0, math.nan], lr=1)
    replicate(tmp_path / "s", [math.nan, 1.2], lr=2)
    last = call(tmp_path / "s", "compare")[1].splitlines()[-1]
    assert last.startswith("nothing can be said: no setting has two complete seeds and no diverged")


def test_without_three_seeds_of_all_settings_the_best_has_the_lowest_mean(tmp_path, call):
    replicate(tmp_path / "s", [1.0, 1.2, 1.4, 0.3], lr=1)
    replicate(tmp_path / "s", [1.1, 1.1, 1.3], lr=2)
    replicate(tmp_path / "s", [2.0, 2.1], lr=3, first=8)
    found = strict(call(tmp_path / "s", "compare", "format=json")[1])
    assert found["best"] == "lr=1"
    assert [each["other"] for each in found["comparisons"]] == ["lr=2", "lr=3"]
    assert [each["test"] for each in found["comparisons"]] == ["paired t", "Welch"]
    first = found["comparisons"][0]
    assert first["difference"] < 0 and first["better"] is None, "lr=2 is lower at three seeds"
    assert first["sentence"].startswith("no difference shown between lr=2 and lr=1: 0.03 ")


def setting(label, losses):
    """Return a setting of complete jobs with these losses by seed."""
    jobs = []
    for seed, loss in losses.items():
        result = {"val_loss": loss}
        place = Path(f"{label}-{seed}")
        jobs.append(Job(str(place), place, "complete", {"run.seed": seed}, result, METRICS, []))
    return Setting(jobs, {}, label)


METRICS = MetricsSummary()


def random_settings(rng):
    """Return settings that share any number of seeds; the others may be much better or worse."""
    shared = range(rng.randint(0, 8))
    settings = []
    for number in range(rng.randint(2, 4)):
        own = range(100 * (number + 1), 100 * (number + 1) + rng.randint(0, 5))
        offset = rng.choice([0.0, 0.1, 0.3])
        losses = {}
        for seed in (*shared, *own):
            if rng.random() > 0.2:
                is_shared = seed < 100
                shift = 0.0 if is_shared else rng.choice([-1.0, 0.0, 1.0])
                losses[seed] = 2 + offset + shift + rng.gauss(0, 0.05)
        if losses:
            settings.append(setting(f"s{number}", losses))
    return settings


SAID = re.compile(
    r"(?:no difference shown between )?(s\d) (?:is better than|and) (s\d)(?:: | by )\d"
)


def test_the_named_winner_has_the_lower_mean_over_the_tested_seeds():
    rng = random.Random(1)
    winners = 0
    for _ in range(400):
        settings = random_settings(rng)
        by_label = {each.label: each.by_seed for each in settings}
        compared = compare(sorted(settings, key=by_objective))
        compared += compare_with_first(settings) if settings else []
        for said in map(sentence, compared):
            found = SAID.match(said)
            assert found or said.startswith("nothing can be said of s"), "of no negative size"
            if found:
                better, worse = (by_label[label] for label in found.groups())
                if "paired seeds" in said:
                    both = {*better} & {*worse}
                    better, worse = (
                        {seed: each[seed] for seed in both} for each in (better, worse)
                    )
                means = [statistics.fmean(losses.values()) for losses in (better, worse)]
                assert means[0] < means[1], said
                winners += "is better than" in said
    assert winners > 100


# Seeds that diverged


@pytest.fixture
def diverged(tmp_path):
    """The best mean is the mean of three survivors."""
    replicate(tmp_path / "s", [1.00, 1.01, 1.03, 1.02, 1.0], lr=1)
    replicate(tmp_path / "s", [1.10, 1.12, 1.12, 1.13, 1.1], lr=2)
    replicate(tmp_path / "s", [0.90, 0.91, 0.92, float("nan")], lr=5)
    stopped = {"run.seed": 5, "optimizer.lr": 5}
    run = fake_run(tmp_path / "s" / "stopped", stopped, status=None, steps=40)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "train_loss": null}\n')
    return tmp_path / "s"


def test_a_setting_with_diverged_seeds_has_no_mean_and_is_never_the_best(diverged, call):
    note = "diverged at 2 of its 5 seeds (4, 5), so it has no mean and is not ranked"
    lines = call(diverged, "compare")[1].splitlines()
    assert re.split("  +", lines[4].strip()) == ["-", "3/5, 2 diverged", "-", "-", "lr=5"]
    assert f"note: lr=5 {note}" in lines
    assert lines[-2].startswith("lr=1 is better than lr=2 by 0.102 ")
    assert lines[-1] == (
        "nothing can be said of lr=5 against lr=1: it has a loss that is not finite at 2 of 5 seeds"
    )
    found = strict(call(diverged, "compare", "format=json")[1])
    assert found["best"] == "lr=1" and found["pairs_corrected_for"] == 1
    last = found["settings"][-1]
    assert (last["n"], last["mean"], last["diverged"]) == (3, None, ["4", "5"])
    table = call(diverged)[1]
    assert re.split("  +", table.splitlines()[3].strip())[:5] == [
        "-",
        "-",
        "-",
        "3/5, 2 diverged",
        "complete, diverged",
    ]
    assert f"run.seed=*,optimizer.lr=5 {note}" in table or f"optimizer.lr=5 {note}" in table
    assert "best: 1.0120 ± 0.0162, mean of 5 seeds" in table
    assert note in shown_on_page(diverged, "Comparison")
    assert "learning rate: 1." in shown_on_page(diverged, "Best configuration")


def test_where_all_settings_diverged_none_is_the_best(tmp_path, call):
    for lr in (1, 2):
        replicate(tmp_path / "s", [1.0, 1.1, float("inf")], lr=lr)
    lines = call(tmp_path / "s", "compare")[1].splitlines()
    assert lines[0].startswith("note: lr=1 diverged at 1 of its 3 seeds (3), so")
    assert lines[2].startswith("nothing can be said: no setting has two complete seeds and no div")
    table = call(tmp_path / "s")[1]
    assert "there is no best setting, since each of them has a diverged seed" in table
    assert "best: " not in table and "*  " not in table
    assert strict(call(tmp_path / "s", "compare", "format=json")[1])["best"] is None


# Numbers and texts


def test_no_number_has_ninety_digits(tmp_path, call):
    replicate(tmp_path / "s", [1e90, 1.1e90, 1.3e90], lr=1)
    replicate(tmp_path / "s", [2e90, 3e90, 2.2e90], lr=2)
    out = call(tmp_path / "s", "compare")[1]
    assert "7.539e89 to 1.513e90" in out and "lr=1 and lr=2: 1.267e90 ± 1.368e90 (95%" in out
    out += (
        call(tmp_path / "s")[1] + (tmp_path / "s" / "report.html").read_text().partition("<scr")[0]
    )
    assert not re.search(r"\d{20}", out)


def test_what_turns_the_direction_of_text_is_escaped(tmp_path, call):
    for number, name in enumerate(("x\u202ey\x1b[2J", "x\u2066z\u2028\n\x07")):
        for seed in (1, 2, 3):
            keys = {"run.seed": seed, "model.name": name}
            fake_run(tmp_path / "s" / f"{number}-{seed}", keys, val_loss=1 + number + seed / 9)
    out = call(tmp_path / "s", "compare")[1] + call(tmp_path / "s")[1]
    assert r"x\u202ey" in out and r"x\u2066z\u2028" in out
    page = (tmp_path / "s" / "report.html").read_text()
    body, _, scripts = page.partition('id="figures">')
    figures = scripts.partition("</script>")[0]
    assert r"x\u202ey" in body and r"x\\u202ey" in figures
    assert not re.search("[\x1b\x07\u2028-\u202e\u2066-\u2069]", out + body + figures)
    assert not re.search(r"[^\\]\\u20(2[89a-e]|6[6-9])", figures), "as JSON's escape"
