"""Load the model in a snapshot without starting a run, to sample from it or to export it."""

import json
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from mingpt_ddp.config.builders import attribute_errors_to_user_code
from mingpt_ddp.config.config import build_group
from mingpt_ddp.config.keys.model_config import ModelConfig, TransformerConfig, changed_parts
from mingpt_ddp.config.recorded import without_unknown
from mingpt_ddp.config.user_code import is_custom_model
from mingpt_ddp.config.validation import NotRegisteredError
from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer, tokenizer_from_state
from mingpt_ddp.errors import ConfigError, SnapshotError, command
from mingpt_ddp.models import build_model
from mingpt_ddp.models.meta_device import meta_device
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.read.load import Step, load
from mingpt_ddp.snapshots.state_dict import load_model_state
from mingpt_ddp.storage.yaml_and_json import MAX_YAML_BYTES

MAX_CONFIG_CHARS = 2 * MAX_YAML_BYTES  # JSON escapes more characters than YAML


def load_model(url: str, step: Step = "newest") -> tuple[nn.Module, Tokenizer]:
    """Load the model and the tokenizer of a snapshot, on the CPU.

    Raises:
        SnapshotError: There is no snapshot, or no model can be built from it.
    """
    model, tokenizer, _ = load_with_state(url, step)
    return model, tokenizer


def load_with_state(url: str, step: Step = "newest") -> tuple[nn.Module, Tokenizer, Snapshot]:
    """Load the model and the tokenizer as `load_model` does, and return the snapshot too."""
    snapshot = load(url, ("model",), step)
    spec = read_model_spec(snapshot.state)
    with attribute_errors_to_user_code():
        model = build_from_tensors(spec.config(), spec.sizes, snapshot.model)
    return model, spec.tokenizer, snapshot


@dataclass(frozen=True)
class ModelSpec:
    """A snapshot's description of its model. It is untrusted until `config` has validated it."""

    model: dict[str, Any]  # the group `model` of the run's configuration
    block_size: int  # context length in tokens
    tokenizer: Tokenizer

    @property
    def sizes(self) -> tuple[int, int]:
        """Vocabulary size and context length: arguments of `build_model`."""
        return self.tokenizer.vocab_size, self.block_size

    def config(self) -> ModelConfig:
        """Validate the configuration of the model.

        Raises:
            SnapshotError: A value is invalid, or the architecture or a part of the model is the
                user's own, and no loaded Python file has registered it.
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
            raise SnapshotError(
                f"the snapshot has an invalid state: {error}; use another snapshot"
            ) from error


def read_model_spec(state: Any) -> ModelSpec:
    """Extract the description of the model from the untrusted state of a snapshot.

    Raises:
        SnapshotError: The description is missing, too large or malformed, or the task is not a
            language model.
    """
    if isinstance(state, dict) and "data" in state:  # the data are samples, not a text
        raise SnapshotError(
            "the snapshot's task is not a language model; evaluate its model with "
            f"{command('evaluate')}"
        )
    try:
        tokenizer = tokenizer_from_state(state)
        config = state["config"]
        architecture = config["model"]["architecture"]
        block_size = config["data"]["block_size"]
        types_fit = isinstance(architecture, str) and type(block_size) is int
        if not types_fit or len(json.dumps(config)) > MAX_CONFIG_CHARS:
            raise ValueError("its configuration is too large, or has values of the wrong types")
        model = without_unknown({"model": config["model"]})["model"]
        return ModelSpec(dict(model), max(1, block_size), tokenizer)
    except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(
            f"the snapshot has an invalid state: {error}; use another snapshot"
        ) from error


def build_from_tensors(
    config: ModelConfig, sizes: tuple[int, Any], tensors: dict[str, Tensor]
) -> nn.Module:
    """Build a model whose parameters are the tensors of a snapshot.

    Shapes are checked before anything is allocated. A hostile configuration can therefore not
    allocate more memory than the tensors take.

    Args:
        sizes: Sizes of the outputs and the inputs: arguments of `build_model`.

    Raises:
        SnapshotError: The tensors do not fit the configuration.
    """
    # A user's constructor may compute buffers, so it needs real memory.
    if is_custom_model(config):
        model = build_model(config, *sizes)
        load_model_state(model, tensors)
        return model

    def on_meta(**changed: Any) -> nn.Module:
        with meta_device():  # tensors have shapes, but no memory
            return build_model(replace(config, **changed), *sizes)

    try:
        # Check the number of layers by the number of tensors, before a billion layers are built.
        if isinstance(config, TransformerConfig):
            tensors_of_one_layer = len(on_meta(n_layer=1).state_dict())
            per_layer = len(on_meta(n_layer=2).state_dict()) - tensors_of_one_layer
            if tensors_of_one_layer + (config.n_layer - 1) * per_layer != len(tensors):
                raise SnapshotError(
                    f"the snapshot's {len(tensors)} tensors do not fit a model with "
                    f"{config.n_layer} layers"
                )
        model = on_meta()
    except RuntimeError as error:  # a tensor size overflows
        raise SnapshotError(
            "the snapshot's weights do not fit the model: it is too large"
        ) from error
    load_model_state(model, tensors, assign=True)
    return model
