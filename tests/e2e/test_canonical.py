"""Check that with ddp.reduction=canonical, the number of ranks does not change the bits of a run.

Every start has another number of ranks, kills end the starts, and one run uses two hosts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from holding import kill_before
from launching import ROOT, TINY, committed, python_main, torchrun
from netns_hosts import HostsUnavailable, TwoHosts
from runs import fail, succeed
from snapshot_helpers import digests

STEPS = 60
COMMON = [
    *TINY,
    f"trainer.max_steps={STEPS}",
    "trainer.batch_size=24",
    "trainer.micro_batch_size=3",
    "trainer.eval_every=20",
    "snapshot.every_steps=5",
    "ddp.reduction=canonical",
    "run.name=run",
]
TWO_SOURCES = [
    "data.path=a.txt",
    "data.tokenizer=bpe",
    "data.vocab_size=300",
    "data.sources=[[a.txt,3],[b.txt,1]]",
    "data.truncate=1",
    "data.block_size=64",
]
CASES = {
    "bpe, ema, patience": [*TWO_SOURCES, "trainer.ema=0.9", "trainer.patience=9"],
    "modern": [
        "model=modern_nano",
        "optimizer=muon",
        "model.n_head=4",
        "model.n_embd=128",
        "data.truncate=0.1",
    ],
}


def write_texts(cwd: Path) -> None:
    lines = [f"line {i} of the grüne book, {i * i}.\n" for i in range(900)]
    (cwd / "a.txt").write_text("".join(lines))
    (cwd / "b.txt").write_text("other words, “quoted” 😀\n" * 300)


@pytest.mark.parametrize("case", CASES)
def test_killed_between_starts_on_different_numbers_of_ranks(case, tmp_path):
    settings = [*COMMON, *CASES[case]]
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    for cwd in (alone, killed):
        cwd.mkdir()
        write_texts(cwd)
    succeed([*python_main(), *settings], alone)

    run = killed / "outputs" / "run"
    starts = (
        (python_main(), 12),
        ([*python_main(), "ddp.nproc_per_node=4"], 24),
        (torchrun(2), 36),
    )
    for command, step in starts:
        kill_before(step + 1, [*command, *settings], killed, lambda: committed(run))
    text = succeed([*torchrun(3), *settings], killed)
    assert "results may differ" not in text
    assert digests(run) == digests(alone / "outputs" / "run")


def test_two_hosts_with_different_numbers_of_ranks(tmp_path):
    """One host has two ranks and the other has one. They communicate over gloo."""
    settings = [*COMMON, "trainer.max_steps=12"]
    (tmp_path / "alone").mkdir()
    (tmp_path / "hosts").mkdir()
    succeed([*python_main(), *settings], tmp_path / "alone")
    try:
        hosts = TwoHosts()
    except HostsUnavailable as reason:
        pytest.skip(f"there cannot be two hosts here: {reason}")
    with hosts:
        jobs = []
        for host, ranks in ((1, 1), (0, 2)):
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                f"--nproc_per_node={ranks}",
                "--rdzv_backend=c10d",
                "--rdzv_id=run",
                f"--rdzv_endpoint={hosts.names[0]}:29500",
                str(ROOT / "main.py"),
            ]
            jobs.append(hosts.start(host, [*launcher, *settings], tmp_path / "hosts"))
        for job in jobs:
            assert job.wait() == 0, job.text()
    found, expected = (digests(tmp_path / name / "outputs" / "run") for name in ("hosts", "alone"))
    assert found == expected


def test_different_micro_batches_or_threads_are_refused(tmp_path):
    settings = [*COMMON, "trainer.max_steps=4"]
    succeed([*python_main(), *settings], tmp_path)
    more = [*settings, "trainer.max_steps=8"]
    text = fail([*python_main(), *more, "trainer.micro_batch_size=4"], tmp_path)
    assert "set trainer.micro_batch_size=3, or ddp.reduction=fast" in text
    text = fail([*python_main(), *more], tmp_path, OMP_NUM_THREADS="2")
    assert "set OMP_NUM_THREADS=1, or ddp.reduction=fast" in text
    succeed([*python_main(), *more], tmp_path)
