"""The plan's table of strategies agrees with numbers worked out by hand and with measurements.

It also says which strategies cannot run. Planning allocates no memory for the model.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Any

import pytest
from multiprocess.ranks import configure

from mingpt_ddp.cli.commands.plan import describe
from mingpt_ddp.config.builders import run_code
from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.gpus import GPUS, Machine
from mingpt_ddp.metrics.mfu import peak_flops_of
from mingpt_ddp.models.ops import DTYPES
from mingpt_ddp.study.planning import sizes
from mingpt_ddp.study.planning.plan import make_plan
from mingpt_ddp.study.planning.strategies import OVERHEAD_BYTES

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, ROWS = 2, 48, 3, 64, 8, 4
GPT = [
    "model=gpt_nano",
    "data.path=a.txt",
    "trainer.precision=bf16",
    "model.dropout=0",
    f"model.n_layer={LAYERS}",
    f"trainer.micro_batch_size={ROWS}",
]
PARAMETERS = (VOCABULARY + LENGTH) * WIDTH + LAYERS * (12 * WIDTH**2 + 2 * WIDTH) + WIDTH
TENSORS = 3 + LAYERS * 6
RESIDENT = 36_000  # bytes of the text that stay on the GPU, one byte per token


def configuration(*overrides: str) -> Config:
    return from_mapping(configure(*overrides))


def strategies(
    *overrides: str, ranks: int = 1, nodes: int = 1, outputs: int | None = None, **machine: Any
) -> dict[str, Any]:
    """Return the figures of each strategy on H100s. Each rank has one micro-batch per step."""
    words = [f"trainer.batch_size={ROWS * ranks * nodes}", f"ddp.nproc_per_node={ranks}"]
    config = configuration(*GPT, *words, *overrides)
    plan = make_plan(Job(config), Machine("h100", nodes, **machine), vocab_size=outputs)
    assert plan["measured"] is None
    return plan["strategies"]


# docs/speed.md has the measured peaks in GiB: 12 x 1024 tokens on an H200.
GPT2 = ["model=gpt2", "data.block_size=1024", "trainer.micro_batch_size=12"]
ON_AN_H200 = {(): 5.40, ("trainer.activation_checkpointing=true",): 1.89}


@pytest.mark.parametrize(("words", "measured"), ON_AN_H200.items())
def test_peaks_on_an_h200_are_within_a_tenth(words, measured):
    batch = ["trainer.batch_size=12", "trainer.precision=bf16", "data.path=a.txt"]
    config = configuration(*GPT2, *batch, *words)
    row = make_plan(Job(config), Machine("h200"), vocab_size=65)["strategies"]["single"]
    assert row["peak_bytes"] / 2**30 == pytest.approx(measured, rel=0.1)


def test_the_time_at_peak_is_below_that_on_an_h200():
    # With 10.7M parameters, 64 x 256 tokens take 4.6 ms with CUDA graphs (docs/speed.md).
    words = [
        "model=gpt_mini",
        "data.path=a.txt",
        "data.train_split=0.8",
        "model.n_layer=6",
        "model.n_head=6",
        "model.n_embd=384",
        "data.block_size=256",
        "trainer.batch_size=64",
        "trainer.micro_batch_size=64",
        "trainer.precision=bf16",
    ]
    row = make_plan(Job(configuration(*words)), Machine("h200"), vocab_size=65)["strategies"][
        "single"
    ]
    tokens = 64 * 256
    flops = 6 * (65 * 384 + 6 * 12 * 384**2) + 12 * 6 * 384 * 256
    assert row["compute_s"] == pytest.approx(flops * tokens / 989.5e12, rel=0.01)
    assert row["step_s_at_peak"] == row["compute_s"] < 4.6e-3


def test_the_state_of_one_rank_is_exact():
    state = 8 * PARAMETERS + 4 * TENSORS  # AdamW has a step count for each tensor
    counted = sizes(configuration(*GPT))
    assert counted.parameters == counted.trained == PARAMETERS
    assert counted.optimizer_bytes == state
    assert counted.snapshot_bytes(has_average=False) == 4 * PARAMETERS + state
    assert sizes(configuration(*GPT), vocab_size=9).parameters == PARAMETERS + WIDTH
    assert sizes(configuration(*GPT, "optimizer=muon")).muon == LAYERS * 12 * WIDTH**2
    single = strategies()["single"]
    assert single["weights_bytes"] == 4 * PARAMETERS
    assert single["optimizer_bytes"] == state
    assert single["average_bytes"] == single["wire_bytes_per_step"] == 0
    assert single["data_bytes"] == RESIDENT
    assert strategies("trainer.ema=0.9")["single"]["average_bytes"] == 4 * PARAMETERS
    parts = ("weights", "gradients", "optimizer", "average", "activations", "temporaries")
    total = sum(single[f"{part}_bytes"] for part in (*parts, "data"))
    assert single["peak_bytes"] == total


def test_the_state_of_eight_ranks_is_divided():
    figures = strategies(ranks=8)
    state = 8 * PARAMETERS + 4 * TENSORS
    assert figures["ddp"]["optimizer_bytes"] == state
    assert figures["ddp"]["gradients_bytes"] == 4 * PARAMETERS, "the buckets stay allocated"
    assert figures["fsdp"]["weights_bytes"] == 4 * PARAMETERS // 8
    assert figures["fsdp"]["optimizer_bytes"] == pytest.approx(state / 8, abs=1)
    assert figures["hsdp"]["weights_bytes"] == PARAMETERS, "half of the ranks of one node"
    share = 4 * WIDTH**2 / PARAMETERS  # the owner of one of the largest matrices owns nothing else
    assert figures["zero1"]["optimizer_bytes"] == pytest.approx(state * max(share, 1 / 8), abs=1)
    assert figures["single"] == {"reason": figures["single"]["reason"]}
    assert figures["single"]["reason"].startswith("ddp.strategy=single trains in one process")


def test_bytes_on_the_wire_match_a_count_by_hand():
    ranks = 8
    figures = strategies(ranks=ranks)
    sent = {name: row.get("wire_bytes_per_step") for name, row in figures.items()}
    ring = (ranks - 1) / ranks
    assert sent["ddp"] == round(2 * ring * 4 * PARAMETERS)
    assert sent["zero1"] == round(3 * ring * 4 * PARAMETERS)
    # 16-bit weights before the forward and before the backward pass, then fp32 gradients.
    assert sent["fsdp"] == round(ring * (2 + 2 + 4) * PARAMETERS)
    half = 3 / 4 * (2 + 2 + 4) * PARAMETERS + 2 * 1 / 2 * 4 * PARAMETERS / 4
    assert sent["hsdp"] == round(half)
    assert figures["tensor_parallel"]["reason"], f"{HEADS} heads"
    halved = strategies("ddp.comm_hook=bf16", ranks=ranks)
    assert halved["ddp"]["wire_bytes_per_step"] == sent["ddp"] // 2
    assert halved["zero1"]["wire_bytes_per_step"] == sent["zero1"] - sent["ddp"] // 2
    assert "does not support ddp.comm_hook" in halved["fsdp"]["reason"]


def test_tensor_parallelism_divides_matrices_and_sends_activations():
    figures = strategies("model.n_head=4", ranks=4)["tensor_parallel"]
    assert figures["passes"] == 4, "the ranks of a copy take the same micro-batches"
    split = LAYERS * (12 * WIDTH**2 + 2 * WIDTH)
    own = PARAMETERS - split + split // 4
    assert figures["weights_bytes"] == pytest.approx(4 * own, rel=1e-3)
    elements = ROWS * LENGTH * WIDTH
    message = 2 * elements * (2 + 4)  # bf16 in the forward pass, fp32 in the backward pass
    assert figures["wire_bytes_per_step"] == 2 * 3 * (4 * LAYERS * message) // 4


def test_a_network_between_nodes_takes_its_time():
    near = strategies(ranks=8)["ddp"]
    assert near["wire_s"] == pytest.approx(near["wire_bytes_per_step"] / 450e9)
    far = strategies(ranks=8, nodes=4, network_gbps=100)
    assert far["ddp"]["wire_bytes_per_step"] == round(2 * 31 / 32 * 4 * PARAMETERS)
    # Each of the nodes with 4 GPUs sends each sum once.
    between = 2 * 3 / 4 * 4 * PARAMETERS / (100e9 / 8)
    assert far["ddp"]["wire_s"] == pytest.approx(between)
    assert far["hsdp"]["wire_s"] == pytest.approx(between)
    inside = 7 / 8 * (2 + 2 + 4) * PARAMETERS + 2 * 3 / 4 * 4 * PARAMETERS / 8
    fast = strategies(ranks=8, nodes=4, network_gbps=1e6)["hsdp"]
    assert fast["wire_s"] == pytest.approx(inside / 450e9)


def test_a_plan_refuses_settings_that_training_refuses():
    compiled = ["trainer.compile=true", f"trainer.batch_size={ROWS * 8}", "ddp.nproc_per_node=8"]
    with pytest.raises(ConfigError, match=r"trainer.compile=true does not work with .*=fsdp"):
        make_plan(Job(configuration(*GPT, *compiled, "ddp.strategy=fsdp")), Machine("h100"))
    figures = strategies("trainer.compile=true", ranks=8)
    assert "does not work with ddp.strategy=fsdp" in figures["fsdp"]["reason"]
    assert figures["ddp"]["reason"] is None
    odd = strategies("trainer.batch_size=20", ranks=5)
    assert "needs an even number of ranks on one node" in odd["hsdp"]["reason"]
    alone = strategies(ranks=1, nodes=4)
    assert "at least two on every node" in alone["hsdp"]["reason"]
    with pytest.raises(ConfigError, match="needs an even number"):
        strategies("trainer.batch_size=20", "ddp.strategy=hsdp", ranks=5)


CODE = """
from dataclasses import dataclass
import torch
from torch import nn
from mingpt_ddp.registry import ModelConfig, register

