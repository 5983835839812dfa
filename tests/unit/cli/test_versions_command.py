"""`mingpt-ddp versions A B` trains with the files of each version, and checks that jobs did so."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_runs import fake_run
from launching import ROOT
from multiprocess.ranks import configure
from snapshot_helpers import filled
from tools import call_tool

from mingpt_ddp.cli.commands import versions as tool
from mingpt_ddp.storage.code_identity import hash_package

SEEDS = "run.seed=1,2"
USER = ["-c", "user.name=a", "-c", "user.email=a@b.c"]


def git(*words: str) -> str:
    done = subprocess.run(["git", *USER, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """Create a checkout with two commits of recipe/mine.py. It is the working directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    project = tmp_path / "project"
    (project / "recipe").mkdir(parents=True)
    monkeypatch.chdir(project)
    git("init", "-q", "-b", "mine")
    for number in (1, 2):
        Path("recipe/mine.py").write_text(f"x = {number}\n")
        git("add", ".")
        git("commit", "-qm", str(number))
    return project


@pytest.fixture
def call(monkeypatch, capsys):
    return call_tool(tool, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["HEAD", "nowhere", SEEDS],
            "nowhere is neither a commit or branch of {project} nor a directory; "
            "there are HEAD, mine\n",
        ),
        (
            ["HEAD", ".", SEEDS, "optimizer.lr=1e-3,2e-3"],
            "optimizer.lr=1e-3,2e-3 has several values; give one value, because",
        ),
        (
            ["HEAD", ".", SEEDS, "model.code=recipe/mine.py"],
            "HEAD has no package mingpt_ddp, and no Python file that --config-dir or code= leads "
            "to; model.code=recipe/mine.py needs the --config-dir=DIR to which it is relative\n",
        ),
        (
            [".", "HEAD", "--config-dir=recpie", SEEDS],
            "--config-dir=recpie leads to {project}/recpie, which is not a directory\n",
        ),
        (
            ["HEAD", ".", SEEDS],
            "HEAD has no package mingpt_ddp, and no Python file that --config-dir",
        ),
        (["HEAD", ".", "run.seed=1"], "run.seed=1 must be a list of at least 2 seeds; write"),
        (["HEAD", ".", "run.seed=1,01"], "run.seed=1,01 must be a list of at least 2 seeds"),
        (
            ["HEAD", ".", "run.seed=1", "require=not_worse"],
            "run.seed=1 must be a list of at least 2 seeds",
        ),
        (["HEAD", ".", "run.seed=1", "require=same_bits"], "HEAD has no package"),
        (["HEAD", "."], "run.seed= must be a list of at least 2 seeds"),
        (["HEAD", ".", f"run.seed=1,{'9' * 5000}"], "run.seed=1,99999"),
        (["HEAD", ".", f"run.seed=1,{2**63}"], f"run.seed=1,{2**63} has a seed of 2**63 or more"),
        (["HEAD", SEEDS], "name at least two versions of the code"),
        (["HEAD", "a=b", SEEDS], "a=b cannot be a version, because its path contains a ="),
        (["HEAD", ".", SEEDS, "require=better"], "require=better must be same_bits or not_worse"),
        (["HEAD", ".", SEEDS, "run.name=x"], "run.name=x cannot be used with versions"),
        (["HEAD", ".", "-m", SEEDS], "-m cannot be used with versions"),
        (["HEAD", ".", SEEDS, "data.path=http://a:b@c/d"], "data.path"),
        (["HEAD", ".", "--config-dir=recipe", SEEDS], ". has uncommitted changes of more than"),
    ],
)
def test_refused_in_one_line_before_anything_is_written(words, message, project, call):
    Path("recipe/large.py").write_text("# large\n" * 120_000)
    git("add", ".")
    Path("a=b").mkdir()
    code, out, err = call(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"config error: {message.format(project=project)}")
    assert not (project / "outputs").exists() and not list(project.rglob("versions-*"))


