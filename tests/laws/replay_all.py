"""Run as a program, in a fresh process: replay the saved schedules of a folder and compare.

    python -W error -m tests.laws.replay_all FOLDER

Each schedule is FOLDER/NUMBER.json; FOLDER/expected.pt holds the model's name, the printed schedule and the results.
Prints a line for each difference, and at last how many were replayed.
"""

import sys
from pathlib import Path

import torch

from slapo_py import History
from tests.laws.random_schedules import MODELS, outcome, reset, start
from tests.laws.steps import registered
from tests.running import differences

NEW_EVERY = 16
"""Every so often on a schedule that has seen no other steps; the others go on with the captures made before."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    expected = torch.load(folder / "expected.pt")
    schedules = {name: start(model) for name, model in MODELS.items()}
    for number, (name, printed, result) in enumerate(expected):
        history = History.load(folder / f"{number}.json", allow=("tests",))
        sch = start(MODELS[name]) if number % NEW_EVERY == 0 else reset(schedules[name])
        history.replay(sch)
        if str(sch) != printed:
            print(f"{number}: printed\n{sch}\ninstead of\n{printed}")
        found = differences(outcome(sch, MODELS[name]), result)
        if found:
            print(f"{number}: {found} of\n{history}")
    print(f"replayed {len(expected)}")


if __name__ == "__main__":
    import warnings

    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    with registered():
        main(Path(sys.argv[1]))
