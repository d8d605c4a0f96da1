"""`save` and `load`: to the bit, all or nothing, and killed at every moment."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem

from slapo_py.backends import folder
from slapo_py.backends.base import Engine
from slapo_py.errors import CheckpointError
from tests.engine.models import TinyLM, batches, decay, engine_of, fingerprint, same_state

ROOT = Path(__file__).parent.parent.parent
DATA = batches(8)


class Noisy(TinyLM):
    """Draws from torch, Python, numpy and a generator of its own, and keeps an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator().manual_seed(5)
        self.seen = 0

    def forward(self, ids: torch.Tensor, **unused: Any) -> torch.Tensor:
        self.seen += 1
        self.scale += 0.001  # a buffer that state_dict leaves out
        noise = random.random() + np.random.rand() + torch.rand((), generator=self.rng)
        return super().forward(ids) + 0.1 * noise * torch.rand(VOCAB)

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


VOCAB = 23


def make(model: nn.Module | None = None, **options: Any) -> Engine:
    torch.manual_seed(7)
    return engine_of(Noisy() if model is None else model, **{"scheduler": decay, **options})


def run(engine: Engine, start: int, end: int) -> list[float]:
    return [engine.train_step(batch).item() for batch in DATA[start:end]]


VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16", "micro_batches": 2, "clip": 0.5},
    "sgd": {"optimizer": partial(torch.optim.SGD, lr=np.float64(0.1), momentum=0.9)},
    "fancy": {
        "optimizer": partial(torch.optim.Adam, lr=0.01, amsgrad=True, betas=(0.8, 0.95)),
        "scheduler": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=20),
    },
    "steps": {"scheduler": partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 5])},
    "lambda": {"scheduler": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))},
    "no scheduler": {"scheduler": None},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loaded_engine_goes_on_to_the_bit(variant: str, tmp_path: Path) -> None:
    options = VARIANTS[variant]
    engine = make(**options)
    run(engine, 0, 3)
    engine.save(tmp_path / "run")
    expected = run(engine, 3, 8)

    other = make(**options)
    random.seed(99)
    np.random.seed(99)
    run(other, 0, 1)  # it has been somewhere else
    other.load(tmp_path / "run")
    assert other.step_count == 3 and other.module.seen == 3 * options.get("micro_batches", 1)
    assert run(other, 3, 8) == expected
    mine, theirs = engine.state_dict(), other.state_dict()
    mine.pop("_extra_state"), theirs.pop("_extra_state")
    assert same_state(mine, theirs)
    assert same_state(dict(engine.module.named_parameters()), dict(other.module.named_parameters()))
    assert torch.equal(engine.module.scale, other.module.scale)
    assert engine.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]
    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        ours = [state[name] for state in engine.optimizer.state.values() if name in state]
        assert all(torch.equal(a, b[name]) for a, b in zip(ours, other.optimizer.state.values(), strict=False))


def test_the_folder_is_a_torch_distributed_checkpoint(tmp_path: Path) -> None:
    engine = make()
    run(engine, 0, 2)
    engine.save(tmp_path / "run")
    names = set(dcp.FileSystemReader(tmp_path / "run").read_metadata().state_dict_metadata)
    assert {f"model/{name}" for name in engine.state_dict() if name != "_extra_state"} <= names
    assert {"buffer/scale", "optimizer/embed.weight/exp_avg", "optimizer/embed.weight/step"} <= names
    assert not list(tmp_path.glob(".*"))


