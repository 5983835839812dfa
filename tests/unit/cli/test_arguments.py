"""How all commands parse arguments: positional URLs, and key=value, --key value or --key=value."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest
from launching import PATIENCE_S, ROOT, environment

from mingpt_ddp.cli.arguments import FREE_TEXT, human_size, parse_arguments
from mingpt_ddp.errors import ConfigError


@dataclass(frozen=True)
class Config:
    url: str
    keep_last: int = 3
    step: int | Literal["newest"] = "newest"
    rate: float = 0.5
    follow: bool = False
    text: str = field(default="", metadata=FREE_TEXT)


@dataclass(frozen=True)
class Several:
    runs: list[str]
    follow: bool = False


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["a"], Config("a")),
        (["url=a"], Config("a")),
        (["--url", "a"], Config("a")),
        (["a", "keep_last=2"], Config("a", keep_last=2)),
        (["keep_last=2", "a"], Config("a", keep_last=2)),
        (["--keep_last", "2", "a"], Config("a", keep_last=2)),
        (["--keep-last=2", "a"], Config("a", keep_last=2)),
        (["a", "--step=newest", "--rate", "1e-3"], Config("a", rate=1e-3)),
        (["a", "step=7", "follow=true"], Config("a", step=7, follow=True)),
        (["a", "--text", "-"], Config("a", text="-")),
        (["a", "--text", "b=c: [null]"], Config("a", text="b=c: [null]")),
        (["a", "text=--b=1"], Config("a", text="--b=1")),
        (["a", "text="], Config("a")),
        (["a", "text=see https://user:word@host"], Config("a", text="see https://user:word@host")),
        (["outputs/sweep/lr=1"], Config("outputs/sweep/lr=1")),
        (["./lr=1", "step=7"], Config("./lr=1", step=7)),
        (["url=lr=1"], Config("lr=1")),
        (["memory://runs/lr=1"], Config("memory://runs/lr=1")),
    ],
)
def test_arguments(args, expected):
    assert parse_arguments(Config, args) == expected


def test_a_list_takes_all_arguments_without_a_key():
    assert parse_arguments(Several, ["a", "follow=true", "b/c=1", "runs=d"]) == Several(
        ["a", "b/c=1", "d"], True
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "url is missing; give it a value"),
        (["keep_last=2"], "url is missing; give it a value"),
        ([" "], "url is empty; name a run directory"),
        (
            ["a", "b"],
            "b does not have the form key=value; the keys are keep_last, step, rate, follow, text",
        ),
        (["a", "url=b"], "url is given twice; give it one value"),
        (["a", "step=1", "--step", "1"], "step is given twice; give it one value"),
        (["a", "keep=1"], "keep is not a key; did you mean keep_last?"),
        (["a", "--keep_lst", "1"], "keep_lst is not a key; did you mean keep_last?"),
        (["a", "--keep-lst=1"], "keep_lst is not a key; did you mean keep_last?"),
        (["a", "--follow"], "--follow has no value; write --follow=VALUE"),
        (["a", "--follow", "--step=1"], "--follow has no value; write --follow=VALUE"),
        (["a", "-s"], "-s is not an option; write key=value or --key value"),
        (["a", "keep_last=many"], "keep_last='many' must be a whole number"),
        (["a", "step="], "step='' must be a whole number or 'newest'"),
        (["nosuch://a"], "url=nosuch://a: the protocol nosuch:// is unknown; check its spelling"),
    ],
)
def test_an_error_is_one_line(args, expected):
    with pytest.raises(ConfigError) as error:
        parse_arguments(Config, args)
    assert str(error.value) == f"config error: {expected}"


# tests/unit/config/test_config.py covers every form in which a URL can hold a secret.
URLS_WITH_SECRETS = [
    "s3://name:hunter2@bucket/run",
    "ftp://name:a hunter2@host/run",
    "https://host/run#access_token=hunter2",
]


@pytest.mark.parametrize("url", ["http://host:8080/a@b", "ftp://name@host/run"])
def test_no_credentials(url):
    assert parse_arguments(Config, [url]).url == url


SPELLINGS = [
    ["{}"],
    ["--step", "{}"],
    ["a", "step={}"],
    ["a", "b", "{}"],
    ["a", "to={}"],
    ["a", "--follow={}"],
]
CASES = [(["{}"], url) for url in URLS_WITH_SECRETS]
CASES += [(args, URLS_WITH_SECRETS[0]) for args in SPELLINGS]


@pytest.mark.parametrize("config", [Config, Several])
@pytest.mark.parametrize(("args", "url"), CASES)
def test_credentials_are_refused_and_not_printed(args, url, config):
    with pytest.raises(ConfigError) as error:
        parse_arguments(config, [arg.format(url) for arg in args])
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("launched", [False, True])
def test_a_rank_of_a_launcher_leaves_before_threads_of_torch_could_abort(launched):
    """It exits without shutting down the interpreter. Its output is complete nevertheless."""
    program = "import atexit, runpy, sys; atexit.register(print, 'shut down'); "
    program += "sys.argv = ['-m', 'snapshots', 'list', sys.argv[1]]; "
    program += "runpy.run_module('mingpt_ddp', run_name='__main__')"
    run = ROOT / "tests" / "data" / "format2" / "gpt-adamw" / "run"
    done = subprocess.run(
        [sys.executable, "-c", program, str(run)],
        env=environment(ROOT, **({"TORCHELASTIC_RUN_ID": "run"} if launched else {})),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert " whole " in done.stdout
    assert done.stdout.endswith("shut down\n") != launched


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 19, "1.5 MiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_a_size_has_a_suitable_unit(size, text):
    assert human_size(size) == text
