"""Train GPT-2 on real text, as written and scheduled, side by side: the same losses, less memory.

Run: make quickstart     (about a minute)
"""

import copy
import pydoc_data.topics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import slapo_py as slapo
from slapo_py.report.measure import paired_ratio, saved_activations
from slapo_py.report.plots import loss_curves
from slapo_py.report.tables import comparison, megabytes

STEPS, BATCH, SEQ, LR = 80, 8, 128, 2e-3
OUT = Path(__file__).parent.parent / "out"
Batch = dict[str, Tensor]

# Python's own help texts, one token a byte.
TEXT = torch.tensor(list("\n\n".join(pydoc_data.topics.topics.values()).encode()))


def batch_at(step: int) -> Batch:
    starts = torch.randint(len(TEXT) - SEQ - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    return {"input_ids": torch.stack([TEXT[i : i + SEQ + 1] for i in starts.tolist()])}


def loss(output: object, batch: Batch) -> Tensor:
    logits = output.logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum")


def count(batch: Batch) -> int:
    return batch["input_ids"][:, 1:].numel()


def main() -> int:
    torch.set_num_threads(1)  # steady times, also on a busy machine
    torch.manual_seed(0)
    size = {"vocab_size": 256, "n_positions": SEQ + 1, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**size, use_cache=False, bos_token_id=0, eos_token_id=0))  # with GPT-2's dropout

    sch = slapo.create_schedule(model, example_inputs=batch_at(0))
    sch.select("transformer.h.*").trace()
    for i in (0, 1):
        sch[f"transformer.h.{i}"].checkpoint()
    print(sch)
    print(sch.history)
    adamw = partial(torch.optim.AdamW, lr=LR)
    engine = slapo.build(sch, target="torch", optimizer=adamw, loss=loss, count=count)

    plain = copy.deepcopy(model).train()  # the original, in a loop written by hand
    optimizer = adamw(plain.parameters())

    def step_original(batch: Batch) -> float:
        optimizer.zero_grad()
        mean = loss(plain(**batch), batch) / count(batch)
        mean.backward()
        optimizer.step()
        return mean.item()

    runs = {
        "original": (step_original, plain),
        "scheduled": (lambda batch: float(engine.train_step(batch)), engine.module),
    }
    losses: dict[str, list[float]] = {name: [] for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    saved: dict[str, int] = {}
    for step in track(range(STEPS), description="training both"):
        batch = batch_at(step)
        for name in sorted(runs, reverse=step % 2 == 0):  # neither always goes first
            train_step, module = runs[name]
            torch.manual_seed(step)  # both draw the same dropout
            start = time.perf_counter()
            if step == 0:  # counting takes time: this step is not timed
                with saved_activations(module) as activations:
                    losses[name].append(train_step(batch))
                saved[name] = activations.bytes
            else:
                losses[name].append(train_step(batch))
                seconds[name].append(time.perf_counter() - start)

    misses = sum(engine.misses.values())
    equal = losses["original"] == losses["scheduled"]
    figures = {
        name: {
            "first loss": losses[name][0],
            "last loss": losses[name][-1],
            "saved activations": megabytes(saved[name]),
            "time of a step": 1.0 if name == "original" else paired_ratio(seconds[name], seconds["original"]),
        }
        for name in runs
    }
    figures["scheduled"] |= {"losses equal to the bit": equal, "calls that missed a trace": misses}
    Console().print(comparison(f"GPT-2, {STEPS} steps on {len(TEXT)} bytes of text", figures))
    print("loss curve:", loss_curves(Path(OUT) / "quickstart_loss.png", losses))
    return 0 if equal and misses == 0 and losses["scheduled"][-1] < losses["scheduled"][0] else 1


if __name__ == "__main__":
    sys.exit(main())
