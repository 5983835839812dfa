"""Build guard.cpp and load it into a process that has not imported torch yet.

This module must not import torch, because the symbols of the first loaded library win.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def missing_requirement() -> str | None:
    """Return the reason why the guard cannot be built here, or None if it can."""
    if sys.platform != "linux":
        return "the fake GPU needs Linux"
    if shutil.which("g++") is None:
        return "the fake GPU needs g++; on Debian and Ubuntu: apt-get install g++"
    if (_torch_directory() / "lib" / "libtorch_cuda.so").exists():
        return "the fake GPU needs a build of torch without CUDA, whose place it takes"
    return None


def _torch_directory() -> Path:
    spec = importlib.util.find_spec("torch")  # this does not import torch
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _command(target: Path) -> list[str]:
    torch = _torch_directory()
    compile_it = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-I", str(torch / "include")]
    link_it = ["-L", str(torch / "lib"), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    return [*compile_it, str(SOURCE), "-o", str(target), *link_it]


@functools.cache
def build() -> Path:
    """Return the path of the library. Its first use on a machine builds it, in two seconds.

    The name of the file depends on the source and on torch. Several processes may build it at the
    same time, since each renames its own complete file.
    """
    version = importlib.metadata.version("torch")
    key = f"{SOURCE.read_text()} {version} {_torch_directory()} {os.getuid()}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"mingpt-fake-gpu-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    # This process runs the code in the directory, so no other user may own it.
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")
    library = directory / f"guard-{digest}.so"
    if not library.exists():
        own = library.with_suffix(f".{os.getpid()}")
        done = subprocess.run(_command(own), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ cannot build {SOURCE.name}:\n{done.stderr}")
        own.rename(library)
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library and register its guard for devices of type `cuda`. Return the library."""
    assert "torch" not in sys.modules, "the guard must be loaded before torch"
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    library.install_guard()
    return library
