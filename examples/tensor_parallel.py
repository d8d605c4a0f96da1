"""Train a small Llama on real text with its weights split over processes: the losses of one process.

The model knows nothing of it. The schedule says how the weights are split, `auto_sync` finds the collectives, and
`build` gives each process its part. What is saved on one mesh goes on with any other.

Run: torchrun --nproc-per-node 2 examples/tensor_parallel.py     (or 4, with --dp 2; or python, for one process)
     torchrun --nproc-per-node 1 examples/tensor_parallel.py --resume
"""

import argparse
import pydoc_data.topics
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_py as slapo

BATCH, LENGTH, STEPS = 8, 64, 40
OUT = Path(__file__).parent.parent / "out" / "tensor_parallel"
Batch = dict[str, Tensor]

# Python's own help texts, one token a byte.
TEXT = torch.tensor(list("\n\n".join(pydoc_data.topics.topics.values()).encode()))


def batch_at(step: int) -> Batch:
    starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([TEXT[i : i + LENGTH + 1] for i in starts.tolist()])
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def loss(output: object, batch: Batch) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def split(sch: slapo.Schedule, ranks: int) -> None:
    """Heads and hidden features are divided: the first product of a pair by its rows, the second by its columns."""
    for layer in sch.select("model.layers.*"):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            layer[name].shard("weight", dim="out")
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            layer[name].shard("weight", dim="in")
    sch["model.embed_tokens"].shard("weight", dim=0)
    sch["lm_head"].shard("weight", dim="out")
    sch.auto_sync("tp", ranks=ranks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp", type=int, default=1, help="copies of the model, each with a part of every batch")
    parser.add_argument("--resume", action="store_true", help="go on from what was saved, on whatever mesh")
    parser.add_argument("--steps", type=int, default=STEPS, help="in all")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()

    torch.set_num_threads(1)  # as torchrun sets it where there are more processes
    with slapo.launch() as world:
        mesh = {"dp": given.dp, "tp": world.size // given.dp}
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
                             num_attention_heads=4, max_position_embeddings=LENGTH, use_cache=False)  # fmt: skip
        inputs = lambda batch: {"input_ids": batch["input_ids"]}
        sch = slapo.create_schedule(LlamaForCausalLM(config), example_inputs=inputs(batch_at(0)))
        if mesh["tp"] > 1:
            split(sch, mesh["tp"])
        engine = slapo.build(
            sch, target="torch", mesh=mesh, optimizer=partial(torch.optim.AdamW, lr=2e-3), loss=loss, inputs=inputs,
            count=lambda batch: batch["labels"].numel(), clip=1.0,
        )  # fmt: skip
        if given.resume:
            engine.load(given.out)
        steps = range(engine.step_count, given.steps)
        for step in track(steps, description=f"training on {mesh}", disable=not world.first):
            part = engine.part(batch_at(step))  # ranks of one "tp" group take the same rows
            value = float(engine.train_step(part))  # the mean over the whole batch, on every rank
            if world.first and (step % 10 == 0 or step + 1 == given.steps):
                print(f"step {step}  loss {value:.6f}")
        engine.save(given.out)
        if world.first:
            print(f"saved to {given.out}; calls that missed a trace: {engine.misses}")


if __name__ == "__main__":
    main()
