"""nn.DataParallel: one process, a thread per GPU; on a CPU it is the model itself."""

from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.distributed.strategies.base import Strategy


class _DataParallel(nn.DataParallel[nn.Module]):
    """Gather mean losses as their mean over the whole batch; torch would return one per GPU."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        outputs = super().parallel_apply(replicas, inputs, kwargs)
        if not all(isinstance(output, Tensor) and output.dim() == 0 for output in outputs):
            return list(outputs)
        sizes = [len(arguments[0]) for arguments in inputs]
        return [o * (n / sum(sizes)) for o, n in zip(outputs, sizes, strict=True)]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        if isinstance(outputs[0], Tensor) and outputs[0].dim() == 0:
            return torch.stack([output.to(output_device) for output in outputs]).sum()
        return super().gather(outputs, output_device)


class DPStrategy(Strategy):
    """Split every micro-batch over the GPUs of this process."""

    name = "dp"

    def wrap(self, model: nn.Module, graphs: bool = False) -> nn.Module:
        return _DataParallel(model)
