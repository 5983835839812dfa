"""Eager training does not load torch's compiler, and whoever wants it, or a part of it, gets the real one."""

from __future__ import annotations

import subprocess
import sys

import pytest

EAGER = """
import gc, sys, tempfile
from mingpt_ddp.eager import Deferred, complete, loading, stands_in, without_compiler
with loading():
    assert not gc.isenabled()
    import torch
assert gc.isenabled() and gc.get_freeze_count() > 100_000
without_compiler()
torch.Generator().manual_seed(1)
nothing = torch.empty(2, 2, device="meta")
def is_put_off():
    put_off = isinstance(torch._meta_registrations, Deferred)
    assert put_off == isinstance(sys.modules["torch._meta_registrations"], Deferred)
    return put_off
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
wrapped = DistributedDataParallel(model)
for x in torch.randn(3, 4, 2):
    wrapped(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert not [name for name in sys.modules if name.startswith("torch._dynamo.")]
import inspect
inspect.getmodule(inspect.currentframe())
from torch.distributed.tensor import DTensor
assert stands_in() and is_put_off()
try:
    torch.cholesky_inverse(nothing)
except NotImplementedError:
    pass
else:
    raise AssertionError("nothing was put off")
"""
WANTED = {
    "compile": "model.compile(backend='eager'); wrapped(x).sum().backward(); optimizer.step()",
    "attribute": "assert torch._dynamo.utils.counters is torch._dynamo.utils.counters; torch.compiler.reset()",
    "part": "import torch._dynamo.config as c; assert c is sys.modules['torch._dynamo.config'] is torch._dynamo.config",
    "name": "from torch._dynamo.utils import counters; from torch._dynamo import reset; reset()",
}
WHOLE = "assert not is_put_off(); torch.cholesky_inverse(nothing)"


@pytest.mark.parametrize("wanted", WANTED)
def test_the_compiler_is_loaded_when_it_is_wanted(wanted):
    check(WANTED[wanted], "assert not stands_in() and sys.modules['torch._dynamo'].__file__", WHOLE)


@pytest.mark.parametrize("wanted", ["complete()", "from torch._meta_registrations import meta_index_Tensor"])
def test_what_tensors_without_data_need_is_loaded_when_it_is_wanted(wanted):
    check(wanted, WHOLE)


def test_the_users_own_code_finds_all_of_torch(tmp_path):
    (tmp_path / "own.py").write_text("import torch\ntorch.cholesky_inverse(torch.empty(2, 2, device='meta'))\n")
    run = f"run_file(Path({str(tmp_path / 'own.py')!r}), 'model.code')"
    check(f"from pathlib import Path; from mingpt_ddp.registry import run_file; {run}", WHOLE)


def check(*lines: str) -> None:
    script = "\n".join([EAGER, *lines, "import os; os._exit(0)"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
