"""What this process sends to other ranks: bytes and calls, counted where a collective of ours is issued.

    with counted() as traffic:
        loss.backward()
    traffic.sent           # {"all_reduce": 4096}: this rank's share
    traffic.in_all(group)  # the same summed over the ranks, as the costs of redistributions are counted

A share is what a rank sends when each part takes the shortest way: the ring's 2(p-1)/p T of an all-reduce, p-1 times
its part in an all-gather, all but its own part in a reduce-scatter or an all-to-all. Padding of uneven parts counts.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass
class Traffic:
    """Bytes sent and calls made, by kind of collective."""

    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        """Of every kind."""
        return sum(self.sent.values())

    def in_all(self, group: dist.ProcessGroup | None = None) -> "Traffic":
        """The sums over the ranks of a group: a collective call, which is not counted itself."""
        shares: list[Traffic] = [Traffic() for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(shares, Traffic(self.sent.copy(), self.calls.copy()), group=group)
        total = Traffic()
        for share in shares:
            total.sent.update(share.sent)
            total.calls.update(share.calls)
        return total


_open: list[Traffic] = []
"""Of the process, not of a thread: a backward runs in threads of autograd's own."""


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count what is sent within, in compiled code too. Counts may nest: each sees all that is within it."""
    traffic = Traffic()
    _open.append(traffic)
    try:
        yield traffic
    finally:
        _open[:] = [one for one in _open if one is not traffic]


def record(kind: str, sent: int) -> None:
    """Called by a collective as it is issued. sent: this rank's share, in bytes."""
    for traffic in _open:
        traffic.sent[kind] += sent
        traffic.calls[kind] += 1
