"""Average the gradients with a communication hook of your own, a ring all-reduce.

    python main.py experiment=demo run.name=ring ddp.nproc_per_node=3 trainer.max_steps=20 \
        ddp.comm_hook=ring +data.code=$PWD/examples/ring_hook.py

The ring is made of sends and receives. Every rank gets the same bits, and a run resumes byte for
byte. The hook blocks the backward pass, so DDP's own all-reduce is faster. On GPUs it needs NCCL.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from mingpt_ddp.registry import register_comm_hook


@register_comm_hook("ring")
def ring_hook(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients over all ranks.

    DDP calls this hook in one thread, with the buckets in the same order on every rank.
    """
    average = bucket.buffer()
    # Divide before the sum, which may overflow in 16 bits.
    average.div_(dist.get_world_size())
    ring_all_reduce(average)
    future: Future[Tensor] = Future(devices=[average.device] if average.is_cuda else None)
    future.set_result(average)
    return future


def ring_all_reduce(values: Tensor) -> None:
    """Sum a tensor (n) over all ranks, in place. This is a collective.

    The tensor is cut into one chunk per rank. In every step each rank passes one chunk to the next
    rank. The first ranks - 1 steps are a reduce-scatter: the receiver adds its own values, and in
    the end each rank has the complete sum of one chunk. The other ranks - 1 steps are an
    all-gather: the sums go around the ring. Each rank sends 2 (ranks - 1) / ranks of the tensor,
    which is the least possible for any number of ranks.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations".
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    chunks = values.tensor_split(ranks)  # views; the first ones may have one more element
    received = torch.empty_like(chunks[0])
    for step in range(2 * (ranks - 1)):
        outgoing = chunks[(rank - step) % ranks]
        incoming = chunks[(rank - step - 1) % ranks]
        if step < ranks - 1:
            part = received[: len(incoming)]
            exchange(outgoing, part)
            incoming += part
        else:
            exchange(outgoing, incoming)


def exchange(outgoing: Tensor, incoming: Tensor) -> None:
    """Send a tensor to the next rank while receiving one from the previous rank.

    Rank 0 follows the last rank.
    """
    if outgoing.is_cuda and "cuda:gloo" in dist.get_backend_config():
        raise RuntimeError("gloo cannot send tensors of a GPU; use ddp.backend=nccl")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    send = dist.P2POp(dist.isend, outgoing, (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % ranks)
    # Send and receive at once, because two blocking sends would wait for each other.
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