def test_saving_changes_nothing_and_replaces(tmp_path: Path) -> None:
    engine, other = make(), make()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = run(engine, 0, 4)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    found = []
    for index in range(4):
        found += run(other, index, index + 1)
        other.save(tmp_path / "run")
    assert found == expected
    assert json.loads((tmp_path / "run" / "slapo.json").read_text())["step"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_precisions_can_be_changed(tmp_path: Path) -> None:
    exact = make(TinyLM())
    run(exact, 0, 2)
    exact.save(tmp_path / "run")
    low = make(TinyLM(), precision="bf16")
    low.load(tmp_path / "run")
    assert same_state(low.state_dict(), exact.module)
    assert torch.equal(low.module.up.weight, exact.module.up.weight.bfloat16())
    with torch.no_grad():
        torch.testing.assert_close(low.eval_step(DATA[0]), exact.eval_step(DATA[0]), rtol=2e-2, atol=0)


def test_frozen_parameters_are_loaded(tmp_path: Path) -> None:
    model = TinyLM()
    model.up.requires_grad_(False)
    for precision in ("fp32", "bf16"):
        engine = make(model, precision=precision)
        engine.save(tmp_path / precision)
        fresh = TinyLM()
        fresh.up.requires_grad_(False)
        other = make(fresh, precision=precision)
        other.load(tmp_path / precision)
        assert same_state(other.state_dict(), model)
        assert same_state(dict(other.module.named_parameters()), dict(engine.module.named_parameters()))


def test_moments_of_a_half_precision_model_keep_their_dtype(tmp_path: Path) -> None:
    class Float32Moments(torch.optim.SGD):
        """Keeps a float32 moment beside bfloat16 parameters."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    held = state.setdefault("moment", torch.zeros(parameter.shape))
                    held.add_(parameter.grad.float() * 1.001)
                    state["count"] = state.get("count", 0) + 1

    engine = make(TinyLM().to(torch.bfloat16), optimizer=partial(Float32Moments, lr=0.1), scheduler=None)
    run(engine, 0, 2)
    engine.save(tmp_path / "run")
    other = make(TinyLM().to(torch.bfloat16), optimizer=partial(Float32Moments, lr=0.1), scheduler=None)
    other.load(tmp_path / "run")
    for one, two in zip(engine.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert two["moment"].dtype is torch.float32 and torch.equal(one["moment"], two["moment"])
        assert two["count"] == 2


def test_files_of_others_stay_with_the_folder(tmp_path: Path) -> None:
    engine = make()
    engine.save(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("keep")
    engine.save(tmp_path / "run")
    assert (tmp_path / "run" / "notes.txt").read_text() == "keep"
    make().load(tmp_path / "run")


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    engine = make()
    engine.save(tmp_path / "empty")
    engine.save(str(tmp_path / "a" / "b"))
    make().load(tmp_path / "a" / "b")
    make().load(tmp_path / "empty")


# A fresh process

GO_ON = """
import sys
from tests.engine.test_save import make, run
engine = make(**eval(sys.argv[2]))
engine.load(sys.argv[1])
print(run(engine, 3, 8))
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "micro_batches": 2}])
def test_a_fresh_process_goes_on_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    engine = make(**options)
    run(engine, 0, 3)
    engine.save(tmp_path / "run")
    expected = run(engine, 3, 8)
    done = python("import torch; torch.set_num_threads(1)\n" + GO_ON, str(tmp_path / "run"), repr(options))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == repr(expected)


# Killed while saving. A forked process kills itself at the n-th call of a function that saving uses.

DEADLY: dict[str, tuple[Any, str]] = {
    "fsync": (os, "fsync"),
    "rename": (os, "rename"),
    "dcp": (dcp, "save"),
    "rmtree": (shutil, "rmtree"),
    "marker": (Path, "write_text"),
    "bytes": (Path, "write_bytes"),
    "unlink": (os, "unlink"),
}


def die_while_saving(directory: Path, where: str, nth: int) -> None:
    engine = make()
    run(engine, 0, 2)
    engine.save(directory)
    run(engine, 2, 3)
    owner, name = DEADLY[where.removeprefix("after ")]
    function, calls = getattr(owner, name), 0

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and not where.startswith("after "):
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)
    engine.save(directory)


# (where, n-th call, the step that must be found afterwards)
KILLS = [
    ("dcp", 1, 2),
    ("after dcp", 1, 2),
    ("bytes", 1, 2),
    ("after bytes", 1, 2),
    ("fsync", 1, 2),
    ("fsync", 3, 2),
    ("fsync", 5, 2),
    ("marker", 1, 2),
    ("after marker", 1, 2),
    ("rename", 1, 2),  # torch's own, of its metadata file
    ("rename", 2, 2),
    ("after rename", 2, 3),  # between the two renames: the new one is whole, and the old one is gone from its place
    ("rename", 3, 3),
    ("after rename", 3, 3),
    ("rmtree", 1, 3),
    ("unlink", 2, 3),  # half of the previous one is deleted
    ("after rmtree", 1, 3),
]


