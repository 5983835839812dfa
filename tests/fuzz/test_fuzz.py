"""Give hostile values to every configuration key and hostile files to every command.

A command either accepts a value or refuses it, in one line and with exit code 2. A refusal takes at
most 40 seconds and 1 GB, and leaves nothing behind. cases.py draws the values.
`make fuzz CASES=10000 SEED=7` runs more cases than the normal tests. A seed always gives the same
cases.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
from fuzz.cases import BASES, COMMANDS, classes, draw, keys, targets
from fuzz.driver import Worker, faults

from mingpt_ddp.cli import COMMANDS as PROGRAMS
from mingpt_ddp.config.keys.schema import GROUPS

CASES = int(os.environ.get("FUZZ_CASES", 300))
SEED = int(os.environ.get("FUZZ_SEED", 1))
BATCH = 50  # number of cases in one test


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("fuzz"))
    yield worker
    worker.close()


@pytest.mark.timeout(BATCH * 120)
@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_hostile_values_are_refused_in_one_line(first, worker):
    wrong = []
    for number in range(first, min(first + BATCH, CASES)):
        done, case = worker.run(SEED, number), draw(SEED, number)
        if found := faults(case, done):
            how = f"python tests/fuzz/driver.py {SEED} {number}"
            wrong.append(
                f"{'; '.join(found)}\n  {case.shell()}\n  to see it: {how}\n  "
                f"{done['stderr'][-1500:]}"
            )
    assert not wrong, (
        "\n\n".join([f"{len(wrong)} cases", *wrong]).encode(errors="backslashreplace").decode()
    )


def test_every_key_of_every_command_is_drawn():
    drawn = {*targets()}
    for group, (_, choices) in GROUPS.items():
        for cls in {*choices.values()}:
            for field in dataclasses.fields(cls):
                assert ("train", f"{group}.{field.name}") in drawn
                assert any(
                    cls is classes(BASES[i][1]).get(group) for i in keys()[f"{group}.{field.name}"]
                )
    assert {command.split()[0] for command, _ in targets()} == {*PROGRAMS} - {"versions"}, (
        "it starts others"
    )
    for command, (cls, *_) in COMMANDS.items():
        assert {(command, field.name) for field in dataclasses.fields(cls)} <= drawn


def test_a_case_depends_only_on_its_seed_and_number():
    assert [draw(3, i) for i in range(40)] == [draw(3, i) for i in range(40)]
    assert [draw(3, i) for i in range(40)] != [draw(4, i) for i in range(40)]
