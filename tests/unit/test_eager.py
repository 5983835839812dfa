"""Eager training does not load torch's compiler, and whoever wants it gets the real one."""

from __future__ import annotations

import subprocess
import sys

import pytest

EAGER = """
import sys, tempfile
from mingpt_ddp.eager import stands_in, without_compiler
without_compiler()
import torch
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
assert stands_in()
"""
WANTED = {
    "compile": "model.compile(backend='eager'); wrapped(x).sum().backward(); optimizer.step()",
    "attribute": "assert torch._dynamo.utils.counters is torch._dynamo.utils.counters; torch.compiler.reset()",
    "part": "import torch._dynamo.config as c; assert c is sys.modules['torch._dynamo.config'] is torch._dynamo.config",
    "name": "from torch._dynamo.utils import counters; from torch._dynamo import reset; reset()",
}


@pytest.mark.parametrize("wanted", WANTED)
def test_the_compiler_is_loaded_when_it_is_wanted(wanted):
    after = "assert not stands_in() and sys.modules['torch._dynamo'].__file__\nimport os; os._exit(0)"
    done = subprocess.run([sys.executable, "-c", f"{EAGER}\n{WANTED[wanted]}\n{after}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