@pytest.mark.parametrize(("where", "nth", "step"), KILLS)
def test_killed_while_saving(where: str, nth: int, step: int, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside torch's idle threads
        child = os.fork()
    if child == 0:
        try:
            die_while_saving(directory, where, nth)
        finally:
            os._exit(0)  # it was to be killed before
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    engine = make()
    listing = sorted(path.name for path in tmp_path.iterdir())
    engine.load(directory)
    assert engine.step_count == step
    assert sorted(path.name for path in tmp_path.iterdir()) == listing  # loading only reads
    assert engine.optimizer.state_dict()["state"][0]["step"] == step
    # and the next save clears up and is whole
    run(engine, step, step + 1)
    engine.save(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    other = make()
    other.load(directory)
    assert other.step_count == step + 1


def test_killed_between_the_renames_with_a_broken_new_one(tmp_path: Path) -> None:
    engine = make()
    engine.save(tmp_path / "run")
    os.rename(tmp_path / "run", tmp_path / ".run.previous")
    shutil.copytree(tmp_path / ".run.previous", tmp_path / ".run.saving")
    (tmp_path / ".run.saving" / "engine.pt").unlink()
    make().load(tmp_path / "run")
    engine.save(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# Refusals: nothing changes


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def edit(file: Path, **changes: Any) -> None:
    marker = {**json.loads(file.read_text()), **changes}
    marker.pop("crc32")
    file.write_text(json.dumps({**marker, "crc32": folder._crc_of(marker)}))


def replace_in(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


DAMAGES: list[tuple[Any, str]] = [
    (lambda run: (run / "__0_0.distcp").unlink(), r"incomplete: '__0_0.distcp' is missing. Load another save"),
    (lambda run: (run / ".metadata").unlink(), r"incomplete: '.metadata' is missing"),
    (lambda run: (run / "engine.pt").unlink(), r"incomplete: 'engine.pt' is missing"),
    (lambda run: truncate(run / "__0_0.distcp"), r"damaged: '__0_0.distcp' has \d+ bytes and should have \d+"),
    (lambda run: truncate(run / "engine.pt"), r"damaged: 'engine.pt' has \d+ bytes"),
    (lambda run: flip(run / "__0_0.distcp"), r"damaged: the content of '__0_0.distcp' has changed"),
    (lambda run: (run / "slapo.json").unlink(), r"has no slapo.json: it was not saved by an engine, or not to its end"),
    (lambda run: truncate(run / "slapo.json"), r"slapo.json' is damaged"),
    (lambda run: edit(run / "slapo.json", files=[]), r"slapo.json' is damaged"),
    (lambda run: edit(run / "slapo.json", format=99), r"has format 99 and this version reads 3"),
    (lambda run: replace_in(run / "slapo.json", '"step"', '"stap"'), r"slapo.json' is damaged: it has changed since"),
    (lambda run: replace_in(run / "slapo.json", '"step": 1', '"step": 3'), r"damaged: it has changed since"),
    (shutil.rmtree, r"there is no folder '.*run'. engine.save\(...\) writes one"),
]


def full_fingerprint(engine: Engine) -> list[Any]:
    state = engine.optimizer.state_dict()
    moments = {key: {name: repr(value) for name, value in held.items()} for key, held in state["state"].items()}
    rates = engine.scheduler and engine.scheduler.state_dict()
    return [fingerprint(engine.module), moments, repr(state["param_groups"]), repr(rates), engine.step_count]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_is_refused(damage: Any, message: str, tmp_path: Path) -> None:
    engine = make()
    run(engine, 0, 1)
    engine.save(tmp_path / "run")
    run(engine, 1, 2)
    damage(tmp_path / "run")
    before = full_fingerprint(engine)
    with pytest.raises(CheckpointError, match=message):
        engine.load(tmp_path / "run")
    assert full_fingerprint(engine) == before


def test_every_flipped_bit_of_the_marker_is_found(tmp_path: Path) -> None:
    engine = make()
    engine.save(tmp_path / "run")
    file = tmp_path / "run" / "slapo.json"
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(changed)
        if json.loads(whole) != as_json(changed):  # a space may have become no space, or a digit an exponent's sign
            with pytest.raises(CheckpointError, match="slapo.json|this version reads|is incomplete"):
                engine.load(tmp_path / "run")


def as_json(content: bytearray) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no folder", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"has no slapo.json: it was not saved by an engine"):
        make().load(tmp_path / "run")


class Wider(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16, bias=False)


class More(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class Stubborn(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = 77
        if state_dict["last_epoch"] == 1:
            raise ValueError("no")
        super().load_state_dict(state_dict)


class WithGenerator(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator()


class WithExtra(TinyLM):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        """There is nothing to take."""


def two_groups(pairs: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": pairs[:2]}, {"params": pairs[2:]}], lr=1e-2)


def stubborn(optimizer: torch.optim.Optimizer) -> Any:
    scheduler = Stubborn(optimizer, step_size=2, gamma=0.5)
    Stubborn.__name__ = "StepLR"
    return scheduler


OTHERS: list[tuple[Any, dict[str, Any], str]] = [
    (More, {}, r"misses 'more.bias', 'more.weight' of the model: it was saved from another model"),
    (Wider, {}, r"has 'up.weight' in shape \(32, 16\), and this engine has \(40, 16\)"),
    (
        lambda: TinyLM().to(torch.bfloat16),
        {},
        r"has 'embed.weight' in float32, which this engine's bfloat16 would round",
    ),
    (TinyLM, {"optimizer": partial(torch.optim.SGD, lr=0.1)}, r"saved with optimizer AdamW and this engine has SGD"),
    (TinyLM, {"scheduler": None}, r"saved with scheduler StepLR and this engine has None"),
    (TinyLM, {"optimizer": two_groups}, r"has optimizer groups of \[6\] parameters and this engine of \[2, 4\]"),
    (WithExtra, {}, r"misses '_extra_state' of the model: it was saved from another model"),
    (WithGenerator, {}, r"has random generators at \[\] and this engine at \['rng#0'\]"),
    (TinyLM, {"scheduler": stubborn}, r"the optimizer or scheduler refuses its saved state \(ValueError: no\)"),
]


@pytest.mark.parametrize(("model", "options", "message"), OTHERS)
def test_another_model_is_refused(model: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    engine = make(TinyLM())
    run(engine, 0, 1)
    engine.save(tmp_path / "run")
    other = make(model(), **options)
    run(other, 0, 2)
    before = full_fingerprint(other)
    with pytest.raises(CheckpointError, match=message):
        other.load(tmp_path / "run")
    assert full_fingerprint(other) == before


def test_a_model_with_less_is_refused(tmp_path: Path) -> None:
    make(More()).save(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"also has 'more.bias', 'more.weight' of the model"):
        make(TinyLM()).load(tmp_path / "run")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.save(tmp_path / "run")

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    run(engine, 0, 1)
    for owner, name in ((filesystem, "_write_item"), (Path, "write_bytes"), (Path, "mkdir")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(
                CheckpointError, match=r"save: .*No space left on device.*(Nothing was changed|is whole)"
            ):
                engine.save(tmp_path / "run")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    other = make()
    other.load(tmp_path / "run")
    assert other.step_count == 0


def test_a_folder_of_others_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"exists and is not a saved engine.*Write engine.save\('.*run/engine'\)"):
        make().save(tmp_path / "run")
    assert (tmp_path / "run" / "thesis.tex").exists()
    make().save(tmp_path / "run" / "engine")


class Weird:
    pass


def test_what_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    engine = make()
    engine.save(tmp_path / "run")
    engine.optimizer.param_groups[0]["note"] = Weird()
    with pytest.raises(CheckpointError, match=r"the engine's optimizer state holds something that a checkpoint can't"):
        engine.save(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    make().load(tmp_path / "run")


def test_loading_runs_no_code(tmp_path: Path) -> None:
    engine = make()
    engine.save(tmp_path / "run")

    class Bomb:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "exploded"),))

    torch.save({"step": Bomb()}, tmp_path / "run" / "engine.pt")
    size = (tmp_path / "run" / "engine.pt").stat().st_size
    files = json.loads((tmp_path / "run" / "slapo.json").read_text())["files"]
    files["engine.pt"] = {"bytes": size, "crc32": folder._crc(tmp_path / "run" / "engine.pt")}
    edit(tmp_path / "run" / "slapo.json", files=files)
    with pytest.raises(CheckpointError, match=r"'engine.pt' holds something that is not loaded"):
        engine.load(tmp_path / "run")
    assert not (tmp_path / "exploded").exists()
