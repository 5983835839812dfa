"""Private API of torch that the package uses.

It exists in this version of torch, only one module uses it, and runs work without it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import mingpt_ddp
from mingpt_ddp import torch_internals as internals

PACKAGE = Path(mingpt_ddp.__file__).parent
MODULE = "torch_internals.py"
FILES = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
# Functions of the module torch_internals, and the private names of torch that they use.
NAMES = [
    ("cpu_is_fast_at_bf16", torch.cpu, "_is_avx512_bf16_supported _is_amx_tile_supported"),
    ("cpu_is_fast_at_bf16", torch.ops.mkldnn, "_is_mkldnn_bf16_supported"),
    ("for_each", torch, "_foreach_mul_ _foreach_add_ _foreach_lerp_ _foreach_lerp"),
    ("for_each", torch, "_foreach_sub _foreach_norm"),
    (
        "leave_overflow_to_scaler",
        torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True),
        "_step_supports_amp_scaling",
    ),
    ("has_hooks", nn.Linear(1, 1), "_forward_hooks _forward_pre_hooks"),
    ("pack_linear", torch.ops.mkldnn, "_reorder_linear_weight _linear_pointwise"),
    ("pack_linear", torch.ops.quantized, "linear_prepack_fp16 linear_dynamic_fp16"),
    ("time_communication", DDP, "_set_ddp_runtime_logging_sample_rate"),
    ("communication_times", DDP, "_get_ddp_logging_data"),
    ("clone_store", dist.HashStore(), "clone"),
    ("record_gpu_allocations", torch.cuda.memory, "_record_memory_history"),
    ("dump_gpu_memory", torch.cuda.memory, "_dump_snapshot"),
]
PRIVATE_NAMES = {name for _, _, names in NAMES for name in names.split()} - {"clone"}


@pytest.mark.parametrize(("function", "owner", "names"), NAMES)
def test_torch_has_the_private_names_that_we_use(function, owner, names):
    assert callable(getattr(internals, function))
    assert not [name for name in names.split() if not hasattr(owner, name)]


def test_the_compiler_has_the_private_names_that_we_use():
    from torch._dynamo import config, exc
    from torch._inductor import config as inductor

    if torch.__version__ >= "2.10":  # torch 2.9 has no such setting
        assert inductor.deterministic is False
    assert config.optimize_ddp is True
    assert internals.compile_error() is exc.TorchDynamoException
    assert issubclass(exc.Unsupported, exc.TorchDynamoException)
    assert issubclass(exc.BackendCompilerFailed, exc.TorchDynamoException)


def test_every_function_is_listed_here():
    defined = {
        n.name for n in ast.parse(FILES[MODULE].read_text()).body if isinstance(n, ast.FunctionDef)
    }
    others = {
        "can_pack",
        "compile_deterministically",
        "compile_error",
        "cut_graph_at_buckets",
        "keep_process_group",
    }
    listed = {function for function, _, _ in NAMES}
    assert defined == {*listed, *others, "without_profiler_noise"}


# No other module uses private names


def private_uses(source: str) -> Iterator[str]:
    """Yield uses of private names of torch, such as `torch.x._y`, and imports of private names.

    Imports may have given torch or a part of it another name.
    """
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported.append(alias.name)
                aliases[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else ""
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported.append(f"{node.module}.{alias.name}")
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    torchs = {name for name, full in aliases.items() if (full or name).split(".")[0] == "torch"}
    yield from (name for name in imported if name.startswith("torch.") and is_private(name))
    for chain in map(dotted, ast.walk(tree)):
        if chain.partition(".")[0] in torchs and is_private(chain):
            yield chain


def dotted(node: ast.AST) -> str:
    """Return an expression of the form `a.b.c` as text, or "" if it has another form."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def is_private(dotted: str) -> bool:
    return any(re.match(r"_(?!_)", part) for part in dotted.split(".")[1:])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._foreach_mul_(x, 1)", ["torch._foreach_mul_"]),
        ("import torch\ntorch.ops.mkldnn._linear(x)", ["torch.ops.mkldnn._linear"]),
        ("import torch.distributed as dist\ndist._x", ["dist._x"]),
        ("from torch import nn as n\nn.Module._call_impl", ["n.Module._call_impl"]),
        ("def f():\n    from torch.optim import _multi", ["torch.optim._multi"]),
        ("from torch._dynamo.exc import Unsupported", ["torch._dynamo.exc.Unsupported"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import os, torch\nos._exit(0), torch.__version__, self._x, torch.x", []),
    ],
)
def test_private_uses_are_found(source, found):
    assert list(private_uses(source)) == found


def test_no_other_module_uses_private_names():
    others = "|".join(sorted(PRIVATE_NAMES | {"bucket_bytes_cap", "optimize_ddp"}))
    for module in FILES.keys() - {MODULE}:
        source = FILES[module].read_text()
        assert "torch" not in source or not list(private_uses(source)), module
        assert not re.findall(rf"\b({others})\b", source), module


# With and without the private API


@pytest.fixture(params=[True, False], ids=["there", "gone"])
def there(request) -> bool:
    return request.param


