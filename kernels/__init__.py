"""Fused operations: plain functions that anyone can call, and that `sch[path].fuse("name")` puts into a model."""

from slapo_py.kernels.bias_gelu import bias_gelu as bias_gelu
from slapo_py.kernels.spec import Form as Form
from slapo_py.kernels.spec import Kernel as Kernel
from slapo_py.kernels.spec import find_kernel as find_kernel
from slapo_py.kernels.spec import list_kernels as list_kernels
from slapo_py.kernels.spec import register_kernel as register_kernel
from slapo_py.kernels.spec import unregister_kernel as unregister_kernel
