"""Plan a run before it is trained: its memory, messages and time. Read plan.py first."""

from mingpt_ddp.study.planning.sizes import Sizes, sizes

__all__ = ["Sizes", "sizes"]
