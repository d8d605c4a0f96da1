"""From captures to a trace: what differs between modes, sizes and dtypes becomes data or a guard, or is refused."""

import inspect
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from slapo_py.errors import TraceError
from slapo_py.scheduled import bare, own_layers
from slapo_py.tracing.align import Difference, Parting, align, counterpart, same, substitute, substitute_node
from slapo_py.tracing.capture import Capture, likeness, sweep
from slapo_py.tracing.expressions import attribute_path, input_tensors, node_at, owned_floats, owned_tensors, place
from slapo_py.tracing.guards import Guards
from slapo_py.tracing.reads import Reads, dotted
from slapo_py.tracing.recorder import Call
from slapo_py.tracing.sandbox import Fakes
from slapo_py.tracing.sizes import Comparison
from slapo_py.tracing.sizing import SizeNames
from slapo_py.tracing.structure import structure_check
from slapo_py.tracing.tape import Fact, Input
from slapo_py.tracing.trace import Trace
from slapo_py.tracing.values import Tensor, tensors

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Leaf = Callable[[str, nn.Module], bool]


class SizeDependent(TraceError):
    """The operations, or a value that is no size, depend on the size of the input."""


class Assembly:
    """The making of one trace."""

    def __init__(
        self,
        module: nn.Module,
        is_leaf: Leaf,
        first: tuple[Call, Fakes],
        second: tuple[Call, Fakes] | None,
        notes: Sequence[str] = (),
    ) -> None:
        self.module, self.is_leaf, self.first, self.second = module, is_leaf, first, second
        self.guards = Guards()
        self.notes = list(notes)

    def trace(self) -> Trace:
        self.identity = self._identity()
        self._capture_modes()
        self._second_size()
        self._guard_arguments()  # first: the lines after these may rely on a tensor being one
        self._guard_sizes()
        self._guard_dtypes()
        self._guard_facts()
        for path in sorted({path for capture in self.used for path in capture.inlined if path}):
            # flattening goes past what was done around a forward, so a trace holds where nothing was
            child = self.module.get_submodule(path)
            kind, own = self.guards.name(bare(child)), own_layers(child)
            if own:
                now = f"type(self{dotted(path)})"
                self.guards.add(f"{now}._slapo_base is {kind} and {now}._slapo_layers == {self.guards.name(own)}")
            else:
                self.guards.add(f"type(self{dotted(path)}) is {kind}")
        reads = self._reads()
        self.guards.attributes(self.module, reads)
        for capture in self.used:
            self.guards.module_globals(capture.module_globals)
        self._rewrite()
        return Trace(
            self.main.graph, self.guards, [(str(i.node.target), i.expr) for i in self.main.inputs if i.node.users],
            self.main.constants, reads, self._checks(), self.sizes.locals, self.notes,
            inlined=frozenset(path for capture in self.used for path in capture.inlined if path),
        )  # fmt: skip

    def _run(
        self,
        training: bool,
        which: tuple[Call, Fakes],
        dtype: torch.dtype | None = None,
        flipped: frozenset[int] = frozenset(),
    ) -> Capture:
        return Capture(self.module, self.is_leaf).run(*which, training, dtype, flipped, self.identity)

    def _identity(self) -> str:
        """Whether it matters which arguments are the same tensor: captured apart and together, does anything change?"""
        call = self.first[0]
        given = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
        groups = Counter(map(likeness, given))
        if len(groups) == len(given):
            return "recorded"
        for training in (True, False):
            self.identity = "apart"
            try:
                apart = self._run(training, self.first)
                self.identity = "together"
                together = self._run(training, self.first)
                found = align(apart.graph, together.graph, _alike(apart)).found
            except (Parting, TraceError):
                return "recorded"
            if found:
                return "recorded"
        return "apart"

    # ---- train and eval --------------------------------------------------------------------------------------------
    def _capture_modes(self) -> None:
        captures: dict[bool, Capture] = {}
        failures: dict[bool, TraceError] = {}
        for training in (True, False):
            try:
                captures[training] = Capture(self.module, self.is_leaf, watch_globals=True).run(
                    *self.first, training, identity=self.identity
                )
            except TraceError as error:
                failures[training] = error
        if not captures:
            raise failures[True]
        self.notes += sorted({note for capture in captures.values() for note in capture.said})
        self.training = True in captures
        self.main = captures[self.training]
        self.used = list(captures.values())
        self.flags = sorted({owner for capture in self.used for owner, name in capture.reads if name == "training"})
        self.mode_choices: list[Difference] | None = None
        self.twins: dict[fx.Node, fx.Node] = {}  # our nodes: those of the other mode
        if len(captures) == 2:
            try:
                self.mode_choices, self.twins = align(captures[True].graph, captures[False].graph)
                _same_constants(captures[True], captures[False])
            except Parting as parting:
                self.notes.append(f"train and eval have different operations, first at {parting}")
            if list(captures[True].children.values()) != list(captures[False].children.values()):
                self.mode_choices = None
                self.notes.append("a submodule gives back another structure in train than in eval")
        if self.mode_choices is None:
            self.used = [self.main]
            self.notes += [f"{'train' if t else 'eval'} mode is not traced: {error}" for t, error in failures.items()]
            self.notes.append(f"{'eval' if self.training else 'train'} mode runs the original")
            if not self.flags:
                self.flags = ["self"]
            for flag in self.flags:
                self.guards.add(f"{flag}.training is {self.training}")
        elif self.mode_choices:
            if not self.flags:
                at = self.mode_choices[0].node.meta.get("where", self.mode_choices[0].node)
                raise TraceError(
                    f"a value at {at} is another one in each run although the forward does not read `training`: does "
                    "it come from the time, or from something else that the graph does not see?"
                )
            for flag in self.flags[1:]:
                self.guards.add(f"{flag}.training is {self.flags[0]}.training")

    # ---- sizes -----------------------------------------------------------------------------------------------------
    def _second_size(self) -> None:
        """Run at another size: what stays constant is folded, what should not depend on the size is refused."""
        self.constants: dict[fx.Node, int] = {}
        pairs: dict[fx.Node, tuple[int, int]] = {}
        other = None
        if self.second is not None:
            other = self._run(self.training, self.second)
            try:
                found, twins = align(self.main.graph, other.graph)
                _same_constants(self.main, other)
            except Parting as parting:
                raise SizeDependent(
                    f"the operations depend on the size of the input, first at {parting}; a loop over a size can't be "
                    "a graph: trace the modules below this one instead"
                ) from None
            if found:
                at = found[0].node.meta.get("where", found[0].node)
                raise SizeDependent(f"the value {found[0].here!r} depends on the size of the input at {at}")
            if [c[1::2] for c in self.main.comparisons] != [c[1::2] for c in other.comparisons]:
                raise SizeDependent("a comparison of sizes comes out differently at the second input size")
            for c, d in zip(self.main.comparisons, other.comparisons, strict=True):
                twins[c.node] = d.node
                if isinstance(c.other, fx.Node) and isinstance(d.other, fx.Node):
                    twins[c.other] = d.other
            for ours, theirs in twins.items():
                if "int" in ours.meta:
                    pairs[ours] = (ours.meta["int"], theirs.meta["int"])
        self.sizes = SizeNames(self.used, other, pairs)
        self.constants = {node: n for node, (n, m) in pairs.items() if n == m and self.sizes.is_fixed(node)}

    def _guard_sizes(self) -> None:
        if self._any_fact("shape"):
            if self.second is None:
                self.notes.append("holds at the recorded sizes only: there is no second recording to compare with")
            idle = tuple(f"{one.expr}{mark}" for one in self.main.inputs if not self._used(one) for mark in (".", "["))
            for expr, size in self.sizes.fixed() if self.second is not None else self.sizes.all():
                if not expr.startswith(idle):
                    self.guards.add(f"{expr} == {size}")
        for capture in self.used:
            for node, sign, other, result in capture.comparisons:
                ours = self._ours(capture, node)
                rival = self._ours(capture, other) if isinstance(other, fx.Node) else other
                self._guard_comparison(Comparison(ours, sign, rival, result))

    def _ours(self, capture: Capture, node: fx.Node) -> fx.Node:
        """The node of the kept capture that stands for this one (itself where only this mode has asked)."""
        return node if capture is self.main else counterpart(node, self.main.graph, self.twins) or node

    def _guard_comparison(self, comparison: Comparison) -> None:
        node, sign, other, result = comparison
        if node in self.constants and (other in self.constants or not isinstance(other, fx.Node)):
            return
        left = self._size(node)
        right = self._size(other) if isinstance(other, fx.Node) else repr(other)
        if left is not None and left == right:
            return
        if left is None or right is None:
            self.notes.append(f"holds at the recorded sizes only: a size is compared at {node.meta.get('where', node)}")
            for expr, size in self.sizes.all():
                self.guards.add(f"{expr} == {size}")
            return
        self.guards.add(f"{left} {sign} {right}" if result else f"not {left} {sign} {right}")

    def _size(self, node: fx.Node) -> str | None:
        return repr(self.constants[node]) if node in self.constants else self.sizes.of(node)

    # ---- dtypes ----------------------------------------------------------------------------------------------------
    def _guard_dtypes(self) -> None:
        """Where a dtype was read: fix it, or (where the other dtypes only change literals) follow the input's."""
        self.dtype_choices: dict[tuple[fx.Node, int], dict[torch.dtype, Any]] = {}
        self.dtype_source: Tensor | str | None = None
        if not self._any_fact("dtype"):
            return
        floats = [(expr, t) for expr, t in input_tensors(self.main) if t.is_floating_point()]
        owned = [*owned_floats(self.module)]
        if not floats and not owned:
            for expr, tensor in input_tensors(self.main):
                self.guards.add(f"{expr}.dtype is {tensor.dtype}")
            return
        source, first = floats[0] if floats else owned[0]
        own = first.dtype
        kinds = {tensor.dtype for _, tensor in [*floats, *owned]}
        self.dtype_expr = source
        allowed = frozenset({own})
        if kinds == {own} and own in FLOATS:
            allowed |= self._follow_dtypes(own)
        self.guards.add("not torch._C._is_any_autocast_enabled()")
        self.guards.add(
            f"{source}.dtype in {self.guards.name(frozenset(allowed))}"
            if len(allowed) > 1
            else f"{source}.dtype is {own}"
        )
        for expr, tensor in input_tensors(self.main):
            if not tensor.is_floating_point():
                self.guards.add(f"{expr}.dtype is {tensor.dtype}")
        for expr, tensor in [*floats, *owned]:
            if expr != source:
                self.guards.add(f"{expr}.dtype is " + (f"{source}.dtype" if tensor.dtype is own else f"{tensor.dtype}"))

    def _follow_dtypes(self, own: torch.dtype) -> set[torch.dtype]:
        followed: set[torch.dtype] = set()
        for dtype in FLOATS:
            if dtype is own:
                continue
            try:
                trial = self._run(self.training, self.first, dtype)
                found = align(self.main.graph, trial.graph).found
                _same_constants(self.main, trial)
                if len(self.used) == 2:
                    twin = self._run(not self.training, self.first, dtype).graph
                    second = align(self.used[1].graph, twin).found
                    if [d[1:] for d in second] != [d[1:] for d in found]:
                        continue
            except (Parting, TraceError, RuntimeError):
                continue
            places = {(d.node, d.position) for d in found}
            if followed and places != set(self.dtype_choices):
                continue
            for d in found:
                self.dtype_choices.setdefault((d.node, d.position), {own: d.here})[dtype] = d.there
            followed.add(dtype)
        return followed

    # ---- everything else that was read -------------------------------------------------------------------------------
    def _any_fact(self, what: str) -> bool:
        return any(fact.what == what for capture in self.used for fact in capture.facts)

    def _guard_facts(self) -> None:
        asked = self._gradients_that_matter()
        for capture in self.used:
            for fact in capture.facts:
                self._guard_fact(capture, fact, asked)
            for (query, args), value in capture.globals.items():
                call = f"{query}({', '.join(map(repr, args))})"
                self.guards.add(f"{call} is {value!r}" if isinstance(value, bool) else f"{call} == {value!r}")

    def _guard_fact(self, capture: Capture, fact: Fact, asked: set[str]) -> None:
        if fact.what in ("shape", "dtype"):
            return
        expr = place(capture, fact.node)
        if fact.what == "device":
            found = [e for e, _ in input_tensors(capture)] or [e for e, _ in owned_tensors(self.module)]
            if found:
                self.guards.add(f"{found[0]}.device.type == {fact.value!r}")
        elif expr is not None and fact.what == "requires_grad":
            if expr.startswith("self") or expr in asked:
                self.guards.add(f"{expr}.requires_grad is {fact.value}")
        elif expr is not None and fact.what == "is_contiguous":
            self.guards.add(f"{expr}.is_contiguous() is {fact.value}")
        else:
            raise TraceError(f"the forward reads .{fact.what} of a tensor at {fact.where}, which a guard can't check")

    def _gradients_that_matter(self) -> set[str]:
        """The arguments whose `requires_grad` was read, unless every combination of theirs gives the same graph."""
        asked = {
            expr
            for capture in self.used
            for fact in capture.facts
            if fact.what == "requires_grad" and (expr := place(capture, fact.node)) is not None
        }
        floats = {id(t): t for t in tensors((self.first[0].args, self.first[0].kwargs)) if t.is_floating_point()}
        if not asked or len(floats) > 3:
            return asked
        for size in range(1, len(floats) + 1):
            for flipped in itertools.combinations(floats, size):
                for capture, training in zip(self.used, (self.training, not self.training), strict=False):
                    try:
                        if align(capture.graph, self._run(training, self.first, None, frozenset(flipped)).graph).found:
                            return asked
                    except (Parting, TraceError):
                        return asked
        return set()

    def _guard_arguments(self) -> None:
        ranks = self._any_fact("shape")
        for parameter in inspect.signature(bare(self.module).forward).parameters.values():
            heads = [i for i in self.main.inputs if i.expr.startswith(parameter.name + "[")]
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                self.guards.add(f"len({parameter.name}) == {len(heads)}")
            if parameter.kind is parameter.VAR_KEYWORD:
                for one in heads:
                    self.guards.add(f"{str(one.node.target)!r} in {parameter.name}")
        for one in self.main.inputs:
            self.guards.argument(one.expr, one.value, ranks and self._used(one))
        if self.identity == "apart":
            return
        found = [(one.expr, one.value) for one in self.main.inputs if isinstance(one.value, Tensor)]
        for index, (expr, tensor) in enumerate(found):
            for other, rival in found[:index]:
                if likeness(tensor) == likeness(rival):  # `query is key` is asked
                    self.guards.add(f"{expr} is {'' if tensor is rival else 'not '}{other}")

    def _used(self, one: Input) -> bool:
        """Whether anything is computed from an argument, its sizes included; if not, its sizes don't matter."""
        position = self.main.inputs.index(one)
        return any(capture.inputs[position].node.users for capture in self.used)

    def _reads(self) -> Reads:
        merged: Reads = {}
        for capture in self.used:
            for key, value in capture.reads.items():
                if key in merged and key[1] != "training" and not same(merged[key], value) and merged[key] is not value:
                    raise TraceError(
                        f"the forward reads {key[0]}.{key[1]} with another value in train than in eval mode"
                    )
                merged[key] = value
            if any(map(_holds_plain, capture.children.values())):  # None or a tensor: a config entry may decide
                merged.update({key: value for key, value in capture.deep_reads.items() if key not in merged})
        return merged

    # ---- the graph -------------------------------------------------------------------------------------------------
    def _rewrite(self) -> None:
        graph = self.main.graph
        body = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(body):
            if self.mode_choices:
                self._choose_by_mode(graph)
            if self.dtype_choices:
                self._choose_by_dtype(graph)
        for node, value in self.constants.items():
            for user in list(node.users):
                substitute_node(user, node, value)
        sweep(graph, frozenset(node for node in graph.nodes if node in self.sizes.checked))
        for node in graph.nodes:
            node.meta = {key: value for key, value in node.meta.items() if key in ("where", "within", "ndim")}

    def _choose_by_mode(self, graph: fx.Graph) -> None:
        flag = graph.create_node("get_attr", attribute_path(self.flags[0]) + "training")
        made: dict[str, fx.Node] = {}
        for node, position, on, off in self.mode_choices or ():
            if on is True and off is False:
                chosen = flag
            else:
                chosen = made.setdefault(
                    repr((off, on)), graph.call_function(operator.getitem, ((off, on), flag))
                )  # a node that is made twice and not used is swept
            substitute(node, position, chosen)

    def _choose_by_dtype(self, graph: fx.Graph) -> None:
        tensor = node_at(graph, self.main, self.dtype_expr)
        dtype = graph.call_function(getattr, (tensor, "dtype"))
        for (node, position), table in self.dtype_choices.items():
            follows = all(key is value for key, value in table.items())
            chosen = dtype if follows else graph.call_function(operator.getitem, (table, dtype))  # type: ignore[arg-type]
            substitute(node, position, chosen)

    def _checks(self) -> dict[str, tuple[str, str]]:
        checks: dict[str, tuple[str, str]] = {}
        for node, structure in self.main.children.items():
            if structure is not None and not node._erased:
                condition = structure_check(node.name, structure)
                message = (
                    f"{node.target} gave back another structure than when its parent was traced (expected "
                    f"{condition}); trace the parent again"
                )
                checks[node.name] = (condition, message)
        for node, length in self.main.lengths.items():
            if not node._erased:
                message = f"{node.name} has another number of parts than when it was traced ({length}); trace it again"
                checks[node.name] = (f"len({node.name}) == {length}", message)
        for node, name in self.sizes.checked.items():
            if not node._erased:
                checks[node.name] = (
                    f"{node.name} == {name}",
                    f"a size at {node.meta.get('where', node.name)} is not what the two recorded sizes suggested; "
                    "give create_schedule(example_inputs=[...]) two inputs whose sizes all differ",
                )
        return checks


def _same_constants(a: Capture, b: Capture) -> None:
    """Raises Parting if two captures used other tensors from outside, as from a cache that holds one for each size."""
    for name, tensor in a.constants.items():
        if b.constants.get(name) is not tensor:
            raise Parting("a tensor from outside the module, which is another one in each run")


def _alike(capture: Capture) -> Callable[[fx.Node, fx.Node], bool]:
    """Whether two placeholders could be given one and the same tensor."""
    kinds = {one.node.target: likeness(one.value) for one in capture.inputs if isinstance(one.value, Tensor)}
    return lambda u, v: u.target == v.target or (u.target in kinds and kinds[u.target] == kinds.get(v.target))


def _holds_plain(structure: Any) -> bool:
    """Whether a submodule gave back something besides tensors, which its parent may pass on as it is."""
    if isinstance(structure, tuple) and structure and isinstance(structure[0], type):
        return any(_holds_plain(item[1] if issubclass(structure[0], dict) else item) for item in structure[1:])
    return structure is not Tensor
