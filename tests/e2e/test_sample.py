"""Check sample.py on the command line."""

from __future__ import annotations

import subprocess

import pytest
from launching import PATIENCE_S, TINY, call, environment, python_main
from runs import succeed, tool


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("trained")
    succeed([*python_main(), *TINY, "run.name=a"], cwd)
    return cwd


def sample(cwd, *args: str, stdin: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
    command = tool("sample", *args)
    if not stdin and not extra:
        return call(command, cwd, separate=True)
    env = environment(cwd, **extra)
    return subprocess.run(
        command, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.parametrize(
    "precision",
    ["auto", *(pytest.param(p, marks=pytest.mark.slow) for p in ("bf16", "fp32", "fp16"))],
)
def test_every_precision_on_a_cpu_without_avx512(trained, precision):
    """On a CPU without AVX-512, oneDNN cannot pack matrices in bf16."""
    older = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    args = [
        "snapshot=outputs/a",
        "prompt=The ",
        "max_new_tokens=40",
        "device=cpu",
        f"precision={precision}",
    ]
    done = sample(trained, *args, **older)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == len("The ") + 40 + len("\n")


def test_argument_forms_and_any_step(trained):
    """The URL is a positional argument, and keys have three forms.

    The default snapshot is the newest one, which here is also the best.
    """
    args = ["prompt=The ", "max_new_tokens=40"]
    newest = sample(trained, "snapshot=outputs/a", *args).stdout
    assert len(newest) == len("The ") + 40 + len("\n")
    assert sample(trained, "outputs/a", "--prompt", "The ", "--max-new-tokens=40").stdout == newest
    assert sample(trained, *args, "--step=newest", "outputs/a").stdout == newest
    assert sample(trained, "outputs/a", *args, "step=best").stdout == newest
    assert sample(trained, "outputs/a", *args, "step=8").stdout not in (newest, "")


def test_several_samples_of_a_prompt_from_standard_input(trained):
    args = [
        "snapshot=outputs/a/snapshots/step_00000012",
        "prompt=-",
        "samples=3",
        "max_new_tokens=9",
        "top_p=0.9",
    ]
    done = sample(trained, *args, stdin="If the ")
    assert done.returncode == 0, done.stderr
    texts = done.stdout.split("-" * 80 + "\n")
    assert len(texts) == 3
    assert all(text.startswith("If the ") for text in texts)
    assert len(set(texts)) == 3


def test_a_run_directory_whose_snapshots_are_elsewhere(tmp_path):
    options = ["run.name=b", f"snapshot.path={tmp_path}/elsewhere", "trainer.max_steps=4"]
    succeed([*python_main(), *TINY, *options], tmp_path)
    done = sample(tmp_path, "snapshot=outputs/b", "max_new_tokens=3")
    assert done.returncode == 0, done.stderr


def test_a_prompt_is_taken_literally(trained):
    done = sample(trained, "snapshot=outputs/a", "prompt=a=1: [null]", "max_new_tokens=1")
    assert done.stdout.startswith("a=1: [null]"), done.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["snapshot=outputs/a", "prompt=日 and é"],
            "data error: the model does not know 'é', '日'",
        ),
        (
            ["snapshot=outputs/nowhere"],
            "snapshot error: there is no whole snapshot at outputs/nowhere",
        ),
        (
            ["snapshot=outputs/a", "top_p=2"],
            "config error: top_p=2 must be less than or equal to 1",
        ),
        (
            ["snapshot=outputs/a", "max_new_tokens=many"],
            "config error: max_new_tokens='many' must be a whole number",
        ),
        (
            ["snapshot=outputs/a", "precision=fp8"],
            "config error: precision='fp8' must be 'auto', 'fp32', 'bf16' or 'fp16'",
        ),
        (["prompt=x"], "config error: snapshot is missing"),
        (["outputs/a", "x"], "config error: x does not have the form key=value"),
        (
            ["outputs/a", "step=5"],
            "snapshot error: there is no snapshot with step=5 at outputs/a; the newest one is",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line(trained, args, expected):
    done = sample(trained, *args)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(expected)
