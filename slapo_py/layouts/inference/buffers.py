"""Buffers that lie as what reads them: batch norm's running statistics, say, lie as its weight does."""

from torch import fx, nn

from slapo_py.layouts.inference.state import Typing
from slapo_py.layouts.placement import R, Shard


def split_buffers(typing: Typing) -> dict[fx.Node, Shard]:
    """Buffers that every reader wants split alike, as batch norm its running statistics: a rank holds its part."""
    found: dict[fx.Node, Shard] = {}
    for node in typing.graph.nodes:
        if node.op == "get_attr" and node in typing.after and not isinstance(node.meta.get("val"), nn.Parameter):
            wanted = {typing.on_edge[node, one].target if (node, one) in typing.on_edge else R for one in node.users}
            shard = wanted.pop() if len(wanted) == 1 else R
            if isinstance(shard, Shard):
                found[node] = shard
    return found
