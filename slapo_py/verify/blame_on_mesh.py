"""Who is to blame for a bug on a mesh: the first module that diverges in order of execution, and the step."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from slapo_py.codec import PerRank, Source
from slapo_py.history import Step
from slapo_py.layouts.placement import Shard
from slapo_py.layouts.recording.borders import ENTER, EXIT
from slapo_py.verify.blame import GRADIENT, Blame, accused, diverging, tied
from slapo_py.verify.borders import GRADIENT as BACKWARD
from slapo_py.verify.borders import Borders, of_gradient
from slapo_py.verify.differences import BUG
from slapo_py.verify.probes import Probe
from slapo_py.verify.report import Row
from slapo_py.verify.simulated import Crossing, RanksRun
from slapo_py.verify.trial import Trial

if TYPE_CHECKING:
    from slapo_py.verify.on_mesh import OnMesh


def accused_on_mesh(side: "OnMesh", trial: Trial, row: Row, where: str) -> Blame:
    """Run the one scenario again, with a look at every border.

    What is wrong on one device, too, has nothing to do with the mesh.
    """
    sch = side.sch
    alone = trial.row(sch.module)
    if alone is not None and alone.grade == BUG:
        return accused(sch, trial, alone, where)
    probed = trial.with_probes(Borders)
    run = side.run(probed) if probed.old.error is None else None
    crossing = (diverging_border(probed, run) or run.raised) if run is not None else None
    parameter = _parameter(trial, row) if crossing is None else None
    if crossing is not None:
        module = _module(crossing)
    elif parameter is not None:
        module = _owner(parameter, {name for name, _ in sch.module.named_modules(remove_duplicate=False)})
    else:
        module = run.results[0].raised_in or "" if run is not None else ""
    steps = (_step(side, axis, run, crossing, parameter, module) for axis in side.axes)
    step = next((one for one in steps if one is not None), None)
    return Blame(module, step, _message(side, row, where, module, crossing, step))


# The module


def diverging_border(probed: Trial, run: RanksRun) -> Crossing | None:
    """The first border in order of execution at which a value or a gradient is not the original's."""
    names = aligned(run.crossings, probed.old.probed)
    known = set(names.values())

    def table(result: Any) -> dict[Probe, Any]:
        if any(result is one for one in run.results):
            return {names[key]: value for key, value in result.probed.items() if key in names}
        return {key: value for key, value in result.probed.items() if key in known}

    bad = {one.key for one in probed.worst(run.results, table) if one.grade == BUG and one.key in known}
    return next((one for one in run.crossings if names.get(one.key) in bad), None)


def aligned(crossings: Iterable[Crossing], old: Mapping[Probe, Any]) -> dict[Probe, Probe]:
    """{crossing of the ranks: the same of the original}, those left out that it has not.

    A recording may pass a tensor more, such as a mask that the original leaves out because it is all ones; so where
    numbers don't agree, tensors of one kind and shape are matched in their order.
    """
    ours: dict[Any, list[Crossing]] = defaultdict(list)
    theirs: dict[Any, list[Probe]] = defaultdict(list)
    for one in crossings:
        if not one.key.kind.startswith(BACKWARD):
            ours[one.key[:3]].append(one)
    for key in old:
        if not key.kind.startswith(BACKWARD):
            theirs[key[:3]].append(key)
    found: dict[Probe, Probe] = {}
    for group, several in ours.items():
        kinds = {one.key: _kind(one.node.meta["val"]) for one in several}
        if all(key in old and _kind(old[key]) == kind for key, kind in kinds.items()):
            found |= {key: key for key in kinds}
            continue
        left = list(theirs.get(group, ()))
        for key, kind in kinds.items():
            match = next((index for index, one in enumerate(left) if _kind(old[one]) == kind), None)
            if match is not None:
                found[key] = left[match]
                left = left[match + 1 :]
    back = {of_gradient(key): of_gradient(other) for key, other in found.items()}
    return found | {key: other for key, other in back.items() if other in old}


def _kind(tensor: Tensor) -> Any:
    return tuple(int(size) for size in tensor.shape), tensor.is_floating_point()


def _module(crossing: Crossing) -> str:
    """The module whose doing it is: the border's own where a collective stands or is due, else what ran before."""
    node, back = crossing.node, crossing.key.kind.startswith(BACKWARD)
    own = node in crossing.program.syncs or node in crossing.program.typing.at_node
    if own or crossing.key.kind in (EXIT, BACKWARD + ENTER):
        return crossing.key.path
    others: Sequence[Any] = list(node.users) if back else node.args[:1]
    return next((str(one.meta["within"]) for one in others if isinstance(one, fx.Node) and "within" in one.meta), "")


def _parameter(trial: Trial, row: Row) -> str | None:
    """The parameter with a wrong gradient whose module runs last, as the gradient comes there first; else a buffer."""
    wrong = [one.key for one in row.differences if one.grade == BUG and one.key]
    bad = [one.name for one in wrong if one.kind == GRADIENT]
    if not bad:  # statistics that a module keeps
        return next((one.name for one in wrong if one.kind in ("buffer", "parameter")), None)
    several = tied(trial.original)
    names = {name for name in bad if name not in several} or set(bad)
    order = [name for name, _ in trial.original.named_parameters(remove_duplicate=False) if name in names]
    return order[-1] if order else None


