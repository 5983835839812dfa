"""Runs of an earlier version go on; what has been retired is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from launching import WITH_DIGITS, call, hashes, python_main
from make_recorded_runs import DATA, RUNS, STEPS, command, train_losses

# By run: the word of its command that is refused now, and what the command needs now.
RETIRED = {
    "csv": "tracker=csv",
    "devices": "model.devices=2",
    "digits": "data=digits",
}
# Archives are named by fsspec's URLs now.
ARCHIVES = {"zip": "data.path=text.zip", "tar": "data.path=text.tar.gz"}
ADDED = {
    "digits": [WITH_DIGITS, "data=digits"],
    "moved": ["run.resume=first/run"],
    "zip": ["data.path=zip://**::text.zip"],
    "tar": ["data.path=tar://**::text.tar.gz"],
}


@pytest.fixture
def cwd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a recorded directory, with the texts."""
    shutil.copytree(DATA / request.getfixturevalue("name"), tmp_path, dirs_exist_ok=True)
    for text in DATA.glob("text.*"):
        shutil.copy(text, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [name for name in RUNS if name != "study"])
def test_a_recorded_run_goes_on(name, cwd):
    """Also one whose command had a word that has been retired, without it, or needs another."""
    expected = json.loads((cwd / "expected.json").read_text())
    begun = train_losses(cwd / "outputs")
    gone = {**RETIRED, **ARCHIVES}.get(name)
    words = [word for word in command(name, more=True) if word != gone]
    words += ADDED.get(name, [])
    done = call([*python_main(), *words], cwd)
    assert done.returncode == 0, done.stdout
    losses = train_losses(cwd / "outputs")
    assert {step: losses[step] for step in begun} == begun
    assert f"resuming from the snapshot of step {STEPS} " in done.stdout
    assert losses == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", RETIRED)
def test_a_retired_word_is_refused(name, cwd):
    before = hashes(cwd)
    done = call([*python_main(), *command(name, more=True)], cwd)
    assert done.returncode == 2, done.stdout
    (line,) = done.stdout.splitlines()
    retired = [RETIRED[name], RETIRED[name].partition("=")[0]]  # a preset, or a key
    assert line.startswith(tuple(f"config error: {word} is no longer there; " for word in retired))
    assert hashes(cwd) == before


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_refused_with_the_words_that_read_it(name, cwd):
    before = hashes(cwd)
    done = call([*python_main(), *command(name, more=True)], cwd)
    assert done.returncode == 2, done.stdout
    [word] = ADDED[name]
    key, _, value = word.partition("=")
    assert done.stdout.endswith(f"not text; name the files in it: '{key}=\"{value}\"'\n")
    assert hashes(cwd) == before


@pytest.mark.parametrize("name", ["study"])
def test_a_search_whose_record_was_another_file_is_refused(name, cwd):
    before = hashes(cwd)
    done = call([*python_main(), *command(name, more=True)], cwd)
    assert (done.returncode, done.stdout) == (
        2,
        "config error: outputs/run holds a search of an earlier version, trials.jsonl; choose "
        "another run.name\n",
    )
    assert hashes(cwd) == before


@pytest.mark.parametrize("name", ["moved"])
@pytest.mark.parametrize("path", ["second", "null"])
def test_snapshots_in_an_earlier_location_are_not_left_behind(path, name, cwd):
    before = hashes(cwd)
    done = call([*python_main(), *command(name, more=True), f"snapshot.path={path}"], cwd)
    new = "second/run" if path == "second" else "outputs/run/snapshots"
    assert (done.returncode, done.stdout) == (
        2,
        f"snapshot error: the run has snapshots at first/run, but none at {new}; add "
        "run.resume=first/run to go on from there, or choose another run.name\n",
    )
    assert hashes(cwd) == before
