"""Layouts: how every tensor of a model lies on a mesh axis, and what that needs.

From below: `placement` and `conversions`; `rules` of single operations; the `recording` of a model as one graph;
`inference` of all placements in it; `checking` of a schedule against that; `simulating` ranks in one process.
"""
