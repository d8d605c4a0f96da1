"""A pattern and a kernel of your own: SwiGLU, found in a model that never heard of it.

The "kernel" here is an autograd function that keeps its two inputs and computes the rest again in backward; on a GPU
its two halves would be Triton kernels.

Run: python examples/own_kernel.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_py as slapo


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping nothing but gate and up."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def,override]
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return SwiGLU.apply(gate, up)  # type: ignore[no-any-return]


def pattern(gate: Tensor, up: Tensor) -> Tensor:
    """What is looked for: it doesn't matter that the model writes `nn.SiLU`, or in which order it multiplies."""
    return F.silu(gate) * up


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (2, 16))
    sch = slapo.create_schedule(model, example_inputs={"input_ids": ids, "use_cache": False})

    mlp = sch["model.layers.0.mlp"].trace(flatten=True, leaves=["*_proj"])
    print("nearly:", sch["model.layers.0.mlp"].why_not(lambda x, y: F.gelu(x) * y))
    print("found:", mlp.find(pattern))
    for block in sch.select("model.layers.*.mlp"):
        if block.path != mlp.path:
            block.trace(flatten=True, leaves=["*_proj"])
        block.replace(swiglu, pattern)
    print(sch.history)
    print("verified:", sch.verify().grade)


if __name__ == "__main__":
    main()
