"""`mingpt-ddp versions A B`: what is refused, and which files a version has."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runs import fake_run
from multiprocess.ranks import configure
from snapshot_helpers import filled
from tools import call_tool

from mingpt_ddp.cli import code_version, version_job
from mingpt_ddp.cli.code_version import find_commit
from mingpt_ddp.cli.commands import versions as tool
from mingpt_ddp.errors import ConfigError

SEEDS = "run.seed=1,2"
USER = ["-c", "user.name=a", "-c", "user.email=a@b.c"]


def git(*words: str) -> str:
    done = subprocess.run(["git", *USER, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A checkout with two commits of recipe/mine.py, in which the user stands."""
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


def find_version(name: str, words: list[str]) -> code_version.Version:
    return code_version.find_version(name, find_commit(name), words)


@pytest.fixture
def call(monkeypatch, capsys):
    return call_tool(tool, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["HEAD", "nowhere", SEEDS],
            "nowhere is no commit or branch of {project}, and no directory; there are HEAD, mine\n",
        ),
        (
            ["HEAD", ".", SEEDS, "optimizer.lr=1e-3,2e-3"],
            "optimizer.lr=1e-3,2e-3 is a sweep; there is one setting in a comparison: give one",
        ),
        (
            ["HEAD", ".", SEEDS, "model.code=recipe/mine.py"],
            "HEAD has no package mingpt_ddp, and no Python file that --config-dir or code= leads "
            "to; model.code=recipe/mine.py needs the --config-dir=DIR that it is relative to\n",
        ),
        (
            [".", "HEAD", "--config-dir=recpie", SEEDS],
            "--config-dir=recpie leads to {project}/recpie, which is no directory\n",
        ),
        (
            ["HEAD", ".", SEEDS],
            "HEAD has no package mingpt_ddp, and no Python file that --config-dir",
        ),
        (["HEAD", ".", "run.seed=1"], "run.seed=1 must be several seeds: one says nothing"),
        (["HEAD", ".", "run.seed=1,01"], "run.seed=1,01 must be several seeds"),
        (["HEAD", ".", "run.seed=1", "require=not_worse"], "run.seed=1 must be several seeds"),
        (["HEAD", ".", "run.seed=1", "require=same_bits"], "HEAD has no package"),
        (["HEAD", "."], "run.seed= must be several seeds"),
        (["HEAD", ".", f"run.seed=1,{'9' * 5000}"], "run.seed=1,99999"),
        (["HEAD", ".", f"run.seed=1,{2**63}"], f"run.seed=1,{2**63} has one of 2**63 or more"),
        (["HEAD", SEEDS], "name two versions of the code or more"),
        (["HEAD", "a=b", SEEDS], "a=b cannot be a version, as it has a = in its path"),
        (["HEAD", ".", SEEDS, "require=better"], "require=better must be same_bits or not_worse"),
        (["HEAD", ".", SEEDS, "run.name=x"], "run.name=x does not go with versions"),
        (["HEAD", ".", "-m", SEEDS], "-m does not go with versions"),
        (["HEAD", ".", SEEDS, "data.path=http://a:b@c/d"], "data.path"),
        (["HEAD", ".", "--config-dir=recipe", SEEDS], "the changes in . are more than 1,000,000"),
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


def test_the_same_files_elsewhere_are_the_same_code(project, tmp_path):
    """A commit that changes other files alone is compared, not refused; by a link, too."""
    (tmp_path / "link").symlink_to(project)
    Path("notes.md").write_text("a note")
    git("add", ".")
    git("commit", "-qm", "3")
    words = ["--config-dir=recipe", f"model.code={tmp_path}/link/recipe/mine.py"]
    before, after, changed = (find_version(name, words) for name in ("HEAD~1", "HEAD", "HEAD~2"))
    assert before.code.record["files"] == after.code.record["files"]
    assert before.code.record["files"] != changed.code.record["files"]


def test_a_commit_has_a_directory_of_its_own_that_is_reused(project):
    words = [
        "--config-dir=recipe",
        "-cd",
        "recipe",
        f"model.code='{project}/recipe/mine.py'",
        "data.path=recipe/text.txt",
        "task.code=mine.py",
        'model.code="/elsewhere/mine.py"',
    ]
    found = find_version("HEAD~1", words)
    there = found.directory
    assert (there / "recipe" / "mine.py").read_text() == "x = 1\n"
    own = [f"--config-dir={there}/recipe", "-cd", f"{there}/recipe"]
    assert found.words == [*own, f'model.code="{there}/recipe/mine.py"', *words[4:]]
    assert not found.has_package
    (there / "left").touch()
    assert find_version("HEAD~1", words) == found and (there / "left").exists()
    (there / "recipe" / "mine.py").write_text("x = 3\n")
    git("worktree", "prune")
    assert find_version(git("rev-parse", "HEAD~1"), words).code == found.code
    assert not (there / "left").exists()

    here = find_version(".", words)
    assert here.directory == project and here.code.record["commits"]["project"] == git(
        "rev-parse", "HEAD"
    )
    here.check_unchanged()
    Path("recipe/new.py").write_text("y = 1\n")
    line = r"run error: version \. has changed since the start \(recipe/new.py\); compare"
    with pytest.raises(code_version.RunError, match=line):
        here.check_unchanged()
    found.check_unchanged()
    changed = find_version(".", words)
    assert changed.code.record["files"] != here.code.record["files"]
    Path("recipe/mine.py").write_text("x = 4\n")
    assert find_version(".", words).code.patch


