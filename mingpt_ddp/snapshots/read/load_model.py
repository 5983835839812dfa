"""Load the model of a snapshot without a run, to sample from it or to export it."""

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.builders import attribute_errors_to_user_code
from mingpt_ddp.config.config import build_group
from mingpt_ddp.config.keys.model_config import ModelConfig, TransformerConfig, changed_parts
from mingpt_ddp.config.recorded import without_unknown
from mingpt_ddp.config.user_code import is_own_model
from mingpt_ddp.config.validation import NotRegisteredError
from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer, tokenizer_from_state
from mingpt_ddp.errors import ConfigError, SnapshotError, command
from mingpt_ddp.models import build_model
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.read.load import Step, load
from mingpt_ddp.snapshots.state_dict import load_model_state
from mingpt_ddp.storage.yaml_and_json import MAX_YAML_BYTES

MAX_CONFIG_CHARS = 2 * MAX_YAML_BYTES  # JSON escapes more characters than YAML


def load_model(url: str, step: Step = "newest") -> tuple[nn.Module, Tokenizer]:
    """Load the model of a snapshot, on the CPU.

    Raises:
        SnapshotError: There is no snapshot, or no model can be built from it.
    """
    model, tokenizer, _ = load_with_state(url, step)
    return model, tokenizer


def load_with_state(url: str, step: Step = "newest") -> tuple[nn.Module, Tokenizer, Snapshot]:
    """Load the model of a snapshot like `load_model`, and return the snapshot too."""
    snapshot = load(url, ("model",), step)
    spec = read_model_spec(snapshot.state)
    with attribute_errors_to_user_code():
        model = build_around(spec.config(), spec.sizes, snapshot.model)
    return model, spec.tokenizer, snapshot


@dataclass(frozen=True)
class ModelSpec:
    """The description of the model in a snapshot. It is untrusted until `config` validates it."""

    model: dict[str, Any]  # the group `model` of the run's configuration
    block_size: int  # context length in tokens
    tokenizer: Tokenizer

    @property
    def sizes(self) -> tuple[int, int]:
        """Vocabulary size and context length, as `build_model` takes them."""
        return self.tokenizer.vocab_size, self.block_size

    def config(self) -> ModelConfig:
        """Validate the values and return the typed configuration.

        Raises:
            SnapshotError: A value is invalid, or no Python file has registered the architecture or
                a part.
        """
        try:
            return build_group("model", self.model)
        except NotRegisteredError as error:
            architecture = f"model.architecture={self.model['architecture']}"
            [name, *_] = [*changed_parts(self.model), architecture]
            raise SnapshotError(
                f"{name} is not built in; name the Python file that registers it, if you "
                "trust it, as in code=my_project/mine.py"
            ) from error
        except (ConfigError, TypeError, ValueError) as error:
            raise SnapshotError(f"the snapshot has an invalid state: {error}") from error


def read_model_spec(state: Any) -> ModelSpec:
    """Extract the description of the model from an untrusted snapshot state.

    Raises:
        SnapshotError: It is missing, too large or malformed, or the task is not a language model.
    """
    if isinstance(state, dict) and "data" in state:  # the task has a dataset of samples
        raise SnapshotError(
            f"its task is not a language model; measure it with {command('evaluate')}"
        )
    try:
        tokenizer = tokenizer_from_state(state)
        config = state["config"]
        architecture = config["model"]["architecture"]
        block_size = config["data"]["block_size"]
        typed = isinstance(architecture, str) and type(block_size) is int
        if not typed or len(json.dumps(config)) > MAX_CONFIG_CHARS:
            raise ValueError("expected a configuration")
        model = without_unknown({"model": config["model"]})["model"]
        return ModelSpec(dict(model), max(1, block_size), tokenizer)
    except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"the snapshot has an invalid state: {error}") from error


def build_around(
    config: ModelConfig, sizes: tuple[int, Any], tensors: dict[str, Tensor]
) -> nn.Module:
    """Build a model around a snapshot's tensors.

    A hostile configuration cannot allocate more memory than the tensors take.

    Args:
        sizes: Outputs and inputs, as `build_model` takes them.

    Raises:
        SnapshotError: The tensors do not fit the configuration.
    """
    if is_own_model(config):  # the user's constructor may compute buffers
        model = build_model(config, *sizes)
        load_model_state(model, tensors)
        return model

    def on_meta(**changed: Any) -> nn.Module:
        with torch.device("meta"):  # shapes without memory
            return build_model(replace(config, **changed), *sizes)

    try:
        if isinstance(config, TransformerConfig):  # do not build a billion modules
            tensors_of_one = len(on_meta(n_layer=1).state_dict())
            per_layer = len(on_meta(n_layer=2).state_dict()) - tensors_of_one
            if tensors_of_one + (config.n_layer - 1) * per_layer != len(tensors):
                raise SnapshotError(
                    f"the snapshot's {len(tensors)} tensors are not those of "
                    f"{config.n_layer} layers"
                )
        model = on_meta()
    except RuntimeError as error:  # a tensor size overflows
        raise SnapshotError(
            "the snapshot's weights do not fit the model: it is too large"
        ) from error
    load_model_state(model, tensors, assign=True)
    return model
