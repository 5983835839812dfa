"""A run that does not fit into memory is refused with advice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.device.device import is_out_of_memory
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.training.memory import refuse_out_of_memory


def refuse(*overrides: str, ranks: int = 1, weights: str = "whole"):
    """Return the context manager in which rank 1 runs a step."""
    config = from_mapping(configure(*overrides))
    strategy = SimpleNamespace(weights=weights)
    group = SimpleNamespace(rank=1, world_size=ranks)
    return refuse_out_of_memory(config, SimpleNamespace(strategy=strategy, group=group), "a step")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (OSError("out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_count_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected
    with (
        pytest.raises(ConfigError if expected else type(error)),
        refuse(),
    ):
        raise error


BATCH = "lower trainer.micro_batch_size"
CHECKPOINTING = "set trainer.activation_checkpointing=true"
FSDP = "set ddp.strategy=fsdp"


@pytest.mark.parametrize(
    ("overrides", "state", "expected"),
    [
        ([], {}, [BATCH, CHECKPOINTING]),
        ([], {"ranks": 2}, [BATCH, CHECKPOINTING, FSDP]),
        (["trainer.activation_checkpointing=true"], {"ranks": 2}, [BATCH, FSDP]),
        (["ddp.strategy=fsdp"], {"ranks": 2, "weights": "rows"}, [BATCH, CHECKPOINTING]),
        (["ddp.tensor_parallel=2"], {"ranks": 2, "weights": "columns"}, [BATCH, CHECKPOINTING]),
        (["optimizer=muon"], {"ranks": 2}, [BATCH, CHECKPOINTING]),
        (["ddp.comm_hook=fp16"], {"ranks": 2}, [BATCH, CHECKPOINTING]),
    ],
)
def test_the_advice_names_keys_that_help(overrides, state, expected):
    with (
        pytest.raises(ConfigError) as refused,
        refuse(*overrides, **state),
    ):
        raise torch.OutOfMemoryError("CUDA out\nof memory")
    assert str(refused.value) == (
        "config error: a step does not fit into the memory of rank 1; "
        f"{', or '.join(expected)} (CUDA out of memory)"
    )
