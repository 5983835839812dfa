"""Compare what the ranks hold, every trainer.verify_every steps and before each commit.

Damaged memory raises no error: the run trains on with it, and its gradients reach all ranks.
"""

import logging

from mingpt_ddp.distributed.group.copies import checksums, copy_name, find_difference
from mingpt_ddp.errors import DamageError
from mingpt_ddp.models.dtensor import local_tensor
from mingpt_ddp.snapshots.write.shard_plan import TensorsByKind
from mingpt_ddp.training.trainable import Run

log = logging.getLogger(__name__)

MAX_RETURNS = 3  # to one snapshot; memory that is damaged more often is broken


class CopyCheck:
    """Compare copies when it is due; count how often the run went back to the same snapshot."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.every = run.config.trainer.verify_every
        self.agreed_step = run.state.step  # the last at which all copies were equal
        self._returned_to: int | None = None  # step of the snapshot after the last damage
        self._returns = 0  # to it, in a row
        strategy = run.runtime.strategy
        ranks = run.runtime.group.world_size
        if self.every and ranks == 1:
            log.info("trainer.verify_every compares only what is staged: there is one rank")
        elif self.every:
            log.info("the copies of %d ranks are compared every %d steps", ranks, self.every)
        if self.every and strategy.is_sharded and strategy.name != "hsdp":
            log.warning(
                "trainer.verify_every compares little with ddp.strategy=%s, which keeps no second "
                "copy; ddp does",
                strategy.name,
            )

    def checksums(self, tensors: TensorsByKind) -> dict[str, int] | None:
        """Return the checksums of all tensors that this rank holds; None if nothing compares."""
        if not self.every:
            return None
        strategy = self.run.runtime.strategy
        parts = {}
        for kind, named in tensors.items():
            for name, tensor in named.items():
                part = local_tensor(tensor)
                parts[copy_name(kind, name, part, strategy.part)] = part
        return checksums(parts)

    def check(self, step: int) -> None:
        """Compare the ranks after a step, if it is due. A collective.

        Raises:
            DamageError: on every rank; names a tensor and the ranks.
        """
        if self.every and step % self.every == 0:
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare the ranks after a step, unless trainer.verify_every=0. A collective.

        Raises:
            DamageError: on every rank; names a tensor and the ranks.
        """
        group = self.run.runtime.group
        if not self.every or group.world_size == 1:
            return
        group.set_activity("comparing the copies of the ranks")
        checksums = self.checksums(self.run.trainable.tensors()) or {}

        def refuse(by_rank: list[dict[str, int]]) -> None:
            if difference := find_difference(by_rank):
                raise DamageError(f"{difference}, at step {step}")

        group.check_agreement(checksums, refuse)  # with fsdp, say, ranks hold different tensors
        self.agreed_step = step

    def count_return(self, step: int) -> bool:
        """Count a return to the snapshot of a step; return whether to try once more from there."""
        self._returns = self._returns + 1 if step == self._returned_to else 1
        self._returned_to = step
        self.agreed_step = step
        return self._returns <= MAX_RETURNS
