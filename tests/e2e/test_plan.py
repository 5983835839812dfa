"""Check the plan command as users type it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from launching import ROOT, TINY, call
from runs import tool


def plan(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = tool("plan", *args)
    return call(command, cwd, separate=True, PYTHONPATH=str(ROOT))


def test_a_plan_as_text_and_json(tmp_path):
    text = plan(tmp_path, *TINY, "ddp.nproc_per_node=2", "trainer.max_epochs=1")
    assert text.returncode == 0, text.stderr
    names = [line.split()[0] for line in text.stdout.splitlines() if line[:1].islower()]
    assert names == [
        "run",
        "data",
        "model",
        "length",
        "batch",
        "snapshots",
        "time",
        "strategy",
        "ddp",
        "zero1",
        "fsdp",
        "single:",
        "hsdp:",
        "tensor_parallel:",
        "each",
        "ranks",
        "doubtful:",
    ]
    assert "* trainer.max_steps=12 ends the run before trainer.max_epochs=1" in text.stdout
    done = plan(tmp_path, "format=json", *TINY)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    times = values["measured"]
    assert (values["length"]["steps"], times["evaluations"]) == (12, 2)
    # Steps are so short that on some machines, evaluations take longer than training.
    is_slow = times["evaluations_s"] > times["training_s"]
    assert [doubt[:16] for doubt in values["doubts"]] == ["evaluations take"] * is_slow
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"], "no run directory"


def test_a_plan_for_gpus_that_are_not_here(tmp_path):
    words = [*TINY, "trainer.micro_batch_size=1", "--device", "4090", "ddp.nproc_per_node=4"]
    text = plan(tmp_path, *words, "nodes=2", "trainer.batch_size=8")
    assert text.returncode == 0, text.stderr
    assert "on 8 x NVIDIA GeForce RTX 4090 in fp32" in text.stdout
    rows = [line.split()[0] for line in text.stdout.splitlines() if "iB  " in line]
    assert {"ddp", "zero1", "fsdp", "hsdp"} <= {*rows}
    assert "single: ddp.strategy=single trains in one process" in text.stdout
    done = plan(tmp_path, "format=json", *words, "trainer.batch_size=4", "device=h100")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    ddp = values["strategies"]["ddp"]
    assert ddp["weights_bytes"] == 4 * values["model"]["parameters"]
    assert ddp["step_s_at_peak"] == max(ddp["compute_s"], ddp["wire_s"])
    assert values["measured"] is None
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"], "no run directory"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["optimizr.lr=1"], "config error: optimizr.lr is not a key; did you mean optimizer.lr?"),
        (["format=yaml"], "config error: format=yaml must be text or json"),
        (["-m", "optimizer.lr=1e-3,1e-4"], "config error: plan describes one run; leave out -m"),
        (["data.path=nowhere.txt"], "data error: data.path=nowhere.txt: there is no such file"),
        (["--cfg=model"], "config error: argument --cfg/-c: invalid choice: 'model'"),
        (["plan"], "config error: cannot read 'plan': "),
        (["device=h1000"], "config error: device=h1000 is not known; use one of a100-40gb, "),
        (["device=h100", "nodes=0"], "config error: nodes=0 must be greater than or equal to 1"),
        (["device=h100", "network_gbps=fast"], "config error: network_gbps='fast' must be "),
        (["nodes=8"], "config error: nodes=8 needs a device to plan for; add device=h100"),
    ],
)
def test_errors_equal_those_of_training(args, message, tmp_path):
    done = plan(tmp_path, *args)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(message)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("preset", "error"),
    [("trainer: {max_steps: 1", "ParserError"), ("defaults: [7]", "ValueError")],
)
def test_a_preset_that_hydra_cannot_read(preset, error, tmp_path):
    (tmp_path / "presets" / "experiment").mkdir(parents=True)
    (tmp_path / "presets" / "experiment" / "mine.yaml").write_text(preset)
    done = plan(tmp_path, "--config-dir=presets", "experiment=mine")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(
        f"config error: cannot read the command line or a configuration file ({error}"
    )
