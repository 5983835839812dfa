"""Which code trains: its SHA-256, and the patch of a checkout, which holds no secret."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from mingpt_ddp.storage import code_identity
from mingpt_ddp.storage.code_identity import (
    PACKAGE,
    SECRET,
    SECRET_NAME,
    TOO_LARGE,
    describe,
    difference_of,
    read_code,
    recorded_code,
    start_reading,
)
from mingpt_ddp.storage.git import MAX_PATCH_BYTES

USER = ["-c", "user.name=a", "-c", "user.email=a@b.c"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Each test as in a new process, with all the time that git takes."""
    monkeypatch.setattr(code_identity, "GIT_S", 600)
    for cached in (code_identity._package_files, code_identity._user_files):
        cached.cache_clear()
    yield
    for cached in (code_identity._package_files, code_identity._user_files):
        cached.cache_clear()


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """A copy of the package as a wheel installs it: in no checkout, with conf/ in it."""
    package = tmp_path / "site-packages" / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_identity, "PACKAGE", package)
    return package


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *USER, *words], cwd=root, check=True, capture_output=True)
    return done.stdout.decode().strip()


@pytest.fixture
def checkout(tmp_path, installed) -> Path:
    """A checkout of a user: mine.py, committed."""
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


def test_a_wheel_has_the_hash_of_a_checkout_and_a_comment_counts(installed, monkeypatch):
    wheel = read_code({}).record
    assert wheel["commits"] == {} and wheel["patch"] is None
    with monkeypatch.context() as context:
        context.setattr(code_identity, "PACKAGE", PACKAGE)
        assert read_code({}).record["sha256"] == wheel["sha256"]
    with (installed / "loop.py").open("a") as file:
        file.write("# a comment\n")
    assert read_code({}).record["sha256"] == wheel["sha256"], "this process has the old one"
    code_identity._package_files.cache_clear()
    changed = read_code({}).record
    assert difference_of(wheel, changed) == "mingpt_ddp/loop.py"
    assert difference_of(wheel, wheel) == difference_of({}, wheel) == ""


def test_what_a_file_imports_from_beside_it_counts_wherever_it_is(tmp_path, installed):
    files = {
        "mine.py": "import torch, pkg.sub\ndef f():\n    from helper import g\n",
        "helper.py": "import mine, mingpt_ddp.loop\n",
        "pkg/__init__.py": "",
        "pkg/sub.py": f"from . import near\nfrom ... import above\nfrom {'.' * 99} import a\n",
        "pkg/near.py": "this is no Python\n",
        "pkg/other.py": "",
        "mingpt_ddp/loop.py": "",
        "torch": "a file\n",
    }
    for folder in ("a", "b/c"):
        for name, text in files.items():
            write(tmp_path / folder, name, text)
    one, other = (read_code({"model": tmp_path / folder / "mine.py"}) for folder in ("a", "b/c"))
    assert [name for name in one.record["files"] if not name.startswith("mingpt_ddp/")] == [
        f"model/{name}"
        for name in ("mine.py", "helper.py", "pkg/sub.py", "pkg/near.py", "pkg/__init__.py")
    ]
    assert one.record["sha256"] == other.record["sha256"]


