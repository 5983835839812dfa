"""How DDP calls the communication hook."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from mingpt_ddp.distributed.strategies.ddp import DDPStrategy
from mingpt_ddp.torch_internals import keep_process_group


def test_the_hook_averages_and_is_timed(tmp_path):
    strategy = object.__new__(DDPStrategy)
    strategy.all_reduce_s = 100.0  # of an earlier pass
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DDP(nn.Linear(2, 1, bias=False))
        keep_process_group(model)  # else its end may wait forever for the interpreter's lock
        model.register_comm_hook(
            lambda bucket: default_hooks.fp16_compress_hook(None, bucket), strategy._comm_hook
        )
        model(torch.ones(1, 2)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.0, 1.0]]
        assert 0 < strategy.all_reduce_s < 100
        del model
    finally:
        dist.destroy_process_group()
