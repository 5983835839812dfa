"""Meters average losses and speed over training steps."""

from __future__ import annotations

import math

import pytest
import torch
from multiprocess.ranks import configure
from queued_device import QueuedDevice

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.meters import Meter
from mingpt_ddp.process.env import DistEnv


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(from_mapping(configure("trainer.device=cpu")), DistEnv())


def record(meter: Meter, *losses: float) -> None:
    for loss in losses:
        meter.record({"loss": torch.tensor(loss)}, torch.tensor(10 * loss), data_time_s=0.25)


def test_means_and_throughput_since_the_last_reading(runtime):
    device = QueuedDevice(runtime)
    meter = Meter(device, 768, "tokens")
    record(meter, 4.0, 3.0, 2.0)
    device.queue(0.75)
    first = meter.read()
    assert (first["train/loss"], first["train/grad_norm"]) == (3.0, 20.0), "norm of the last step"
    assert (first["speed/data_ms"], first["speed/step_ms"]) == (250, 250)
    assert first["speed/tokens_per_s"] == 3 * 768 / 0.75
    assert first["memory/peak_mib"] > 10
    record(meter, 1.0, math.nan)
    assert math.isnan(meter.read()["train/loss"])
    assert meter.read() == {}


def test_a_pause_does_not_count(runtime):
    """An evaluation or a snapshot must not look like slow steps.

    When a pause begins, the device may still work on earlier steps. That time belongs to the
    steps, even though the host waits for them within the pause.
    """
    device = QueuedDevice(runtime)
    meter = Meter(device, 768, "tokens")
    record(meter, 1.0, 1.0)
    device.queue(10.0)  # the two steps
    with meter.paused() as pause:
        device.queue(2.0)  # an evaluation
    assert pause.seconds == 2.0
    reading = meter.read()
    assert (reading["speed/step_ms"], reading["speed/tokens_per_s"]) == (5e3, 2 * 768 / 10)


def test_a_pause_within_another_does_not_count_twice(runtime):
    """An evaluation of averaged weights first waits for a snapshot."""
    device = QueuedDevice(runtime)
    meter = Meter(device, 768, "tokens")
    record(meter, 1.0)
    device.queue(1.0)
    with meter.paused() as outer:
        with meter.paused() as inner:
            device.wait_until(3.0)
        device.queue(4.0)
    assert (outer.seconds, inner.seconds) == (6.0, 2.0)
    assert meter.clock(waits=True) == 1.0
    assert meter.read()["speed/step_ms"] == 1e3


def test_an_interval_that_a_restart_interrupts(runtime):
    """The mean over 5 steps is the same if the process was restarted after 3 of them."""
    losses = [4.1, 3.7, 3.2, 2.9, 2.5]
    uninterrupted = Meter(runtime, 1, "tokens")
    record(uninterrupted, *losses)
    before = Meter(runtime, 1, "tokens")
    record(before, *losses[:3])
    assert before.state() == before.state(), "reading does not reset the interval"
    sums, steps = before.state()
    assert (sums, steps) == ({"loss": pytest.approx(11.0)}, 3)
    after = Meter(runtime, 1, "tokens")
    after.load_state(sums, steps)
    record(after, *losses[3:])
    readings, expected = after.read(), uninterrupted.read()
    assert readings["train/loss"] == expected["train/loss"] == pytest.approx(sum(losses) / 5)
    assert after.state() == uninterrupted.state() == ({"loss": 0.0}, 0)


def test_several_losses_are_averaged_separately(runtime):
    meter = Meter(runtime, 1, "samples")
    for a, b in ((1.0, 2.0), (3.0, 6.0)):
        losses = {"loss": torch.tensor(a + b), "loss_a": torch.tensor(a), "loss_b": torch.tensor(b)}
        meter.record(losses, torch.tensor(1.0), data_time_s=0.0)
    readings = meter.read()
    assert [readings[f"train/{name}"] for name in ("loss", "loss_a", "loss_b")] == [6.0, 2.0, 4.0]
    assert "speed/samples_per_s" in readings


class OnGPU(torch.Tensor):
    """A tensor that records, whenever its value is read, if the heartbeat says "waiting"."""

    seen: list[bool]

    def cpu(self):
        self.seen.append(self.runtime.group.heartbeat["waiting"])
        return torch.Tensor.cpu(self).as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs)
        if isinstance(found, OnGPU):
            found.seen, found.runtime = cls.seen, cls.runtime
        return found


def test_reading_the_state_waits_for_other_ranks(runtime):
    """On a GPU, reading waits for queued collectives. The watchdog must not blame this rank."""
    OnGPU.seen, OnGPU.runtime = [], runtime
    meter = Meter(runtime, 100, "tokens")
    meter.record({"loss": torch.tensor(1.0).as_subclass(OnGPU)}, torch.tensor(1.0), 0.0)
    assert meter.state() == ({"loss": 1.0}, 1)
    assert (OnGPU.seen, runtime.group.heartbeat["waiting"]) == ([True], False)
