"""A forward in evaluation mode: it may compute otherwise than in training, and is looked at then as well."""

from typing import TYPE_CHECKING, Any

from torch import fx

from slapo_py.layouts.inference.state import Fault, Typing, said
from slapo_py.layouts.recording.nodes import is_border, name_of, slots_of
from slapo_py.layouts.recording.record import Recording, record
from slapo_py.layouts.rules.table import canonical

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule

_DROPS = frozenset("dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d native_dropout".split())


def evaluation_of(place: "Schedule", recording: Recording) -> Recording | None:
    """The recording in evaluation mode, if more differs there than what is dropped; made once."""
    if recording.evaluation is None:
        other = record(place, training=False)
        recording.evaluation = (other if _told(other.graph) != _told(recording.graph) else None,)
    return recording.evaluation[0]


def _told(graph: fx.Graph) -> list[Any]:
    """What a graph computes, and of what; flags and probabilities left out, dropped values as they came."""
    numbers: dict[fx.Node, Any] = {}
    told: list[Any] = []
    for node in graph.nodes:
        if canonical(name_of(node)) in _DROPS and slots_of(node):
            numbers[node] = numbers[slots_of(node)[0]]
            continue
        numbers[node] = len(told)
        told.append((node.op, name_of(node), _shown((node.args, node.kwargs), numbers)))
    return told


def _shown(value: Any, numbers: dict[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return ("value", numbers.get(value))
    if isinstance(value, dict):
        return [(key, _shown(one, numbers)) for key, one in value.items()]
    if isinstance(value, tuple | list):
        return [_shown(one, numbers) for one in value]
    if isinstance(value, slice):
        return [_shown(one, numbers) for one in (value.start, value.stop, value.step)]
    return None if isinstance(value, bool | float) else str(value)


def other_collectives(training: Typing, evaluation: Typing) -> list[Fault]:
    """What ranks exchange, or do otherwise than one process, in evaluation and not in training, or the reverse."""
    ours, theirs = _done(training), _done(evaluation)
    for (place, what), node in {**ours, **theirs}.items():
        if ((place, what) in ours) != ((place, what) in theirs):
            text = (
                f"{said(node)} goes through another exchange in evaluation than in training, and a schedule has "
                f"one for both. Let the forward do the same with split values in both modes."
            )
            return [Fault("other in evaluation", node, text)]
    return []


def _done(typing: Typing) -> dict[tuple[Any, Any], fx.Node]:
    """By place and kind, the first node that is converted, or done by a local implementation."""
    found: dict[tuple[Any, Any], fx.Node] = {}

    def note(node: fx.Node, *what: str) -> None:
        place = node.args[1:] if is_border(node) else (str(node.meta.get("within", "")), name_of(node))
        found.setdefault((place, what), node)

    for one in typing.conversions():
        note(one.node, str(one.source), str(one.target), one.forward)
    for node, signature in typing.signature.items():
        if signature.needs or node in typing.made_local:
            note(node, signature.needs, str(typing.made_local.get(node)))
    return found
