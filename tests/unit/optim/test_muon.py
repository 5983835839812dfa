"""Muon orthogonalizes updates of matrices. Its other parameters use AdamW."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tasks import gpt_config
from torch import nn

from mingpt_ddp.config.keys.model_config import ModernConfig
from mingpt_ddp.config.keys.optimizer_config import MuonConfig
from mingpt_ddp.models import build_model
from mingpt_ddp.models.rotary import FusedLinear
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.optim.muon import MIN_SINGULAR_VALUE, Muon, polar_express
from mingpt_ddp.snapshots.state_dict import load_optimizer_state, optimizer_state

MUON = MuonConfig(
    name="muon",
    lr=0.02,
    weight_decay=0.1,
    schedule="constant",
    schedule_steps=None,
    warmup_steps=0,
    min_lr_ratio=0.0,
    decay_ratio=0.5,
    momentum=0.9,
    embedding_lr=0.3,
    head_lr=0.05,
    vector_lr=0.01,
    betas=(0.9, 0.95),
    eps=1e-10,
)
MODELS = {
    "gpt": gpt_config(name="g"),
    "modern": ModernConfig(
        name="m", architecture="modern", n_layer=2, n_head=2, n_embd=16, dropout=0.0
    ),
}


def matrices(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("shape", "dtype", "scale"),
    [
        ((3, 16, 16), torch.float32, 1e-8),
        ((2, 16, 64), torch.float32, 1.0),
        ((2, 64, 16), torch.float32, 1e8),
        ((1, 1, 5), torch.float32, 1.0),
        ((3, 16, 16), torch.bfloat16, 1.0),
        ((2, 64, 16), torch.bfloat16, 1e8),
        ((2, 16, 64), torch.bfloat16, 1e-8),
    ],
)
def test_singular_values_become_one_and_singular_vectors_are_kept(shape, dtype, scale):
    given = matrices(*shape)
    orthogonalized = polar_express((given * scale).to(dtype)).float()
    u, s, vh = torch.linalg.svd(given, full_matrices=False)
    rotated = u.mT @ orthogonalized @ vh.mT  # diagonal where the singular vectors are the same
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    known = s > MIN_SINGULAR_VALUE * 1.1 * torch.linalg.matrix_norm(given)[:, None]
    assert float(known.float().mean()) > 0.8
    rounding = 0.03 if dtype == torch.bfloat16 else 1e-3
    assert float((diagonal - 1).abs()[known].max()) < 0.1 + rounding
    assert float(diagonal.max()) < 1.1 + rounding
    assert float((rotated - diagonal.diag_embed()).abs().max()) < 4 * rounding


def test_a_stack_is_orthogonalised_matrix_by_matrix():
    """A matrix of zeros stays zero."""
    stack = torch.cat([matrices(4, 8, 8), torch.zeros(1, 8, 8)])
    batched = polar_express(stack)
    for matrix, expected in zip(stack, batched, strict=True):
        torch.testing.assert_close(polar_express(matrix[None])[0], expected)
    assert torch.equal(batched[-1], stack[-1])


def trained(architecture: str, steps: int) -> tuple[nn.Module, Muon]:
    torch.manual_seed(0)
    model = build_model(MODELS[architecture], 31, 16)
    optimizer = Muon(model, MUON)
    train_steps(model, optimizer, range(steps))
    return model, optimizer


def train_steps(model: nn.Module, optimizer: Muon, steps: range) -> None:
    for step in steps:
        x, y = torch.randint(31, (2, 4, 16), generator=torch.Generator().manual_seed(step))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("architecture", MODELS)
def test_parameter_groups(architecture):
    model = build_model(MODELS[architecture], 31, 16)
    optimizer = build_optimizer(model, MUON)
    names = {parameter: name for name, parameter in model.named_parameters()}
    members = {
        round(g["lr_ratio"] * MUON.lr, 6): {names[p] for p in g["params"]}
        for g in optimizer.param_groups
    }
    inner = {n for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() >= 2}
    assert members[0.02] == inner
    assert members[0.3] == {n for n in names.values() if "embedding" in n}
    assert members.get(0.05, set()) == {n for n in names.values() if n.startswith("head")}
    assert sum(map(len, members.values())) == len(names)
    assert [g["muon"] for g in optimizer.param_groups] == [
        round(g["lr_ratio"] * 0.02, 6) == 0.02 for g in optimizer.param_groups
    ]


def test_an_update_is_orthogonal():
    """Every singular value changes by the learning rate.

    For a matrix that is four times as tall as wide, it is twice the learning rate.
    """
    model = nn.ModuleList([FusedLinear(8, 8, parts=2), nn.Linear(8, 32, bias=False)])
    weights = [layer.weight for layer in model]
    for weight in weights:
        nn.init.zeros_(weight)
        weight.grad = matrices(*weight.shape)
    Muon(model, replace(MUON, weight_decay=0.0)).step()
    assert all(weight.grad is None for weight in weights)
    for changed, expected in ((weights[0].view(2, 8, 8), 0.02), (weights[1], 0.04)):
        values = torch.linalg.svdvals(changed.detach())
        assert float(values.max()) < 1.13 * expected
        assert float(values.median()) > 0.87 * expected


def test_each_group_has_its_own_learning_rate_and_decay():
    """A matrix without elements is unchanged."""
    model = nn.Module()
    model.up, model.none = nn.Parameter(torch.eye(4) * 2), nn.Parameter(torch.zeros(0, 4))
    optimizer = Muon(model, MUON)
    [group] = optimizer.param_groups
    group["lr"] = 0.5
    model.up.grad, model.none.grad = torch.zeros(4, 4), torch.zeros(0, 4)
    optimizer.step()
    torch.testing.assert_close(model.up.detach(), torch.eye(4) * 2 * (1 - 0.5 * 0.1))


@pytest.mark.parametrize("architecture", MODELS)
def test_the_state_is_saved_and_restored_exactly(architecture):
    uninterrupted, _ = trained(architecture, 4)
    model, optimizer = trained(architecture, 2)
    tensors = {name: tensor.clone() for name, tensor in optimizer_state(model, optimizer).items()}
    fresh = Muon(model, MUON)
    load_optimizer_state(model, fresh, tensors)
    train_steps(model, fresh, range(2, 4))
    for (name, expected), restored in zip(
        uninterrupted.named_parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(expected, restored), name


def test_muon_overfits_a_batch():
    model, optimizer = trained("modern", 1)
    x, y = torch.randint(31, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(40):
        train_steps(model, optimizer, range(1))
    assert float(model(x, y).detach()) < 1.5  # it begins at log 31 = 3.4
