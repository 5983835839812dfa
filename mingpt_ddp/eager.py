"""torch without its compiler, for as long as nothing is compiled.

torch's optimizers and DistributedDataParallel import torch._dynamo, which takes a second and a half of every process,
only to tell it to leave them alone. Until somebody wants more of it than that, a stand-in is told. torch itself imports
torch._meta_registrations, a quarter of the time that it takes: what operations do with tensors that have no data, those
of the compiler and of `torch.device("meta")`. It is loaded with the compiler, or before the user's own code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

NAME = "torch._dynamo"
META = "torch._meta_registrations"


class Part:
    """A module of the compiler of which one function is known here."""

    def __init__(self, name: str, **known: Callable[[], Any]) -> None:
        self._name = name
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(real(), self._name), name)


class StandIn(types.ModuleType):
    """What eager code asks of the compiler; at the first other question the real one takes its place."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__path__: list[str] = []  # a package: its parts are looked for
        self.utils = Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # the default
        self.trace_rules = Part("trace_rules", clear_lru_cache=lambda: None)

    @staticmethod
    def disable(function: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
        return function

    @staticmethod
    def graph_break(*args: Any, **options: Any) -> None:
        """There is no graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module, by `inspect` for one
            raise AttributeError(name)
        return getattr(real(), name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Whoever imports a part of the compiler imports the real one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not (name.startswith(f"{NAME}.") and stands_in()):
            return None
        real()
        return importlib.machinery.ModuleSpec(name, self) if name in sys.modules else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """It has been."""


FINDER = Finder()


class Deferred(types.ModuleType):
    """torch._meta_registrations, until somebody asks for anything of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        complete()
        return getattr(sys.modules[META], name)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around the first import of torch; later it changes nothing.

    Python's collector looks at all objects again and again while modules make hundreds of thousands of them, which
    stay: it is switched off, and never looks at them afterwards either.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    sys.modules[META] = Deferred(META)
    gc.disable()
    try:
        yield
        importlib.import_module("torch._prims.rng_prims")  # of what was put off, torch.Generator() needs this
        gc.freeze()
    finally:
        gc.enable()


def complete() -> None:
    """Load what a tensor without data needs, if it was put off."""
    if isinstance(sys.modules.get(META), Deferred):
        del sys.modules[META]
        importlib.import_module(META)


def stands_in() -> bool:
    return isinstance(sys.modules.get(NAME), StandIn)


def without_compiler() -> None:
    """Put the stand-in where torch looks for its compiler, unless that is loaded."""
    import torch

    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = StandIn()
        sys.meta_path.insert(0, FINDER)


def real() -> types.ModuleType:
    """torch's compiler, loaded now if it was not."""
    import torch

    complete()
    if stands_in():
        del sys.modules[NAME]
        sys.meta_path.remove(FINDER)
        del torch._dynamo  # torch finds it again
        importlib.import_module(NAME)
    return sys.modules[NAME]
