"""Start a run from the weights that `run.init_from` names: find, check and load them.

Only the first start reads the weights. A resume takes everything from the snapshot of the run,
because the weights may be gone.
"""

import contextlib
import logging
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.config import Config, build_group
from mingpt_ddp.config.job import run_name
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.config.recorded import without_unknown
from mingpt_ddp.config.user_code import is_own_model
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.errors import ConfigError, SnapshotError
from mingpt_ddp.snapshots.read.initial_weights import (
    InitialWeights,
    read_initial_weights,
    weights_of_state,
)

log = logging.getLogger(__name__)

# Keys of the group `model` that may differ from the settings of the weights.
FREE_KEYS = ("name", "dropout", "code")


@dataclass(frozen=True)
class WarmStart:
    """The configuration of a run, and the weights that it starts from, if any."""

    config: Config  # with the sizes of the weights
    state: dict[str, Any]  # argument of Task.extend
    sizes: list[int | None]  # as InitialWeights.sizes
    tensors: dict[str, Tensor]  # on rank zero at the first start, until they are loaded

    def check(self, build_model: Callable[[], nn.Module], shape: tuple[int, Any]) -> None:
        """Refuse weights that the model cannot take.

        Args:
            shape: As Task.shape.

        Raises:
            SnapshotError: As `_check_fit`.
        """
        if not self.tensors:  # a resume, or random weights
            return
        # A user's model may not know the meta device.
        is_own = is_own_model(self.config.model)
        with contextlib.nullcontext() if is_own else torch.device("meta"):
            model = build_model()
        _check_fit(model, self.tensors, {*zip(self.sizes, shape, strict=True)})

    def load_into(self, group: ProcessGroup, model: nn.Module) -> None:
        """Give the weights, if any, to a new model on every rank. A collective."""
        if self.config.run.init_from is None:
            return
        _copy_into(model, group.broadcast_tensors(self.tensors or None))
        log.info("the weights are those of run.init_from=%s", self.config.run.init_from)
        self.tensors.clear()


def warm_start(
    config: Config, recorded: Any, command_line_keys: Container[str], group: ProcessGroup
) -> WarmStart:
    """Find what the run starts from, if not from random weights. A collective.

    Args:
        recorded: The state of the snapshot that the run resumes from. None if there is none.
        command_line_keys: Keys from the command line. The weights determine all other sizes.

    Raises:
        SnapshotError: The weights cannot be used, or the run has started from other weights.
        ConfigError: A size on the command line differs from the size in the weights.
    """
    url = config.run.init_from
    if url is None:
        return WarmStart(config, {}, [], {})
    tensors: dict[str, Tensor] = {}

    def find() -> dict[str, Any]:
        if recorded is not None:
            described = _described(weights_of_state(recorded), _recorded_sha256(url, recorded))
            if "text" in recorded:  # which the run goes on with
                described["state"]["text"] = recorded["text"]
            return described
        weights = read_initial_weights(url)
        tensors.update(weights.tensors)
        return _described(weights, weights.sha256())

    description = group.run_on_rank_zero(find)
    config = _with_sizes(config, description, command_line_keys)
    if recorded is None:
        _check_data_keys(config, description["data"])
    return WarmStart(config, description["state"], description["sizes"], tensors)


def _described(weights: InitialWeights, sha256: Any) -> dict[str, Any]:
    """Return the weights' description as JSON values, without tensors."""
    return {**asdict(replace(weights, tensors={})), "sha256": sha256}


def _recorded_sha256(url: str, recorded: Any) -> Any:
    """Return the SHA-256 of the weights that a run has started from.

    Args:
        recorded: The state of the run's snapshot.

    Raises:
        SnapshotError: The URL has other weights.
    """
    before = recorded["config"]["run"]
    sha256 = before.get("init_sha256")
    if before.get("init_from") != url and read_initial_weights(url).sha256() != sha256:
        raise SnapshotError(
            f"the run has not started from run.init_from={url}; choose another run.name"
        )
    return sha256


