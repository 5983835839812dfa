"""The GPUs of a plan, and what collectives send there by ring algorithms.

Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (JPDC 69(2)).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs. Rates are what a GPU, or a node, sends while it receives as much."""

    nodes: int
    ranks_per_node: int
    link: float  # bytes/s of a GPU to those of its node
    network: float  # bytes/s of a node to others

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def seconds(self, sent: float, ranks: int, rings_per_node: int = 1) -> float:
        """Return the least time of a ring in which each rank sends some bytes.

        Args:
            ranks: of the ring; with more than a node has, it crosses the network.
            rings_per_node: those that share a node's network.
        """
        crosses = self.nodes > 1 and ranks * rings_per_node > self.ranks_per_node
        rate = min(self.link, self.network / rings_per_node) if crosses else self.link
        return sent / rate


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in a step."""

    sent: int  # bytes
    seconds: float  # at the rates of the cluster

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.sent + other.sent, self.seconds + other.seconds)


def all_reduce(size: int, ranks: int) -> int:
    """Return the bytes that a rank sends in a ring all-reduce of `size` bytes."""
    return 2 * all_gather(size, ranks)


def all_gather(size: int, ranks: int) -> int:
    """Return the bytes that a rank sends in an all-gather, or reduce-scatter, of `size` in all."""
    return size * (ranks - 1) // ranks
