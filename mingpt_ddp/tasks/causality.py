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

# relative to the largest logit; covers summation order and TF32
TOLERANCE = {"cpu": 1e-3, "cuda": 1e-2}
OFFSET = 0.5  # the most that `draw_weights` adds to a parameter of one dimension


def check_shapes(model: nn.Module, name: str, vocab_size: int, x: Tensor, y: Tensor) -> None:
    """Check the shapes of logits (B, T, V), also those of the first call of sampling, and the loss.

    And of what a user's parts of blocks return.

    Args:
        name: of the model, for messages.
        x: (B, T) tokens.
        y: (B, T) targets.

    Raises:
        CodeError: another shape.
    """
    with eval_mode(model), torch.no_grad(), _checked_parts(model):
        for tokens in (x[:, :1], x[:1]):
            shape = (*tokens.shape, vocab_size)
            promise = f"model(tokens) must return logits of shape {shape}"
            _check_shape(model(tokens), shape, f"the model {name}: {promise}")
        promise = "model(tokens, targets) must return the mean loss, a scalar"
        _check_shape(model(x, y), (), f"the model {name}: {promise}")


def _check_shape(output: Any, shape: tuple[int, ...], promise: str) -> None:
    actual = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if actual != shape:
        raise CodeError(f"{promise}, not {actual}")


@contextmanager
def _checked_parts(model: nn.Module) -> Iterator[None]:
    """Require that each part of a user returns a tensor of the shape of its input."""
    parts = [module for module in model.modules() if PART_LABEL in vars(module)]
    hooks = [part.register_forward_hook(_check_part) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_part(part: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    """Refuse what would fail in the block, or be broadcast when added to the residual stream."""
    shape = tuple(arguments[0].shape)
    promise = f"{vars(part)[PART_LABEL]} must return a tensor of shape (B, T, C), here {shape}"
    if getattr(part, "rotary", False):
        promise += ", and the values of the first block"
        if isinstance(output, tuple) and len(output) == 2:
            output, _ = output
        elif isinstance(output, Tensor):
            raise CodeError(f"{promise}, not a Tensor alone")
    _check_shape(output, shape, promise)


def check_is_causal_lm(model: nn.Module, name: str, vocab_size: int, x: Tensor, y: Tensor) -> None:
    """Check causality and the loss; call it after steps, since initial outputs are often zero.

    Args:
        as for `check_shapes`.

    Raises:
        CodeError: logits depend on later tokens, on other sequences or on chance, or the loss is
            not their mean cross-entropy, or decoding with a cache gives others.
    """
    other = x.clone()
    other[:, -1] = (x[:, -1] + 1) % vocab_size  # another last token
    with eval_mode(model), torch.no_grad():
        logits = model(x)
        loss = model(x, y)
        again = model(x)
        other_logits = model(other)
        alone = torch.cat([model(row) for row in x.split(1)])
        decoded = _decode(model, x)  # the logits after the last token, by each way

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
        other_logits[:, :-1],  # at the last position they may differ
        logits[:, :-1],
        "is not causal: its logits at a position depend on later characters",
    )
    check_equal(
        alone,
        logits,
        "mixes sequences: the logits of one depend on the others in its batch",
    )
    for each in decoded:
        check_equal(
            each,
            logits[:, -1],
            "decodes other logits with its cache than without; a part of a block that cannot "
            "decode says recomputes = True",
        )
    if not math.isclose(float(loss), expected, abs_tol=relative * max(1.0, largest)):
        raise CodeError(
            f"the model {name}: model(tokens, targets) must return the mean cross-entropy of "
            f"its logits, which in evaluation mode are {expected:.4f} nats, not {float(loss):.4f}"
        )


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Draw weights with which all that a block computes is seen in the logits, in place.

    After a few steps layers that write to the residual stream are nearly zero, and attention is
    nearly uniform. Matrices are drawn from N(0, 1 / inputs); their zeros stay, which may be a mask,
    unless all are. Other parameters grow, so that gates open and what is positive stays so.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad or not parameter.is_floating_point():
            continue
        if parameter.dim() < 2:
            parameter.add_(OFFSET * torch.rand_like(parameter))
            continue
        inputs = parameter[0].numel()
        drawn = torch.randn_like(parameter) / math.sqrt(max(1, inputs))
        parameter.copy_(drawn * (parameter != 0) if parameter.any() else drawn)


def _decode(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the logits (B, V) after x (B, T), by each way of the model to decode with a cache."""
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
