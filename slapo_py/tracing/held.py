"""What a container of objects held at one moment."""

from typing import Any

from slapo_py.tracing.align import same
from slapo_py.tracing.values import is_plain


class Held:
    """What a container of objects held when it was read."""

    def __init__(self, container: Any) -> None:
        self.kind = type(container)
        self.items = list(container.items()) if isinstance(container, dict) else list(container)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held) or other.kind is not self.kind or len(other.items) != len(self.items):
            return False
        return all(map(_same_item, other.items, self.items))

    def put_back(self, container: Any) -> None:
        """Let a list, dict or set hold what it held."""
        container.clear()
        if isinstance(container, list):
            container.extend(self.items)
        else:
            container.update(self.items)

    def matches(self, container: Any) -> bool:
        """Whether a container holds the same objects (plain ones by value)."""
        if type(container) is not self.kind:
            return False
        now = list(container.items()) if isinstance(container, dict) else list(container)
        return len(now) == len(self.items) and all(map(_same_item, now, self.items))


def _same_item(now: Any, then: Any) -> bool:
    if isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then):
        return all(map(_same_item, now, then))
    return now is then or (is_plain(then) and same(now, then))
