"""Plan a run before it is trained: memory, messages, time and doubts. Read plan.py first."""

from mingpt_ddp.study.planning.sizes import Sizes, sizes

__all__ = ["Sizes", "sizes"]
