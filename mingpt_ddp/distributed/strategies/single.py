"""One rank: the model itself, compiled if requested."""

from mingpt_ddp.distributed.strategies.base import Strategy


class SingleStrategy(Strategy):
    """Train on one rank."""
