"""Fused operations: plain functions that anyone can call, and that `sch[path].fuse("name")` puts into a model."""

from slapo_py.kernels.spec import Kernel, find_kernel, list_kernels, register_kernel, unregister_kernel

__all__ = ["Kernel", "find_kernel", "list_kernels", "register_kernel", "unregister_kernel"]
