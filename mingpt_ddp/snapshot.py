"""The state of a run on disk or in an object store, in a form that a kill at any moment leaves whole.

A snapshot is a directory `step_00001000` with model.safetensors, optimizer.safetensors, state.json and, written last,
manifest.json with the size and SHA-256 of the others. Without a manifest that fits, it does not exist. Nothing in it
can run code: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.storage import Storage

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
SMALL = 1 << 24  # bytes: no JSON of ours is larger


class Damaged(Exception):
    """This snapshot is not what was written."""


@dataclass(frozen=True)
class Snapshot:
    """The content of one snapshot, all of it on the CPU."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # `<parameter>:<name>`, see `optimizer_tensors`
    state: dict[str, Any]  # plain values: configuration, position, scaler, losses, vocabulary


def directory_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    match = re.fullmatch(r"step_([0-9]{8,18})", name)
    return int(match[1]) if match and directory_name(int(match[1])) == name else None


class SnapshotStore:
    """The snapshots of one run below one URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.storage = Storage(url)
        self.damaged: set[int] = set()  # steps that turned out to be

    def steps(self) -> list[int]:
        """The steps that have a directory, whole or not, in ascending order.

        Raises:
            SnapshotError: the place cannot be read.
        """
        try:
            names = self.storage.list()
        except Exception as error:  # every protocol fails in its own way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise SnapshotError(f"cannot look for snapshots at {self.url}: {reason[:200]}") from error
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def is_committed(self, step: int) -> bool:
        return self.storage.size(f"{directory_name(step)}/{MANIFEST}") is not None

    def write(self, snapshot: Snapshot) -> None:
        """Commit a snapshot; what an earlier attempt left of the same step is replaced."""
        directory = directory_name(snapshot.step)
        self.damaged.discard(snapshot.step)
        self.storage.delete(f"{directory}/{MANIFEST}")
        self.storage.delete(directory)
        files: dict[str, dict[str, Any]] = {}
        contents = {
            MODEL: safetensors.torch.save(snapshot.model),
            OPTIMIZER: safetensors.torch.save(snapshot.optimizer),
            STATE: json.dumps(snapshot.state, indent=1).encode(),
        }
        for name, content in contents.items():
            self.storage.write(f"{directory}/{name}", content)
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = {"format": FORMAT, "step": snapshot.step, "files": files}
        self.storage.write(f"{directory}/{MANIFEST}", json.dumps(manifest, indent=1).encode())

    def read(self, step: int) -> Snapshot:
        """A snapshot, every byte checked against the manifest.

        Raises:
            Damaged: it is not whole.
        """
        files = self._manifest(step)
        contents = {name: self._verified(step, name, files[name]) for name in (MODEL, OPTIMIZER, STATE)}
        try:
            return Snapshot(
                step=step,
                model=safetensors.torch.load(contents[MODEL]),
                optimizer=safetensors.torch.load(contents[OPTIMIZER]),
                state=json.loads(contents[STATE]),
            )
        except Exception as error:  # the bytes are those of the manifest, but nothing that we wrote
            raise Damaged(f"cannot be parsed: {error}") from error

    def read_state(self, step: int) -> dict[str, Any]:
        """Only the plain values of a snapshot, verified as `read` does."""
        state: dict[str, Any] = json.loads(self._verified(step, STATE, self._manifest(step)[STATE]))
        return state

    def _manifest(self, step: int) -> dict[str, Any]:
        try:
            manifest = json.loads(self.storage.read(f"{directory_name(step)}/{MANIFEST}", limit=SMALL))
            files: dict[str, Any] = manifest["files"]
            complete = {MODEL, OPTIMIZER, STATE} <= files.keys()
            readable = manifest["format"] == FORMAT and manifest["step"] == step
            complete &= all(
                isinstance(file["bytes"], int) and isinstance(file["sha256"], str) for file in files.values()
            )
            version = manifest["format"]
        except FileNotFoundError as error:
            raise Damaged("it was never finished") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"{MANIFEST} is damaged") from error
        if isinstance(version, int) and version > FORMAT:
            raise SnapshotError(f"{self.url} has snapshots of format {version}, written by a newer version; upgrade")
        if not (complete and readable):
            raise Damaged(f"{MANIFEST} does not describe step {step} in format {FORMAT}")
        return files

    def _verified(self, step: int, name: str, expected: dict[str, Any]) -> bytes:
        path = f"{directory_name(step)}/{name}"
        if self.storage.size(path) != expected["bytes"]:
            raise Damaged(f"{name} is missing or has another size")
        try:
            content = self.storage.read(path)
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error}") from error
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            raise Damaged(f"{name} has other content than was written")
        return content

    def newest(self) -> Snapshot | None:
        """The newest whole snapshot; each damaged one that is newer is reported in one line.

        Raises:
            SnapshotError: all that were committed are damaged.
        """
        for step in reversed(self.steps()):
            if not self.is_committed(step):
                log.info("%s/%s was never finished and is ignored", self.url, directory_name(step))
                continue
            try:
                return self.read(step)
            except Damaged as damage:
                self.damaged.add(step)
                log.warning("damaged snapshot %s/%s is ignored: %s", self.url, directory_name(step), damage)
        if self.damaged:
            raise SnapshotError(f"all snapshots at {self.url} are damaged; move them away, or use run.resume=never")
        return None

    def prune(self, keep_last: int, best: int | None, newest: int) -> None:
        """Delete all but the last `keep_last` committed snapshots up to `newest` and the `best` one.

        The manifest goes first, so that a snapshot which is deleted half-way does not exist. Directories beyond
        `newest` belong to a future that this run left behind by resuming from an older snapshot; they stay until it
        writes them anew.
        """
        past = [step for step in self.steps() if step <= newest]
        committed = [step for step in past if step not in self.damaged and self.is_committed(step)]
        kept = {*committed[-keep_last:], newest, best}
        for step in past:
            if step not in kept:
                self.storage.delete(f"{directory_name(step)}/{MANIFEST}")
                self.storage.delete(directory_name(step))


def load(url: str) -> Snapshot:
    """The newest snapshot at a run directory, a directory of snapshots or one snapshot.

    Raises:
        SnapshotError: there is none.
    """
    url = url.rstrip("/")
    parent, _, last = url.rpartition("/")
    step = step_of(last)
    if step is not None:
        try:
            return SnapshotStore(parent or ".").read(step)
        except Damaged as damage:
            raise SnapshotError(f"{url} cannot be used: {damage}") from damage
    for candidate in (f"{url}/snapshots", url, _recorded_place(url)):
        found = SnapshotStore(candidate).newest() if candidate else None
        if found is not None:
            return found
    raise SnapshotError(f"there is no whole snapshot at {url}; name a run directory, its snapshots or one of them")


def _recorded_place(run: str) -> str | None:
    """Where a run directory says that it keeps its snapshots, if that is somewhere else."""
    try:
        path = yaml.safe_load(Storage(run).read("config.yaml"))["snapshot"]["path"]
    except Exception:  # it is no run directory of ours
        return None
    return f"{path.rstrip('/')}/{run.rsplit('/', 1)[-1]}" if isinstance(path, str) else None


# Between live objects and named CPU tensors.


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the model's parameters and buffers on the CPU, by name."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}


def load_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """
    Raises:
        SnapshotError: other names or shapes.
    """
    own = model.state_dict()
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong = wrong or [k for k in own if (own[k].shape, own[k].dtype) != (tensors[k].shape, tensors[k].dtype)]
    if wrong:
        raise SnapshotError(f"the snapshot's weights do not fit the model: {', '.join(wrong[:3])}")
    model.load_state_dict(tensors)


def _named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of the optimizer's state on the CPU, as `<parameter>:<name>`; hyper-parameters are configuration."""
    tensors = {}
    for name, parameter in _named_states(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{name}:{key}"] = torch.as_tensor(value).detach().cpu().clone().contiguous()
    return tensors


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """
    Raises:
        SnapshotError: state of parameters that the model does not have.
    """
    parameters = dict(_named_states(model, optimizer))
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(":")
        if name not in states:
            raise SnapshotError(f"the snapshot's optimizer state does not fit the model: {name}")
        states[name][key] = tensor
    if len({frozenset(state) for state in states.values()}) > 1:
        raise SnapshotError("the snapshot's optimizer state lacks some of the parameters")
    for name, state in states.items():
        if any(tensor.dim() and tensor.shape != parameters[name].shape for tensor in state.values()):
            raise SnapshotError(f"the snapshot's optimizer state does not fit the model: {name}")
    # The optimizer's own loader knows which of its tensors follow the parameter to its device and which stay.
    packed = optimizer.state_dict()
    packed["state"] = {i: states[name] for i, name in enumerate(parameters) if states[name]}
    optimizer.load_state_dict(packed)
