"""What every kernel has to show, as a class of tests: a test file names the kernel and draws its inputs."""

import abc
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import slapo_py as slapo
from slapo_py.kernels import Kernel, find_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="of the plain form, which a GPU does not run: it has Triton's")
"""There are no numbers of a GPU to compare to the bit: those of Triton are held against float64 on either device."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Args = tuple[Any, ...]
drawing = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # the interpreter is too slow to look for a smaller example
)


class Draw:
    """Sizes and tensors, drawn by hypothesis: odd ones, 1, 0, primes, every kind of strides."""

    def __init__(self, data: st.DataObject, dtype: torch.dtype, device: str = DEVICE) -> None:
        self.data, self.dtype, self.device = data, dtype, device
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))

    def one_of(self, *values: Any) -> Any:
        return self.data.draw(st.sampled_from(values))

    def size(self, most: int = 300) -> int:
        """A size of a dim: often 1, a prime, a power of two or next to one; now and then 0."""
        usual = [1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 64, 65, 97, 127, 128, 129, 211, 256, 257, 300]
        sizes = [size for size in usual if size <= most]
        return self.data.draw(st.one_of(st.sampled_from(sizes), st.integers(1, most), st.just(0)), label="size")

    def shape(self, width: int | None = None, most: int = 300, rows: int = 12) -> tuple[int, ...]:
        """(..., width) with one to three leading dims of at most `rows` rows in all."""
        width = self.size(most) if width is None else width
        lead: list[int] = []
        for _ in range(self.data.draw(st.integers(1, 3), label="leading dims")):
            left = max(rows // max(int(np.prod(lead)), 1), 1)
            lead.append(self.data.draw(st.integers(0 if left > 1 else 1, left), label="rows"))
        return (*lead, width)

    def tensor(self, shape: tuple[int, ...], scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that requires grad: contiguous, transposed, sliced or expanded, now and then of a large mean."""
        dtype = dtype or self.dtype
        kind = self.one_of("contiguous", "contiguous", "transposed", "sliced", "expanded")
        mean = self.one_of(0.0, 0.0, 0.0, 30.0)
        if kind == "transposed" and len(shape) > 1:
            made = self._numbers((*shape[:-2], shape[-1], shape[-2]), scale).transpose(-1, -2)
        elif kind == "sliced":
            made = self._numbers((*shape[:-1], 2 * shape[-1] + 1), scale)[..., 1::2]
        elif kind == "expanded" and len(shape) > 1:
            made = self._numbers((1, *shape[1:]), scale).expand(shape)
        else:
            made = self._numbers(shape, scale)
        made = made.add(mean) if kind == "contiguous" else made  # `add` would lay the others out anew
        return _like(made, dtype, self.device).detach().requires_grad_()

    def _numbers(self, shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=self.generator) * scale

    def seed(self) -> int:
        return int(self.data.draw(st.integers(0, 2**31), label="seed of dropout"))


