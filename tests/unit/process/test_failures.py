"""The failures that ranks record for each other. tests/multiprocess tests them over gloo."""

import torch.distributed as dist

from mingpt_ddp.config.validation import NotRegisteredError
from mingpt_ddp.errors import ConfigError, pack_error, unpack_error
from mingpt_ddp.process.failures import Failures, RankFailure


def test_a_lost_store_reports_no_failure():
    """Rank zero hosts the store, and may exit before the others."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    failures = Failures(store, rank=0, world_size=1)
    failures.record("no text", "DataError")
    assert failures.first(wait_s=5) == RankFailure(0, "DataError", "no text")
    del server
    assert failures.first(wait_s=5) is None
    failures.record("a later error")
    assert not failures.compare_with_all("no text")


def test_an_error_counts_as_repeated_only_if_an_earlier_attempt_had_it():
    """Several ranks of one attempt may have it, and another rank the next time."""
    job = dist.HashStore()
    first, second = (dist.PrefixStore(name, job) for name in ("first", "second"))
    ranks = [Failures(first, rank, 2, job) for rank in range(2)]
    assert [rank.record_for_later("boom at 0x7f01") for rank in ranks] == [False, False]
    later = Failures(second, 1, 2, job)
    assert later.record_for_later("boom at 0x7f02")
    assert not later.record_for_later("another")
    assert not Failures(None, 0, 1).record_for_later("boom at 0x7f01")
    assert Failures(None, 0, 1, job).record_for_later("boom at 0x7f01")


def test_an_error_class_of_another_module_is_unpacked_as_its_base_class():
    error = unpack_error(pack_error(NotRegisteredError("model.architecture=mine is in no file")))
    assert type(error) is ConfigError
    assert str(error) == "config error: model.architecture=mine is in no file"
