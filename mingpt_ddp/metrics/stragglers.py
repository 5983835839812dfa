"""Find the slowest rank, which the other ranks wait for."""

import statistics

import torch

from mingpt_ddp.distributed.group.process_group import ProcessGroup


def slowest_rank(group: ProcessGroup, work_ms: float, micro_batches: int) -> dict[str, float]:
    """Compare the slowest rank with the median of the other ranks.

    This is a collective: all ranks must call it.

    Args:
        work_ms: Milliseconds that this rank works per step, without waiting for other ranks. 0 if
            this time was not measured.
        micro_batches: Number of this rank's micro-batches per step. A rank may have one
            micro-batch more than other ranks, which does not make it slow.

    Returns:
        Two metrics by tag: the number of the slowest rank, and the time that it works divided by
        the median of the other ranks. Empty for a single rank, or if the work was not measured.
    """
    if group.world_size == 1:
        return {}
    row = torch.tensor([work_ms / micro_batches], dtype=torch.float64)
    work = group.all_gather_async(row)().flatten().tolist()
    rank = work.index(max(work))
    slowest_ms = work.pop(rank)
    if min(work) <= 0.0:
        return {}
    ratio = slowest_ms / statistics.median(work)
    return {"speed/slowest_rank": float(rank), "speed/slowest_ratio": ratio}