def test_the_patch_leads_from_the_commit_to_the_files(checkout, tmp_path):
    clean = read_code({"model": checkout / "mine.py"})
    commit = git(checkout, "rev-parse", "HEAD")
    assert clean.record["commits"] == {"project": commit} and clean.patch == b""
    lines = b"# \xe9 in Latin-1\r\nb = 1\r\n"
    (checkout / "bytes.py").write_bytes(lines)
    (checkout / "picture.png").write_bytes(b"\0\1")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "second")
    commit = git(checkout, "rev-parse", "HEAD")
    index = (checkout / ".git" / "index").stat()
    write(checkout, "mine.py", "x = 2\n")
    (checkout / "bytes.py").write_bytes(lines.replace(b"1\r", b"2\r"))
    (checkout / "new.py").write_bytes(lines)
    (checkout / "picture.png").write_bytes(b"\0\2")
    write(checkout, "new/né.py", "no line feed")
    write(checkout, "empty.py", "")
    write(checkout, "notes.txt", "untracked, and no code\n")
    (checkout / ".git" / "index.lock").touch()  # another git is at work
    dirty = read_code({"model": checkout / "mine.py", "data": checkout / "mine.py"})
    assert dirty.record["commits"] == {"project": f"{commit}-dirty"}
    assert describe(dirty.record_in(tmp_path, {})) == (
        f"{dirty.record['sha256'][:12]}, project at {commit[:12]}-dirty, code.patch"
    )
    (checkout / ".git" / "index.lock").unlink()
    assert (checkout / ".git" / "index").stat() == index
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(checkout), str(copy))
    (tmp_path / "code.patch").write_bytes(dirty.patch)
    git(copy, "apply", "../code.patch")
    for name in ("mine.py", "bytes.py", "new.py", "new/né.py", "empty.py"):
        assert (copy / name).read_bytes() == (checkout / name).read_bytes()
    assert not (copy / "notes.txt").exists()
    assert b"# not here, as it is binary or large: diff --git a/picture.png" in dirty.patch


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.py", 'API_KEY = "0123456789abcdef"\n'),
        ("mine.py", "fs = open('s3://me:hunter22@host/bucket')\n"),
        ("mine.py", "# token hf_" + "aB3" * 10 + "\n"),
        ("mine.py", "key = '''-----BEGIN RSA PRIVATE KEY-----\n'''\n"),
        ("mine.py", "password: hunter22\n"),
        ("new_secrets.py", "x = 1\n"),
    ],
)
def test_a_file_that_may_hold_a_secret_is_named_alone(name, text, checkout):
    write(checkout, name, f"y = 3\n{text}")
    write(checkout, "harmless.py", "token = text[0]\napi_key = os.environ['API_KEY']\n")
    git(checkout, "remote", "add", "origin", "https://me:hunter33@host/project")
    patch = read_code({"model": checkout / "mine.py"}).patch.decode()
    assert f"# not here, as it may hold a secret: diff --git a/{name} b/{name}\n" in patch
    assert "y = 3" not in patch and "hunter" not in patch
    assert "+token = text[0]" in patch


@pytest.mark.parametrize(
    ("line", "is_secret"),
    [
        ('os.environ["WANDB_API_KEY"] = "0123456789abcdef"', True),
        (f'wandb.login(key="{"0a" * 20}")', True),
        (f'TOKEN = "{"0a" * 16}"', True),
        ('h = {"Authorization": "Bearer eyJhbGciOiJIUzI1NiJ9.eyJz"}', True),
        ('repo = "https://abcdef0123456789@github.com/me/x"', True),
        ('stripe = "sk_live_abcdefghijklmnop"', True),
        ('pwd = "hunter22"', True),
        ('password: str = "hunter22"', True),
        ('eos_token = "<|endoftext|>"', False),
        ("pwd = os.getcwd()", False),
        ("password: str | None = None", False),
        ("def login(password: str, key: bytes) -> None:", False),
        ('url = f"https://{token}@{host}"', False),
        ('remote = "ssh://git@github.com/me/x"', False),
    ],
)
def test_what_looks_like_a_secret(line, is_secret):
    assert bool(SECRET.search(f"+{line}\n".lower())) is is_secret
    assert SECRET_NAME.search("diff --git a/prod.env b/prod.env")


