"""Check that a user's model is a causal language model with the right loss."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.errors import CodeError
from mingpt_ddp.models import eval_mode, has_cache, has_graph_step
from mingpt_ddp.models.block_parts import PART_LABEL

# Allowed difference between logits, as a fraction of the largest logit. If sums are computed in a
# different order, or products in TF32, the logits may differ by as much.
TOLERANCE = {"cpu": 1e-3, "cuda": 1e-2}
MAX_OFFSET = 0.5  # largest number that `draw_weights` adds to an element of a vector


def check_shapes(model: nn.Module, name: str, vocab_size: int, x: Tensor, y: Tensor) -> None:
    """Check the shapes of a model's logits (B, T, V) and of its loss.

    Logits are checked for a batch of single tokens, as in the first call of sampling, and for a
    whole sequence. Also check the shapes of the tensors that a user's block parts return.

    Args:
        name: Name of the model in error messages.
        x: Tokens (B, T).
        y: Targets (B, T).

    Raises:
        CodeError: A shape is wrong.
    """
    with eval_mode(model), torch.no_grad(), _checked_parts(model):
        for tokens in (x[:, :1], x[:1]):
            shape = (*tokens.shape, vocab_size)
            requirement = f"model(tokens) must return logits of shape {shape}"
            _check_shape(model(tokens), shape, f"the model {name}: {requirement}")
        requirement = "model(tokens, targets) must return the mean loss, a scalar"
        _check_shape(model(x, y), (), f"the model {name}: {requirement}")


def _check_shape(output: Any, shape: tuple[int, ...], requirement: str) -> None:
    actual = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if actual != shape:
        raise CodeError(f"{requirement}, not {actual}")


@contextmanager
def _checked_parts(model: nn.Module) -> Iterator[None]:
    """In this context, require that each block part of the user keeps the shape of its input."""
    parts = [module for module in model.modules() if PART_LABEL in vars(module)]
    hooks = [part.register_forward_hook(_check_part) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_part(part: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    """Refuse an output whose shape differs from the input.

    Adding it to the residual stream would raise an error, or silently broadcast it.
    """
    shape = tuple(arguments[0].shape)
    requirement = f"{vars(part)[PART_LABEL]} must return a tensor of shape (B, T, C), here {shape}"
    if getattr(part, "rotary", False):
        requirement += ", and the attention values v1 of the first block"
        if isinstance(output, tuple) and len(output) == 2:
            output, _ = output
        elif isinstance(output, Tensor):
            raise CodeError(f"{requirement}, not a Tensor alone")
    _check_shape(output, shape, requirement)


def check_is_causal_lm(model: nn.Module, name: str, vocab_size: int, x: Tensor, y: Tensor) -> None:
    """Check that a model is causal and computes the right loss.

    Call this after some training steps, since the initial outputs of many models are zero.

    Args:
        name: Name of the model in error messages.
        x: Tokens (B, T).
        y: Targets (B, T).

    Raises:
        CodeError: The logits depend on later tokens, on other sequences, on chance, or on whether
            the model decodes with a cache. Or the loss is not the mean cross-entropy of the logits.
    """
    changed = x.clone()
    changed[:, -1] = (x[:, -1] + 1) % vocab_size  # x with a different last token
    with eval_mode(model), torch.no_grad():
        logits = model(x)
        loss = model(x, y)
        again = model(x)
        changed_logits = model(changed)
        alone = torch.cat([model(row) for row in x.split(1)])
        decoded = _decode(model, x)

    rounding = max(torch.finfo(logits.dtype).eps, torch.finfo(loss.dtype).eps)
    logits = logits.float()
    largest = float(logits.abs().max())
    relative = max(TOLERANCE[x.device.type], 8 * rounding)
    tolerance = relative * largest
    expected = float(F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    if not math.isfinite(expected):
        return  # trainer.on_nonfinite handles it in the first steps

    def check_equal(actual: Tensor, wanted: Tensor, problem: str) -> None:
        if not torch.allclose(actual.float(), wanted, rtol=0, atol=tolerance):
            raise CodeError(f"the model {name} {problem}")

    check_equal(
        again,
        logits,
        "is random in evaluation mode: apply dropout only if self.training is true",
    )
    check_equal(
        changed_logits[:, :-1],  # without the last position, where the logits may differ
        logits[:, :-1],
        "is not causal: its logits at a position depend on later tokens",
    )
    check_equal(
        alone,
        logits,
        "mixes sequences: the logits of a sequence depend on the other sequences in its batch",
    )
    for each in decoded:
        check_equal(
            each,
            logits[:, -1],
            "decodes different logits with its cache than without it; if a part of its blocks "
            "cannot decode, set recomputes = True in that part",
        )
    if not math.isclose(float(loss), expected, abs_tol=relative * max(1.0, largest)):
        raise CodeError(
            f"the model {name}: model(tokens, targets) must return the mean cross-entropy of "
            f"its logits, which in evaluation mode is {expected:.4f} nats, not {float(loss):.4f}"
        )


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Replace the weights by larger random ones, so that an error in a block shows in the logits.

    After a few training steps the layers that write to the residual stream are still nearly zero,
    and attention is nearly uniform. Matrices are therefore drawn from N(0, 1 / inputs). Zeros in a
    matrix may be a mask, so they stay, unless the whole matrix is zero. Vectors only grow, so that
    gates open and positive parameters stay positive.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad or not parameter.is_floating_point():
            continue
        if parameter.dim() < 2:
            parameter.add_(MAX_OFFSET * torch.rand_like(parameter))
            continue
        inputs = parameter[0].numel()
        drawn = torch.randn_like(parameter) / math.sqrt(max(1, inputs))
        parameter.copy_(drawn * (parameter != 0) if parameter.any() else drawn)


def _decode(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Compute the logits (B, V) of the last token of x (B, T) by decoding with a cache.

    Return one result for each method of the model that decodes: `decode`, and `step`, which CUDA
    graphs capture. Return [] for a model without a cache.
    """
    position = x.shape[1] - 1
    weight = next(model.parameters(), x)
    in_graph = model if has_graph_step(model) else None
    if position == 0 or not has_cache(model):
        return []
    cache = model.new_cache(len(x), weight.dtype)
    model.decode(x[:, :-1], cache, 0)
    decoded = [model.decode(x[:, -1:], cache, position)]
    if in_graph is not None:
        in_graph.decode(x[:, :-1], cache, 0)
        decoded.append(in_graph.step(x[:, -1], cache, torch.tensor(position, device=x.device)))
    return decoded
