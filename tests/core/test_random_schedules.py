"""Law 8 on random legal schedules: replay is identity, also in a fresh process; undo is replay of the rest."""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slapo_py as slapo
from slapo_py import History, Schedule, ScheduleError
from tests.core import policies
from tests.fingerprint import changes, fingerprint
from tests.models import ids, net

SCHEDULES = 30
AT_LEAST = 10  # schedules that use each primitive
ALLOW = ("tests.core.policies",)
PATHS = [
    "", "embed", "norm", "head", "blocks.0", "blocks.1",
    *[f"blocks.{i}.{name}" for i in range(2) for name in ("norm", "up", "down", "drop")],
]  # fmt: skip
CALLS: dict[str, list[dict[str, Any]]] = {
    "trace": [{}, {"flatten": True}, {"flatten": True, "leaves": ["up", "*.up"]}],
    "checkpoint": [{}, {"policy": ["aten.addmm"]}, {"policy": policies.keep_matmuls}],
    "compile": [{"backend": "eager", "dynamic": False}, {"backend": "eager"}],
    "annotate": [
        {"param": "weight", "key": "lr", "value": 0.5},
        {"param": "bias", "key": "tags", "value": (1, [None, "x"])},
    ],
    "configure": [{"eps": 1e-3}, {"out_features": slapo.per_rank("tp")}, {"scale": 0.25}, {"p": 0.5}],
}
STEPS = st.tuples(
    st.sampled_from(PATHS), st.sampled_from([(name, call) for name, calls in CALLS.items() for call in calls])
)


def inputs() -> dict[str, Any]:
    return {"ids": ids()}


def fresh() -> Schedule:
    return slapo.create_schedule(net(), example_inputs=inputs())


def output(sch: Schedule) -> torch.Tensor:
    """Loss and all gradients, with dropout."""
    torch.manual_seed(7)
    random.seed(7)
    loss = sch.module(**inputs()).square().mean()
    gradients = torch.autograd.grad(loss, list(sch.module.parameters()), allow_unused=True)
    return torch.cat([loss.detach().reshape(1), *[one.reshape(-1) for one in gradients if one is not None]])


def apply(sch: Schedule, steps: list[Any]) -> None:
    """Those of the steps that are legal; a refused one changes nothing."""
    for path, (name, kwargs) in steps:
        before, history = fingerprint(sch.module), sch.history
        try:
            getattr(sch[path], name)(**kwargs)
        except ScheduleError:
            assert changes(before, fingerprint(sch.module)) == []
            assert sch.history == history


def runs_compiled(history: History) -> bool:
    """Compiling is left out of what is run here: dynamo takes seconds for each kind of layer."""
    return any(step.primitive == "compile" for step in history)


def test_replay_is_identity_also_in_a_fresh_process(tmp_path: Path) -> None:
    texts: list[str] = []
    results: list[torch.Tensor | None] = []
    used: dict[str, int] = dict.fromkeys(CALLS, 0)

    @settings(
        max_examples=SCHEDULES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(STEPS, min_size=6, max_size=10), st.integers(1, 10))
    def one(steps: list[Any], k: int) -> None:
        sch = fresh()
        original = fingerprint(sch.original)
        apply(sch, steps)
        whole = sch.history
        for name in {step.primitive for step in whole}:
            used[name] += 1
        note(sch, tmp_path, texts, results)
        assert History.load(tmp_path / f"{len(texts) - 1}.json", allow=ALLOW) == whole
        if len(whole) >= k:
            assert sch.undo(k).history == whole[:-k]
            note(sch, tmp_path, texts, results)
        assert changes(original, fingerprint(sch.original)) == []

    one()
    assert len(texts) >= SCHEDULES
    assert all(count >= AT_LEAST for count in used.values()), used
    assert sum(result is not None for result in results) >= SCHEDULES / 4

    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True, cwd=Path(__file__).parents[2], timeout=280)
    assert json.loads((tmp_path / "texts").read_text()) == texts
    for here, there in zip(results, torch.load(tmp_path / "results"), strict=True):
        assert (here is None) == (there is None)
        assert here is None or torch.equal(here, there)


def note(sch: Schedule, folder: Path, texts: list[str], results: list[torch.Tensor | None]) -> None:
    """The schedule as it prints and computes, and its history in a file."""
    sch.history.save(folder / f"{len(texts)}.json")
    texts.append(f"{sch}\n{sch.history}")
    results.append(None if runs_compiled(sch.history) else output(sch))


def main(folder: Path) -> None:
    """The fresh process: replay every saved history on a schedule of its own."""
    torch.set_num_threads(1)
    texts: list[str] = []
    results: list[torch.Tensor | None] = []
    with tempfile.TemporaryDirectory() as again:
        for number in range(len(list(folder.glob("*.json")))):
            history = History.load(folder / f"{number}.json", allow=ALLOW)
            note(history.replay(fresh()), Path(again), texts, results)
    (folder / "texts").write_text(json.dumps(texts))
    torch.save(results, folder / "results")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
