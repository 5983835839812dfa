r"""Compare the weights of all ranks in every step, to find a bit that has flipped in memory.

    python main.py experiment=demo run.name=verified ddp.nproc_per_node=2 trainer.max_steps=20 \
        +data.code=$PWD/examples/verify_copies.py

Damaged memory raises no error: the run continues with wrong weights. With ddp.strategy=ddp or zero1
all ranks hold equal weights, bit for bit. After each update this hook adds up the bits of every
weight, and compares the sums of all ranks. If a sum differs, an error names the rank and the
weight, and this step is not saved. The launcher then restarts the run from the last snapshot. The
same command also does this if you run it again.

To compare less often, copy this file and change EVERY. A snapshot of a step in between is then not
checked, and may hold damaged weights. The hook cannot see a flipped bit in an activation or a
gradient, because the average passes its effect to all ranks alike. A replay finds such a bit
(docs/fault-tolerance.md). Do not use the hook with fsdp, hsdp or tensor parallelism, where each
rank holds only a part of the weights.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt_ddp.registry import acts

EVERY = 1  # steps between two comparisons
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
CHUNK = 1 << 20  # number of elements to convert to int64 at once


@acts("update")
def verify_copies(step: int, weights: dict[str, Tensor]) -> None:
    """Compare the weights of all ranks. This is a collective.

    Raises:
        RuntimeError: The ranks hold different bits of a weight. Every rank raises this error, which
            names the step, the weight and the ranks that differ from most others.
    """
    if step % EVERY or not dist.is_initialized():
        return
    own = torch.stack([sum_of_bits(weight) for weight in weights.values()])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    sums = torch.stack(gathered, dim=1).tolist()  # for each weight, its sums on all ranks
    for name, by_rank in zip(weights, sums, strict=True):
        common, count = Counter(by_rank).most_common(1)[0]
        if count == len(by_rank):
            continue
        odd = [rank for rank, value in enumerate(by_rank) if value != common]
        message = f"after step {step} rank {odd[0]} holds different bits of {name} than "
        if 2 * count > len(by_rank):
            raise RuntimeError(f"{message}most ranks (odd ranks: {odd}); test its memory")
        raise RuntimeError(f"{message}rank {by_rank.index(common)}; test the memory of both")


def sum_of_bits(weight: Tensor) -> Tensor:
    """Sum a tensor's elements, whose bits are read as integers of the same width, modulo 2**64.

    Any single flipped bit changes the sum. It does not depend on the order of the additions.
    """
    words = weight.flatten().view(INTEGERS[weight.element_size()])
    return torch.stack([part.sum(dtype=torch.int64) for part in words.split(CHUNK)]).sum()
