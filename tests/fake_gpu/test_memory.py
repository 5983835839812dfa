"""The peak memory of a step on the fake GPU, where it is known by hand."""

from __future__ import annotations

import pytest

from fake_gpu.process import job, result_of

GPT2 = ["model=gpt2", "data.block_size=1024", "trainer.precision=bf16", "model.n_layer=4"]
PARAMETERS = 50257 * 768 + 1024 * 768 + 4 * (12 * 768**2 + 13 * 768) + 2 * 768
EMBEDDING = 50257 * 768  # largest, so rank zero owns it, and nothing else
SLACK = 1 << 20  # tensors are rounded up, and more ranks have a longer text

RUNS = {
    "one GPU": ([], 1),
    "average": (["trainer.ema=0.999"], 1),
    "recomputed": (["trainer.activation_checkpointing=true"], 1),
    "ddp": (["ddp.strategy=ddp"], 8),
    "zero1": (["ddp.strategy=zero1"], 8),
    "fsdp on 8": (["ddp.strategy=fsdp"], 8),
    "fsdp on 64": (["ddp.strategy=fsdp"], 64),
}


def job_of(name):
    overrides, ranks = RUNS[name]
    sizes = [f"trainer.batch_size={4 * ranks}", "trainer.micro_batch_size=4"]
    arguments = {"overrides": [*GPT2, *sizes, *overrides], "vocab_size": 50257}
    return job("peak_bytes", world_size=ranks, **arguments)


@pytest.mark.parametrize("run", [[job_of(name) for name in RUNS]], ids=["gpt2"])
def test_peaks(run, answer_of):
    peaks = {name: result_of(answer_of(job_of(name))) for name in RUNS}

    def difference(larger: str, smaller: str) -> int:
        return peaks[larger] - peaks[smaller]

    # fp32 averages; DDP's buckets, which the gradients then are views of; two moments of AdamW
    assert difference("average", "one GPU") == pytest.approx(4 * PARAMETERS, abs=SLACK)
    assert difference("ddp", "one GPU") == pytest.approx(4 * PARAMETERS, abs=SLACK)
    saved = 8 * (PARAMETERS - EMBEDDING)
    assert difference("ddp", "zero1") == pytest.approx(saved, abs=SLACK)
    assert peaks["recomputed"] < peaks["one GPU"]
    assert peaks["fsdp on 64"] < peaks["fsdp on 8"] < peaks["one GPU"]
