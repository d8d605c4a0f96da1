"""Training a scheduled GPT-2 with dropout: to the bit the original's, and through a kill at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_py as slapo
from slapo_py.tracing import trace_of
from slapo_py.tracing.trace import misses

ROOT = Path(__file__).parents[1]
STEPS = 20
adamw = partial(torch.optim.AdamW, lr=3e-3)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    config = GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=29, n_positions=12, **drop, use_cache=False)
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(5)
    return GPT2LMHeadModel(config)


def batch(step: int) -> dict[str, torch.Tensor]:
    """Batches of several sizes, with labels that are left out."""
    draw = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 29, (3 + step % 3, 6 + step % 4), generator=draw)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.2, -100)
    return {"input_ids": ids, "labels": labels}


def loss(output: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), given["labels"].flatten(), reduction="sum")


def count(given: dict[str, torch.Tensor]) -> int:
    return int((given["labels"] != -100).sum())


def scheduled(model: nn.Module) -> slapo.Schedule:
    """All layers traced, every second one checkpointed."""
    sch = slapo.create_schedule(model, {"input_ids": batch(0)["input_ids"]})
    layers = sch.select("transformer.h.*").trace()
    layers[::2].checkpoint()
    return sch


def engine_of(model: nn.Module) -> Any:
    return slapo.build(
        scheduled(model), target="torch", optimizer=adamw, loss=loss, count=count,
        inputs=lambda given: {"input_ids": given["input_ids"]},
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.5),
    )  # fmt: skip


def plainly(model: nn.Module) -> list[float]:
    """The loop that everybody writes."""
    optimizer = adamw(model.parameters())
    rate = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
    model.train()
    found = []
    for step in range(STEPS):
        given = batch(step)
        mean = loss(model(input_ids=given["input_ids"]), given) / count(given)
        mean.backward()
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        found.append(mean.item())
    return found


def run(engine: Any, start: int, end: int) -> list[float]:
    return [engine.train_step(batch(step)).item() for step in range(start, end)]


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and last parameters of the scheduled model, from one run of all steps."""
    engine = engine_of(gpt2())
    torch.manual_seed(11)
    return run(engine, 0, STEPS), state(engine.module)


def test_twenty_steps_are_the_originals_to_the_bit() -> None:
    model, plain = gpt2(), gpt2()
    before = state(model)
    engine = engine_of(model)
    torch.manual_seed(11)
    expected = plainly(plain)
    after = torch.get_rng_state()
    torch.manual_seed(11)
    assert run(engine, 0, STEPS) == expected
    assert torch.equal(torch.get_rng_state(), after)
    assert same(state(engine.module), state(plain))
    assert expected[-1] < expected[0]

    traced = [name for name, one in engine.module.named_modules() if trace_of(one)]
    assert traced == [f"transformer.h.{i}" for i in range(4)]
    assert misses(engine.module) == {}
    engine.eval_step(batch(0))
    assert misses(engine.module) == {}
    assert same(state(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_this_test_sees_a_lost_random_state(uninterrupted: tuple[list[float], Any]) -> None:
    """Dropout is on: with another seed the losses are others."""
    engine = engine_of(gpt2())
    torch.manual_seed(12)
    found = run(engine, 0, 2)
    assert found[0] != uninterrupted[0][0]


# A process of its own, killed while it goes on

CHILD = """
import sys, torch
torch.set_num_threads(1)
from tests.test_training import STEPS, engine_of, gpt2, run
engine = engine_of(gpt2())
torch.manual_seed(11)
for step in range(STEPS):
    run(engine, step, step + 1)
    if step == 9:
        engine.save(sys.argv[1])
        print("saved", flush=True)
print("done", flush=True)
sys.stdin.read()
"""
LOADED = """
import json, random, sys, torch
torch.set_num_threads(1)
from tests.test_training import STEPS, engine_of, gpt2, run, state
engine = engine_of(gpt2())
random.seed(77), torch.manual_seed(77)
engine.load(sys.argv[1])
start = engine.step_count
losses = run(engine, start, STEPS)
torch.save(state(engine.module), sys.argv[1] + ".pt")
print(json.dumps([start, losses]))
"""


def python(code: str, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_killed_and_loaded_it_goes_on_to_the_bit(
    uninterrupted: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with python(CHILD, str(folder)) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "saved\n", child.stderr.read()
        child.send_signal(signal.SIGKILL)  # somewhere in the steps after the save
    assert child.returncode == -signal.SIGKILL
    with python(LOADED, str(folder)) as fresh:
        out, errors = fresh.communicate(timeout=120)
    assert fresh.returncode == 0, errors
    start, losses = json.loads(out)
    assert start == 10
    assert losses == uninterrupted[0][10:]
    assert same(torch.load(folder.with_name("run.pt")), uninterrupted[1])


def save_for_ever(folder: Path) -> None:
    engine = engine_of(gpt2())
    torch.manual_seed(11)
    for step in range(STEPS):
        run(engine, step, step + 1)
        engine.save(folder)
    while True:  # the last one again and again
        engine.save(folder)


def test_killed_at_any_moment_what_is_found_is_whole(
    uninterrupted: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """A process that does nothing but train and save is killed again and again, half of the time while it saves."""
    wait = random.Random(0)
    engine = engine_of(gpt2())
    for attempt in range(6):
        folder = tmp_path / f"run{attempt}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside idle threads
            child = os.fork()
        if child == 0:
            try:
                save_for_ever(folder)
            finally:
                os._exit(1)
        try:
            deadline = time.monotonic() + 60
            while not folder.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(wait.uniform(0, 0.4))
        finally:
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        engine.load(folder)
        start = engine.step_count
        assert 1 <= start <= STEPS
        assert run(engine, start, STEPS) == uninterrupted[0][start:]
        assert same(state(engine.module), uninterrupted[1])
        assert misses(engine.module) == {}
