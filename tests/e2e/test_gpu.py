"""Check the same guarantees on a GPU. `pytest -m gpu` runs only these tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from example_files import EXAMPLES
from example_model import placed_on, with_example
from launching import TINY, call, python_main
from multiprocess.ranks import configure
from runs import fail, read_history, succeed, tool
from tasks import gpt_config, take_step, text_task

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data.dataloader import BatchPlan, TokenLoader, plan_batches
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.inference.decoding import prepare
from mingpt_ddp.inference.generate import SamplingParams, generate, sample_token
from mingpt_ddp.metrics.meters import Meter
from mingpt_ddp.models import build_model
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.state_dict import model_state, optimizer_state
from mingpt_ddp.snapshots.write.async_writer import AsyncSave, Capture
from mingpt_ddp.snapshots.write.ledger import Ledger
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import build_trainable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def weights(run: Path) -> bytes:
    return (run / "snapshots" / "step_00000012" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("compiled", ["false", "true", "cuda_graphs"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_in_two_parts_equals_the_whole(precision: str, compiled: str, tmp_path: Path) -> None:
    options = [
        *TINY,
        "model.dropout=0.1",
        "trainer.device=cuda",
        "trainer.deterministic=true",
        f"trainer.precision={precision}",
        "optimizer.schedule_steps=12",
        f"trainer.compile={compiled}",
    ]
    succeed([*python_main(), *options, "run.name=whole"], tmp_path)
    for steps in (8, 12):
        succeed(
            [*python_main(), *options, "run.name=parts", f"trainer.max_steps={steps}"], tmp_path
        )
    assert weights(tmp_path / "outputs" / "parts") == weights(tmp_path / "outputs" / "whole")


def test_compiled_and_under_torchrun(tmp_path: Path) -> None:
    options = [*TINY, "ddp.nproc_per_node=1", "trainer.compile=true", "trainer.precision=auto"]
    done = call([*python_main(), *options, "run.name=a"], tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout
    assert "cuda in bf16" in done.stdout


def test_compiled_steps_equal_eager_steps(tmp_path: Path) -> None:
    """The runs evaluate and generate samples.

    They have no dropout, since compiled code draws its random numbers in another order.
    """
    losses = {}
    for compiled in ("false", "true", "cuda_graphs"):
        options = [
            *TINY,
            "trainer.device=cuda",
            "trainer.precision=fp32",
            "model.dropout=0.0",
            "trainer.sample_every=5",
            f"trainer.compile={compiled}",
            f"run.name=compile-{compiled}",
        ]
        done = call([*python_main(), *options], tmp_path, timeout=280)
        assert done.returncode == 0, done.stdout
        assert ("compiled in" in done.stdout) == (compiled != "false")
        run = tmp_path / "outputs" / f"compile-{compiled}"
        losses[compiled] = read_history(run).series("train_loss")
    assert len(losses["false"]) == 12
    for compiled in ("true", "cuda_graphs"):
        for (step, loss), (_, eager) in zip(losses[compiled], losses["false"], strict=True):
            assert loss == pytest.approx(eager, abs=2e-3), (compiled, step)


@pytest.mark.parametrize("recomputed", ["false", "true"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_does_not_wait_for_the_device(precision: str, recomputed: str) -> None:
    options = [
        "trainer.device=cuda",
        f"trainer.precision={precision}",
        "trainer.compile=false",
        "model=gpt_nano",
        "model.dropout=0.1",
        "trainer.batch_size=4",
        "trainer.micro_batch_size=2",
    ]
    config = from_mapping(configure(*options, f"trainer.activation_checkpointing={recomputed}"))
    runtime = Runtime(config, DistEnv())
    loader = TokenLoader(np.arange(1000) % 65, 16, None, batch_size=4, seed=0)
    task = text_task(config, vocab_size=65)
    trainable = build_trainable(runtime, task)
    train_step = TrainStep(runtime, task, loader, plan_batches(config, 1), trainable)
    meter = Meter(runtime, 64, "tokens")

    def step(number: int) -> None:
        result = take_step(train_step, number)
        meter.record(result.losses, result.grad_norm, train_step.phase.fetch_s)

    step(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in (2, 3, 4):
            step(number)
        with pytest.raises(RuntimeError, match="synchroniz"):
            meter.read()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 < meter.read()["train/loss"] < 10


def test_one_rank_per_gpu(tmp_path: Path) -> None:
    options = [*TINY, f"ddp.nproc_per_node={torch.cuda.device_count() + 1}"]
    printed = fail([*python_main(), *options], tmp_path)
    assert "has no GPU" in printed


def some_gpt(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build_model(gpt_config(n_embd=32), 17, 12)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(device)


@pytest.mark.parametrize("length", [1, 12])
def test_decoding_with_a_cuda_graph_writes_the_text_of_the_cpu(length: int) -> None:
    """The text spans several windows, and a batch has several texts."""
    tokens = torch.arange(3 * length).view(3, length) % 17
    texts = [
        torch.stack(
            list(generate(some_gpt(device), tokens.to(device), 40, SamplingParams(temperature=0)))
        ).cpu()
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(*texts)


def test_sampling_in_bf16_is_reproducible() -> None:
    texts = []
    for _ in range(2):
        model = some_gpt("cuda")
        prepare(model, "bf16", 2)
        assert next(model.parameters()).dtype == torch.bfloat16
        generator = torch.Generator("cuda").manual_seed(1)
        prompt = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
        texts.append(torch.stack(list(generate(model, prompt, 40, SamplingParams(), generator))))
    assert torch.equal(*texts)


def test_sampling_a_token_does_not_wait() -> None:
    logits = torch.zeros(3, 17, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample_token(logits, SamplingParams(top_k=5, top_p=0.9), generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.shape == (3,)


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_sample_on_a_gpu(precision: str, tmp_path: Path) -> None:
    succeed([*python_main(), *TINY, "trainer.device=cuda", "run.name=a"], tmp_path)
    command = tool("sample", "snapshot=outputs/a", "device=cuda", f"precision={precision}")
    printed = succeed([*command, "max_new_tokens=100"], tmp_path)
    assert len(printed) >= 100


@pytest.mark.parametrize("share", [1 / 8, 0.0], ids=["resident", "sent"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_batches_on_the_gpu_equal_those_on_the_cpu(
    dtype: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingpt_ddp.data.dataloader.MAX_RESIDENT_FRACTION", share)
    tokens = np.linspace(
        0, np.iinfo(dtype).max >> 1 if dtype == "uint32" else np.iinfo(dtype).max, 5000
    ).astype(dtype)
    plan = BatchPlan(12, 3, 2)
    on_cpu, on_gpu = (TokenLoader(tokens, 16, None, 12, 1, device) for device in ("cpu", "cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [on_gpu.get_batch(step, plan, 1) for step in range(1, 60)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, batch in enumerate(batches, start=1):
        for ours, theirs in zip(batch, on_cpu.get_batch(step, plan, 1), strict=True):
            for part, expected in zip(ours.batch, theirs.batch, strict=True):
                assert part.device.type == "cuda"
                assert torch.equal(part.cpu(), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")
@pytest.mark.parametrize("hook", ["none", "fp16", "bf16"])
def test_gradients_are_reduced_across_gpus_and_the_run_resumes(hook: str, tmp_path: Path) -> None:
    options = [
        *TINY,
        "trainer.device=cuda",
        "trainer.precision=fp32",
        "trainer.deterministic=true",
        "ddp.nproc_per_node=2",
        f"ddp.comm_hook={hook}",
        "optimizer.schedule_steps=12",
    ]
    succeed([*python_main(), *options, "run.name=whole"], tmp_path)
    for steps in (8, 12):
        succeed(
            [*python_main(), *options, "run.name=parts", f"trainer.max_steps={steps}"], tmp_path
        )
    assert weights(tmp_path / "outputs" / "parts") == weights(tmp_path / "outputs" / "whole")


def train_on(devices: list[torch.device], options: list[str]) -> tuple[list[float], bytes]:
    """Train the example of a model that places itself on these devices, for a few steps.

    Returns:
        The loss and gradient norm of each step, and the tensors for a snapshot as bytes.
    """
    config = with_example(
        from_mapping(configure("trainer.device=cuda", "trainer.batch_size=4", *options))
    )
    runtime = Runtime(config, DistEnv())
    task = text_task(config, vocab_size=65)
    with placed_on(devices):
        trainable = build_trainable(runtime, task)
    model = trainable.model
    assert {parameter.device for parameter in model.parameters()} == {*devices}
    loader = TokenLoader(np.arange(1000) % 65, 16, None, batch_size=4, seed=0)
    train_step = TrainStep(runtime, task, loader, plan_batches(config, 1), trainable)
    numbers = []
    for step in range(1, 6):
        result = take_step(train_step, step)
        numbers += [float(result.losses["loss"]), float(result.grad_norm)]
    tensors = {**model_state(model), **optimizer_state(model, trainable.optimizer)}
    save = AsyncSave(
        runtime,
        SnapshotStore("snapshots"),
        {},
        Capture(5, {"model.safetensors": tensors}),
        print,
        Ledger(Path()),
    )
    contents = save._stage()["model.safetensors"]
    prompt = torch.zeros(2, 1, dtype=torch.int64, device=runtime.device)
    text = torch.stack(list(generate(model, prompt, 40, SamplingParams(temperature=0))))
    assert text.device == runtime.device
    return numbers, bytes(contents)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_model_on_a_gpu_and_the_cpu_learns_alike(optimizer: str) -> None:
    """The GPU and the CPU are two real devices, even on a machine with one GPU.

    The biases of keys are left out. Their gradients are 0 except for rounding errors, and AdamW
    turns these into steps of full size.
    """
    options = [f"optimizer={optimizer}", "trainer.precision=fp32"]
    gpu = torch.device("cuda", 0)
    one, two = (train_on(devices, options) for devices in ([gpu], [gpu, torch.device("cpu")]))
    assert two[0] == pytest.approx(one[0], rel=1e-3)
    ours, theirs = (safetensors.torch.load(content) for content in (two[1], one[1]))
    assert ours.keys() == theirs.keys()
    for name in (name for name in ours if "qkv.bias" not in name):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-2, atol=2e-3, msg=name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recomputed", ["false", "true"])
def test_a_model_on_two_gpus_learns_alike(precision: str, recomputed: str) -> None:
    """Two equal GPUs give the same bits, except that the gradient norm sums in another order."""
    options = [
        f"trainer.precision={precision}",
        "trainer.deterministic=true",
        f"trainer.activation_checkpointing={recomputed}",
    ]
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    one, two = (train_on(devices, options) for devices in (gpus[:1], gpus))
    assert two[0] == pytest.approx(one[0], rel=1e-5)


EXAMPLE = [
    f"--config-dir={EXAMPLES}",
    *TINY,
    "model=model_parallel",
    "trainer.device=cuda",
    "trainer.precision=fp32",
    "trainer.deterministic=true",
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")
def test_a_run_on_all_gpus_of_one_rank_resumes(tmp_path: Path) -> None:
    options = [*EXAMPLE, "optimizer.schedule_steps=12"]
    succeed([*python_main(), *options, "run.name=whole"], tmp_path)
    for steps in (8, 12):
        succeed(
            [*python_main(), *options, "run.name=parts", f"trainer.max_steps={steps}"], tmp_path
        )
    assert weights(tmp_path / "outputs" / "parts") == weights(tmp_path / "outputs" / "whole")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="there are fewer than four CUDA devices")
def test_two_ranks_with_two_gpus_each_train_alike(tmp_path: Path) -> None:
    """Ranks with two GPUs train like ranks with one. DDP has a bucket for each GPU."""
    options = [*EXAMPLE, "ddp.nproc_per_node=2"]
    for name, gpus in (("one", "0,1"), ("two", "0,1,2,3")):
        succeed([*python_main(), *options, f"run.name={name}"], tmp_path, CUDA_VISIBLE_DEVICES=gpus)
    one, two = (
        safetensors.torch.load(weights(tmp_path / "outputs" / name)) for name in ("one", "two")
    )
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-5, msg=name)
