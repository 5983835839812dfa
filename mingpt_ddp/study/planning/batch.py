"""Divide the batch of a step between ranks."""

from dataclasses import asdict, dataclass
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import plan_batches, with_batch_size
from mingpt_ddp.distributed.group.process_group import check_ranks
from mingpt_ddp.distributed.strategies import check_strategy
from mingpt_ddp.distributed.strategies.tensor_split import check_tensor_parallel
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.optim.lr_schedule import scale_lr


@dataclass(frozen=True)
class BatchOnRanks:
    """The batch of a step on a number of ranks, and the learning rate for this batch."""

    ranks: int
    copies: int  # number of copies of the model
    batch_size: int
    micro_batch_size: int
    micro_batches: int
    micro_batches_per_rank: int  # number of micro-batches of the busiest rank
    idle: float  # share of the ranks' time that they wait for the busiest rank
    lr: float


def divide_batch(config: Config, ranks: int) -> BatchOnRanks:
    """Divide the batch of a step between ranks.

    Raises:
        ConfigError: This number of ranks cannot train the configuration.
    """
    check_strategy(config, ranks)
    check_tensor_parallel(config)
    check_ranks(config.ddp, ranks)
    copies = ranks // config.ddp.tensor_parallel
    config = with_batch_size(config, copies, None)
    plan = plan_batches(config, copies)
    micro_batches_per_rank = len(plan.indices_for_rank(0))  # rank 0 has the most
    return BatchOnRanks(
        ranks=ranks,
        copies=copies,
        batch_size=plan.batch_size,
        micro_batch_size=plan.micro_batch_size,
        micro_batches=plan.n_micro,
        micro_batches_per_rank=micro_batches_per_rank,
        idle=1 - plan.n_micro / (micro_batches_per_rank * copies),
        lr=scale_lr(config.optimizer, plan.batch_size).lr,
    )


def ranks_row(config: Config, ranks: int) -> dict[str, Any]:
    """Describe the batch on a number of ranks, or explain why they cannot train."""
    try:
        return asdict(divide_batch(config, ranks))
    except ConfigError as error:
        return {"ranks": ranks, "error": str(error.args[0])}
