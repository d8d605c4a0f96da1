"""Layouts as types: where the parts of a tensor lie on a mesh axis, and what an operation makes of that."""
