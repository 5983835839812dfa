"""Restarted ranks join each other in a store that still has the keys of killed ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from launching import wait_for
from ports import free_port
from torch.distributed import TCPStore

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import RunError
from mingpt_ddp.process.env import read_env
from multiprocess.ranks import Ranks, configure

WORLD = 3


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """Host the key-value store of an elastic agent. In this process, it outlives every rank."""
    yield TCPStore(
        "127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False
    )


def sum_over_ranks(config: dict[str, Any], attempt: int) -> list[float]:
    """Join the other ranks. Return two sums over the ranks: of (rank + 1), and of 100 * attempt."""
    runtime = Runtime(from_mapping(config), read_env())
    values = torch.tensor([runtime.group.rank + 1.0, 100.0 * attempt])
    total: list[float] = runtime.group.all_reduce(values).tolist()
    runtime.close()
    return total


@pytest.mark.parametrize("killed", [[0], [1], [0, 2], [1, 2]], ids=str)
def test_a_restart_after_ranks_were_killed_in_the_rendezvous(tmp_path, store, killed):
    """The killed ranks had set their hello key, or had made or confirmed a proposal. The other
    ranks had not joined yet.
    """
    arguments = {"config": configure(), "port": store.port, "agent": True}
    early = {**arguments, "only": killed, "attempt": 1}
    with Ranks(WORLD, sum_over_ranks, tmp_path / "killed", **early) as ranks:
        keys = [f"mingpt_ddp/0/hello/{rank}" for rank in killed if rank > 0]
        wait_for(lambda: store.check(keys) if keys else True)
        time.sleep(0.2)  # long enough for the next step of the handshake
        ranks.kill(*killed)
    with Ranks(WORLD, sum_over_ranks, tmp_path / "new", attempt=2, **arguments) as ranks:
        assert ranks.results() == [[6.0, 600.0]] * WORLD


@pytest.mark.parametrize("last", [0, 2])
def test_a_rank_may_join_late(tmp_path, last):
    """It may be the rank that hosts the store if there is no agent."""
    arguments = {"config": configure(), "attempt": 1, "port": free_port()}
    early = [rank for rank in range(WORLD) if rank != last]
    with Ranks(WORLD, sum_over_ranks, tmp_path / "early", only=early, **arguments) as first:
        time.sleep(0.5)
        with Ranks(WORLD, sum_over_ranks, tmp_path / "late", only=[last], **arguments) as second:
            assert second.results() == [[6.0, 300.0]]
        assert first.results() == [[6.0, 300.0]] * 2


def try_to_join(config: dict[str, Any]) -> str:
    try:
        Runtime(from_mapping(config), read_env())
    except RunError as error:
        return str(error)
    return "joined"


@pytest.mark.parametrize("duplicate", [0, 1])
def test_a_duplicate_rank_is_named(tmp_path, store, duplicate):
    """Two machines may have the same RANK. The process that joins last cannot detect it."""
    options = {"port": store.port, "agent": True, "only": [duplicate]}
    patient, hasty = configure("ddp.timeout_s=20"), configure("ddp.timeout_s=3")
    with Ranks(WORLD, try_to_join, tmp_path / "one", **options, config=patient) as one:
        wait_for(lambda: store.check([f"mingpt_ddp/0/hello/{duplicate}"]))
        with Ranks(WORLD, try_to_join, tmp_path / "other", **options, config=hasty) as other:
            (first,), (second,) = one.results(), other.results()
    assert (
        first
        == f"run error: another process also has RANK={duplicate}; give every process its own rank"
    )
    assert second.startswith("run error: rank ")


def test_an_unreachable_address_is_named(tmp_path):
    config = configure("ddp.timeout_s=1")
    port = free_port()
    with Ranks(
        WORLD, try_to_join, tmp_path, port=port, agent=True, only=[1], config=config
    ) as ranks:
        (message,) = ranks.results()
    assert message.startswith(
        f"run error: rank 1 cannot reach MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}: "
    )