def _owner(parameter: str, known: set[str]) -> str:
    path = parameter.rpartition(".")[0]
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path


# The step


def _step(
    side: "OnMesh", axis: str, run: RanksRun | None, crossing: Crossing | None, parameter: str | None, module: str
) -> int | None:
    """The number of the step that stands at a border, splits a parameter or the values that meet one, or divides."""
    history = side.sch.history
    crossing = crossing.on(axis) if crossing is not None else None

    def last(test: Any) -> int | None:
        found = [number for number, one in enumerate(history, 1) if one.kwargs.get("axis", "tp") == axis and test(one)]
        return found[-1] if found else None

    if crossing is not None and crossing.node in crossing.program.syncs:
        return last(lambda one: _stands_at(one, crossing.node))
    if parameter is not None:
        summed = last(lambda one: one.primitive == "reduce_grad" and parameter in _parameters(one))
        if summed is not None:
            return summed
    start = crossing.node if crossing is not None else _reader(run, parameter)
    node = _splitting(start, run, crossing) if start is not None else None
    if node is not None and _is_within(str(node.args[2]), module):
        return last(lambda one: _stands_at(one, node))
    near = [number for number, one in enumerate(history, 1) if _splits(one, module, axis)]
    if near:
        return near[0] if crossing is not None and crossing.key.kind.endswith(ENTER) else near[-1]
    if node is not None:
        return last(lambda one: _stands_at(one, node))
    divided = [number for number, one in enumerate(history, 1) if _divides(one, module, axis)]
    return divided[-1] if divided else None


def _stands_at(step: Step, node: fx.Node) -> bool:
    _, side, path, index = node.args
    given = dict(zip(("at", "value", "grad", "dim", "axis", "index"), step.args)) | dict(step.kwargs)
    here = (given.get("at"), step.path, given.get("index", 0))
    return step.primitive == "sync" and here == (side, path, index)


def _parameters(step: Step) -> list[str]:
    """The parameters that a step names, seen from the whole model."""
    return [f"{step.path}.{one}" if step.path else str(one) for one in step.args]


def _splits(step: Step, module: str, axis: str) -> bool:
    """Whether a step splits parameters at or below a module."""
    here = step.kwargs.get("axis", "tp") == axis and step.primitive == "shard"
    return here and any(_is_within(name, module) for name in _parameters(step))


def _divides(step: Step, module: str, axis: str) -> bool:
    """Whether a step divides an attribute of a module."""
    values = step.kwargs.values() if step.primitive == "configure" and step.path == module else ()
    return any(isinstance(one, PerRank) and one.axis == axis for one in values)


def _is_within(path: str, module: str) -> bool:
    return not module or f"{path}.".startswith(f"{module}.")


def _reader(run: RanksRun | None, parameter: str | None) -> fx.Node | None:
    """A node that reads a parameter."""
    graphs = [one.program.typing.graph for one in run.crossings[:1]] if run is not None else []
    found = [node for graph in graphs for node in graph.nodes if node.op == "get_attr" and node.target == parameter]
    return next((user for node in found for user in node.users), None)


def _splitting(node: fx.Node, run: RanksRun | None, crossing: Crossing | None) -> fx.Node | None:
    """The nearest border above a node at which a sync splits the value that comes to it, as it is split there."""
    if run is None or not run.crossings:
        return None
    program = crossing.program if crossing is not None else run.crossings[0].program
    typing, wanted = program.typing, crossing and program.typing.produced[crossing.node][0]
    queue, seen = [node], {node}
    for one in queue:
        placed = typing.after[one][0] if one in program.syncs else None
        if isinstance(placed, Shard) and wanted in (None, placed):
            return one
        for other in one.all_input_nodes:
            if other not in seen:
                seen.add(other)
                queue.append(other)
    return None


# The words


def _message(side: "OnMesh", row: Row, where: str, module: str, crossing: Crossing | None, step: int | None) -> str:
    sch = side.sch
    text = diverging(sch, row, where, module)
    if crossing is not None:
        kind, back = crossing.key.kind.removeprefix(BACKWARD), crossing.key.kind.startswith(BACKWARD)
        what = f"the gradient of {kind} {crossing.key.name}" if back else f"{kind} {crossing.key.name}"
        text += f' There {what} of "{crossing.key.path}" is not the original\'s.'
    if step is not None:
        text += f" It comes with step {step}: {sch.history[step - 1].source(Source())}."
    if side.faults:
        axis = side.axes[0]
        sizes = f'"{axis}", ranks={side.sizes[axis]}' if len(side.axes) == 1 else f"ranks={side.sizes}"
        text += f" sch.check({sizes}) says which line is missing or wrong."
    return f"{text} error.report has all that was compared."
