"""Train settings with several seeds each, and check how they are compared."""

from __future__ import annotations

import json
import statistics

from launching import TINY, call, python_main
from runs import succeed, tool


def test_two_learning_rates_of_real_runs(tmp_path):
    """A rate of 1e-9 trains nothing, so the other rate is better beyond any doubt."""
    words = [*TINY, "run.name=lr", "optimizer.lr=1e-9,1e-2", "run.seed=1,2,3"]
    succeed([*python_main(), "-m", *words, "trainer.eval_every=12"], tmp_path)
    report = tool("report", "outputs/lr", "compare")
    text, numbers = (
        call([*report, *more], tmp_path, separate=True) for more in ([], ["format=json"])
    )
    assert text.returncode == 0, text.stderr
    assert "lr=0.01 is better than lr=1e-9 by " in text.stdout.splitlines()[-1]
    assert "3 paired seeds" in text.stdout
    (comparison,) = json.loads(numbers.stdout)["comparisons"]
    means = {}
    for lr in ("1e-09", "0.01"):
        found = [
            json.loads(path.read_text())
            for path in tmp_path.glob(f"outputs/lr/optimizer.lr={lr},*/result.json")
        ]
        assert len(found) == 3
        assert all(result["parameters"] > 10_000 for result in found)
        means[lr] = statistics.fmean(result["val_loss"] for result in found)
    assert abs(comparison["difference"] - (means["1e-09"] - means["0.01"])) < 1e-9
    assert comparison["low"] > 0


def test_a_rate_that_diverges_is_named_and_not_ranked(tmp_path):
    """Its jobs fail and leave no result. The last line of metrics.jsonl gives the reason."""
    words = [*TINY, "run.name=lr", "optimizer.lr=1e-2,1e30", "run.seed=1,2", "trainer.max_steps=6"]
    done = call([*python_main(), "-m", *words], tmp_path)
    assert "has loss nan" in done.stdout and "best: " in done.stdout
    report = tool("report", "outputs/lr", "compare")
    lines = call(report, tmp_path, separate=True).stdout.splitlines()
    assert lines[3].split()[:4] == ["-", "0/2,", "2", "diverged"]
    note = "lr=1e30 diverged at 2 of its 2 seeds (1, 2), so it has no mean and is not ranked"
    assert f"note: {note}" in lines
    assert lines[-1] == (
        "nothing can be said of lr=1e30 against lr=0.01: it has a loss that is not finite at 2 of "
        "2 seeds"
    )
