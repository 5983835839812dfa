"""Which signal asks a run to stop, and which ends it at once."""

from __future__ import annotations

import signal

import pytest

from mingpt_ddp.distributed.signals import SIGNALS, SignalHandler


@pytest.fixture
def interrupt():
    """Installed, and ended by no signal: `left` has those that would have."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    interrupt = SignalHandler()
    interrupt.left = []
    interrupt.exit = interrupt.left.append
    interrupt.install()
    yield interrupt
    for number, handler in before.items():
        signal.signal(number, handler)


def test_before_training_a_signal_ends_the_process(interrupt):
    signal.raise_signal(signal.SIGUSR1)
    assert interrupt.left == [signal.SIGUSR1]


def test_told_by_the_scheduler_and_then_by_the_launcher(interrupt):
    """The second signal may come when the snapshot is written, but not yet the result."""
    interrupt.deferred = True
    signal.raise_signal(signal.SIGUSR1)
    interrupt.deferred = False
    signal.raise_signal(signal.SIGTERM)
    assert (interrupt.left, interrupt.signal_name) == ([], "SIGUSR1")


def test_the_second_ctrl_c_and_what_nobody_could_answer_end_the_process(interrupt):
    interrupt.deferred = True
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    interrupt.peer_failed = lambda: True
    signal.raise_signal(signal.SIGTERM)
    assert interrupt.left == [signal.SIGINT, signal.SIGTERM]
