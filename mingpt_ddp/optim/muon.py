"""Muon for the matrices of the hidden layers, AdamW for everything else, as one optimizer.

Unlike torch.optim.Muon, it also updates vectors and embeddings (with AdamW). It orthogonalizes all
matrices of the same shape in one batch, and treats each part of a fused weight (QKV) as a matrix of
its own. It takes three Polar Express steps instead of five Newton-Schulz steps, and divides the
work among ranks.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Amsel et al.
2025, "The Polar Express" (arXiv:2505.16932); Loshchilov and Hutter 2017, "Decoupled Weight Decay
Regularization" (arXiv:1711.05101).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mingpt_ddp.config.keys.optimizer_config import MuonConfig
from mingpt_ddp.models.ops import DTYPES, resolve_precision
from mingpt_ddp.optim.eager import AdamW
from mingpt_ddp.optim.state import DECLARATIONS, State, declare_state
from mingpt_ddp.torch_internals import for_each, leave_overflow_to_scaler

# Coefficients (a, b, c) of three Polar Express steps a x + b x^3 + c x^5. Each step is optimal for
# the range of singular values that the previous step leaves. Together they map singular values in
# [MIN_SINGULAR_VALUE, 1] to within a tenth of 1, and multiply smaller ones by up to 55.
MIN_SINGULAR_VALUE = 0.02
POLYNOMIALS = (
    (7.710969245867679, -22.11375479048116, 16.248743017738473),
    (3.2152759873077463, -2.4111720102557843, 0.501300013614882),
    (2.21830775242379, -1.5939896229158321, 0.4107478875104999),
)

# Iterating on the Gram matrix takes fewer operations if a matrix has at least this many times as
# many columns as rows.
MIN_ASPECT_FOR_GRAM = 2

# Divide the work among ranks only if all matrices together have at least this many elements. With
# fewer, the all_gather takes as long as the work that it saves.
MIN_NUMEL_TO_SHARD = 1 << 17

# Returns the context in which to call a collective. It tells the watchdog, which looks for hangs,
# that this rank waits for other ranks.
Waiting: TypeAlias = Callable[[], AbstractContextManager[None]]


def polar_express(matrices: Tensor) -> Tensor:
    """Orthogonalize matrices: keep their singular vectors, move their singular values near 1.

    Args:
        matrices: The matrices, (N, rows, columns), in the type in which to compute.

    Returns:
        The orthogonalized matrices, (N, rows, columns).
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.matrix_norm(x, keepdim=True) * 1.02
    x = x / norm.clamp_min(1e-30)  # singular values of at most 1
    is_wide = x.shape[2] >= MIN_ASPECT_FOR_GRAM * x.shape[1]
    # Do not iterate on a Gram matrix in bf16, which would lose its small eigenvalues.
    iterate = _iterate_on_gram_matrix if is_wide and x.dtype == torch.float32 else _iterate
    x = iterate(x)
    return x.mT if is_tall else x


def _iterate(x: Tensor) -> Tensor:
    """Apply the polynomials to the singular values of matrices (N, rows, columns)."""
    for a, b, c in POLYNOMIALS:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b G + c G^2
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a X + (b G + c G^2) X
    return x


def _iterate_on_gram_matrix(x: Tensor) -> Tensor:
    """Apply the polynomials like `_iterate`, with two products of the size of x instead of six.

    A step multiplies X from the left by a polynomial P of its Gram matrix G. Then the Gram matrix
    becomes P G P.

    Source: Amsel et al., the section on rectangular matrices.
    """
    gram = torch.bmm(x, x.mT)
    factor = _polynomial(gram, *POLYNOMIALS[0])
    product = factor
    for coefficients in POLYNOMIALS[1:]:
        gram = factor @ gram @ factor
        factor = _polynomial(gram, *coefficients)
        product = factor @ product
    return product @ x


def _polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """Return a I + b G + c G^2."""
    polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    polynomial.diagonal(dim1=1, dim2=2).add_(a)
    return polynomial


def _parameter_groups(model: nn.Module, config: MuonConfig) -> list[dict[str, Any]]:
    """Group parameters by algorithm and learning rate."""
    embedding_weights: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embedding_weights.update(module.parameters())
    head_weights = set(getattr(model, "head", nn.Module()).parameters())

    embeddings = []
    head = []
    vectors = []
    matrices = []
    for parameter in model.parameters():
        if not parameter.requires_grad or parameter.numel() == 0:
            continue
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif parameter in embedding_weights:
            embeddings.append(parameter)
        elif parameter in head_weights:
            head.append(parameter)
        else:
            matrices.append(parameter)

    groups = [
        _group(embeddings, config.embedding_lr / config.lr, weight_decay=0.0),
        _group(head, config.head_lr / config.lr, config.weight_decay),
        _group(vectors, config.vector_lr / config.lr, weight_decay=0.0),
        _group(matrices, 1.0, config.weight_decay, muon=True),
    ]
    return [group for group in groups if group["params"]]


def _group(
    parameters: list[nn.Parameter], lr_ratio: float, weight_decay: float, muon: bool = False
) -> dict[str, Any]:
    """Make a parameter group with `lr_ratio` times the learning rate of the run."""
    return {
        "params": parameters,
        "muon": muon,
        "lr_ratio": lr_ratio,
        "weight_decay": weight_decay,
    }


@runtime_checkable
class DividesWork(Protocol):
    """An optimizer that can divide the work of each step among ranks.

    Then all ranks must call `step` together, with the same gradients.
    """

    def divide_work(self, rank: int, world_size: int, waiting: Waiting, one_by_one: bool) -> None:
        """Divide the work of the next steps among ranks.

        Args:
            waiting: Returns the context in which to call a collective.
            one_by_one: True to compute each matrix by itself. In a batch, the last bits of a
                product depend on the number of matrices, and therefore on the number of ranks.
        """