@dataclass(frozen=True)
class Config(ModelConfig):
    pass

class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.scores = nn.Embedding(vocab_size, vocab_size)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens, targets=None):
        logits = self.scores(tokens) * self.scale
        READ
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

@register("model", "mine", Config)
def build(config, vocab_size, block_size):
    return Model(vocab_size)
"""


@pytest.fixture
def plan_of_code(cwd):
    """Return a function that plans for 4 ranks, with a user's model from this code."""

    def plan(code: str, device: str | None = "h100") -> dict[str, Any]:
        (cwd / "mine.py").write_text(code)
        run_code({"model": {"code": "mine.py"}}, [cwd])
        words = ["data.path=a.txt", "trainer.batch_size=16", "trainer.micro_batch_size=4"]
        values = configure(*words, "trainer.precision=bf16", "ddp.nproc_per_node=4")
        values["model"] = {"code": "mine.py", "architecture": "mine", "name": "mine"}
        machine = Machine(device) if device else None
        return make_plan(Job(from_mapping(values)), machine)["strategies"]

    yield plan
    run_code({}, [])


def test_for_a_user_model_only_the_state_is_planned(plan_of_code):
    """Its forward pass is not run, so that it may read values of tensors."""
    figures = plan_of_code(CODE.replace("READ", "logits.sum().item()"))
    parameters = 8 * 8 + 1
    ddp = figures["ddp"]
    assert ddp["weights_bytes"] == ddp["gradients_bytes"] == 4 * parameters
    assert ddp["optimizer_bytes"] == 8 * parameters + 4 * 2
    assert ddp["wire_bytes_per_step"] == 2 * 3 * 4 * parameters // 4
    unknown = ("peak_bytes", "activations_bytes", "temporaries_bytes", "largest_micro_batch_size")
    assert {ddp[name] for name in (*unknown, "compute_s")} == {None}
    assert ddp["step_s_at_peak"] == ddp["wire_s"]
    assert ddp["reason"] is None


