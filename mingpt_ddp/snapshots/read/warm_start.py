"""Find, check and load the weights from which a run starts (run.init_from).

Only the first start of a run reads these weights. When the run resumes, it takes everything from
its own snapshot, because the weights may have been deleted since.
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
from mingpt_ddp.config.user_code import is_custom_model
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.errors import ConfigError, SnapshotError
from mingpt_ddp.models.meta_device import meta_device
from mingpt_ddp.snapshots.read.initial_weights import (
    InitialWeights,
    read_initial_weights,
    weights_of_state,
)

log = logging.getLogger(__name__)

# Keys of the group `model` that may differ from the configuration recorded with the weights.
KEYS_THAT_MAY_DIFFER = ("name", "dropout", "code")


@dataclass(frozen=True)
class WarmStart:
    """The configuration of a run, and the weights that it starts from, if any."""

    config: Config  # the configuration of the run, with the model sizes of the weights
    # Argument of Task.extend: the state of the tokenizer that the weights were trained with. If the
    # run resumes, also the hash and the format of its text, under the key `text`.
    initial_state: dict[str, Any]
    sizes: list[int | None]  # vocabulary size and context length, as in InitialWeights.sizes
    # The weights on rank zero, at the first start of the run, until `load_into` has loaded them.
    tensors: dict[str, Tensor]

    def check(self, build_model: Callable[[], nn.Module], shape: tuple[int, Any]) -> None:
        """Refuse weights that do not fit the model.

        Args:
            build_model: Builds the model. It is called on the meta device, unless the model is the
                user's own.
            shape: Sizes of the model's outputs and inputs, as in Task.shape.

        Raises:
            SnapshotError: The weights do not fit the model, or a value is not finite.
        """
        if not self.tensors:  # the run resumes, or starts from random weights
            return
        # A user's model may not work on the meta device.
        is_custom = is_custom_model(self.config.model)
        with contextlib.nullcontext() if is_custom else meta_device():
            model = build_model()
        _check_fit(model, self.tensors, {*zip(self.sizes, shape, strict=True)})

    def load_into(self, group: ProcessGroup, model: nn.Module) -> None:
        """Copy the weights, if there are any, into a new model on every rank. A collective."""
        if self.config.run.init_from is None:
            return
        _copy_into(model, group.broadcast_tensors(self.tensors or None))
        log.info("starting from the weights of run.init_from=%s", self.config.run.init_from)
        self.tensors.clear()


def warm_start(
    config: Config, recorded: Any, command_line_keys: Container[str], group: ProcessGroup
) -> WarmStart:
    """Find the weights that run.init_from names, and adapt the configuration to them. A collective.

    Without run.init_from, the run starts from random weights, and the configuration is unchanged.

    Args:
        recorded: The state of the snapshot that the run resumes from. None at its first start.
        command_line_keys: Keys that were set on the command line. They must agree with the
            weights. All other keys take the values that the weights determine.

    Raises:
        SnapshotError: The weights cannot be used, or the run has started from other weights.
        ConfigError: A size from the command line differs from the size of the weights.
    """
    url = config.run.init_from
    if url is None:
        return WarmStart(config, {}, [], {})
    tensors: dict[str, Tensor] = {}

    def find() -> dict[str, Any]:
        if recorded is not None:
            sha256 = _recorded_sha256(url, recorded)
            description = _describe_weights(weights_of_state(recorded), sha256)
            if "text" in recorded:  # the run continues with the text that it recorded
                description["tokenizer_state"]["text"] = recorded["text"]
            return description
        weights = read_initial_weights(url)
        tensors.update(weights.tensors)
        return _describe_weights(weights, weights.sha256())

    description = group.run_on_rank_zero(find)
    config = _with_sizes(config, description, command_line_keys)
    if recorded is None:
        _check_data_keys(config, description["data"])
    return WarmStart(config, description["tokenizer_state"], description["sizes"], tensors)


def _describe_weights(weights: InitialWeights, sha256: Any) -> dict[str, Any]:
    """Return the fields of the weights as JSON values: the SHA-256 instead of the tensors."""
    return {**asdict(replace(weights, tensors={})), "sha256": sha256}


def _recorded_sha256(url: str, recorded: Any) -> Any:
    """Return the SHA-256 of the weights from which a run has started.

    Args:
        url: The configured run.init_from. It may have changed since, but only to a copy of the same
            weights.
        recorded: The state in a snapshot of the run.

    Raises:
        SnapshotError: The weights at the URL are not the weights from which the run has started.
    """
    before = recorded["config"]["run"]
    sha256 = before.get("init_sha256")
    if before.get("init_from") != url and read_initial_weights(url).sha256() != sha256:
        raise SnapshotError(
            f"the run did not start from run.init_from={url}, but from other weights; choose "
            "another run.name"
        )
    return sha256


def _with_sizes(
    config: Config, description: dict[str, Any], command_line_keys: Container[str]
) -> Config:
    """Return the configuration of the run with the sizes and the SHA-256 of the weights.

    If run.name is not set, the name of the run is still made from the configuration without these
    sizes.

    Raises:
        ConfigError: A key from the command line, or run.init_sha256, differs from the weights.
    """
    run = config.run
    configured = config.to_dict()["model"]
    if run.init_sha256 not in (None, description["sha256"]):
        raise ConfigError(
            f"run.init_from={run.init_from} has SHA-256 {description['sha256']}, not "
            f"run.init_sha256={run.init_sha256}; set run.init_sha256=null to use it nevertheless"
        )
    # The user names the code that runs. It is never taken from untrusted weights.
    code = configured.get("code")
    known = without_unknown({"model": {**description["model"], "code": code}})
    model = asdict(build_group("model", known["model"]))
    chosen = {
        key
        for key in configured
        if "model" in command_line_keys or f"model.{key}" in command_line_keys
    }
    for key in sorted(chosen):
        if key in KEYS_THAT_MAY_DIFFER:
            model[key] = configured[key]
        elif configured[key] != model.get(key):
            raise _conflict(f"model.{key}", configured[key], model.get(key), run.init_from)
    config = replace(
        config, run=replace(run, name=run_name(config), init_sha256=description["sha256"])
    )
    config = replace(config, model=build_group("model", model))
    if isinstance(config.data, DataConfig):
        taken_over = {
            key: value
            for key, value in description["data"].items()
            if f"data.{key}" not in command_line_keys
        }
        config = replace(config, data=replace(config.data, **taken_over))
    return config


def _check_data_keys(config: Config, data: dict[str, Any]) -> None:
    """Refuse values in the group `data` that differ from the weights. A shorter context is allowed.

    Args:
        data: The keys of the group `data` that the weights determine, with their values.

    Raises:
        ConfigError: A value differs. The message names its key.
    """
    if not isinstance(config.data, DataConfig):
        return
    url = config.run.init_from
    for key, value in data.items():
        configured = getattr(config.data, key)
        if key == "block_size":
            if configured > value:
                raise ConfigError(
                    f"data.block_size={configured} is more than {value}, the context length of "
                    f"run.init_from={url}; lower it, or leave it out"
                )
        elif configured != value:
            raise _conflict(f"data.{key}", configured, value, url)


def _conflict(key: str, value: Any, value_of_weights: Any, url: str | None) -> ConfigError:
    """Return the error for a key whose value differs from the value in the weights."""
    return ConfigError(
        f"{key}={value} differs from run.init_from={url}, where it is {value_of_weights}; leave "
        f"{key} out"
    )


def _check_fit(model: nn.Module, tensors: dict[str, Any], resized: set[tuple[Any, Any]]) -> None:
    """Check that `_copy_into` can copy the weights into a model.

    Args:
        model: The model. It may be on the meta device.
        resized: Pairs (rows in the weights, rows in the model) that may differ: the two vocabulary
            sizes, and the two context lengths.

    Raises:
        SnapshotError: Names or types differ, shapes differ in anything but `resized` rows, or a
            value is not finite.
    """
    expected = model.state_dict()
    wrong = sorted(expected.keys() ^ tensors.keys())
    for name in sorted(expected.keys() & tensors.keys()):
        tensor = tensors[name]
        shape = tuple(tensor.shape)
        model_shape = tuple(expected[name].shape)
        may_differ = shape[1:] == model_shape[1:] and (*shape[:1], *model_shape[:1]) in resized
        if shape != model_shape and not may_differ:
            wrong.append(f"{name} has shape {shape} instead of {model_shape}")
        elif tensor.is_floating_point() != expected[name].is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            wrong.append(f"{name} has the wrong type, {kind}")
    if wrong:
        raise SnapshotError(
            f"the weights of run.init_from do not fit the model: {', '.join(wrong[:3])}; use the "
            "model that they were trained with, or choose other weights"
        )
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor.to(expected[name].dtype)).all():
            raise SnapshotError(
                f"the weights of run.init_from cannot be used: {name} has values that are "
                "not finite; choose other weights"
            )


@torch.no_grad()
def _copy_into(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy weights that `_check_fit` has accepted into a model.

    If the model has more rows, for added tokens, it keeps its own values in these rows. If the
    weights have more rows, for positions beyond the context of the model, these are not copied.
    """
    for name, tensor in model.state_dict().items():
        loaded = tensors[name]
        if tensor.dim() == 0:
            tensor.copy_(loaded)
            continue
        rows = min(len(tensor), len(loaded))
        tensor[:rows] = loaded[:rows]
