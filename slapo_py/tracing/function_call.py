"""A call of an autograd.Function as one graph node."""

from typing import Any

import torch


class FunctionCall:
    """`cls.apply` of an autograd.Function as a plain picklable callable that fx can print."""

    def __init__(self, cls: type[torch.autograd.Function]) -> None:
        self.cls = cls
        self.__name__ = self.__qualname__ = f"{cls.__name__}_apply"

    def __call__(self, *args: Any) -> Any:
        return self.cls.apply(*args)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionCall) and other.cls is self.cls

    def __hash__(self) -> int:
        return hash(self.cls)
