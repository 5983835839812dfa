"""Contexts that restore the state of a model when they end."""

from __future__ import annotations

import torch
from torch import nn

from mingpt_ddp.models import kept_buffers


def test_buffers_that_forward_passes_change_are_restored():
    model = nn.BatchNorm1d(3)
    model(torch.randn(4, 3))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with kept_buffers(model):
        model(torch.randn(4, 3))
        assert not torch.equal(model.running_mean, before["running_mean"])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
