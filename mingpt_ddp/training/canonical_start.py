"""What a start of a run with ddp.reduction=canonical must have in common with the starts before."""

import torch

from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.training.preflight import Recorded


def check_canonical_start(
    runtime: Runtime, micro_batch_size: int, recorded: Recorded | None
) -> None:
    """Check what the bits of a canonical run depend on. A collective.

    Args:
        recorded: of the snapshot that the run resumes from, if there is one.

    Raises:
        ConfigError: the ranks have different numbers of threads, or the snapshot has another one or
            other micro-batches.
    """
    if not runtime.strategy.is_canonical:
        return
    threads = runtime.group.all_gather(torch.get_num_threads())
    if len({*threads}) > 1:
        raise ConfigError(
            f"ddp.reduction=canonical needs as many threads on every rank, not {threads}; set "
            "OMP_NUM_THREADS"
        )
    if recorded is None:
        return
    environment = recorded.state.get("environment")
    if not isinstance(environment, dict) or environment.get("reduction") != "canonical":
        return
    settings = {
        "trainer.micro_batch_size": (recorded.micro_batch_size, micro_batch_size),
        "OMP_NUM_THREADS": (environment.get("threads"), threads[0]),
    }
    for name, (before, now) in settings.items():
        if before != now:
            raise ConfigError(
                f"{name}={now} would change the bits of a run with ddp.reduction=canonical; set "
                f"{name}={str(before)[:20]}, or ddp.reduction=fast"
            )
