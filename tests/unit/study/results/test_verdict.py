"""`report A B compare` says which of several settings is better, and how certain that is."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path

import pytest
import yaml
from fake_runs import fake_run
from tools import call_tool

from mingpt_ddp.cli.commands import report as tool
from mingpt_ddp.study.results.analysis.compare import Setting, compare, pairs_of
from mingpt_ddp.study.results.analysis.verdict import sentence
from mingpt_ddp.study.results.objective import objective_named
from mingpt_ddp.study.results.runs import MetricsSummary, RunRecord, by_objective

NAN = math.nan
ONE_SEED = "nothing can be said of b against a: it has one seed, which says nothing about chance"


@pytest.fixture
def call(monkeypatch, capsys):
    return call_tool(tool, monkeypatch, capsys)


def strict(out):
    return json.loads(out, parse_constant=pytest.fail)


# Verdicts on numbers


def setting(label, losses, status=None, metric="val_loss", **config):
    """Return a setting of jobs with these losses by seed. A job with a loss of NaN has diverged."""
    if not isinstance(losses, dict):
        losses = dict(enumerate(losses, 1))
    jobs = []
    for seed, loss in losses.items():
        what = status or ("diverged" if math.isnan(loss) else "complete")
        result = {"val_loss": loss} if metric == "val_loss" else {metric: loss}
        place = Path(f"{label}-{seed}")
        jobs.append(
            RunRecord(str(place), place, what, {"run.seed": seed}, result, MetricsSummary(), [])
        )
    return Setting(jobs, config, label)


def verdicts(*settings):
    return [sentence(each) for each in compare(sorted(settings, key=by_objective))]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (
            [1.0, 2.0, 3.0],
            [1.1, 2.2, 3.3],
            "no difference shown between a and b: 0.20 ± 0.25 (95% interval -0.05 to 0.45, "
            "3 paired seeds, p = 0.074)",
        ),
        (
            [1.0, 2.0, 3.0, 4.0],
            [1.1, 2.12, 3.1, 4.12],
            "a is better than b by 0.110 ± 0.018 (95% interval 0.092 to 0.128, 4 paired seeds, "
            "p = 0.00032)",
        ),
        (  # two more seeds, which the test leaves out, give the other setting the lower mean
            [1.10, 1.113, 1.121, 0.80, 0.81],
            [1.00, 1.01, 1.02],
            "b is better than a by 0.1013 ± 0.0038 (95% interval 0.0975 to 0.1051, "
            "3 paired seeds, 2 unpaired seeds left out, p < 0.0001)",
        ),
        (  # Welch's test
            [1.0, 1.1, 1.2],
            {7: 2.0, 8: 2.1, 9: 2.2, 10: 2.3},
            "a is better than b by 1.05 ± 0.22 (95% interval 0.83 to 1.27, 3 and 4 seeds, "
            "p < 0.0001)",
        ),
        (
            [1e90, 1.1e90, 1.3e90],
            [2e90, 3e90, 2.2e90],
            "no difference shown between a and b: 1.267e90 ± 1.368e90 (95% interval -1.015e89 to "
            "2.635e90, 3 paired seeds, p = 0.058)",
        ),
        ([1.5, 1.6], [1.0], f"{ONE_SEED}; train more seeds in a grid, not in a search: -m run"),
        (
            [1.1, 1.2],
            [0.9, 0.91, NAN],
            "nothing can be said of b against a: it has a loss that is not finite at 1 of 3 seeds",
        ),
    ],
)
def test_the_verdict_on_two_settings(a, b, expected):
    (said,) = verdicts(setting("a", a), setting("b", b))
    assert said.startswith(expected) and (expected[-1] != ")" or said == expected)


def test_losses_of_different_parts_of_the_split_are_not_compared():
    """A setting that was measured on easier windows would be called better."""
    part = {"trainer.eval_steps": 2}
    settings = [setting("a", [1.0, 1.1]), setting("b", [0.5, 0.7], **part)]
    (said,) = verdicts(*settings)
    assert "they were measured on different parts of the validation split" in said
    assert pairs_of([*settings, setting("c", [0.6, 0.8], **part)]) == 1


def test_a_metric_that_a_setting_lacks_is_named():
    accuracy = objective_named("-accuracy")
    settings = [setting("a", [0.5, 0.6], metric="accuracy"), setting("b", [1.0, 1.1])]
    for each in settings:
        each.jobs[:] = [RunRecord(**{**vars(job), "ranked_by": accuracy}) for job in each.jobs]
    (said,) = verdicts(*settings)
    assert said.endswith("it has complete jobs, but none of them has recorded accuracy")


def test_if_a_setting_lacks_three_seeds_the_best_has_the_lowest_mean():
    one, two = setting("1", [1.0, 1.2, 1.4, 0.3]), setting("2", [1.1, 1.1, 1.3])
    first, second = compare([one, two, setting("3", {8: 2.0, 9: 2.1})])
    assert first.reference is second.reference is one
    assert (first.difference.test, second.difference.test) == ("paired t", "Welch")
    assert first.difference.difference < 0 and first.better is None
    said = sentence(first)
    assert said.startswith("no difference shown between 2 and 1: 0.03 "), "2 is lower at three"


def test_several_settings_are_corrected_for_all_pairs():
    """The differences are proportional, so their p-values are equal. Holm triples the first one."""
    losses = [[1.0 + d, 2.01 + 1.1 * d, 3.0 + 1.2 * d] for d in (0.0, 0.1, 0.2)]
    settings = [setting(label, each) for label, each in zip("abc", losses, strict=True)]
    first, second = compare(settings)
    assert first.difference.p == pytest.approx(second.difference.p, rel=1e-6)
    assert [first.p, second.p] == pytest.approx([3 * first.difference.p] * 2, rel=1e-6)


# Directories of runs


def replicate(root, losses, first=1, **values):
    """Write a run for each loss. The seeds begin with `first`."""
    for seed, loss in enumerate(losses, first):
        keys = {"run.seed": seed, **{f"optimizer.{key}": value for key, value in values.items()}}
        name = ",".join(f"{key}={value}" for key, value in keys.items())
        fake_run(root / name, keys, val_loss=loss)


def shown_on_page(directory, heading):
    section = re.search(f"<h2>{heading}</h2>(.*?)<h2>", (directory / "report.html").read_text())
    return unescape(section[1])


def test_the_settings_of_directories(tmp_path, call):
    """They are two recipes, one recipe before and after a change of the code, and single runs."""
    replicate(tmp_path / "a", [1.0, 2.0, 3.0], lr=1e-3)
    replicate(tmp_path / "b", [1.1, 2.2, 3.3], lr=3e-3)
    replicate(tmp_path / "after", [1.1, 2.11, 3.1], lr=1e-3)
    code, out, err = call(tmp_path / "a", tmp_path / "b", "compare")
    assert (code, err) == (0, "") and not list(tmp_path.rglob("*.html")), "compare writes no page"
    assert out.splitlines()[0] == "compared by validation loss, in nats per token"
    assert out.splitlines()[-1].startswith("no difference shown between lr=0.001 and lr=0.003: 0.2")
    _, out, _ = call(tmp_path / "a", tmp_path / "after", "compare")
    assert out.splitlines()[-1].startswith("a is better than after by 0.103 ± 0.014")
    found = strict(call(*(tmp_path / n for n in ("a", "b", "after")), "compare", "format=json")[1])
    names = ["a (lr=0.001)", "after (lr=0.001)", "lr=0.003"]
    assert [each["name"] for each in found["settings"]] == names
    runs = [run for name in "ab" for run in sorted((tmp_path / name).glob("*=*"))]
    found = strict(call(*runs, "compare", "format=json")[1])
    assert [len(side["by_seed"]) for side in found["settings"]] == [3, 3]
    code, out, err = call(tmp_path / "a", "compare")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "there is only one setting, so nothing to compare" in err


def test_the_numbers_as_json(tmp_path, call):
    replicate(tmp_path, [1.0, 2.0, 3.0], lr=1e-3)
    replicate(tmp_path, [1.1, 2.2, 3.3], lr=3e-3)
    fake_run(tmp_path / "killed", {"run.seed": 9, "optimizer.lr": 3e-3}, status=None)
    replicate(tmp_path, [1.2, 2.4, 3.6], lr=4e-3)
    found = strict(call(tmp_path, "compare", "format=json")[1])
    assert (found["best"], found["pairs_corrected_for"]) == ("lr=0.001", 3)
    assert found["settings"][0]["by_seed"] == {"1": 1.0, "2": 2.0, "3": 3.0}
    assert [each["unfinished"] for each in found["settings"]] == [0, 1, 0]
    first = found["comparisons"][0]
    assert (first["reference"], first["other"]) == ("lr=0.001", "lr=0.003")
    assert first["better"] is None and first["p_corrected"] == pytest.approx(3 * first["p"])
    assert any("do not count: 1 job of lr=0.003" in note for note in found["notes"])
    assert any("p is corrected for all 3 pairs of settings (Holm)" in n for n in found["notes"])


def test_one_seed_each_says_nothing(tmp_path, call):
    replicate(tmp_path, [1.0], lr=1e-3)
    replicate(tmp_path, [2.0], lr=3e-3)
    why = "nothing can be said: each setting has one seed, which says nothing about chance; train"
    assert call(tmp_path, "compare")[1].startswith(why)
    found = strict(call(tmp_path, "compare", "format=json")[1])
    assert (found["comparisons"], found["best"]) == ([], None)


@pytest.mark.parametrize("metric", ["-val_vowels", "val_vowels"])
def test_a_user_metric_ranks_the_settings(metric, tmp_path, call):
    """The order, the verdict, the table and the documents follow it, up or down."""
    replicate(tmp_path, [1.0, 1.1, 1.2], lr=1e-3)
    replicate(tmp_path, [2.0, 2.1, 2.3], lr=3e-3)
    for result in tmp_path.glob("*/result.json"):
        record = json.loads(result.read_text())
        record["val_vowels"] = record["val_loss"] / 10 + 0.3 * ("lr=0.003" in result.parent.name)
        result.write_text(json.dumps(record))
    better, best, other = "lower", "lr=0.001", "lr=0.003"
    if metric.startswith("-"):
        better, best, other = "higher", other, best
    out = call(tmp_path, "compare", f"metric={metric}")[1].splitlines()
    assert out[0] == f"compared by val_vowels: {better} is better"
    assert [line.split()[-1] for line in out[2:4]] == [best, other]
    assert out[-1].startswith(f"{best} is better than {other} by 0.403 ± 0.0")
    found = strict(call(tmp_path, f"metric={metric}", "format=json")[1])
    assert (found["objective"], found["better"]) == ("val_vowels", better)
    lines = call(tmp_path, f"metric={metric}")[1].splitlines()
    assert lines[0].split()[0] == "val_vowels" and "val loss" in lines[0]
    assert lines[1].startswith("*") and best[3:] in lines[1]
    assert f"note: ranked by val_vowels: {better} is better" in lines
    assert any(f"compare metric={metric}` tests whether other settings" in line for line in lines)
    for words in (["compare"], ["format=json"], []):
        code, out, err = call(tmp_path, *words, "metric=val_vowel")
        hint = "no run has this number; did you mean val_vowels?"
        assert (code, out, err) == (2, "", f"run error: metric=val_vowel: {hint}\n")


def halves(root, other):
    """Write two settings of six seeds. The last three seeds have recorded these other values."""
    for lr in (1e-3, 3e-3):
        replicate(root, [1.0 + lr, 2.0 + lr, 3.0 + lr, 1.1, 2.3, 3.2], lr=lr)
    for run in root.iterdir():
        more = other if int(re.search(r"seed=(\d)", run.name)[1]) > 3 else {}
        files = {"recipe/mine.py": more.get("content", "1")}
        package = {"sha256": more.get("package", "p"), "commit": more.get("commit", "a" * 40)}
        code = {"files": files, "package": package, "earlier": more.get("earlier", [])}
        result = json.loads((run / "result.json").read_text())
        result |= {"code": code, "data": {"sha256": more.get("text", "t") * 64}}
        (run / "result.json").write_text(json.dumps(result))
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["run"] |= {"accept_code": more.get("is_accepted", False)}
        (run / "config.yaml").write_text(yaml.safe_dump(config))


VERSIONS = "the jobs were trained with several versions of"


@pytest.mark.parametrize(
    ("other", "words", "settings", "note"),
    [
        (
            {"content": "2"},
            [],
            4,
            f"{VERSIONS} recipe/mine.py: seeds of different versions are not grouped",
        ),
        (
            {"content": "2"},
            ["accept_code=true"],
            2,
            f"{VERSIONS} recipe/mine.py: run.accept_code=true groups their seeds",
        ),
        ({"content": "2", "is_accepted": True}, [], 2, f"{VERSIONS} recipe/mine.py: run.acc"),
        (
            {"earlier": ["12345678"]},
            [],
            4,
            "these jobs were trained with more than one version of your code: ",
        ),
        (
            {"package": "q", "commit": f"{'b' * 40}-dirty"},
            [],
            2,
            f"{VERSIONS} mingpt_ddp, {'a' * 12} and {'b' * 12}-dirty: their seeds are gro",
        ),
        (
            {"text": "u"},
            [],
            4,
            "the jobs were measured on different texts (data.sha256): their results cannot be com",
        ),
    ],
    ids=["file", "accepted", "recorded", "earlier file", "package", "text"],
)
def test_seeds_with_other_code_or_another_text_form_another_setting(
    other, words, settings, note, tmp_path, call
):
    halves(tmp_path, other)
    found = strict(call(tmp_path, "compare", "format=json", *words)[1])
    assert [each["n"] for each in found["settings"]] == [12 // settings] * settings
    assert len({each["name"].rpartition("code=")[2] for each in found["settings"]}) >= 2
    notes = [each for each in found["notes"] if "version" in each or "different texts" in each]
    assert [each[: len(note)] for each in notes] == [note]
    table = strict(call(tmp_path, "format=json", *words)[1])
    assert [each for each in table["notes"] if each in notes] == notes


def test_a_job_that_has_not_ended_belongs_to_its_setting(tmp_path, call):
    halves(tmp_path, {})
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
    ledger = root / "experiments.jsonl"
    _, out, err = call("outputs/lr/a", "outputs/lr/b", "compare", "format=json")
    record = json.loads(ledger.read_text())
    assert err == "" and record.pop("when").startswith("20")
    assert record == {"runs": ["outputs/lr/a", "outputs/lr/b"], **strict(out)}
    with ledger.open("a") as file:
        file.write('{"runs": 1')  # a killed process leaves such a line
    call("outputs/lr/b", "outputs/lr/a", "compare")
    lines = ledger.read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[2])["runs"] == ["outputs/lr/b", "outputs/lr/a"]
    ledger.unlink()
    ledger.mkdir()
    code, out, err = call("outputs/lr/a", "outputs/lr/b", "compare")
    assert code == 0 and "no difference shown" in out and err.count("note: cannot write") == 1


def test_the_better_setting_is_better_over_the_tested_seeds(tmp_path, call):
    """This holds in the text, the JSON document, the table and the page."""
    replicate(tmp_path, [1.10, 1.113, 1.121, 0.80, 0.81], lr=1e-2)
    replicate(tmp_path, [1.00, 1.01, 1.02], lr=2e-2)
    verdict = "lr=0.02 is better than lr=0.01 by 0.1013 ± 0.0038 ("
    order = (
        "lr=0.01 has the better mean over all of its seeds, but lr=0.02 is better at the 3 seeds "
        "that both have: 2 seeds left out"
    )
    lines = call(tmp_path, "compare")[1].splitlines()
    assert [line.split()[-1] for line in lines[2:4]] == ["lr=0.01", "lr=0.02"], "by the mean"
    assert lines[4] == f"note: {order}" and lines[5].startswith(verdict)
    found = strict(call(tmp_path, "compare", "format=json")[1])
    (comparison,) = found["comparisons"]
    assert (found["best"], comparison["better"]) == ("lr=0.02", "lr=0.02")
    table = call(tmp_path)[1]
    assert "best: 1.0100 ± 0.0248, mean of 3 seeds; its best seed is " in table
    assert "but run.seed=*,optimizer.lr=0.02 has the best mean over the 3 seeds" in table
    assert table.splitlines()[2].split()[:2] == ["*", "1.0100"]
    shown = shown_on_page(tmp_path, "Comparison")
    assert verdict in shown and order in shown
    assert "learning rate: 0.02" in shown_on_page(tmp_path, "Best configuration")


def test_the_named_best_does_not_contradict_a_verdict(tmp_path, call):
    """The best at the three shared seeds is worse at the twelve seeds that two settings have."""
    usual = {seed: 2 + 0.3 * math.sin(7 * seed) for seed in range(1, 13)}
    better = [value + (0.001 if seed < 4 else -0.1 - 0.001 * seed) for seed, value in usual.items()]
    replicate(tmp_path, [*usual.values()], lr=1)
    replicate(tmp_path, better, lr=2)
    replicate(tmp_path, [usual[seed] + 0.2 + 0.01 * seed for seed in (1, 2, 3)], lr=3)
    found = strict(call(tmp_path, "compare", "format=json")[1])
    assert (found["best"], found["comparisons"][0]["better"]) == (None, "lr=2")
    note = "lr=1 is the best over the seeds that all settings have, but lr=2 is better than it"
    assert any(each.startswith(note) for each in found["notes"])


def test_a_setting_with_diverged_seeds_has_no_mean_and_is_never_the_best(tmp_path, call):
    """Without the diverged seeds it would have the best mean. One job has only a last loss."""
    replicate(tmp_path, [1.00, 1.01, 1.03, 1.02, 1.0], lr=1)
    replicate(tmp_path, [1.10, 1.12, 1.12, 1.13, 1.1], lr=2)
    replicate(tmp_path, [0.90, 0.91, 0.92, NAN], lr=5)
    run = fake_run(tmp_path / "stopped", {"run.seed": 5, "optimizer.lr": 5}, status=None, steps=40)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "train_loss": null}\n')
    note = "diverged at 2 of its 5 seeds (4, 5), so it has no mean and is not ranked"
    lines = call(tmp_path, "compare")[1].splitlines()
    assert re.split("  +", lines[4].strip()) == ["-", "3/5, 2 diverged", "-", "-", "lr=5"]
    assert f"note: lr=5 {note}" in lines
    assert lines[-2].startswith("lr=1 is better than lr=2 by 0.102 ")
    found = strict(call(tmp_path, "compare", "format=json")[1])
    assert found["best"] == "lr=1" and found["pairs_corrected_for"] == 1
    last = found["settings"][-1]
    assert (last["n"], last["mean"], last["diverged"]) == (3, None, ["4", "5"])
    table = call(tmp_path)[1]
    cells = re.split("  +", table.splitlines()[3].strip())
    assert cells[:5] == ["-", "-", "-", "3/5, 2 diverged", "complete, diverged"]
    assert f"optimizer.lr=5 {note}" in table and "best: 1.0120 ± 0.0162, mean of 5" in table
    assert note in shown_on_page(tmp_path, "Comparison")


def test_if_all_settings_diverged_none_is_the_best(tmp_path, call):
    for lr in (1, 2):
        replicate(tmp_path, [1.0, 1.1, math.inf], lr=lr)
    lines = call(tmp_path, "compare")[1].splitlines()
    assert lines[0].startswith("note: lr=1 diverged at 1 of its 3 seeds (3), so")
    assert lines[2].startswith(
        "nothing can be said: every setting has fewer than two complete seeds, or a"
    )
    table = call(tmp_path)[1]
    assert "there is no best setting, since each of them has a diverged seed" in table
    assert "best: " not in table and "*  " not in table


def test_characters_that_reverse_the_text_direction_are_escaped(tmp_path, call):
    for number, name in enumerate(("x\u202ey\x1b[2J", "x\u2066z\u2028\n\x07")):
        for seed in (1, 2, 3):
            keys = {"run.seed": seed, "model.name": name}
            fake_run(tmp_path / f"{number}-{seed}", keys, val_loss=1 + number + seed / 9)
    out = call(tmp_path, "compare")[1] + call(tmp_path)[1]
    assert r"x\u202ey" in out and r"x\u2066z\u2028" in out
    body, _, scripts = (tmp_path / "report.html").read_text().partition('id="figures">')
    figures = scripts.partition("</script>")[0]
    assert r"x\u202ey" in body and r"x\\u202ey" in figures
    assert not re.search("[\x1b\x07\u2028-\u202e\u2066-\u2069]", out + body + figures)
    assert not re.search(r"[^\\]\\u20(2[89a-e]|6[6-9])", figures), "as JSON's escape"


def decided_at(root, losses, decided, seeds=12, care=None):
    """Record a comparison of learning rates with until=decided that has these pairs."""
    runs = {
        label: {str(seed): f"run.seed={seed},optimizer.lr={label}" for seed in range(1, seeds + 1)}
        for label in losses
    }
    rule = {"settings": [*losses], "seeds": [*map(str, range(1, seeds + 1))], "metric": None}
    record = {**rule, "care": care, "runs": runs, "decided": decided}
    root.mkdir(exist_ok=True)
    (root / "sweep.json").write_text(json.dumps({"until_decided": record}))
    for label, each in losses.items():
        replicate(root, each, lr=float(label))


def test_a_recorded_decision_counts_whatever_the_results_say(tmp_path, call):
    better = [[1.0, 2.0 + seed / 100] for seed in range(6)]
    decided_at(tmp_path, {"0.001": [3.0, 3.1, 3.2], "0.003": [1.0, 1.1, 1.2]}, {"0.003": better})
    *_, note, said = call(tmp_path, "compare")[1].splitlines()
    assert said.startswith("lr=0.001 is better than lr=0.003 by 1.025 ± ")
    assert "sequential test after 6 paired seeds" in said and "the test is sequential" in note
    call(tmp_path)
    assert said in unescape((tmp_path / "report.html").read_text())


def test_undecided_settings_get_no_verdict_of_a_fixed_test(tmp_path, call):
    """It would call lr=0.001 better, but the number of seeds was chosen by looking at results."""
    root, other = tmp_path / "a", tmp_path / "b"
    decided_at(root, {"0.001": [1.0, 1.1, 1.2], "0.003": [2.0, 2.11, 2.19]}, {})
    said = call(root, "compare")[1].splitlines()[-1]
    assert said == "not decided between lr=0.001 and lr=0.003: 3 of 12 pairs of seeds"
    found = strict(call(root, "compare", "format=json")[1])["comparisons"][0]
    assert (found["decision"], found["better"], found["pairs"]) == ("undecided", None, 3)
    replicate(other, [5.0, 5.1, 5.2], lr=0.009)
    lines = call(root, other, "compare")[1].splitlines()
    assert sum("decided how many seeds it has (until=decided)" in line for line in lines) == 2
    by_another = call(root, "compare", "metric=best_val_loss")[1]
    assert "is better" not in by_another


def test_a_diverged_seed_ends_a_comparison_until_decided(tmp_path, call):
    decided_at(tmp_path, {"0.001": [1.0, 1.1], "0.003": [2.0, NAN]}, {})
    said = call(tmp_path, "compare")[1].splitlines()[-1]
    assert said.startswith("not decided between lr=0.001 and lr=0.003: seed 2 of lr=0.003 diverged")


def test_seeds_of_another_sweep_do_not_turn_it_into_a_fixed_test(tmp_path, call):
    """The other sweep has the same settings, so its jobs are grouped with those of the first."""
    root, other = tmp_path / "a", tmp_path / "b"
    decided_at(root, {"0.001": [2.0, 2.1, 2.2], "0.003": [3.0, 3.1, 3.21]}, {})
    replicate(other, [1.0, 1.1, 1.2], first=20, lr=0.001)
    replicate(other, [3.0, 3.1, 3.2], first=20, lr=0.003)
    said = call(root, other, "compare")[1]
    assert "is better" not in said and "until=decided" in said