def _like(made: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """The same strides in another dtype, also with gaps."""
    base = made._base if made._base is not None else made
    return base.to(device, dtype).as_strided(made.shape, made.stride(), made.storage_offset())


class KernelTests(abc.ABC):
    """A subclass, its name beginning with Test, gives `name` and `inputs`, and what else it needs.

    An error is measured against the largest value of its tensor: where a formula cancels near 0, draw small scales too.
    """

    name: str
    conditioned = False
    """Whether the reference's own error is also what inputs moved by half a unit in their last place make of float64,
    as `verify` measures it: where products and sums of inputs come first, the reference's error may be 0 by luck."""

    @abc.abstractmethod
    def inputs(self, draw: Draw) -> Args:
        """The arguments of the op, drawn."""

    def call(self, *args: Any) -> Any:
        """What is tested."""
        return self.kernel.op(*args)

    def oracle(self, *args: Any) -> Any:
        """The reference with the same arguments, in whatever dtype they have."""
        return self.kernel.reference(*args)

    def exact(self, *args: Any) -> Any:
        """The same on float64 arguments: what is right. Where torch's formula cancels in float64, too, give another."""
        return self.oracle(*args)

    @property
    def kernel(self) -> Kernel:
        return find_kernel(self.name)

    def example(self, dtype: torch.dtype = torch.float32, rows: int = 6, width: int = 16) -> Args:
        assert self.kernel.example is not None
        torch.manual_seed(2)
        return self.kernel.example(rows, width, dtype, DEVICE)

    # By Triton

    @pytest.mark.triton
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @drawing
    @given(data=st.data())
    def test_triton_is_as_exact_as_the_reference(self, dtype: torch.dtype, data: st.DataObject) -> None:
        draw = Draw(data, dtype)
        args = self.inputs(draw)
        torch.manual_seed(1)
        made = _outputs(self.call(*args))
        grads = [_numbers_like(one, draw) for one in made]
        found = [*made, *_grads(made, args, grads)]
        wide = tuple(_to(one, torch.float64) for one in args)
        torch.manual_seed(1)
        exact = _outputs(self.exact(*wide))
        expected = [*exact, *_grads(exact, wide, [one.double() for one in grads])]
        torch.manual_seed(1)
        plain = _outputs(self.oracle(*args))
        usual = [*plain, *_grads(plain, args, grads)]
        assert len(found) == len(expected) == len(usual)
        floors: list[Tensor | None] = [None] * len(usual)
        if self.conditioned:
            near = tuple(_moved(one, dtype) for one in wide)
            torch.manual_seed(1)
            moved = _outputs(self.exact(*near))
            moved += _grads(moved, near, [one.double() for one in grads])
            floors = [one - truth for one, truth in zip(moved, expected)]
        for place, (one, truth, other) in enumerate(zip(found, expected, usual)):
            close(
                one,
                truth,
                other,
                f"value {place} of {len(made)} outputs and {len(found) - len(made)} gradients",
                floors[place],
            )

    def test_triton_in_the_interpreter(self) -> None:
        file = sys.modules[type(self).__module__].__file__
        assert file is not None
        run_interpreted(Path(file), type(self).__name__)

    # In plain torch

    @cpu_only
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_the_plain_form_is_the_reference_bit_by_bit(self, dtype: torch.dtype) -> None:
        same(*(self.run(one, self.example(dtype)) for one in (self.call, self.oracle)))

    @cpu_only
    def test_under_autocast(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            same(*(self.run(one, self.example()) for one in (self.call, self.oracle)))

    def run(self, function: Any, args: Args) -> list[Tensor]:
        torch.manual_seed(3)
        made = _outputs(function(*args))
        torch.manual_seed(4)
        return [*made, *_grads(made, args, [torch.randn_like(one) for one in made]), torch.get_rng_state()]

    def test_opcheck(self) -> None:
        calls = _Calls()
        made = _outputs(calls.forward(self.call, self.example()))
        with calls:
            torch.autograd.grad(sum(one.float().sum() for one in made), _needing(calls.given))
        assert {str(one) for one, _ in calls.seen} >= {f"slapo.{self.kernel.name}.default"}, calls.seen
        for op, args in calls.seen:
            checks = ["test_schema", "test_faketensor"] if "backward" in str(op) else None
            kwargs = {"test_utils": checks} if checks else {}
            torch.library.opcheck(op, args, **kwargs)

    def test_fake_tensors_have_the_same_shapes(self) -> None:
        args = self.example(torch.bfloat16)
        made = _outputs(self.call(*args))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in args]
            faked = _outputs(self.call(*fakes))
        facts = [[(one.shape, one.dtype, one.stride()) for one in each] for each in (made, faked)]
        assert facts[0] == facts[1]

    def test_compiles_whole(self) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(self.call, fullgraph=True, backend="aot_eager")
        same(*(self.run(one, self.example())[:-1] for one in (self.call, compiled)))

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning")  # torch's own
    def test_compiles_whole_by_inductor(self) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(self.call, fullgraph=True, options={"fallback_random": True})  # torch's own masks
        for one, other in zip(*(self.run(one, self.example())[:-1] for one in (self.call, compiled)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

    def test_under_a_checkpoint(self) -> None:
        again = functools.partial(checkpoint, self.call, use_reentrant=False)
        same(*(self.run(one, self.example()) for one in (self.call, again)))

    def test_exports(self) -> None:
        args = self.example()
        program = torch.export.export(_Calling(self.call), args)
        assert any(f"slapo.{self.kernel.name}" in str(node.target) for node in program.graph.nodes)
        torch.manual_seed(3)
        made = _outputs(self.call(*args))
        torch.manual_seed(3)
        same(_outputs(program.module()(*args)), made)

    def test_our_tracer_takes_it(self) -> None:
        args = self.example()
        module = _Calling(self.call)
        sch = slapo.create_schedule(module, example_inputs=args)
        sch.trace()
        same(*(self.run(one, self.example()) for one in (module, sch.module)))
        assert slapo.misses(sch.module) == {}

    @pytest.mark.triton
    def test_triton_leaves_second_derivatives_to_the_reference(self) -> None:
        self._compare_second()

    def test_second_derivatives_are_the_references(self) -> None:
        self._compare_second()

    def _compare_second(self) -> None:
        found = [_second(one, self.example()) for one in (self.call, self.oracle)]
        assert len(found[0]) == len(found[1])
        for one, other in zip(*found):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class _Calling(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class _Calls(TorchDispatchMode):
    """The operations of ours that run, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Args]] = []
        self.given: Args = ()

    def forward(self, function: Any, args: Args) -> Any:
        """Call a function; its operations are noted with arguments that still require gradients."""
        calls, self.given = self, args

        class Noting(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if getattr(func, "namespace", "") == "slapo":
                    calls.seen.append((func, args))
                return func(*args, **(kwargs or {}))

        with Noting():
            return function(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "slapo":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def _outputs(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _needing(args: Args) -> list[Tensor]:
    return [one for one in args if isinstance(one, Tensor) and one.requires_grad]


def _grads(made: list[Tensor], args: Args, grads: list[Tensor]) -> list[Tensor]:
    pairs = [(one, grad) for one, grad in zip(made, grads) if one.requires_grad]
    if not pairs:
        return []
    outputs, given_grads = zip(*pairs)
    found = torch.autograd.grad(outputs, _needing(args), given_grads, allow_unused=True, materialize_grads=True)
    return list(found)


def _second(function: Any, args: Args) -> list[Tensor]:
    torch.manual_seed(3)
    made = _outputs(function(*args))
    torch.manual_seed(4)
    first = torch.autograd.grad(
        [one for one in made if one.requires_grad],
        _needing(args),
        [torch.randn_like(one) for one in made if one.requires_grad],
        create_graph=True,
    )
    total = sum(one.double().square().sum() for one in first)
    if not total.requires_grad:  # linear in all that needs gradients
        return [torch.zeros_like(one) for one in _needing(args)]
    return list(torch.autograd.grad(total, _needing(args), allow_unused=True, materialize_grads=True))


def _numbers_like(tensor: Tensor, draw: Draw) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor)
    made = draw.tensor(tuple(tensor.shape), dtype=tensor.dtype).detach() if tensor.dim() else torch.ones_like(tensor)
    return made.to(tensor.device)


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(dtype).requires_grad_(value.requires_grad)
    return value


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit by bit."""
    assert len(found) == len(expected)
    for place, (one, other) in enumerate(zip(found, expected)):
        assert one.dtype == other.dtype and one.shape == other.shape, place
        assert torch.equal(one, other) or torch.equal(one.nan_to_num(7e4), other.nan_to_num(7e4)), place


def _moved(value: Any, dtype: torch.dtype) -> Any:
    """float64 inputs as they might have been before they were rounded to a dtype."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    signs = torch.randint(0, 2, value.shape, generator=torch.Generator().manual_seed(0)).to(value) * 2 - 1
    near = value.detach() * (1 + signs * torch.finfo(dtype).eps / 2)
    return near.requires_grad_(value.requires_grad)


def close(found: Tensor, exact: Tensor, usual: Tensor, what: str, floor: Tensor | None = None) -> None:
    """The error against float64 is at most twice the reference's in this dtype, and one unit in the last place.

    floor: another error of the reference's, of which the larger counts.
    """
    assert found.dtype == usual.dtype and found.shape == usual.shape == exact.shape, what
    strange = ~torch.isfinite(usual)
    assert torch.equal(found[strange].nan_to_num(7e4), usual[strange].nan_to_num(7e4)), f"{what}: nan and inf"
    epsilon = torch.finfo(found.dtype).eps
    floor = torch.zeros_like(exact) if floor is None else floor
    exact, usual, found, floor = (one.double()[~strange] for one in (exact, usual, found, floor))
    if not exact.numel():
        return
    unit = exact.abs().max() * epsilon
    for name, measure in _MEASURES.items():
        mine, allowed = measure(found - exact), 2 * max(measure(usual - exact), measure(floor)) + unit
        assert mine <= allowed, f"{what}: {name} error {mine:.3g}, allowed {allowed:.3g}"


_MEASURES = {
    "largest": lambda error: error.abs().max(),
    "root mean square": lambda error: error.square().mean().sqrt(),
}


def run_interpreted(file: Path, only: str = "") -> None:
    """Run the tests of a file that are marked `triton` in a process of their own, under Triton's interpreter."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in [one for one in environment if one.startswith("PYTEST_")]:
        del environment[name]
    where = f"{file}::{only}" if only else str(file)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", where]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def philox_mask(seed: int, shape: tuple[int, ...], p: float) -> Tensor:
    """The noise of dropout off any GPU: Philox 4x32-10 (Salmon et al., "Parallel Random Numbers", SC 2011), counter =
    the row-major index, the first of its four words as a number in [0, 1)."""
    index = np.arange(int(np.prod(shape)), dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    c = [index & low, index >> np.uint64(32), np.zeros_like(index), np.zeros_like(index)]
    k0, k1 = np.uint64(seed) & low, np.uint64(seed) >> np.uint64(32)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ k0, b & low, (a >> np.uint64(32)) ^ c[3] ^ k1, a & low]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    word = c[0].astype(np.uint32).view(np.int32)
    uniform = np.where(word < 0, -word - 1, word).astype(np.float32) * np.float32(4.6566127342e-10)
    kept = torch.from_numpy(uniform >= np.float32(p)).reshape(shape)
    return kept.double() / max(1 - p, 1e-30)
