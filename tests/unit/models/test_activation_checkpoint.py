"""Activation checkpointing saves fewer activations, and changes no result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from multiprocess.ranks import configure
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import apply_activation_checkpointing, build_model

B, T, V = 4, 16, 20


def model(recomputed: bool, n_layer: int = 3) -> nn.Module:
    config = from_mapping(configure("model=gpt_nano", "model.dropout=0.2")).model
    torch.manual_seed(0)
    made = build_model(replace(config, n_layer=n_layer), V, T)
    if recomputed:
        apply_activation_checkpointing(made)
    return made


def tokens() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def step(made: nn.Module) -> tuple[Tensor, list[Tensor], int]:
    """Return the loss, the gradients, and the bytes of activations saved for the backward pass."""
    kept: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in made.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(7)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = made(tokens(), tokens())
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in made.parameters()], sum(kept.values())


def test_the_same_gradients_with_dropout():
    loss, gradients, _ = step(model(recomputed=False))
    again, others, _ = step(model(recomputed=True))
    assert torch.equal(loss, again)
    assert all(map(torch.equal, gradients, others))


def test_a_block_saves_only_its_input():
    width = 48  # model.n_embd of gpt_nano
    added = {
        on: step(model(on, n_layer=5))[2] - step(model(on, n_layer=3))[2] for on in (False, True)
    }
    inputs = 2 * B * T * width * 4
    assert inputs <= added[True] < 1.1 * inputs
    assert added[False] > 10 * inputs


def test_evaluation_and_names_are_unchanged():
    plain, recomputed = model(False).eval(), model(True).eval()
    assert plain.state_dict().keys() == recomputed.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(plain(tokens()), recomputed(tokens()))


@pytest.mark.parametrize("blocks", [None, 3])
def test_a_model_without_blocks_is_refused(blocks):
    made = nn.Linear(1, 1)
    if blocks:
        made.blocks = blocks
    with pytest.raises(
        ConfigError,
        match=r"=true needs a model with an nn\.ModuleList named blocks, but Linear has none",
    ):
        apply_activation_checkpointing(made)