# This package copies a run instead of training one, and records its arguments and its user code.
COPIES = """
import json, pathlib, shutil, sys
template, here = pathlib.Path({template!r}), pathlib.Path(__file__).parents[1]
if (template / "error").exists():
    sys.exit("config error: why")
if "--cfg" in sys.argv:
    print((template / "config.yaml").read_text())
else:
    words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    root, name = (words[key].strip("\\"'") for key in ("run.root", "run.name"))
    shutil.copytree(template, pathlib.Path(root, name))
    seen = sys.argv[1:], str(here), (here / "recipe" / "mine.py").read_text()
    pathlib.Path(root, name, "seen.json").write_text(json.dumps(seen))
    if (template / "edits").exists():
        pathlib.Path("recipe/new.py").touch()
"""


@pytest.fixture
def copied(project, tmp_path) -> Path:
    """Create the run that each version of the project copies, and return its directory."""
    Path("mingpt_ddp").mkdir()
    Path("mingpt_ddp/__init__.py").touch()
    template = tmp_path / "template"
    Path("mingpt_ddp/__main__.py").write_text(COPIES.format(template=str(template)))
    git("add", ".")
    git("commit", "-qm", "a package")
    Path("text.txt").write_text("one")
    fake_run(template)
    filled(str(template), 4)
    values = configure("data.path=text.txt", "optimizer.lr=0.1")
    (template / "config.yaml").write_text(json.dumps(values))
    return template


@pytest.fixture
def compare(copied, call):
    """Return a function that compares HEAD with the working tree. It returns the runs' folder."""

    def compare(*words: str) -> Path:
        code, out, err = call("HEAD", ".", "run.seed=1", "require=same_bits", *words)
        if code:
            raise RuntimeError(err)
        return Path(out.splitlines()[-1].removeprefix("the runs are in "))

    return compare


def last_line(compare, *words: str) -> str:
    with pytest.raises(RuntimeError) as raised:
        compare(*words)
    return str(raised.value).splitlines()[-1]


def test_each_version_trains_with_its_own_files(compare, project):
    """Each commit is checked out into its own directory, which later calls reuse.

    git runs no filters there. With a filter, the files would differ from the commit, and each
    call would write them again.
    """
    Path(".gitattributes").write_text("*.py filter=f\n")
    git("add", ".")
    git("commit", "-qm", "a filter")
    git("config", "filter.f.smudge", "tr x y")
    Path("recipe/mine.py").write_text("x = 3\n")
    others = ["data.path=recipe/text.txt", "task.code=mine.py", 'model.code="/elsewhere/mine.py"']
    words = ["--config-dir=recipe", "-cd", "recipe", f"model.code='{project}/recipe/mine.py'"]

    def seen() -> list[tuple[list[str], Path, str]]:
        """Return of each version its arguments (except the last three), directory and user code."""
        found = [json.loads(path.read_text()) for path in sorted(runs.glob("*/seen.json"))]
        return [(words[:-3], Path(where), text) for words, where, text in found]

    runs = compare(*words, *others)
    [(before, there, theirs), (after, here, ours)] = seen()
    assert (theirs, ours, here) == ("x = 2\n", "x = 3\n", project)
    for found, directory in ((before, there), (after, here)):
        own = [f"--config-dir={directory}/recipe", "-cd", f"{directory}/recipe"]
        assert found == [*own, f'model.code="{directory}/recipe/mine.py"', *others]
    (there / "left").touch()
    compare(*words)
    assert (there / "left").exists()
    (there / "recipe" / "mine.py").write_text("x = 4\n")
    assert compare(*words, *others) == runs
    assert not (there / "left").exists()
    git("worktree", "lock", str(there))  # a killed git leaves such a lock
    shutil.rmtree(there)
    compare(*words)
    assert (there / "recipe" / "mine.py").read_text() == "x = 2\n"