def test_no_filter_runs_as_git_writes_the_files_of_a_commit(project):
    """As that of git-lfs: a commit that differs from its files would be written each time."""
    Path(".gitattributes").write_text("*.py filter=f\n")
    git("add", ".")
    git("commit", "-qm", "3")
    git("config", "filter.f.smudge", "tr x y")
    found = find_version("HEAD", ["--config-dir=recipe"])
    assert (found.directory / "recipe" / "mine.py").read_text() == "x = 2\n"
    commit = found.directory.name
    assert found.code.record["commits"][commit] == commit, "nothing differs from it"


def test_why_git_says_nothing_is_in_the_line(project, tmp_path, monkeypatch):
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nexit 128\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    what = f"HEAD is no commit or branch of {project}, and no directory: "
    with pytest.raises(ConfigError, match=f"{what}.* exit status 128"):
        find_commit("HEAD")
    program.unlink()
    with pytest.raises(ConfigError, match=f"{what}.* No such file or directory: 'git'"):
        find_commit("HEAD")
    assert find_commit(".") == "" and not find_version(".", ["--config-dir=recipe"]).code.patch


def test_a_worktree_that_a_killed_git_has_left_locked_is_written_anew(project):
    words = ["--config-dir=recipe"]
    found = find_version("HEAD", words)
    git("worktree", "lock", str(found.directory))
    shutil.rmtree(found.directory)
    assert find_version("HEAD", words) == found


def test_a_job_refuses_the_package_of_another_directory(tmp_path, monkeypatch, capsys):
    """As where a hook of the interpreter imports it first: here it is imported already."""
    (tmp_path / "mingpt_ddp").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["version_job.py", str(tmp_path), "--help"])
    with pytest.raises(SystemExit, match="2"):
        version_job.main()
    found = Path(version_job.__file__).parents[1]
    line = f"run error: mingpt_ddp is imported from {found}, not from {tmp_path}/mingpt_ddp\n"
    assert capsys.readouterr().err == line


# A package that copies a run instead of training one.
COPIES = """
import pathlib, shutil, sys
template = pathlib.Path({template!r})
if (template / "error").exists():
    sys.exit("config error: why")
if "--cfg" in sys.argv:
    print((template / "config.yaml").read_text())
else:
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    root, name = (words[key].strip("\\"'") for key in ("run.root", "run.name"))
    shutil.copytree(template, pathlib.Path(root, name))
"""


@pytest.fixture
def copied(project, tmp_path) -> Path:
    """The run that each version of the project copies."""
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
    """Return a function that compares HEAD with the code here; it returns where the runs are."""

    def compare() -> Path:
        code, out, err = call("HEAD", ".", "run.seed=1", "require=same_bits")
        if code:
            raise RuntimeError(err)
        return Path(out.splitlines()[-1].removeprefix("the runs are in "))

    return compare


def last_line(compare) -> str:
    with pytest.raises(RuntimeError) as raised:
        compare()
    return str(raised.value).splitlines()[-1]


def test_an_error_of_a_version_is_one_line_that_names_it(compare, copied):
    (copied / "error").touch()
    assert last_line(compare) == "version HEAD: config error: why"


def test_another_text_is_another_comparison(compare):
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
        ({"../lib/shared.py": "edited since\n"}, {}, "../lib/shared.py"),
        ({"../lib/gone.py": "deleted since\n"}, {}, "../lib/gone.py"),
        ({"recipe/mine.py": "x = 2\n"}, {}, "recipe/mine.py"),  # of this checkout
        ({}, {"package": {"sha256": "q", "commit": None}}, "mingpt_ddp"),
        ({}, {"earlier": ["12345678"]}, "several versions of it have"),
    ],
    ids=str,
)
def test_a_complete_job_counts_if_its_version_has_trained_it(files, more, named, compare, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "shared.py").write_text("a library\n")
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    package = find_version("HEAD", []).code.record["package"]
    runs = compare()
    file = runs / "1-HEAD,run.seed=1" / "result.json"
    result = json.loads(file.read_text())
    result["code"] = {"files": hashes, "package": package, **more}
    file.write_text(json.dumps(result))
    if named is None:
        assert compare() == runs
    else:
        assert f"was not trained by the code of HEAD ({named}): restore" in last_line(compare)


def test_a_job_of_another_configuration_is_not_of_that_version(compare):
    """As where a preset has been edited, and perhaps set back, between two jobs or two starts."""
    run = compare() / "1-HEAD,run.seed=1"
    config = json.loads((run / "config.yaml").read_text())
    file = run / ".hydra" / "config.yaml"
    file.parent.mkdir(exist_ok=True)
    config["run"] |= {"seed": 1, "name": "a/b"}
    file.write_text(json.dumps(config))
    compare()
    config["optimizer"]["lr"] = 0.2
    file.write_text(json.dumps(config))
    expected = "with the configuration of HEAD (optimizer.lr: 0.1 -> 0.2): files of that have"
    assert expected in last_line(compare)
    config["optimizer"]["lr"] = 0.1
    file.write_text(json.dumps(config))
    (run / "config.2.yaml").touch()
    assert "it has config.2.yaml" in last_line(compare)
