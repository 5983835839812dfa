"""Check that a user's model is a causal language model with the right loss."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.errors import CodeError
from mingpt_ddp.models import eval_mode

# relative to the largest logit; covers summation order and TF32
TOLERANCE = {"cpu": 1e-3, "cuda": 1e-2}


def check_shapes(model: nn.Module, name: str, vocab_size: int, x: Tensor, y: Tensor) -> None:
    """Check the shapes of logits (B, T, V), also of the first call of sampling, and of the loss.

    Args:
        name: of the model, for messages.
        x: (B, T) tokens.
        y: (B, T) targets.

    Raises:
        CodeError: another shape.
    """
    with eval_mode(model), torch.no_grad():
        for inputs in ((x[:, :1],), (x[:1],), (x, y)):
            output = model(*inputs)
            shape = (*inputs[0].shape, vocab_size) if len(inputs) == 1 else ()
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            if found != shape:
                wanted = f"model(tokens) must return logits of shape {shape}"
                if not shape:
                    wanted = "model(tokens, targets) must return the mean loss, a scalar"
                raise CodeError(f"the model {name}: {wanted}, not {found}")


def check_is_causal_lm(model: nn.Module, name: str, vocab_size: int, x: Tensor, y: Tensor) -> None:
    """Check causality and the loss; call it after steps, since initial outputs are often zero.

    Args:
        as for `check_shapes`.

    Raises:
        CodeError: logits depend on later tokens, on other sequences or on chance, or the loss is
            not their mean cross-entropy.
    """
    other = x.clone()
    other[:, -1] = (x[:, -1] + 1) % vocab_size
    with eval_mode(model), torch.no_grad():
        logits = model(x)
        loss = model(x, y)
        again = model(x)
        later = model(other)
        alone = torch.cat([model(row) for row in x.split(1)])
    coarsest = max(torch.finfo(t.dtype).eps for t in (logits, loss))
    logits = logits.float()
    tolerance = max(TOLERANCE[x.device.type], 8 * coarsest) * max(1.0, float(logits.abs().max()))
    expected = float(F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    if not math.isfinite(expected):
        return  # trainer.on_nonfinite handles it in the first steps
    # the last position may change
    later = torch.cat([later[:, :-1].float(), logits[:, -1:]], dim=1)
    for found, problem in (
        (again, "is random in evaluation mode: apply dropout only if self.training is true"),
        (later, "is not causal: its logits at a position depend on later characters"),
        (alone, "mixes sequences: the logits of one depend on the others in its batch"),
    ):
        if not torch.allclose(found.float(), logits, rtol=0, atol=tolerance):
            raise CodeError(f"the model {name} {problem}")
    if not math.isclose(float(loss), expected, abs_tol=tolerance):
        raise CodeError(
            f"the model {name}: model(tokens, targets) must return the mean cross-entropy of "
            "its logits, which in "
            f"evaluation mode are {expected:.4f} nats, not {float(loss):.4f}"
        )