def test_files_that_change_meanwhile_are_named(compare, copied):
    (copied / "edits").touch()
    line = r"run error: version \. has changed since the start \(recipe/new.py\); if you"
    assert re.match(line, last_line(compare, "--config-dir=recipe"))


def test_a_version_that_imports_another_package_is_refused(compare, tmp_path, monkeypatch):
    """A startup hook of the interpreter (sitecustomize) may import the package too early."""
    hook = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import mingpt_ddp"
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    expected = f"version HEAD: run error: mingpt_ddp is imported from {ROOT}/mingpt_ddp, not from "
    assert last_line(compare).startswith(expected)


def test_an_error_says_why_git_failed(project, call, tmp_path, monkeypatch):
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nexit 128\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    what = f"config error: HEAD is neither a commit or branch of {project} nor a directory: "
    assert re.match(f"{what}.* exit status 128", call("HEAD", ".", SEEDS)[2])
    program.unlink()
    assert re.match(f"{what}.* No such file or directory: 'git'", call("HEAD", ".", SEEDS)[2])


def test_an_error_of_a_version_is_one_line_that_names_it(compare, copied):
    (copied / "error").touch()
    assert last_line(compare) == "version HEAD: config error: why"


def test_a_changed_text_starts_a_new_comparison(compare):
    runs = compare()
    assert {path.name for path in runs.iterdir()} >= {"1-HEAD,run.seed=1", "2-.,run.seed=1"}
    assert compare() == runs
    Path("text.txt").write_text("two")
    assert compare() != runs


def test_a_second_process_of_the_same_comparison_is_refused(compare):
    with open(compare() / ".lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        expected = "which is still running; wait for it, then run this again"
        assert last_line(compare).endswith(expected)


@pytest.mark.parametrize(
    ("files", "more", "named"),
    [
        ({"../lib/shared.py": "a library\n"}, {}, None),
        ({"../lib/shared.py": "edited since\n"}, {}, "changed: ../lib/shared.py"),
        ({"../lib/gone.py": "deleted since\n"}, {}, "changed: ../lib/gone.py"),
        # The file of this checkout, not of HEAD.
        ({"recipe/mine.py": "x = 2\n"}, {}, "changed: recipe/mine.py"),
        ({}, {"package": {"sha256": "q", "commit": None}}, "changed: mingpt_ddp"),
        ({}, {"earlier": ["12345678"]}, "the code changed between two starts of the job"),
    ],
    ids=str,
)
def test_a_complete_job_counts_if_its_version_has_trained_it(files, more, named, compare, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "shared.py").write_text("a library\n")
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    package = {"sha256": hash_package(Path("mingpt_ddp")), "commit": None}
    runs = compare()
    file = runs / "1-HEAD,run.seed=1" / "result.json"
    result = json.loads(file.read_text())
    result["code"] = {"files": hashes, "package": package, **more}
    file.write_text(json.dumps(result))
    if named is None:
        assert compare() == runs
    else:
        expected = f"was not trained with the present code of HEAD ({named}); restore"
        assert expected in last_line(compare)


def test_a_job_with_another_configuration_does_not_count(compare):
    """A preset may have been edited, and perhaps restored, between two jobs or two starts."""
    run = compare() / "1-HEAD,run.seed=1"
    config = json.loads((run / "config.yaml").read_text())
    file = run / ".hydra" / "config.yaml"
    file.parent.mkdir(exist_ok=True)
    config["run"] |= {"seed": 1, "name": "a/b"}
    file.write_text(json.dumps(config))
    compare()
    config["optimizer"]["lr"] = 0.2
    file.write_text(json.dumps(config))
    expected = "with the configuration that HEAD has now (optimizer.lr: 0.1 -> 0.2); delete"
    assert expected in last_line(compare)
    config["optimizer"]["lr"] = 0.1
    file.write_text(json.dumps(config))
    (run / "config.2.yaml").touch()
    assert "a later start changed it: see config.2.yaml" in last_line(compare)
