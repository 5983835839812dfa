"""A step of one rank with tensors without data, as a GPU would take it: its memory.

The tensors are those of a CPU, so nothing here needs a GPU or memory for the model. What CUDA does
otherwise is in models/cuda_functions.py.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import attribute_errors_to_user_code
from mingpt_ddp.data.dataloader import BatchPlan, Loader
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime, map_tensors
from mingpt_ddp.distributed.step_memory import ParameterSize, StepMemory, TensorSize
from mingpt_ddp.distributed.strategies.single import SingleStrategy, for_one_rank
from mingpt_ddp.errors import CodeError, ConfigError, UserError
from mingpt_ddp.models.cuda_functions import CUDAFunctions
from mingpt_ddp.optim.muon import Muon
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.torch_internals import (
    count_operations,
    outputs_of_operators,
    tensors_without_data,
)
from mingpt_ddp.training.preflight import TrialLoader
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import Trainable, build_trainable

MICRO_BATCHES = 2  # at most: from the second on, gradients add up


class Allocations:
    """The storages of tensors, as they are allocated and released."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []  # the storage's number, its bytes or minus them
        self._numbers: dict[int, int] = {}  # by the identity of a living storage
        self._references: dict[int, weakref.ref[Any]] = {}

    def record(self, tensor: Tensor) -> int:
        """Return the number of the tensor's storage, from now on watched until its release."""
        storage = tensor.untyped_storage()
        identity = id(storage)
        if identity in self._numbers:
            return self._numbers[identity]
        number = len(self.events)
        size = storage.nbytes()
        self._numbers[identity] = number
        self.events.append((number, size))

        def release(_: Any) -> None:
            self.events.append((number, -size))
            del self._numbers[identity], self._references[identity]

        self._references[identity] = weakref.ref(storage, release)
        return number

    def living(self) -> dict[int, int]:
        """Return the bytes of the storages that are allocated, by number."""
        return {number: self.events[number][1] for number in self._numbers.values()}


class _Marks:
    """Note what belongs to the passes of a simulated step."""

    def __init__(
        self, allocations: Allocations, model: nn.Module, counter: Any, micro_batches: int
    ) -> None:
        self.allocations = allocations
        self.micro_batches = micro_batches
        self.counter = counter
        self.model = model
        self.resident: dict[int, int] = {}  # bytes by storage, at the beginning of the step
        self.first = 0  # event of the step
        self.kept: set[int] = set()  # storages, after a forward pass
        self.gradients: dict[int, str] = {}  # names of the parameters
        self.last = 0  # event of the passes
        self.operations = 0  # of the passes
        model.register_forward_hook(self._after_forward)

    def begin(self) -> None:
        """Begin the step that is measured."""
        self.resident = self.allocations.living()
        self.first = len(self.allocations.events)
        self.kept.clear()
        self.gradients.clear()

    def _after_forward(self, *_: Any) -> None:
        self.kept.update(self.allocations.living())

    def end_passes(self) -> None:
        """Note the gradients, when the passes have ended."""
        self.operations = self.counter.get_total_flops()
        self.last = len(self.allocations.events)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.gradients[self.allocations.record(parameter.grad)] = name

    def step_memory(self, state: dict[int, str], sizes: list[ParameterSize]) -> StepMemory:
        """Return the memory of the step.

        Args:
            state: kinds of the storages that hold the state.
        """
        in_blocks = {size.name for size in sizes if size.block is not None}

        def kind(number: int) -> str:
            if number in state:
                return state[number]
            if number in self.gradients:
                is_in_block = self.gradients[number] in in_blocks
                return "block_gradients" if is_in_block else "other_gradients"
            is_kept = number in self.kept or number in self.resident
            return "activations" if is_kept else "temporaries"

        events = [*self.resident.items(), *self.allocations.events[self.first :]]
        return StepMemory.from_events(
            kinds=[kind(number) for number, _ in events],
            sizes=[size for _, size in events],
            passes=len(self.resident) + self.last - self.first,
            operations=self.operations // self.micro_batches,
        )


