"""Importable arguments for the tests of histories."""

import enum
import os as os  # what a forged history must not reach through this module
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

imported = []


class Colors(enum.Enum):
    RED = 1


class Holder:
    @staticmethod
    def nested(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE


VALUE = 3


def keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