def test_for_each(there, monkeypatch):
    def tensors() -> list[torch.Tensor]:
        return [torch.arange(6.0).view(2, 3), torch.linspace(0, 1, 5)]

    if not there:
        for name in ("mul_", "add_", "lerp_", "lerp"):
            monkeypatch.delattr(torch, f"_foreach_{name}")
    a, b = tensors(), [2 * tensor for tensor in tensors()]
    mixed = internals.for_each("lerp", a, b, 0.25)
    internals.for_each("mul_", a, 3.0)
    internals.for_each("add_", a, b, alpha=-0.5)
    internals.for_each("lerp_", b, mixed, 0.5)
    for x, plain in enumerate(tensors()):
        torch.testing.assert_close(mixed[x], 1.25 * plain)
        torch.testing.assert_close(a[x], 2 * plain)
        torch.testing.assert_close(b[x], 1.625 * plain)


def test_an_unknown_cpu_is_not_fast(monkeypatch):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name)
    assert internals.cpu_is_fast_at_bf16() is False


def test_a_cpu_whose_onednn_is_limited_is_not_fast():
    """Some layers, such as nn.LSTM, cannot run in bf16 then."""
    code = "from mingpt_ddp.torch_internals import cpu_is_fast_at_bf16 as fast; print(fast())"
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(PACKAGE.parent)}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == "False\n"


def test_hooks():
    module = nn.Linear(1, 1)
    assert not internals.has_hooks(module)
    handle = module.register_forward_pre_hook(lambda module, inputs: None)
    assert internals.has_hooks(module)
    handle.remove()
    module.register_forward_hook(lambda module, inputs, y: None)
    assert internals.has_hooks(module)
    assert internals.has_hooks(object()), "an unknown object may have hooks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_layer_computes_the_same(dtype):
    """A layer that is packed in fp16 takes and returns fp32."""
    if not internals.can_pack(dtype):
        pytest.skip(f"this CPU, or this torch, cannot pack in {dtype}")
    given = torch.float32 if dtype == torch.float16 else dtype
    layer, x = nn.Linear(5, 3).to(given), torch.randn(2, 4, 5).to(given)
    packed = internals.pack_linear(layer.weight.detach(), layer.bias.detach(), dtype, batch=4)
    torch.testing.assert_close(packed(x), layer(x).detach(), rtol=0.02, atol=0.02)


@pytest.fixture
def wrapped(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    model = DDP(nn.Linear(64, 64))
    internals.keep_process_group(model)  # else its end may wait forever for the interpreter's lock
    yield model
    dist.destroy_process_group()


def test_communication_is_timed(wrapped, there, monkeypatch):
    if not there:
        for name in ("_set_ddp_runtime_logging_sample_rate", "_get_ddp_logging_data"):
            monkeypatch.delattr(DDP, name)
    internals.time_communication(wrapped, every=1)
    for _ in range(3):
        wrapped(torch.randn(8, 64)).sum().backward()
    times = internals.communication_times(wrapped)
    if not there:
        assert times == internals.CommunicationTimes(iteration=0, total_s=0, hidden_s=0)
        return
    assert times.iteration == 2  # a forward pass shows the times of the iteration before it
    assert 0 < times.total_s < 60
    assert 0 <= times.hidden_s < 60


@pytest.mark.parametrize(
    ("mib", "wanted", "cuts"), [(25, True, True), (0.5, True, False), (25, False, False)]
)
def test_where_torch_can_cut_the_graph(wrapped, mib, wanted, cuts):
    from torch._dynamo import config

    assert wrapped.bucket_bytes_cap == 25 * 2**20
    wrapped.bucket_bytes_cap = mib * 2**20
    internals.cut_graph_at_buckets(wrapped, wanted)
    assert config.optimize_ddp is cuts
    config.optimize_ddp = True


def test_a_store_is_cloned(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    clone = internals.clone_store(store)
    assert clone is not store
    clone.set("key", "value")
    assert store.get("key") == b"value"
    nothing = object()
    assert internals.clone_store(nothing) is nothing


def test_a_profile_writes_no_lines_of_its_own(capfd):
    """All else that arrives at standard error meanwhile, such as errors of the profiler, is
    kept, but not that there is no GPU.
    """
    no_gpu = b"ERROR:2026 1:1 DeviceProperties.cpp:48] gpuGetDeviceCount failed with code 35\n"
    with internals.without_profiler_noise():
        profile = torch.profiler.profile()
        profile.start()
        os.write(2, b"ERROR:2026 CuptiActivityApi.cpp:1] no permission\n")
        os.write(2, no_gpu)
        torch.ones(2).add(1)
        profile.stop()
    with pytest.raises(ValueError, match="x"), internals.without_profiler_noise():
        os.write(2, b"before an exception")
        raise ValueError("x")
    os.write(2, b" and after it\n")
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "ERROR:2026 CuptiActivityApi.cpp:1] no permission",
        "before an exception and after it",
    ]


def test_a_profile_without_standard_error(capfd):
    kept = os.dup(2)
    os.close(2)
    try:
        with internals.without_profiler_noise():
            pass
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(2)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