class _InPlace(SingleStrategy):
    """Train on one rank, whose model need not be moved to the device."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model


def precision_of_gpu(config: Config) -> str:
    """Return fp32, bf16 or fp16; a GPU that is fast at bf16 resolves auto to it."""
    wanted = config.trainer.precision
    return "bf16" if wanted == "auto" else wanted


def runtime_without_data(config: Config) -> Runtime:
    """Return the runtime of one rank for `simulate`; fp16 takes the memory of bf16."""
    trainer = replace(config.trainer, device="cpu", compile=False)
    if trainer.precision != "fp32":
        trainer = replace(trainer, precision="bf16")
    ddp = for_one_rank(config.ddp)
    runtime = Runtime(replace(config, trainer=trainer, ddp=ddp), DistEnv())
    strategy = runtime.strategy
    runtime.strategy = _InPlace(strategy.config, strategy.device, strategy.group, compiles=False)
    return runtime


def simulate(
    task: Task,
    runtime: Runtime,
    loader: Loader,
    rows: int,
    micro_batches: int,
    prepare: Callable[[nn.Module], None],
) -> tuple[StepMemory, list[ParameterSize]]:
    """Take two steps without data; return the memory of the second, and the sizes of the state.

    Args:
        runtime: of `runtime_without_data`.
        loader: of the run, on the CPU.
        rows: of a micro-batch.
        micro_batches: of a step; only the first MICRO_BATCHES are taken.
        prepare: changes the new model, before its optimizer is built.

    Raises:
        ConfigError, CodeError: the code does not run without data.
    """
    batch_size = task.config.trainer.batch_size
    batch = loader.get_batch(1, BatchPlan(batch_size, batch_size, 1), 0)[0].batch
    micro_batches = min(micro_batches, MICRO_BATCHES)
    plan = BatchPlan(micro_batches, 1, world_size=1)
    with _report_failures(), _without_data() as allocations:

        def initialize(model: nn.Module) -> None:
            prepare(model)
            _compute_again_as_cuda(model)

        trainable = build_trainable(runtime, task, initialize)
        _adapt(trainable.optimizer)

        def without_data(tensor: Tensor) -> Tensor:
            return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)

        empty = map_tensors(without_data, batch)
        same = TrialLoader(loader, [empty] * micro_batches)
        train_step = TrainStep(runtime, task, same, plan, trainable)
        counter = count_operations()
        marks = _Marks(allocations, trainable.model, counter, micro_batches)

        def take(step: int) -> None:
            train_step.passes(step)
            marks.end_passes()
            train_step.clip()
            train_step.update(step)

        with counter:  # it keeps tensors, so not in the step that is measured
            take(1)  # creates the optimizer's state
        marks.begin()
        take(2)
        sizes = _sizes(trainable)
        return marks.step_memory(_kinds_of_state(allocations, trainable), sizes), sizes


@contextmanager
def _report_failures() -> Iterator[None]:
    """Raise what code does without data as a ConfigError of one line."""
    try:
        with attribute_errors_to_user_code():
            yield
    except CodeError as error:
        reason = str(error.args[0])
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    else:
        return
    raise ConfigError(
        "device= tries the code with tensors of a CPU that have no data, and there it fails; "
        f"leave it out, or let the code read no values ({reason[:300]})"
    )


@contextmanager
def _without_data() -> Iterator[Allocations]:
    allocations = Allocations()
    with tensors_without_data(), CUDAFunctions(), outputs_of_operators(allocations.record):
        yield allocations


def _compute_again_as_cuda(model: nn.Module) -> None:
    """Let blocks that compute again in the backward pass, without function modes, do so as CUDA."""
    for block in getattr(model, "blocks", []):
        block.forward = partial(_call_as_cuda, block.forward)


def _call_as_cuda(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with CUDAFunctions():
        return forward(*args, **kwargs)


def _adapt(optimizer: torch.optim.Optimizer) -> None:
    """Compute as on a GPU that is fast at bf16; leave out a kernel that needs data."""
    if isinstance(optimizer, Muon):
        optimizer.precision = "bf16"
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            group["fused"] = False


def _kinds_of_state(allocations: Allocations, trainable: Trainable) -> dict[int, str]:
    """Return the kinds of the storages that a step begins with."""
    kinds = {}
    for tensor in (*trainable.model.parameters(), *trainable.model.buffers()):
        kinds[allocations.record(tensor)] = "weights"
    for state in trainable.optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                kinds[allocations.record(value)] = "optimizer"
    for tensor in trainable.average.state().get("ema", {}).values():
        kinds.setdefault(allocations.record(tensor), "average")
    return kinds


def _sizes(trainable: Trainable) -> list[ParameterSize]:
    """Return the sizes of the parameters and the buffers, in the order of the model."""
    blocks: dict[int, int] = {}
    for index, block in enumerate(getattr(trainable.model, "blocks", [])):
        blocks |= dict.fromkeys(map(id, block.parameters()), index)
    averaged = trainable.average.state().get("ema", {})
    sizes = []
    for name, parameter in trainable.model.named_parameters():
        state = trainable.optimizer.state.get(parameter, {}).values()
        sizes.append(
            ParameterSize(
                name,
                _size(parameter),
                [_size(value) for value in state if isinstance(value, Tensor)],
                has_average=name in averaged,
                is_trained=parameter.requires_grad,
                block=blocks.get(id(parameter)),
                matrices=_matrices(trainable.optimizer, parameter),
            )
        )
    for name, buffer in trainable.model.named_buffers():
        sizes.append(ParameterSize(name, _size(buffer), [], False, False, is_buffer=True))
    return sizes


def _matrices(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    """Return how many matrices of a parameter Muon orthogonalizes."""
    if not isinstance(optimizer, Muon) or "momentum" not in optimizer.state[parameter]:
        return 0
    return math.prod(parameter.shape[:-2]) * optimizer.parts[parameter]


def _size(tensor: Tensor) -> TensorSize:
    return TensorSize(tuple(tensor.shape), tensor.element_size())