class Muon(AdamW):
    """Muon for matrices, then AdamW's own step for the parameters that still have gradients."""

    def __init__(self, model: nn.Module, config: MuonConfig) -> None:
        """
        Args:
            model: Model whose parameters are updated. Muon updates its matrices, except the weights
                of embeddings and of the submodule `head`. If a module has an attribute `parts`, its
                weight is that many matrices, concatenated by rows. A tensor with more than two
                dimensions is a batch of matrices.
        """
        super().__init__(
            _parameter_groups(model, config),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.momentum = config.momentum
        self.divide_work(rank=0, world_size=1, waiting=nullcontext, one_by_one=False)
        self.parts: dict[nn.Parameter, int] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self.parts[parameter] = getattr(module, "parts", 1)
        # If gradients overflow in fp16, AdamW's kernel would skip its part of the step, but Muon
        # would take its part. So let the gradient scaler skip the whole step.
        leave_overflow_to_scaler(self)

    def divide_work(self, rank: int, world_size: int, waiting: Waiting, one_by_one: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.waiting = waiting
        self.one_by_one = one_by_one

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients. Free the gradients of the matrices."""
        for group in self.param_groups:
            if not group["muon"]:
                continue
            parameters = [p for p in group["params"] if p.grad is not None]
            for device in dict.fromkeys(p.device for p in parameters):
                members = [p for p in parameters if p.device == device]
                self._muon_step(members, group["lr"], group["weight_decay"])
        return super().step(closure)

    def _muon_step(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        """Update matrices by their orthogonalized Nesterov momentum.

        The update of a tall matrix is scaled up, so that the outputs of its layer change as much as
        the outputs of a layer with a square matrix.
        """
        directions = self._nesterov_momentum(parameters)
        for_each("mul_", parameters, 1 - lr * weight_decay)

        # All matrices of a shape are orthogonalized in one batch.
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, parameter in enumerate(parameters):
            rows = parameter.shape[-2] // self.parts[parameter]
            columns = parameter.shape[-1]
            by_shape[rows, columns].append(i)

        dtype = DTYPES[resolve_precision("auto", parameters[0].device)]
        stacks = []
        for (rows, columns), members in by_shape.items():
            matrices = [directions[i].view(-1, rows, columns).to(dtype) for i in members]
            stacks.append(torch.cat(matrices))  # (N, rows, columns)
        stacks = self._polar_express(stacks)

        for ((rows, columns), members), stack in zip(by_shape.items(), stacks, strict=True):
            weights = [parameters[i].view(-1, rows, columns) for i in members]
            updates = stack.to(weights[0].dtype).split([len(weight) for weight in weights])
            scale = max(1.0, rows / columns) ** 0.5
            for_each("add_", weights, updates, alpha=-lr * scale)

    def _polar_express(self, stacks: list[Tensor]) -> list[Tensor]:
        """Orthogonalize all stacks (N, rows, columns).

        If they have enough elements, each rank computes a shard of every stack, and one all_gather
        completes them.
        """
        if self.world_size == 1 or sum(stack.numel() for stack in stacks) < MIN_NUMEL_TO_SHARD:
            return [self._orthogonalize(stack) for stack in stacks]

        own_shards = []
        for stack in stacks:
            count = math.ceil(len(stack) / self.world_size)
            shard = stack[self.rank * count : (self.rank + 1) * count]
            missing = count - len(shard)  # all_gather needs equal sizes
            padding = stack.new_zeros(missing, *stack.shape[1:])
            own_shards.append(torch.cat([self._orthogonalize(shard), padding]).flatten())

        sent = torch.cat(own_shards)
        received = sent.new_empty(self.world_size, len(sent))
        with self.waiting():
            # Send bytes, because gloo does not support bf16.
            dist.all_gather(list(received.view(torch.uint8)), sent.view(torch.uint8))

        whole = []
        lengths = [len(shard) for shard in own_shards]
        by_stack = received.split(lengths, dim=1)  # each (world_size, ...)
        for stack, shards in zip(stacks, by_stack, strict=True):
            matrices = shards.reshape(-1, *stack.shape[1:])
            whole.append(matrices[: len(stack)])  # without the padding
        return whole

    def _orthogonalize(self, matrices: Tensor) -> Tensor:
        """Orthogonalize matrices (N, rows, columns), in one batch or each by itself."""
        if not self.one_by_one:
            return polar_express(matrices)
        return torch.cat([polar_express(matrix) for matrix in matrices.split(1)])

    def _nesterov_momentum(self, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
        """Update the momentum with the gradients, and free the gradients.

        Return the Nesterov momentum: the momentum moved once more towards the gradient.
        """
        gradients: list[Any] = []
        momenta = []
        for parameter in parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
            state = self.state[parameter]
            if not state:
                state.update(_momentum_state(parameter))
            momenta.append(state["momentum"])
        for_each("lerp_", momenta, gradients, 1 - self.momentum)
        return for_each("lerp", gradients, momenta, self.momentum)


@declare_state(Muon)
def _muon_state(parameter: Tensor, group: dict[str, Any]) -> State:
    if group["muon"]:
        return _momentum_state(parameter)
    return DECLARATIONS[AdamW](parameter, group)


def _momentum_state(parameter: Tensor) -> State:
    # AdamW's load_state_dict expects the state to have a step.
    return {"momentum": torch.zeros_like(parameter), "step": torch.zeros(())}