@pytest.mark.parametrize("files", [["a.py"], ["a.py", "b.py"]])
def test_a_patch_above_the_limit_is_named_and_not_kept(files, checkout, tmp_path):
    """A larger file is named alone."""
    for name in files:
        write(checkout, name, "x = 1\n" * (MAX_PATCH_BYTES // 6 // len(files)))
    code = read_code({"model": checkout / "mine.py"})
    assert code.record["commits"]["project"].endswith("-dirty")
    assert code.record_in(tmp_path, {})["patch"] == TOO_LARGE and code.patch == b""
    for name in files:
        write(checkout, name, "x = 1\n" * MAX_PATCH_BYTES)
    patch = read_code({"model": checkout / "mine.py"}).patch
    assert b"# not here, as it is binary or large: diff --git a/a.py b/a.py\n" in patch


def test_no_program_of_the_checkout_is_run(checkout, tmp_path, monkeypatch):
    program = write(tmp_path, "program", f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    git(checkout, "clone", "-q", ".", "sub")
    git(checkout, "add", "sub")
    git(checkout, "commit", "-qm", "a submodule")
    write(checkout, "sub/mine.py", "x = 3\n")
    git(checkout / "sub", "commit", "-qam", "second")
    git(checkout / "sub", "config", "diff.external", str(program))
    git(checkout, "config", "diff.submodule", "diff")
    settings = ["core.fsmonitor", "core.pager", "diff.d.textconv", "diff.d.command"]
    settings += ["filter.f.clean", "filter.f.process", "filter.a=b.clean"]
    for key in settings:
        git(checkout, "config", key, str(program))
    git(checkout, "config", "filter.f.required", "true")
    write(checkout, ".git/hooks/post-index-change", program.read_text()).chmod(0o755)
    write(checkout, ".git/info/attributes", "*.py filter=f diff=d\nb.py filter=a=b\n")
    write(checkout, "mine.py", "x = 2\n")
    write(checkout, "b.py", "x = 2\n")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(program))
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert b"+x = 2" in read_code({"model": checkout / "mine.py"}).patch
    assert not (tmp_path / "ran").exists()


def test_without_git_there_is_the_hash_alone(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_code({"model": checkout / "mine.py"}).record["commits"] == {}
    program = write(tmp_path, "git", "#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    monkeypatch.setattr(code_identity, "GIT_S", 0.1)
    code = read_code({"model": checkout / "mine.py"}).record
    assert code["commits"] == {"project": "unknown: git took more than 0.1 s"}
    assert describe(code).endswith("project at unknown: git took more than 0.1 s")


def test_the_commit_is_kept_where_its_patch_takes_too_long(checkout, tmp_path, monkeypatch):
    commit = git(checkout, "rev-parse", "HEAD")
    write(checkout, "mine.py", "x = 2\n")

    def git_without_diffs(root, deadline, *words):
        if "diff" in words:
            raise subprocess.TimeoutExpired("git", 600)
        return answer(root, deadline, *words)

    answer = code_identity.git
    monkeypatch.setattr(code_identity, "git", git_without_diffs)
    code = read_code({"model": checkout / "mine.py"})
    assert code.record["commits"] == {"project": f"{commit}-dirty"} and code.patch == b""
    assert code.record_in(tmp_path, {})["patch"] == "git took more than 600 s, not kept"


def test_checkouts_of_one_name_are_all_recorded(checkout, tmp_path):
    other = tmp_path / "other" / "project"
    git(tmp_path, "clone", "-q", str(checkout), str(other))
    git(other, "commit", "-qm", "second", "--allow-empty")
    code = read_code({"model": checkout / "mine.py", "data": other / "mine.py"}).record
    assert code["commits"] == {
        "project": git(checkout, "rev-parse", "HEAD"),
        str(other): git(other, "rev-parse", "HEAD"),
    }


def test_a_commit_by_sha256_is_cut_to_twelve_digits():
    code = {"sha256": "a" * 64, "commits": {"b": f"{'c' * 64}-dirty"}}
    assert describe(code) == f"{'a' * 12}, b at {'c' * 12}-dirty"
    code = {"sha256": "a" * 64, "commits": {"c" * 40: "c" * 40}}  # as a version is checked out
    assert describe(code) == f"{'a' * 12}, {'c' * 12}"


def test_no_error_of_the_reading_ends_a_run(tmp_path, monkeypatch):
    def fail(chosen):
        raise IndexError("7")

    monkeypatch.setattr(code_identity, "read_code", fail)
    record = start_reading({})().record_in(tmp_path, {})
    assert describe(recorded_code({"code": record})) == "unknown, unknown: IndexError('7')"
    other = {"sha256": "a", "files": {"a.py": "1"}}
    assert difference_of(record, other) == "which files is unknown"
    assert difference_of(record, record) == ""


def test_no_reading_holds_up_a_run_for_ever(monkeypatch):
    is_over = threading.Event()
    monkeypatch.setattr(code_identity, "read_code", lambda chosen: is_over.wait())
    monkeypatch.setattr(code_identity, "READ_S", 0.01)
    code = start_reading({})
    assert describe(code().record) == "unknown, unknown: reading it takes more than 0.01 s"
    is_over.set()
    assert code().record["sha256"] == "unknown", "a run has one answer"


def test_a_process_forked_meanwhile_holds_no_pipe_of_a_starting_git(checkout):
    """It may live as long as the run, whose start would wait for it, as for a loader process."""
    before = pipes_to_write()
    opened = set()
    held = []

    def fork():
        if (child := os.fork()) == 0:
            os._exit(100 + len(pipes_to_write() & opened))
        held.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)

    class Root(os.PathLike):
        def __fspath__(self):
            """Fork on a thread when `subprocess` has opened the pipes, and starts git."""
            opened.update(pipes_to_write() - before)
            thread.start()
            thread.join(0.3)  # the fork waits for the start, which waits for this
            return str(checkout)

    head = code_identity.git(Root(), time.monotonic() + 600, "rev-parse", "HEAD")
    thread.join()
    assert head.decode().strip() == git(checkout, "rev-parse", "HEAD")
    assert opened
    assert held == [100]


def pipes_to_write() -> set[str]:
    """Return the pipes that this process can write to."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the directory itself
            pipe, flags = os.readlink(link), fcntl.fcntl(int(link.name), fcntl.F_GETFL)
            if pipe.startswith("pipe:") and flags & os.O_WRONLY:
                found.add(pipe)
    return found


def test_a_checkout_without_a_commit_and_one_with_a_file_named_head(checkout, tmp_path):
    (tmp_path / "new").mkdir()
    git(tmp_path / "new", "init", "-q")
    for root in (checkout, tmp_path / "new"):
        write(root, "HEAD", "x")
        write(root, "mine.py", "x = 2\n")
        git(root, "add", "mine.py")
    code = read_code({"model": checkout / "mine.py", "data": tmp_path / "new" / "mine.py"})
    assert code.record["commits"]["project"].endswith("-dirty")
    assert code.record["commits"]["new"] == "(initial)-dirty"
    assert code.patch.count(b"+x = 2") == 2


def test_a_run_keeps_the_patch_and_the_name_of_what_trained_it_before(checkout, tmp_path):
    write(checkout, "mine.py", "x = 2\n")
    first = read_code({"model": checkout / "mine.py"})
    record = first.record_in(tmp_path, {})
    assert (record["patch"], record["earlier"]) == ("code.patch", [])
    (tmp_path / "code.patch").write_bytes(first.patch)
    assert first.record_in(tmp_path, record) == record
    code_identity._user_files.cache_clear()
    write(checkout, "mine.py", "x = 3\n")
    second = read_code({"model": checkout / "mine.py"}).record_in(tmp_path, record)
    assert second["earlier"] == [record["sha256"]]
    assert second["patch"].startswith("code-")
    third = first.record_in(tmp_path, second)
    assert third["earlier"] == [record["sha256"], second["sha256"]]


@pytest.mark.parametrize(
    "code", [None, [], {"files": {}}, {"sha256": 1}, {"sha256": "a", "files": []}]
)
def test_what_is_no_record_is_none(code):
    assert recorded_code({"code": code}) == recorded_code(code) == {}


def test_a_record_of_a_stranger_is_described_within_a_line():
    code = {"sha256": "a" * 10**6, "commits": {"b\n" * 10**6: ["c"]}, "patch": {"d": 1}}
    line = describe(recorded_code({"code": code}))
    assert len(line) == 400 and "\n" not in line
