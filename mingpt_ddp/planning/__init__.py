"""What a configuration means before it is trained: read plan.py first."""

from mingpt_ddp.planning.sizes import Sizes, sizes

__all__ = ["Sizes", "sizes"]
