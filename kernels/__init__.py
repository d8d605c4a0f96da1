"""Fused ops, one a file. None is shipped yet."""
