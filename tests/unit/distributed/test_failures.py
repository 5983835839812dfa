"""Failures of ranks, as peers read them. tests/multiprocess has them over gloo."""

import torch.distributed as dist

from mingpt_ddp.distributed.failures import Failure, FailureReports


def test_a_lost_store_reports_no_failure():
    """Rank 0 hosts the store, and may exit first."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    failures = FailureReports(store, rank=0, world_size=1)
    failures.report("no text", "DataError")
    assert failures.first(wait_s=5) == Failure(0, "DataError", "no text")
    del server
    assert failures.first(wait_s=5) is None
    failures.report("a later error")
    assert not failures.have_all_failed("no text")
