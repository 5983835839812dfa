"""Before anything is written: what would fail later is told now.

A model has to fit, and a user's own model and optimizer are tried for three steps.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import attribute_errors_to_user_code, is_user_defined
from mingpt_ddp.data.dataloader import MicroBatch
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.compile import check_compiles
from mingpt_ddp.distributed.runtime import Runtime, eval_mode
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.models import build_model, count_parameters, flops_per_token
from mingpt_ddp.models.activation_checkpoint import apply_activation_checkpointing
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.snapshots.state_dict import (
    check_savable,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)

ROWS, LENGTH = 2, 64  # sequences, and characters of each, are enough to train on
BYTES = 8  # of a parameter and its gradient in fp32; what an optimizer keeps comes on top
TOLERANCE = {"cpu": 1e-3, "cuda": 1e-2}  # of the largest logit, for products in another order, or in TF32


def check_fits(config: Config, runtime: Runtime, vocab_size: int) -> None:
    """Whether a model of ours can be trained on all ranks' machines. A collective.

    Raises:
        ConfigError: the parameters and their gradients alone are more than there is.
    """
    if is_user_defined("model", config.model.architecture):  # nobody knows what it takes to make one
        return
    memory = min(runtime.group.all_gather(runtime.memory()))
    with torch.device("meta"):  # nothing is allocated
        model = build_model(config.model, vocab_size, config.data.block_size)
    count = count_parameters(model)
    if count * BYTES > memory:
        needed, there = (f"{size / 2**30:,.0f} GiB" for size in (count * BYTES, memory))
        raise ConfigError(
            f"the model {config.model.name} has {count:,} parameters, which need {needed} with their "
            f"gradients, and there are {there} of memory; lower model.n_embd or model.n_layer"
        )


def check_resumes_exactly(config: Config, runtime: Runtime, vocab_size: int, batch: MicroBatch) -> None:
    """Train two steps, put the state down, train a third; then the same third step from what was put down.

    Raises:
        CodeError: the code fails, gives something else than it should, or does not resume exactly.
        ConfigError: a parameter without a gradient, for which the ranks would wait.
    """
    x, y = (runtime.to_device(part[:ROWS, :LENGTH].contiguous()) for part in (batch.x, batch.y))
    with attribute_errors_to_user_code():
        first = _Trial(config, runtime, vocab_size)
        flops_per_token(first.model)
        check_savable(first.model, first.optimizer)
        first.check_scores(x[:, :1])  # as sampling begins
        first.check_scores(runtime.to_device(batch.x[:1]))
        if runtime.compiles:
            check_compiles(first.model, config, x, y)
        fresh = first.digest()
        first.step(1, x, y)
        check_savable(first.model, first.optimizer)
        _check_gradients(first.unused, config, runtime.group.world_size)
        first.step(2, x, y)
        saved = first.state()
        loss, end = first.step(3, x, y), first.digest()
        del first
        second = _Trial(config, runtime, vocab_size)
        if fresh != second.digest():
            raise CodeError(f"the model {config.model.architecture} {_OTHER.format('first weights depend')}")
        load_model_state(second.model, saved[0])
        load_optimizer_state(second.model, second.optimizer, saved[1])
        again = second.step(3, x, y)
        if runtime.device.type == "cpu" or config.trainer.deterministic:  # else a GPU adds up in an order of its own
            if not torch.equal(loss.nan_to_num(), again.nan_to_num()):
                raise CodeError(f"the model {config.model.architecture} {_OTHER.format('loss depends')}")
            if end != second.digest():
                raise CodeError(f"the optimizer {config.optimizer.name} {_OTHER.format('step depends')}")
        second.check_is_causal_lm(x, y)


_OTHER = (
    "would not resume exactly: its {} on more than the snapshot and torch's seed; keep what it remembers in "
    "parameters, buffers or optimizer.state, and draw random numbers from torch's global generator"
)


class _Trial:
    """The model and the optimizer of the run, as every start makes them."""

    def __init__(self, config: Config, runtime: Runtime, vocab_size: int) -> None:
        self.config, self.runtime, self.vocab_size = config, runtime, vocab_size
        seed_everything("weights", config.run.seed)
        self.model: nn.Module = build_model(config.model, vocab_size, config.data.block_size).to(runtime.device)
        if config.trainer.activation_checkpointing:
            apply_activation_checkpointing(self.model)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.unused: list[str] = []  # parameters without a gradient in the last step

    def check_scores(self, x: Tensor) -> None:
        with eval_mode(self.model), self.runtime.autocast():
            scores = self.model(x)
        self._check_shape("model(tokens)", scores, (*x.shape, self.vocab_size))

    def check_is_causal_lm(self, x: Tensor, y: Tensor) -> None:
        """That the losses of two models can be compared; after some steps, as first outputs are often zero."""
        other = x.clone()
        other[:, -1] = (x[:, -1] + 1) % self.vocab_size
        with eval_mode(self.model):
            scores, loss = self.model(x), self.model(x, y)
            again, later = self.model(x).float(), self.model(other).float()
            alone = torch.cat([self.model(row).float() for row in x.split(1)])
        name, coarse = self.config.model.architecture, max(torch.finfo(t.dtype).eps for t in (scores, loss))
        scores = scores.float()
        tolerance = max(TOLERANCE[x.device.type], 8 * coarse) * max(1.0, float(scores.abs().max()))
        expected = float(F.cross_entropy(scores.flatten(0, 1), y.flatten()))
        if not math.isfinite(expected):
            return  # the first steps will tell
        if not torch.allclose(scores, again, rtol=0, atol=tolerance):
            raise CodeError(f"the model {name} is random in evaluation mode: drop out only where self.training is true")
        if not torch.allclose(scores[:, :-1], later[:, :-1], rtol=0, atol=tolerance):
            raise CodeError(
                f"the model {name} looks ahead: its logits at a position change with the characters after it"
            )
        if not torch.allclose(scores, alone, rtol=0, atol=tolerance):
            raise CodeError(f"the model {name} mixes sequences: the logits of one change with the others of its batch")
        if not math.isclose(float(loss), expected, abs_tol=tolerance):
            raise CodeError(
                f"the model {name}: model(tokens, targets) must give the mean cross-entropy of its logits, which in "
                f"evaluation mode are {expected:.4f} nats, not {float(loss):.4f}"
            )

    def step(self, step: int, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one step like those of the run."""
        seed_everything("dropout", self.config.run.seed, step, 0)
        with self.runtime.autocast():
            loss: Tensor = self.model(x, y)
        self._check_shape("model(tokens, targets)", loss, ())
        loss.backward()
        self.unused = [n for n, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        seed_everything("update", self.config.run.seed, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _check_shape(self, call: str, found: object, shape: tuple[int, ...]) -> None:
        if not isinstance(found, Tensor) or tuple(found.shape) != shape:
            kind = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            wanted = f"logits of the shape {shape}" if shape else "the mean loss, a scalar"
            raise CodeError(f"the model {self.config.model.architecture}: {call} must give {wanted}, not {kind}")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a snapshot would hold, apart from the live objects."""
        tensors = model_state(self.model), optimizer_state(self.model, self.optimizer)
        first, second = ({name: tensor.detach().cpu().clone() for name, tensor in kind.items()} for kind in tensors)
        return first, second

    def digest(self) -> bytes:
        """Of every bit of the state."""
        digest = hashlib.sha256()
        for tensors in (model_state(self.model), optimizer_state(self.model, self.optimizer)):
            for name in sorted(tensors):
                flat = tensors[name].detach().cpu().contiguous().flatten()
                digest.update(f"{name} {tuple(tensors[name].shape)} {flat.dtype}".encode())
                digest.update(flat.view(torch.uint8).numpy().data)
        return digest.digest()


def _check_gradients(unused: list[str], config: Config, world_size: int) -> None:
    if unused and world_size > 1 and not config.ddp.find_unused_parameters:
        raise ConfigError(
            f"{', '.join(unused[:3])} of the model {config.model.architecture} have no gradient; leave them out, or "
            "set ddp.find_unused_parameters=true"
        )
