"""From a schedule to a module of its own, or to an engine that trains it."""

from slapo_py.build.build import build

__all__ = ["build"]
