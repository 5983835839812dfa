"""Mutation tests by mutmut, whose settings are in pyproject.toml: `make mutation`.

Run it again to continue.

All mutants of the snapshot format and store, the loader and the schedules, and a seeded sample of
those of the process group, the train step and the training loop. Prints the score and what
survived; `mutmut show NAME` prints a mutant.

mutmut forks a process per mutant from one that has collected the tests; there this file is a plugin
of pytest.
"""

import gc
import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

LANES = os.environ.get("LANES", "2")
SAMPLES = {  # mutants of each file, chosen by seed; all of the others
    "mingpt_ddp/distributed/group/process_group.py": 100,
    "mingpt_ddp/training/step_flags.py": 6,
    "mingpt_ddp/training/train_step.py": 40,
    "mingpt_ddp/training/trainer.py": 24,
    "mingpt_ddp/training/after_evaluation.py": 10,
}
WHOLE_RUNS = "test_trainer.py"
HELD_BY_WHOLE_RUNS = ("mingpt_ddp.training.saves.save_schedule.", "mingpt_ddp.training.trainer.")
KILLED = {1, 3, 24, -24, 36, -9, -11, 152, 255}  # by a test, a timeout or a crash
TARGET = 0.85


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Run the fastest tests first: the first one that fails kills the mutant.

    Whole runs are for the save schedule and the training loop.
    """
    if (stats := Path("mutmut-stats.json")).exists():
        seconds = json.loads(stats.read_text())["duration_by_test"]
        items.sort(key=lambda item: seconds.get(item.nodeid, 0))
    # fork the ranks from here: a fork server would import torch
    if ranks := sys.modules.get("multiprocess.ranks"):
        import mingpt_ddp.training.run  # noqa: F401

        ranks.processes = multiprocessing.get_context("fork")
    mutant = os.environ.get("MUTANT_UNDER_TEST", "")
    if "__mutmut_" in mutant and not mutant.startswith(HELD_BY_WHOLE_RUNS):
        items[:] = [item for item in items if item.path.name != WHOLE_RUNS] or items


def pytest_sessionfinish() -> None:
    """Import once for all mutants what torch imports late; let no fork collect what is there."""
    import torch._dynamo  # noqa: F401

    gc.freeze()


def results() -> dict[str, dict[str, int | None]]:
    """Return the exit code of each chosen mutant by file; None: not run yet."""
    found = {}
    for path in sorted(Path("mutants").rglob("*.py.meta")):
        file = str(path.relative_to("mutants")).removesuffix(".meta")
        codes = json.loads(path.read_text())["exit_code_by_key"]
        names = sorted(codes)
        size = min(SAMPLES.get(file, len(names)), len(names))
        names = sorted(random.Random(0).sample(names, size))
        found[file] = {name: codes[name] for name in names}
    return {file: codes for file, codes in found.items() if codes}


def main() -> None:
    """Run what has not been run; exit with 1 below the target."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    mutmut = [str(Path(sys.executable).parent / "mutmut"), "run", f"--max-children={LANES}"]
    if not results():
        subprocess.run([*mutmut, "mingpt_ddp.optim.lr_schedule*"], check=True)
    for _ in range(2):  # mutmut forgets all results if its settings or the tests have changed
        left: list[str] = []
        for codes in results().values():
            left += [name for name, code in codes.items() if code is None]
        if left:
            subprocess.run([*mutmut, *left], check=True)
    total: Counter[bool] = Counter()
    for file, codes in results().items():
        killed = Counter(code in KILLED for code in codes.values())
        total += killed
        print(f"{file}: {killed[True]} of {killed.total()} killed")
        for name, code in codes.items():
            if code not in KILLED:
                print(f"    {name}")
    score = total[True] / total.total()
    print(f"mutation score {score:.1%} of {total.total()} mutants")
    sys.exit(score < TARGET)


if __name__ == "__main__":
    main()
