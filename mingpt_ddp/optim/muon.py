"""Muon for the matrices of the hidden layers, AdamW for everything else, as one optimizer.

Unlike torch.optim.Muon it also updates vectors and embeddings (with AdamW), orthogonalizes all
matrices of a shape in one batch and each part of a fused weight (QKV) separately, takes three Polar
Express steps instead of five Newton-Schulz steps, and shards the work over ranks.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Amsel et al.
2025, "The Polar Express" (arXiv:2505.16932); Loshchilov and Hutter 2017, "Decoupled Weight Decay
Regularization" (arXiv:1711.05101).
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mingpt_ddp.config.optimizer_config import MuonConfig
from mingpt_ddp.models.ops import DTYPES, resolve_precision
from mingpt_ddp.torch_internals import for_each, leave_overflow_to_scaler

# Three Polar Express steps a x + b x^3 + c x^5, each optimal for the range of singular values that
# the previous one leaves. Together they map [MIN_SINGULAR_VALUE, 1] to within a tenth of 1 and
# scale smaller values up 55 times.
MIN_SINGULAR_VALUE = 0.02
POLYNOMIALS = (
    (7.710969245867679, -22.11375479048116, 16.248743017738473),
    (3.2152759873077463, -2.4111720102557843, 0.501300013614882),
    (2.21830775242379, -1.5939896229158321, 0.4107478875104999),
)

# elements of all matrices; below that, the all_gather takes as long as the work
MIN_NUMEL_TO_SHARD = 1 << 17


def polar_express(matrices: Tensor) -> Tensor:
    """Orthogonalize matrices: keep their singular vectors, move their singular values near 1.

    Args:
        matrices: (N, rows, columns), in the type to compute in.

    Returns:
        (N, rows, columns)
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    # singular values of at most 1
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) * 1.02).clamp_min(1e-30)
    for a, b, c in POLYNOMIALS:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _parameter_groups(model: nn.Module, config: MuonConfig) -> list[dict[str, Any]]:
    """Group parameters by algorithm and learning rate; `lr_ratio` is the group's rate over that of
    the run.
    """
    embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = set(getattr(model, "head", nn.Module()).parameters()) - embeddings
    decays = {
        "embedding_lr": 0.0,
        "head_lr": config.weight_decay,
        "vector_lr": 0.0,
        "lr": config.weight_decay,
    }
    groups: dict[str, dict[str, Any]] = {
        key: {
            "params": [],
            "muon": key == "lr",
            "lr_ratio": getattr(config, key) / config.lr,
            "weight_decay": decay,
        }
        for key, decay in decays.items()
    }
    for parameter in (p for p in model.parameters() if p.requires_grad and p.numel()):
        key = (
            "embedding_lr" if parameter in embeddings else "head_lr" if parameter in head else "lr"
        )
        groups["vector_lr" if parameter.dim() < 2 else key]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


class Muon(torch.optim.AdamW):
    """Muon for matrices, then AdamW's own step for the parameters that still have gradients."""

    def __init__(self, model: nn.Module, config: MuonConfig) -> None:
        """
        Args:
            model: Muon takes its matrices except embeddings and the submodule `head`. The weight of
                a module with an attribute `parts` is that many matrices, concatenated by rows;
                leading dimensions are a batch.
        """
        super().__init__(
            _parameter_groups(model, config),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.momentum = config.momentum
        # Set to shard each step over ranks; all must call `step` together, with the same gradients.
        self.rank = 0
        self.world_size = 1
        self.parts = {
            p: getattr(m, "parts", 1) for m in model.modules() for p in m.parameters(recurse=False)
        }
        leave_overflow_to_scaler(self)  # AdamW's kernel would skip the step, Muon's would not

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients; free the gradients of those that Muon
        updates.
        """
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None and group["muon"]]
            for device in dict.fromkeys(p.device for p in parameters):  # of one model
                members = [p for p in parameters if p.device == device]
                self._muon_step(members, group["lr"], group["weight_decay"])
        return super().step(closure)

    def _muon_step(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        """Apply orthogonalized Nesterov momentum, scaled up for tall matrices to change all outputs
        alike.
        """
        directions = self._nesterov_momentum(parameters)
        for_each("mul_", parameters, 1 - lr * weight_decay)
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, parameter in enumerate(parameters):
            by_shape[parameter.shape[-2] // self.parts[parameter], parameter.shape[-1]].append(i)
        dtype = DTYPES[resolve_precision("auto", parameters[0].device)]
        stacks = [
            torch.cat([directions[i].view(-1, rows, columns).to(dtype) for i in members])
            for (rows, columns), members in by_shape.items()
        ]
        for ((rows, columns), members), stack in zip(
            by_shape.items(), self._polar_express(stacks), strict=True
        ):
            matrices = [parameters[i].view(-1, rows, columns) for i in members]
            updates = stack.to(matrices[0].dtype).split([len(m) for m in matrices])
            for_each("add_", matrices, updates, alpha=-lr * max(1.0, rows / columns) ** 0.5)

    def _polar_express(self, stacks: list[Tensor]) -> list[Tensor]:
        """Orthogonalize all stacks.

        With enough elements, each rank computes a shard of every stack.
        """
        if self.world_size == 1 or sum(stack.numel() for stack in stacks) < MIN_NUMEL_TO_SHARD:
            return [polar_express(stack) for stack in stacks]
        own = []
        for stack in stacks:
            share = -(-len(stack) // self.world_size)
            part = stack[self.rank * share : (self.rank + 1) * share]
            # equal sizes for all_gather
            padding = stack.new_zeros(share - len(part), *stack.shape[1:])
            own.append(torch.cat([polar_express(part), padding]).flatten())
        sent = torch.cat(own)
        received = sent.new_empty(self.world_size, len(sent))
        # as bytes: gloo lacks bf16
        dist.all_gather(list(received.view(torch.uint8)), sent.view(torch.uint8))
        pieces = received.split([len(piece) for piece in own], dim=1)
        return [
            piece.reshape(-1, *stack.shape[1:])[: len(stack)]
            for piece, stack in zip(pieces, stacks, strict=True)
        ]

    def _nesterov_momentum(self, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
        """Update the momentum with the gradients, free these, and return the momentum one gradient
        ahead.
        """
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
            if not self.state[parameter]:  # AdamW's load_state_dict expects a step in every state
                self.state[parameter].update(
                    momentum=torch.zeros_like(parameter), step=torch.zeros(())
                )
        momenta = [self.state[parameter]["momentum"] for parameter in parameters]
        for_each("lerp_", momenta, gradients, 1 - self.momentum)
        return for_each("lerp", gradients, momenta, self.momentum)
