"""Checks before anything is written: the model fits into memory, and user code trains and resumes exactly."""

import hashlib
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import attribute_errors_to_user_code, is_user_defined
from mingpt_ddp.data.dataloader import MicroBatch
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.ddp import check_compiles
from mingpt_ddp.distributed.device import total_memory
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.models import build_model, count_parameters, eval_mode, flops_per_token
from mingpt_ddp.snapshots import state_dict
from mingpt_ddp.training.train_step import build_model_and_optimizer

ROWS, LENGTH = 2, 64  # of the batch of a trial step: sequences, characters of each
BYTES = 8  # per parameter with its gradient, in fp32; optimizer state not included
TOLERANCE = {"cpu": 1e-3, "cuda": 1e-2}  # relative to the largest logit; covers summation order and TF32


def check_fits(config: Config, runtime: Runtime, vocab_size: int) -> None:
    """Check that a built-in model fits the smallest memory of all ranks. A collective.

    Raises:
        ConfigError: the parameters and gradients alone do not fit.
    """
    if is_user_defined("model", config.model.architecture):  # its constructor may allocate any amount
        return
    memory = min(runtime.group.all_gather(total_memory(runtime.device)))
    with torch.device("meta"):  # allocates nothing
        count = count_parameters(build_model(config.model, vocab_size, config.data.block_size))
    if count * BYTES > memory:
        raise ConfigError(
            f"the model {config.model.name} has {count:,} parameters, which need {count * BYTES / 2**30:,.0f} GiB with "
            f"their gradients, but there are {memory / 2**30:,.0f} GiB of memory; lower model.n_embd or model.n_layer"
        )


def check_resumes_exactly(config: Config, runtime: Runtime, vocab_size: int, batch: MicroBatch) -> None:
    """Train three steps, restore the state after the second into fresh objects, and compare the third bit for bit.

    Raises:
        CodeError: the code raises, returns the wrong type or shape, or does not resume exactly.
        ConfigError: a parameter gets no gradient, which DDP would wait for.
    """
    x, y = (runtime.to_device(part[:ROWS, :LENGTH].contiguous()) for part in (batch.x, batch.y))
    with attribute_errors_to_user_code():
        first = _Trial(config, runtime, vocab_size)
        flops_per_token(first.model)
        state_dict.check_savable(first.model, first.optimizer)
        with eval_mode(first.model), torch.no_grad():
            first.call_model(x[:, :1])  # the first call of sampling
            first.call_model(runtime.to_device(batch.x[:1]))
        if runtime.compiles:
            check_compiles(first.model, config, x, y)
        fresh = first.digest()
        first.step(1, x, y)
        state_dict.check_savable(first.model, first.optimizer)
        first.step(2, x, y)
        saved = [{name: t.detach().to("cpu", copy=True) for name, t in tensors.items()} for tensors in first.state()]
        loss, end = first.step(3, x, y), first.digest()
        del first
        second = _Trial(config, runtime, vocab_size)
        if fresh != second.digest():
            raise _not_exact(f"model {config.model.architecture}", "first weights depend")
        state_dict.load_model_state(second.model, saved[0])
        state_dict.load_optimizer_state(second.model, second.optimizer, saved[1])
        again = second.step(3, x, y)
        if runtime.device.type == "cpu" or config.trainer.deterministic:  # otherwise GPU summation order varies
            if not torch.equal(loss.nan_to_num(), again.nan_to_num()):
                raise _not_exact(f"model {config.model.architecture}", "loss depends")
            if end != second.digest():
                raise _not_exact(f"optimizer {config.optimizer.name}", "step depends")
        second.check_is_causal_lm(x, y)


def _not_exact(part: str, depends: str) -> CodeError:
    return CodeError(
        f"the {part} would not resume exactly: its {depends} on more than the snapshot and torch's seed; keep its "
        "state in parameters, buffers or optimizer.state, and draw random numbers from torch's global generator"
    )


class _Trial:
    """A fresh model and optimizer, built as every start of the run builds them."""

    def __init__(self, config: Config, runtime: Runtime, vocab_size: int) -> None:
        self.config, self.runtime, self.vocab_size = config, runtime, vocab_size
        self.model, self.optimizer = build_model_and_optimizer(config, runtime, vocab_size)

    def call_model(self, *inputs: Tensor) -> Tensor:
        """Return the logits (B, T, V) for tokens (B, T), or the loss if targets are given; check the shape."""
        with self.runtime.autocast():
            output: Tensor = self.model(*inputs)
        shape = (*inputs[0].shape, self.vocab_size) if len(inputs) == 1 else ()
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if found != shape:
            wanted = f"model(tokens) must return logits of shape {shape}"
            if not shape:
                wanted = "model(tokens, targets) must return the mean loss, a scalar"
            raise CodeError(f"the model {self.config.model.architecture}: {wanted}, not {found}")
        return output

    def step(self, step: int, x: Tensor, y: Tensor) -> Tensor:
        """Take an optimizer step with the seeds of the run, and return its loss."""
        seed_everything("dropout", self.config.run.seed, step, 0)
        loss = self.call_model(x, y)
        loss.backward()
        unused = [n for n, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        if unused and self.runtime.group.world_size > 1 and not self.config.ddp.find_unused_parameters:
            raise ConfigError(
                f"{', '.join(unused[:3])} of the model {self.config.model.architecture} have no gradient; remove them, "
                "or set ddp.find_unused_parameters=true"
            )
        seed_everything("update", self.config.run.seed, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def check_is_causal_lm(self, x: Tensor, y: Tensor) -> None:
        """Check causality and the loss; call it after steps, since initial outputs are often zero."""
        other = x.clone()
        other[:, -1] = (x[:, -1] + 1) % self.vocab_size
        with eval_mode(self.model), torch.no_grad():
            logits, loss, again, later = self.model(x), self.model(x, y), self.model(x), self.model(other)
            alone = torch.cat([self.model(row) for row in x.split(1)])
        coarsest = max(torch.finfo(t.dtype).eps for t in (logits, loss))
        logits = logits.float()
        tolerance = max(TOLERANCE[x.device.type], 8 * coarsest) * max(1.0, float(logits.abs().max()))
        expected = float(F.cross_entropy(logits.flatten(0, 1), y.flatten()))
        if not math.isfinite(expected):
            return  # trainer.on_nonfinite handles it in the first steps
        name = self.config.model.architecture
        later = torch.cat([later[:, :-1].float(), logits[:, -1:]], dim=1)  # the last position may change
        for found, problem in (
            (again, "is random in evaluation mode: apply dropout only if self.training is true"),
            (later, "is not causal: its logits at a position depend on later characters"),
            (alone, "mixes sequences: the logits of one depend on the others in its batch"),
        ):
            if not torch.allclose(found.float(), logits, rtol=0, atol=tolerance):
                raise CodeError(f"the model {name} {problem}")
        if not math.isclose(float(loss), expected, abs_tol=tolerance):
            raise CodeError(
                f"the model {name}: model(tokens, targets) must return the mean cross-entropy of its logits, which in "
                f"evaluation mode are {expected:.4f} nats, not {float(loss):.4f}"
            )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of a snapshot: those of the model and of the optimizer, by name."""
        return state_dict.model_state(self.model), state_dict.optimizer_state(self.model, self.optimizer)

    def digest(self) -> bytes:
        """Return the SHA-256 of every bit of the state."""
        digest = hashlib.sha256()
        for tensors in self.state():
            for name, tensor in sorted(tensors.items()):
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.digest()
