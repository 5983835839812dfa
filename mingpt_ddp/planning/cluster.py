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

    def traffic(self, sent: int, ranks: int, rings_per_node: int = 1) -> "Traffic":
        """Return the traffic of a collective in which each rank of a ring sends some bytes.

        Across nodes the ranks of a node reduce, or copy, among themselves first, so that the
        network carries each byte once per node and not once per rank.

        Args:
            ranks: of the ring; with more than a node has, it crosses the network.
            rings_per_node: those that share a node's network.
        """
        if ranks == 1:
            return Traffic()
        network_s = 0.0
        nodes = ranks * rings_per_node // self.ranks_per_node
        if nodes > 1:
            whole = sent * ranks / (ranks - 1)
            leaves_node = whole * (nodes - 1) / nodes * rings_per_node
            network_s = leaves_node / self.network
        return Traffic(sent, sent / self.link, network_s)


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in a step, and the least times that links and network take for it."""

    sent: int = 0  # bytes
    link_s: float = 0.0
    network_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the least time: links and network may work at once."""
        return max(self.link_s, self.network_s)

    def __add__(self, other: "Traffic") -> "Traffic":
        link_s = self.link_s + other.link_s
        return Traffic(self.sent + other.sent, link_s, self.network_s + other.network_s)


def all_reduce(size: int, ranks: int) -> int:
    """Return the bytes that a rank sends in a ring all-reduce of `size` bytes."""
    return 2 * all_gather(size, ranks)


def all_gather(size: int, ranks: int) -> int:
    """Return the bytes that a rank sends in an all-gather, or reduce-scatter, of `size` in all."""
    return size * (ranks - 1) // ranks
