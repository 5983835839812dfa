"""The record of the training code: the user's files, the package, and the patch of a checkout."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from mingpt_ddp.config.builders import code_roots, run_code
from mingpt_ddp.config.loaded_code import loaded_files
from mingpt_ddp.storage import code_identity
from mingpt_ddp.storage.code_identity import (
    PACKAGE,
    TOO_LARGE,
    changed_files,
    describe,
    describe_change,
    hash_package,
    read_code,
    recorded_code,
    start_reading,
    user_code_digest,
    with_loaded_files,
)
from mingpt_ddp.storage.git import MAX_PATCH_BYTES

USER = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
PACKAGE_RECORD = {"sha256": "b" * 64, "commit": None}
INSTALLED = Path("/site-packages") / PACKAGE.name  # a wheel installs it outside any checkout


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Give git enough time on a busy machine."""
    monkeypatch.setattr(code_identity, "GIT_TIMEOUT_S", 600)


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *USER, *words], cwd=root, check=True, capture_output=True)
    return done.stdout.decode().strip()


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Create a user's checkout with a committed file mine.py."""
    root = tmp_path / "project"
    root.mkdir()
    write(root, "mine.py", "x = 1\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(*folders: Path, files: dict[str, str] | None = None) -> code_identity.Code:
    return read_code(files or {}, folders, INSTALLED)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def record(files: dict[str, str], **more: object) -> dict[str, object]:
    return {"files": files, "package": PACKAGE_RECORD, "commits": {}, **more}


def test_the_hash_of_a_package_depends_on_all_its_text_and_not_on_its_path(tmp_path):
    copy = tmp_path / "site-packages" / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert hash_package(copy) == hash_package(PACKAGE)
    with (copy / "loop.py").open("a") as file:
        file.write("# a comment\n")
    sha256 = hash_package(copy)
    assert sha256 != hash_package(PACKAGE)
    assert read_code({}, [], copy).record["package"] == {"sha256": sha256, "commit": None}


FILES = {
    "first.py": "import torch, own_pkg.sub\ndef f():\n    from own_helper import G\n    return G\n",
    "own_helper.py": "G = 1\n",
    "own_pkg/__init__.py": "",
    "own_pkg/sub.py": "from . import near\nimport importlib as i\ni.import_module('own_named')\n",
    "own_pkg/near.py": "",
    "own_pkg/other.py": "",
    "own_named.py": "",
    "second.py": "import own_alone\nfrom own_pkg.near import __name__ as name\n",
    "own_alone.py": "",
}


def test_the_record_of_a_file_includes_its_imports(tmp_path, monkeypatch):
    """Modules of other jobs in this process, and edits after the import, are left out."""
    for name, text in FILES.items():
        write(tmp_path, name, text)
    monkeypatch.chdir(tmp_path)
    run_code({"model": {"code": "first.py"}, "task": {"code": "second.py"}}, [tmp_path])
    run_code({"model": {"code": "first.py"}}, [tmp_path])
    write(tmp_path, "own_pkg/near.py", "edited = True\n")
    first = {"first.py", "own_named.py", "own_pkg/__init__.py", "own_pkg/near.py", "own_pkg/sub.py"}
    code = start_reading(code_roots())().record
    assert {*code["files"]} == first
    assert code["files"]["own_pkg/near.py"] == sha256("")
    assert changed_files(code) == [], "this process trains with what it has loaded"

    __import__("own_helper")  # a late import, for example in a hook
    assert {*with_loaded_files(code, code_roots())["files"]} == first | {"own_helper.py"}
    run_code({"model": {"code": "second.py"}}, [tmp_path])
    assert {*start_reading(code_roots())().record["files"]} == {
        "second.py",
        "own_alone.py",
        "own_pkg/__init__.py",
        "own_pkg/near.py",
    }
    run_code({}, [])
    assert start_reading(code_roots())().record["files"] == {}, "a built-in model has none"
    assert loaded_files([tmp_path / "nowhere.py"]) == {}


def test_a_start_continues_if_the_disk_does_not_respond(monkeypatch):
    answer = threading.Event()

    def lost_files():
        answer.wait()
        yield from ()

    monkeypatch.setattr(code_identity, "READ_TIMEOUT_S", 0.1)
    record = start_reading(lost_files())().record
    answer.set()
    assert recorded_code({"code": record}) == record
    assert "more than 0.1 s" in describe(record)


@pytest.mark.parametrize(
    ("recorded", "changed"),
    [
        ({"a.py": sha256("a")}, []),
        ({"a.py": sha256("b")}, ["a.py"]),
        ({"gone.py": sha256("a"), "a.py": sha256("a")}, ["gone.py"]),
        ({"folder.py": sha256("a")}, ["folder.py"]),
        ({"../../../a.py": sha256("c")}, ["../../../a.py"]),
        ({"notes.txt": sha256("a")}, ["notes.txt"]),
        ({"nul\0.py": sha256("a")}, ["nul\0.py"]),
        ({"moved/a.py": sha256("now")}, []),
        ({}, []),
    ],
    ids=str,
)
def test_which_files_of_a_record_have_changed(recorded, changed, tmp_path, monkeypatch):
    """The files are not imported: `a.py` is not even Python."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.py", "a")
    write(tmp_path, "notes.txt", "a")
    (tmp_path / "folder.py").mkdir()
    assert changed_files(record(recorded), {"here.py": sha256("now")}) == changed


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (record({"a.py": "1"}), record({"a.py": "1", "new.py": "2"}), ""),
        (record({"a.py": "1"}), record({"a.py": "2"}), "a.py"),
        (record({f"{i}.py": "1" for i in range(7)}), record({}), "0.py, 1.py, 2.py, 3.py, 4.py, 2"),
        (
            record({}, package={"sha256": "c" * 64, "commit": f"{'d' * 40}-dirty"}),
            record({}),
            f"mingpt_ddp at {'b' * 12} instead of {'d' * 12}-dirty",
        ),
        ({}, record({}), ""),
    ],
    ids=range(5),
)
def test_the_difference_of_two_records_is_described(before, now, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert describe_change(before, now).startswith(text)
    assert bool(describe_change(before, now)) is bool(text)


def test_earlier_code_that_has_trained_the_run_stays_in_the_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "late.py", "a hook imports it")
    before = record({"a.py": "1", "late.py": sha256("a hook imports it")})
    for unchanged in ({}, record({"late.py": sha256("a hook imports it")})):
        same = read(files={"a.py": "2"}).record_in(tmp_path, unchanged)
        assert same["earlier"] == [] and same["files"]["a.py"] == "2"
    other = read(files={"a.py": "2"}).record_in(tmp_path, before)
    assert other["earlier"] == [user_code_digest(before)]
    assert other["files"] == {"a.py": "2", "late.py": sha256("a hook imports it")}
    write(tmp_path, "late.py", "edited")
    again = read(files={"a.py": "2"}).record_in(tmp_path, other)
    assert again["earlier"] == [user_code_digest(before), user_code_digest(other)]
    assert again["files"] == {"a.py": "2"}


def test_the_patch_leads_from_the_commit_to_the_tracked_files(checkout, tmp_path):
    clean = read(checkout)
    commit = git(checkout, "rev-parse", "HEAD")
    assert clean.record["commits"] == {"project": commit} and clean.patch == b""
    installed = read_code({}, [], checkout / "site-packages" / PACKAGE.name)
    assert installed.record["package"]["commit"] is None, "the checkout is not the package's"
    lines = b"# \xe9 in Latin-1\r\nb = 1\r\n"
    (checkout / "bytes.py").write_bytes(lines)
    (checkout / "picture.png").write_bytes(b"\0\1")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "second")
    commit = git(checkout, "rev-parse", "HEAD")
    index = (checkout / ".git" / "index").stat().st_mtime_ns
    write(checkout, "mine.py", "x = 2\n")
    (checkout / "bytes.py").write_bytes(lines.replace(b"1\r", b"2\r"))
    (checkout / "picture.png").write_bytes(b"\0\2")
    write(checkout, "untracked.py", "y = 1\n")
    (checkout / ".git" / "index.lock").touch()  # another git process holds the lock
    dirty = read(checkout, checkout)
    (checkout / ".git" / "index.lock").unlink()
    assert (checkout / ".git" / "index").stat().st_mtime_ns == index
    assert dirty.record["commits"] == {"project": f"{commit}-dirty"}
    line = describe(dirty.record_in(tmp_path, {}))
    assert f", project at {commit[:12]}-dirty" in line and line.endswith(", code.patch")
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(checkout), str(copy))
    (tmp_path / "code.patch").write_bytes(dirty.patch)
    git(copy, "apply", "../code.patch")
    for name in ("mine.py", "bytes.py"):
        assert (copy / name).read_bytes() == (checkout / name).read_bytes()
    assert (
        b"# left out, because the file is binary or large: diff --git a/picture.png" in dirty.patch
    )
    assert b"untracked" not in dirty.patch


SECRETS = """
.env prod.env id_rsa my_id_ed25519 my_secrets.py server.key .npmrc api_key.txt hf_token
data/token.txt .aws/config kubeconfig x.tfvars
""".split()  # noqa: SIM905


def test_a_file_that_may_hold_a_secret_is_only_named(checkout):
    for text in ("before\n", "hunter22\n"):
        for name in SECRETS:
            write(checkout, name, text)
        if text == "before\n":
            git(checkout, "add", "-f", ".")
            git(checkout, "commit", "-qm", "second")
    write(checkout, "mine.py", "x = 2\n")
    git(checkout, "remote", "add", "origin", "https://me:hunter33@host/project")
    patch = read(checkout).patch.decode()
    named = re.findall(
        "# left out, because the name suggests a secret: diff --git a/(.*) b/.*\n", patch
    )
    assert sorted(named) == sorted(SECRETS)
    assert "hunter" not in patch and "+x = 2" in patch


def test_a_patch_above_the_limit_is_not_kept_and_a_larger_file_is_named(checkout, tmp_path):
    write(checkout, "b.py", "x = 1\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "second")
    for name in ("mine.py", "b.py"):
        write(checkout, name, "y = 1\n" * (MAX_PATCH_BYTES // 6 // 2))
    code = read(checkout)
    assert code.record["commits"]["project"].endswith("-dirty")
    assert code.record_in(tmp_path, {})["patch"] == TOO_LARGE and code.patch == b""
    for name in ("mine.py", "b.py"):
        write(checkout, name, "y = 1\n" * MAX_PATCH_BYTES)
    assert (
        b"# left out, because the file is binary or large: diff --git a/b.py b/b.py\n"
        in read(checkout).patch
    )


def test_no_program_of_the_checkout_is_run(checkout, tmp_path, monkeypatch):
    program = write(tmp_path, "program", f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    git(checkout, "clone", "-q", ".", "sub")
    git(checkout, "add", "sub")
    git(checkout, "commit", "-qm", "a submodule")
    write(checkout, "sub/mine.py", "x = 3\n")
    git(checkout / "sub", "commit", "-qam", "second")
    for key in ("diff.external", "filter.of_sub.clean"):
        git(checkout / "sub", "config", key, str(program))
    write(checkout, "sub/.git/info/attributes", "*.py filter=of_sub\n")
    write(checkout, "sub/mine.py", "x = 4\n")
    git(checkout, "config", "diff.submodule", "diff")
    settings = "core.fsmonitor core.pager diff.d.textconv diff.d.command"
    for key in f"{settings} filter.f.clean filter.f.process filter.a=b.clean".split():
        git(checkout, "config", key, str(program))
    git(checkout, "config", "filter.f.required", "true")
    write(checkout, ".git/hooks/post-index-change", program.read_text()).chmod(0o755)
    write(checkout, ".git/info/attributes", "*.py filter=f diff=d\nb.py filter=a=b\n")
    write(checkout, "mine.py", "x = 2\n")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(program))
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert b"+x = 2" in read(checkout).patch
    assert not (tmp_path / "ran").exists()


def test_without_git_only_the_hashes_are_recorded(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read(checkout).record["commits"] == {}
    program = write(tmp_path, "git", "#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    monkeypatch.setattr(code_identity, "GIT_TIMEOUT_S", 0.1)
    code = read(checkout).record
    assert code["commits"] == {} and code["package"]["sha256"]


def test_several_checkouts(checkout, tmp_path):
    """One has no commit, one has a file called HEAD, and two have the same name."""
    (tmp_path / "new").mkdir()
    git(tmp_path / "new", "init", "-q")
    write(checkout, "HEAD", "x")
    write(checkout, "mine.py", "x = 2\n")
    other = tmp_path / "other" / "project"
    git(tmp_path, "clone", "-q", str(checkout), str(other))
    git(other, "commit", "-qm", "second", "--allow-empty")
    code = read(checkout, tmp_path / "new", other)
    assert code.record["commits"] == {
        "project": f"{git(checkout, 'rev-parse', 'HEAD')}-dirty",
        str(other): git(other, "rev-parse", "HEAD"),
    }
    assert code.patch.count(b"+x = 2") == 1


def test_a_process_forked_meanwhile_holds_no_pipe_of_a_starting_git(checkout):
    """Such a process may live as long as the run. The start would wait for it to close the pipe."""
    children = []

    def fork() -> None:
        if (child := os.fork()) == 0:
            time.sleep(1000)
            os._exit(1)
        children.append(child)

    thread = threading.Thread(target=fork)

    class Root(os.PathLike):
        def __fspath__(self):
            """Fork on a thread when `subprocess` has opened the pipes to start git."""
            thread.start()
            thread.join(0.3)  # has a limit, since the fork waits until git has started
            return str(checkout)

    try:
        head = code_identity.git(Root(), time.monotonic() + 60, "rev-parse", "HEAD")
    finally:
        thread.join()
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
    assert head.decode().strip() == git(checkout, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "code",
    [
        None,
        [],
        {"files": {}},
        {
            "sha256": "a" * 64,
            "commits": {},
            "files": {"a.py": "1"},
        },  # the format of an earlier version
        record({"a.py": 1}),
        record([]),
        record({}, commits=[]),
        record({}, earlier="a"),
        record({}, package={"sha256": 1}),
    ],
)
def test_an_invalid_record_is_read_as_none(code):
    assert recorded_code({"code": code}) == recorded_code(code) == {}


def test_a_hostile_record_is_described_in_one_line():
    code = record({"c\n" * 10**6: "1"}, commits={"b\n" * 10**6: ["c"]}, patch={"d": 1})
    line = describe(recorded_code({"code": code}))
    assert len(line) == 400 and "\n" not in line