def test_the_state_without_activations_may_be_too_large(plan_of_code, monkeypatch):
    monkeypatch.setitem(GPUS, "h100", replace(GPUS["h100"], memory=OVERHEAD_BYTES))
    ddp = plan_of_code(CODE.replace("READ", ""))["ddp"]
    assert ddp["reason"] == "needs 0.5 GiB including CUDA's own memory, but a rank has 0.5 GiB"
    assert ddp["peak_bytes"] is None


def test_a_model_that_reads_values_when_built_cannot_be_planned_for_another_gpu(plan_of_code):
    line = "self.first = self.scores.weight.sum().item()"
    code = CODE.replace("READ", "").replace("self.scale =", f"{line}\n        self.scale =")
    with pytest.raises(ConfigError, match=r"device= builds the model .*mine.py:1\d: .*item"):
        plan_of_code(code)
    here = plan_of_code(code, None)["ddp"]
    assert here["weights_bytes"] == 4 * (8 * 8 + 1)


def test_too_little_memory_on_this_machine_gives_one_line(plan_of_code):
    code = CODE.replace("READ", "raise torch.OutOfMemoryError('CUDA out of memory')")
    with pytest.raises(ConfigError, match="a micro-batch of 4 does not fit"):
        plan_of_code(code, None)


def test_a_scalar_parameter_cannot_be_split(plan_of_code):
    figures = plan_of_code(CODE.replace("READ", ""))
    assert figures["ddp"]["weights_bytes"] == 4 * (8 * 8 + 1)
    assert "cannot split scale, a scalar" in figures["fsdp"]["reason"]


