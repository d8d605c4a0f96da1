"""Fused operations: plain functions that anyone can call, and that `sch[path].fuse("name")` puts into a model."""

from slapo_py.kernels.add_layer_norm import add_layer_norm as add_layer_norm
from slapo_py.kernels.add_rms_norm import add_rms_norm as add_rms_norm
from slapo_py.kernels.bias_dropout_add import bias_dropout_add as bias_dropout_add
from slapo_py.kernels.bias_gelu import bias_gelu as bias_gelu
from slapo_py.kernels.cross_entropy import cross_entropy as cross_entropy
from slapo_py.kernels.dropout_add_layer_norm import dropout_add_layer_norm as dropout_add_layer_norm
from slapo_py.kernels.geglu import geglu as geglu
from slapo_py.kernels.layer_norm import layer_norm as layer_norm
from slapo_py.kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from slapo_py.kernels.masked_softmax import masked_softmax as masked_softmax
from slapo_py.kernels.rms_norm import rms_norm as rms_norm
from slapo_py.kernels.rope import rope as rope
from slapo_py.kernels.softcap import softcap as softcap
from slapo_py.kernels.spec import Form as Form
from slapo_py.kernels.spec import Kernel as Kernel
from slapo_py.kernels.spec import find_kernel as find_kernel
from slapo_py.kernels.spec import list_kernels as list_kernels
from slapo_py.kernels.spec import register_kernel as register_kernel
from slapo_py.kernels.spec import unregister_kernel as unregister_kernel
from slapo_py.kernels.swiglu import swiglu as swiglu
from slapo_py.kernels.table import list as list
