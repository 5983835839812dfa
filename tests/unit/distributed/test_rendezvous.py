"""If a rank does not join in time, the error names it.

Time is simulated by tests/turns.py, so that a busy machine changes nothing.
"""

from __future__ import annotations

import pytest
from counting import Network
from torch.distributed import PrefixStore

from mingpt_ddp.distributed.group.rendezvous import join_attempt
from mingpt_ddp.errors import JoinError
from mingpt_ddp.process.env import DistEnv


@pytest.mark.parametrize("limit_s", [0.8, 480.0])
@pytest.mark.parametrize("later_s", [-0.5, -0.05, 0.0, 0.05, 0.2, 0.5])
def test_a_rank_that_has_joined_is_not_missing(later_s, limit_s):
    """Rank 1 starts `later_s` after rank zero. Its time may end while rank zero waits for it."""
    network = Network(3)
    found = {}

    def work(rank: int) -> None:
        if rank == 2:
            return
        network.turns.sleep(max(0.0, later_s if rank else -later_s))
        env = DistEnv(rank=rank, local_rank=rank, world_size=3, is_standalone=False)
        with pytest.raises(JoinError) as raised:
            join_attempt(PrefixStore("p", network.stores[rank]), env, limit_s)
        found[rank] = str(raised.value)

    with network.patched():
        network.run(work)
    expected = "run error: rank 2 did not join in time; start all ranks, or raise ddp.timeout_s"
    assert found == {0: expected, 1: expected}