def test_the_largest_micro_batch_is_the_last_that_fits(monkeypatch):
    memory = OVERHEAD_BYTES + (40 << 20)
    monkeypatch.setitem(GPUS, "h100", replace(GPUS["h100"], memory=memory))
    largest = strategies()["single"]["largest_micro_batch_size"]
    assert largest > ROWS
    for rows, fits in ((largest, True), (largest + 1, False)):
        words = [f"trainer.micro_batch_size={rows}", f"trainer.batch_size={rows}"]
        figures = strategies(*words)["single"]
        assert (figures["peak_bytes"] + OVERHEAD_BYTES <= memory) is fits
        assert (figures["reason"] is None) is fits
    assert figures["reason"] == "needs 0.5 GiB including CUDA's own memory, but a rank has 0.5 GiB"


def test_no_memory_is_allocated_for_the_model():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = strategies("model.n_embd=12288", "model.n_head=96", ranks=1)["single"]
    assert figures["weights_bytes"] > 12 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # 1 GiB, in KiB


def test_another_vocabulary():
    figures = strategies(outputs=50257)["single"]
    assert figures["weights_bytes"] == 4 * (PARAMETERS + (50257 - VOCABULARY) * WIDTH)
    config = configuration("experiment=toy")
    with pytest.raises(ConfigError, match="vocab_size=9 works only for texts"):
        make_plan(Job(config), Machine("h100"), vocab_size=9)


def test_a_task_without_text_is_planned_too():
    plan = make_plan(Job(configuration("experiment=toy")), Machine("l40s"))
    single = plan["strategies"]["single"]
    assert single["weights_bytes"] > 0
    assert single["activations_bytes"] is single["step_s_at_peak"] is None
    [row] = [line for line in describe(plan).splitlines() if line.startswith("single ")]
    assert row.count("not known") == 4, "peak, activations, temporaries, largest"


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_the_speed_of_each_gpu_is_known(gpu):
    assert peak_flops_of(gpu.name, DTYPES["bf16"])
