"""Judge ideas for a better model: each against its base, seed by seed.

The recipe is `experiment=shakespeare_bpe_cpu` without the ideas that it has adopted. An idea is a
few overrides of it, and some need the code in benchmarks/idea_parts. Each idea is a sweep over the
seeds, and `report compare` compares it with its base: the recipe, or, for the ideas in LATER, the
recipe with the idea that was adopted first.

All runs use only the training split of tinyshakespeare, and its last tenth is their validation
text. The validation split of tinyshakespeare decides nothing.

The jobs run two at a time, with one thread each. "Time" is the idea's CPU time for a step, divided
by that of its base, on one thread. Times of equal work differ by up to a tenth. Runs that are
complete in --root are not repeated.

    MINGPT_SHAKESPEARE=input.txt python benchmarks/ideas.py --root build/ideas

By default, the ideas in LATER are left out. The files results/ideas_later.json and
results/ideas_tokens.json have them with other seeds, because the first ones have decided what was
adopted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import ROOT, corpus_path, environment, log, nats_per_character, parser, report, timed

RECIPE = "recipe"
ADOPTED = "EMA and weight decay 0.5"
CODE = [f"--config-dir={ROOT / 'benchmarks' / 'idea_parts'}", "model=ideas"]
# The settings of the recipe before it adopted any idea.
BEFORE = {
    "trainer.ema": "null",
    "optimizer.min_lr_ratio": "0",
    "optimizer.weight_decay": "0",
    "optimizer.weight_decay_schedule": "constant",
    "data.vocab_size": "384",
    "data.train_split": "0.9",
}
FALLING = "optimizer.weight_decay_schedule=lr"
DECAY = ["optimizer.weight_decay=0.5", FALLING]
# Averages of the weights need a learning rate that stays above 0.
FINAL_RATE = "optimizer.min_lr_ratio=0.2"
EMA = ["trainer.ema=0.99", FINAL_RATE]
SNAPSHOTS = [*CODE, "model.mean_of=4", FINAL_RATE]
GATES = [*CODE, "model.gates=true"]
# The split is a share of the tokens. With this one, the validation text begins where that of 384
# tokens begins, within 0.1% of the text.
TOKENS = ["data.vocab_size=768", "data.train_split=0.8976"]
IDEAS: dict[str, list[str]] = {
    RECIPE: [],
    "EMA": EMA,
    "mean of the last 4 snapshots": SNAPSHOTS,
    "weight decay 0.2": ["optimizer.weight_decay=0.2", FALLING],
    "weight decay 1": ["optimizer.weight_decay=1.0", FALLING],
    ADOPTED: [*EMA, *DECAY],
    "gates on the heads": GATES,
    "n-grams in the values": [*CODE, "model.value_rows=32768"],
    "n-grams in the embedding": ["model.ngram_rows=32768"],
    "skips between blocks": [*CODE, "model.skips=true"],
    "two tokens ahead": [*CODE, "model.ahead=0.3"],
    "dropout": ["model.dropout=0.05"],
}
# Further ideas, compared with ADOPTED.
LATER = {
    "EMA 0.98 and weight decay 0.5": ["trainer.ema=0.98", FINAL_RATE, *DECAY],
    "mean of the last 4 snapshots and weight decay 0.5": [*SNAPSHOTS, *DECAY],
    "EMA, weight decay 0.5 and gates on the heads": [*EMA, *DECAY, *GATES],
    "EMA, weight decay 0.5 and rate 0.018": [*EMA, *DECAY, "optimizer.lr=0.018"],
    "EMA, weight decay 0.5 and 768 tokens": [*EMA, *DECAY, *TOKENS],
}
# Share of the text that is the training split of the recipes.
TRAINING = 0.9
VERDICT = re.compile(r"^(?:no difference shown|.* is better than ).*$", re.MULTILINE)
HEADER = ["idea", "nats/character", "change", "time", "verdict"]


def base_of(idea: str) -> str:
    """Return the idea that an idea is compared with."""
    return ADOPTED if idea in LATER else RECIPE


def directory_of(idea: str) -> str:
    return re.sub(r"\W+", "-", idea)


def overrides(idea: str, text: Path) -> list[str]:
    chosen = (IDEAS | LATER)[idea]
    changed = {word.partition("=")[0] for word in chosen}
    return [
        "experiment=shakespeare_bpe_cpu",
        *(f"{key}={value}" for key, value in BEFORE.items() if key not in changed),
        *chosen,
        f"data.path='{text}'",
        "data.sha256=null",
        f"data.cache_dir='{text.parent / 'cache'}'",
        "trainer.device=cpu",
    ]


def train(idea: str, seeds: list[int], text: Path, runs: Path) -> list[float]:
    """Train an idea with all seeds, below `runs`. Return the losses in nats per character."""
    log(f"{idea}: seeds {seeds}")
    name = directory_of(idea)
    command = [
        *[sys.executable, str(ROOT / "main.py"), "-m", *overrides(idea, text)],
        *[f"run.root='{runs}'", f"run.name={name}", f"run.seed={','.join(map(str, seeds))}"],
        "sweep.parallel=2",
    ]
    subprocess.run(command, cwd=runs, env=environment(), stdout=subprocess.DEVNULL, check=True)
    losses: dict[int, float] = {}
    for path in (runs / name).glob("*/result.json"):
        result = json.loads(path.read_text())
        (seed,) = re.findall(r"run\.seed=(\d+)", path.parent.name)
        losses[int(seed)] = nats_per_character(result)
    return [losses[seed] for seed in seeds]


def compare(idea: str, runs: Path) -> str:
    """Return the verdict of `report compare` on an idea and its base."""
    both = [str(runs / directory_of(name)) for name in (idea, base_of(idea))]
    command = [sys.executable, "-m", "mingpt_ddp", "report", *both, "compare", "accept_code=true"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), text=True, capture_output=True, check=True
    )
    found = VERDICT.search(done.stdout)
    assert found is not None, done.stdout
    return found[0]


def step_ratios(
    ideas: list[str], steps: int, repetitions: int, text: Path, root: Path
) -> dict[str, float]:
    """Measure the CPU time of each idea for `steps` steps, as a multiple of that of its base.

    The time of a run of one step is subtracted.
    """
    seconds: dict[str, list[float]] = {idea: [] for idea in ideas}
    for _ in range(repetitions):
        for idea in ideas:
            times = []
            for n in (1, 1 + steps):
                where = [f"run.root='{root}'", "run.name=time", "run.resume=never"]
                short = [f"trainer.max_steps={n}", "snapshot.every_steps=null"]
                command = [*overrides(idea, text), "data.truncate=0.1", *where, *short]
                _, cpu = timed([sys.executable, str(ROOT / "main.py"), *command], root)
                times.append(cpu)
            seconds[idea].append(times[1] - times[0])
    medians = {idea: median(found) for idea, found in seconds.items()}
    return {
        idea: medians[idea] / medians[base_of(idea)] for idea in ideas if base_of(idea) in medians
    }


def main() -> None:
    options = parser(__doc__, "ideas")
    options.add_argument("--ideas", nargs="+", choices=IDEAS | LATER, default=list(IDEAS))
    options.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[201, 202],
        help="two or more (default: %(default)s)",
    )
    options.add_argument(
        "--timed-steps",
        type=int,
        default=40,
        help="steps to time (default: %(default)s)",
    )
    options.add_argument(
        "--repetitions", type=int, default=3, help="0 times nothing (default: %(default)s)"
    )
    options.add_argument("--root", type=Path, required=True, help="where to keep the runs")
    chosen = options.parse_args()
    if len(set(chosen.seeds)) < 2:
        options.error("--seeds needs at least two seeds, because a comparison needs a spread")
    root = chosen.root.resolve()
    # Runs with other seeds are in another directory, because a verdict is about a whole directory.
    runs = root / f"seeds-{'-'.join(map(str, chosen.seeds))}"
    runs.mkdir(parents=True, exist_ok=True)
    whole = corpus_path().read_text()
    text = root / "training.txt"
    text.write_text(whole[: int(TRAINING * len(whole))])

    bases = [base_of(idea) for idea in chosen.ideas]
    ideas = [idea for idea in IDEAS | LATER if idea in (*chosen.ideas, *bases)]
    losses = {idea: train(idea, chosen.seeds, text, runs) for idea in ideas}
    ratios: dict[str, float] = {}
    if chosen.repetitions:
        ratios = step_ratios(ideas, chosen.timed_steps, chosen.repetitions, text, root)
    results: dict[str, Any] = {}
    rows, readme = [], []
    for idea in ideas:
        loss = mean(losses[idea])
        results[idea] = {"losses": losses[idea]}
        if idea == RECIPE or idea not in chosen.ideas:  # only a base
            rows.append([idea, f"{loss:.4f}", "", "", ""])
            continue
        change = loss - mean(losses[base_of(idea)])
        verdict = compare(idea, runs)
        ratio = ratios.get(idea)
        results[idea] |= {"change": change, "time": ratio, "verdict": verdict}
        time = "" if ratio is None else f"{ratio:.1f}"
        rows.append([idea, f"{loss:.4f}", f"{change:+.4f}", time or "not measured", verdict])
        recipe = "`shakespeare_bpe_cpu` with 384 tokens"
        if idea not in LATER:
            recipe += f", without {ADOPTED}"
        what = f"{idea}: change of the loss of {recipe}, {len(chosen.seeds)} seeds"
        shown = "no difference shown" if "no difference" in verdict else "a difference"
        (p,) = re.findall(r"p [=<] [\d.e-]+", verdict)
        cost = f"; {time} of the CPU time" if time else ""
        readme.append((what, f"{change:+.4f} nats per character, {shown} ({p}){cost}"))
    report(chosen.out, {"seeds": chosen.seeds, "ideas": results}, HEADER, rows, readme)


if __name__ == "__main__":
    main()
