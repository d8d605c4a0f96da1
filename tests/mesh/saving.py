"""Engines that are saved and loaded on meshes, and what lies in a folder, read without any engine."""

import hashlib
import json
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.backends.base import Engine
from slapo_py.backends.parts import Part
from slapo_py.params import cat
from tests.layouts.plans import PLANS
from tests.mesh import training
from tests.mesh.whole import schedule

Sizes = dict[str, int]

VOCAB, WIDTH, HIDDEN = 23, 8, 10
"""The vocabulary and the hidden size do not divide over 2 or 4 ranks, and the width over 3 does not."""


class Gated(nn.Module):
    """A gated layer, as Llama has it, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedGated(nn.Module):
    """The same with one product for gate and up."""

    def __init__(self, old: Gated) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


FUSED = {f"gate_up.{kind}": cat(f"gate.{kind}", f"up.{kind}") for kind in ("weight", "bias")}


class Tiny(nn.Module):
    """Two gated layers between an embedding and the head that is tied to it; counts its calls in a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Gated(), Gated()])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((), 1.5))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return {"logits": self.head(x) * self.scale}


def tiny(sizes: Sizes, dtype: torch.dtype, fused: bool = False, dropout: float = 0.0) -> slapo.Schedule:
    torch.manual_seed(3)
    model = Tiny(dropout).to(dtype).train(dropout > 0)
    sch = slapo.create_schedule(model, {"input_ids": torch.arange(8).reshape(2, 4)})
    if fused:
        for layer in sch.select("layers.*"):
            layer.replace(FusedGated, params=FUSED)
    if sizes.get("tp", 1) == 1:
        return sch
    sch["embed"].shard("weight", dim=0)
    for layer in sch.select("layers.*"):
        if fused:
            layer["gate_up"].shard("weight", "bias", dim="out", parts=2)
        else:
            layer["gate"].shard("weight", "bias", dim="out")
            layer["up"].shard("weight", "bias", dim="out")
        layer["down"].shard("weight", dim="in")
    return sch.auto_sync("tp", ranks=sizes["tp"])


def schedule_of(name: str, sizes: Sizes, dtype: torch.dtype = torch.float64) -> slapo.Schedule:
    """A family, or "tiny", or "fused": tiny with gate and up in one."""
    if name in PLANS:
        return schedule(name, False, sizes.get("tp", 1), dtype)
    return tiny(sizes, dtype, name == "fused", 0.3 if name == "noisy" else 0.0)


def engine_of(name: str, sizes: Sizes | None, dtype: torch.dtype = torch.float64, **options: Any) -> Engine:
    """sizes: None for one process. Without dropout, but for "noisy"."""
    sch = schedule_of(name, sizes or {}, dtype)
    given: dict[str, Any] = {
        "optimizer": training.OPTIMIZER,
        "loss": training.loss,
        "count": training.count,
        "inputs": training.inputs,
    }
    given |= {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)} | options
    engine: Engine = slapo.build(sch, target="torch", mesh=sizes, **given)
    if name != "noisy":
        engine.module.eval()
        engine.module.train = lambda mode=True: engine.module  # type: ignore[method-assign]
    return engine


def batch_of(name: str, step: int, rows: int = 4) -> dict[str, Any]:
    if name in PLANS:
        return training.batches(schedule(name, False, 1, torch.float64), rows)[step]
    draw = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, VOCAB, (rows, 5), generator=draw) for _ in range(2))
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def step_of(engine: Engine, name: str, step: int) -> float:
    batch, mesh = batch_of(name, step), engine.mesh  # type: ignore[attr-defined]
    return float(engine.train_step(batch if mesh is None else training.of_rank(batch, mesh)))


def trained_and_saved(folder: Path, name: str, sizes: Sizes | None, options: dict[str, Any]) -> list[float]:
    """The losses of two steps before a save, and of one after it. The first rank also saves the whole state_dict."""
    engine = engine_of(name, sizes, **options)
    losses = [step_of(engine, name, step) for step in range(2)]
    engine.eval_step(batch_of(name, 0))  # a forward alone leaves FSDP2's outermost parameters whole
    engine.save(folder)
    state = engine.state_dict()
    if sizes is None or dist.get_rank() == 0:
        torch.save(state, folder.with_suffix(".pt"))
    return [*losses, step_of(engine, name, 2)]


def loss_of_original(state: Path, name: str) -> float:
    """What the model that the schedule was made of gives, if it takes a state_dict strictly."""
    model = schedule_of(name, {}).original
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    model.load_state_dict(torch.load(state, weights_only=True), strict=True)
    batch = batch_of(name, 0)
    with torch.no_grad():
        return float(training.loss(model(**training.inputs(batch)), batch) / training.count(batch))


def loaded_elsewhere(seed: int, *arguments: Any) -> tuple[float, float, dict[str, str]]:
    """The same in a process whose random numbers are elsewhere."""
    torch.manual_seed(seed)
    return loaded(*arguments)


def loaded(
    folder: Path, name: str, sizes: Sizes | None, options: dict[str, Any], again: Path | None = None
) -> tuple[float, float, dict[str, str]]:
    """Load into a fresh engine, save again elsewhere, and go on.

    The loss of an eval step, that of the next step, and digests of the whole state_dict.
    """
    engine = engine_of(name, sizes, **options)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(0.5)  # as if it had been somewhere else
    engine.eval_step(batch_of(name, 0))
    engine.load(folder)
    assert engine.step_count == 2
    if again is not None:
        engine.save(again)
    digests = {key: digest(one) for key, one in engine.state_dict().items()}
    return float(engine.eval_step(batch_of(name, 0))), step_of(engine, name, 2), digests


def digest(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]}"


def content(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, whole: parameters, buffers and moments."""
    listed = json.loads((folder / "slapo.json").read_text())["tensors"]
    tensors = {key: torch.empty(one["shape"], dtype=getattr(torch, one["dtype"])) for key, one in listed.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def written(folder: Path) -> dict[str, int]:
    """How many elements lie in each file."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    found: dict[str, int] = {}
    for index, stored in metadata.storage_data.items():
        tensor: Any = metadata.state_dict_metadata[index.fqn]
        chunk = tensor.chunks[index.index]
        found[stored.relative_path] = found.get(stored.relative_path, 0) + math.prod(chunk.sizes)
    return found


def saved_with_own_buffers(folder: Path) -> None:
    """Each rank has other values in buffers."""
    engine = engine_of("tiny", {"tp": 2})
    for index in range(4):
        engine.module.register_buffer(f"own{index}", torch.full((), dist.get_rank()))
    engine.save(folder)


def parts_of_state(name: str, sizes: Sizes, options: dict[str, Any]) -> dict[str, Part]:
    """What `state_dict(whole=False)` has on this rank, and that it is what the whole one says."""
    engine = engine_of(name, sizes, **options)
    parts: dict[str, Part] = engine.state_dict(whole=False)
    whole = engine.state_dict()
    assert list(parts) == list(whole)
    for key, part in parts.items():
        assert part.shape == tuple(whole[key].shape)
        assert torch.equal(part.cut(whole[key]), part.tensor)
    return parts


def boxes(name: str, sizes: Sizes, options: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By name, the shape of the whole and the boxes that this rank has."""
    return {key: (one.shape, one.boxes) for key, one in parts_of_state(name, sizes, options).items()}