def _with_sizes(
    config: Config, description: dict[str, Any], command_line_keys: Container[str]
) -> Config:
    """Return the configuration with the sizes of the weights and their SHA-256.

    The run keeps its name.
    """
    run = config.run
    configured = config.to_dict()["model"]
    if run.init_sha256 not in (None, description["sha256"]):
        raise ConfigError(
            f"run.init_from={run.init_from} has SHA-256 {description['sha256']}, not "
            f"run.init_sha256={run.init_sha256}; set that to null to use it"
        )
    code = configured.get("code")  # never taken from the source of the weights
    known = without_unknown({"model": {**description["model"], "code": code}})
    model = asdict(build_group("model", known["model"]))
    chosen = {
        key
        for key in configured
        if "model" in command_line_keys or f"model.{key}" in command_line_keys
    }
    for key in sorted(chosen):
        if key in FREE_KEYS:
            model[key] = configured[key]
        elif configured[key] != model.get(key):
            raise _differs(f"model.{key}", configured[key], model.get(key), run.init_from)
    config = replace(
        config, run=replace(run, name=run_name(config), init_sha256=description["sha256"])
    )
    config = replace(config, model=build_group("model", model))
    if isinstance(config.data, DataConfig):
        from_weights = {
            k: value
            for k, value in description["data"].items()
            if f"data.{k}" not in command_line_keys
        }
        config = replace(config, data=replace(config.data, **from_weights))
    return config


def _check_data_keys(config: Config, data: dict[str, Any]) -> None:
    """Refuse keys of `data` that differ from the weights, except for a shorter context.

    Args:
        data: Keys of the group `data` that the weights determine.
    """
    if not isinstance(config.data, DataConfig):
        return
    url = config.run.init_from
    for key, value in data.items():
        configured = getattr(config.data, key)
        if key == "block_size":
            if configured > value:
                raise ConfigError(
                    f"data.block_size={configured} is more than the {value} of the weights of "
                    f"run.init_from={url}; lower it, or leave it out"
                )
        elif configured != value:
            raise _differs(f"data.{key}", configured, value, url)


def _differs(key: str, value: Any, other: Any, url: str | None) -> ConfigError:
    return ConfigError(
        f"{key}={value} is {other} in the weights of run.init_from={url}; leave {key} out"
    )


def _check_fit(model: nn.Module, tensors: dict[str, Any], resized: set[tuple[Any, Any]]) -> None:
    """Check that `_copy_into` can copy the weights into a model.

    Args:
        model: The model. It may be on the meta device.
        resized: Pairs of numbers of rows, of the weights and of the model, that may differ.

    Raises:
        SnapshotError: Names, other shapes or types of numbers differ, or a value is not finite.
    """
    expected = model.state_dict()
    wrong = sorted(expected.keys() ^ tensors.keys())
    for name in sorted(expected.keys() & tensors.keys()):
        tensor = tensors[name]
        theirs = tuple(tensor.shape)
        shape = tuple(expected[name].shape)
        may_differ = theirs[1:] == shape[1:] and (*theirs[:1], *shape[:1]) in resized
        if theirs != shape and not may_differ:
            wrong.append(f"{name} {theirs} for {shape}")
        elif tensor.is_floating_point() != expected[name].is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            wrong.append(f"{name} in {kind}")
    if wrong:
        raise SnapshotError(
            f"the weights of run.init_from do not fit the model: {', '.join(wrong[:3])}"
        )
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor.to(expected[name].dtype)).all():
            raise SnapshotError(
                f"the weights of run.init_from cannot be used: {name} has values that are "
                "not finite"
            )


@torch.no_grad()
def _copy_into(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy weights that have been checked into a model.

    The model keeps its own rows for added tokens. Weights for positions beyond its context are
    dropped.
    """
    for name, tensor in model.state_dict().items():
        loaded = tensors[name]
        if tensor.dim() == 0:
            tensor.copy_(loaded)
            continue
        rows = min(len(tensor), len(loaded))
        tensor[:rows] = loaded[:rows]
