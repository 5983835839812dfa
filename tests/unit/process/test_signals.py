"""Some signals ask a run to save and stop, and some end the process at once."""

from __future__ import annotations

import signal

import pytest

from mingpt_ddp.process.interrupts import SIGNALS
from mingpt_ddp.process.root_cause import ProcessExit
from mingpt_ddp.process.signals import SignalHandler


class Exits(ProcessExit):
    """Records the signals that would have ended the process."""

    def __init__(self) -> None:
        super().__init__()
        self.ended_by: list[int] = []
        self.has_failed_peer = False

    def on_signal(self, number: int, ask_for_cause: bool = True) -> None:
        assert ask_for_cause is not (number == signal.SIGINT), "a second Ctrl-C asks no other rank"
        self.ended_by.append(number)

    def peer_failure(self) -> bool:
        return self.has_failed_peer


@pytest.fixture
def exits():
    return Exits()


@pytest.fixture
def handler(exits):
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handler = SignalHandler(exits)
    handler.install()
    yield handler
    for number, previous in before.items():
        signal.signal(number, previous)


def test_a_signal_before_training_ends_the_process(handler, exits):
    signal.raise_signal(signal.SIGUSR1)
    assert exits.ended_by == [signal.SIGUSR1]


def test_the_scheduler_s_signal_and_then_the_launcher_s_count_once(handler, exits):
    """The second signal may arrive when the snapshot is written, but not yet the result."""
    handler.deferred = True
    signal.raise_signal(signal.SIGUSR1)
    handler.deferred = False
    signal.raise_signal(signal.SIGTERM)
    assert (exits.ended_by, handler.signal_name) == ([], "SIGUSR1")


def test_the_second_ctrl_c_and_a_signal_after_a_peer_s_failure_end_the_process(handler, exits):
    handler.deferred = True
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    exits.has_failed_peer = True
    signal.raise_signal(signal.SIGTERM)
    assert exits.ended_by == [signal.SIGINT, signal.SIGTERM]
