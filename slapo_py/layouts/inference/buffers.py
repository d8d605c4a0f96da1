"""Buffers that lie as what reads them: batch norm's running statistics, say, lie as its weight does."""

from torch import fx, nn

from slapo_py.layouts.inference.state import Typing
from slapo_py.layouts.placement import R, Shard


def split_buffers(typing: Typing, module: nn.Module) -> dict[fx.Node, Shard]:
    """Buffers that every reader wants split alike, as batch norm its running statistics: a rank holds its part.

    module: what was recorded. A tensor that is a plain attribute of it stays whole, and each rank takes its part.
    """
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    found: dict[fx.Node, Shard] = {}
    for node in typing.graph.nodes:
        if node.op == "get_attr" and node in typing.after and str(node.target) in names:
            wanted = {typing.on_edge[node, one].target if (node, one) in typing.on_edge else R for one in node.users}
            shard = wanted.pop() if len(wanted) == 1 else R
            if isinstance(shard, Shard):
                found[node] = shard
    return found
