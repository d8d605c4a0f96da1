"""Patterns: how they are said, where they are found, and what is put in their place."""

from slapo_py.patterns.children import is_known
from slapo_py.patterns.nearest import why_none, why_not
from slapo_py.patterns.pattern import Pattern, as_pattern, call, pattern, wild
from slapo_py.patterns.search import Occurrence, find
from slapo_py.patterns.words import Attribute

__all__ = [
    "Attribute", "Occurrence", "Pattern", "as_pattern", "call", "find", "is_known", "pattern", "why_none", "why_not",
    "wild",
]  # fmt: skip
