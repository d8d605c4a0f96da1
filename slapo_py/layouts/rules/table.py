"""What each torch operation is, for placements: one line of labels, or membership in a set. Pure data.

A line names the dims of each operand and result as in einsum: `...k, nk, n -> ...n`. A dim under a small letter may be
split, under a capital never; `...` are any number of dims that may be split, `***` of dims that never are; `-` is a
plain value. Operands of fewer dims are aligned from the right. Dims of size 1 broadcast and are never split. A small
label that no result has is summed over.

`linear` says in which arguments the operation is linear, so that one of them may be a partial sum: `0 * 1 + 2` are two
terms, the first a product of arguments 0 and 1. A written number in a product is a factor; alone, and not 0, it is a
term that every rank would add, so `x + 1` is not linear, nor is `1 - x`. In an argument of no term (a divisor) it isn't
linear.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rule:
    """line: labels. linear: its terms. names: the arguments' names, for those given by keyword.

    local: for a label, the local implementation without which it can't be split.
    whole: labels over which that implementation reduces by itself, so that the result is no partial sum.
    grouped: a label may stand for dims of two sizes, one a multiple of the other (heads of queries and of keys).
    """

    line: str
    linear: str = ""
    names: tuple[str, ...] = ()
    local: dict[str, str] = field(default_factory=dict)
    whole: str = ""
    grouped: bool = False


_NORM = ("input", "normalized_shape", "weight", "bias")
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias")
_TWO = ("input", "other")

# Operations with a line of their own. Where a line depends on arguments (training, groups, is_causal), the variant has
# a name of its own here, and `labels.py` says which one it is.
RULES: dict[str, Rule] = {
    "linear": Rule("...k, nk, n -> ...n", "0 * 1 + 2", ("input", "weight", "bias")),
    "addmm": Rule("mn, mk, kn -> mn", "0 + 1 * 2", ("input", "mat1", "mat2")),
    "baddbmm": Rule("bmn, bmk, bkn -> bmn", "0 + 1 * 2", ("input", "batch1", "batch2")),
    "bmm": Rule("bmk, bkn -> bmn", "0 * 1", ("input", "mat2")),
    "mm": Rule("mk, kn -> mn", "0 * 1", ("input", "mat2")),
    "matmul": Rule("...mk, ...kn -> ...mn", "0 * 1", _TWO),
    "matmul of a vector": Rule("k, ...kn -> ...n", "0 * 1", _TWO),
    "matmul by a vector": Rule("...mk, k -> ...m", "0 * 1", _TWO),
    "matmul of two vectors": Rule("k, k -> ", "0 * 1", _TWO),
    "conv": Rule("bc***, oc***, o -> bo***", "0 * 1 + 2", ("input", "weight", "bias")),
    "conv, in groups": Rule("bC***, OG***, O -> bO***", "0 * 1 + 2", ("input", "weight", "bias")),
    "adaptive_avg_pool2d": Rule("...XY -> ...XY", "0"),
    "avg_pool2d": Rule("...XY -> ...XY", "0"),
    "max_pool2d": Rule("...XY -> ...XY"),
    "embedding": Rule("..., vn -> ...n", "1", ("input", "weight"), local={"v": "embedding"}),
    "layer_norm": Rule("...N, -, N, N -> ...N", "", _NORM),
    "rms_norm": Rule("...N, -, N -> ...N", "2", _NORM),
    # The mean is over the batch: a split of it would need an exchange inside (SyncBatchNorm is another operation).
    "batch_norm, in training": Rule("Bc***, c, c, c, c -> Bc***", "", _BATCH_NORM),
    "batch_norm": Rule("bc..., c, c, c, c -> bc...", "", _BATCH_NORM),
    # Causal: row q sees columns up to q, so that a rank's rows would have to know where they begin.
    "scaled_dot_product_attention": Rule(
        "...qD, ...KD, ...Ke, ...qK -> ...qe", "2", ("query", "key", "value", "attn_mask")
    ),
    "scaled_dot_product_attention, causal": Rule("...QD, ...KD, ...Ke -> ...Qe", "2", ("query", "key", "value")),
    # Classes split over ranks: a maximum and a sum of exponentials are exchanged inside.
    "cross_entropy, of each": Rule("tv, t -> t", "", ("input", "target"), local={"v": "cross_entropy"}, whole="v"),
    "cross_entropy, summed": Rule("tv, t -> ", "", ("input", "target"), local={"v": "cross_entropy"}, whole="v"),
    "cross_entropy, averaged": Rule("Tv, T -> ", "", ("input", "target"), local={"v": "cross_entropy"}, whole="v"),
}

# The value is the same on its way out: every partial value passes, the maximum of one too.
IDENTITY = frozenset(
    "border alias to float double half bfloat16 type clone contiguous detach identity positive "
    "autocast_argument".split()
)

# Row-major order is kept: one rule of `shapes.py` for all.
RESHAPE = frozenset("view reshape flatten unflatten unsqueeze squeeze view_as reshape_as ravel".split())

# Elements move as wholes: the dims of the result in terms of the input's, in `shapes.py`.
MOVES = frozenset(
    "transpose swapaxes swapdims permute t movedim expand expand_as broadcast_to repeat repeat_interleave split chunk "
    "unbind getitem select narrow flip roll cat concat stack".split()
)

# Element by element, operands broadcast: name -> in which arguments it is linear.
LINEAR: dict[str, tuple[str, tuple[str, ...]]] = {
    "add": ("0 + 1", _TWO),
    "sub": ("0 + 1", _TWO),
    "mul": ("0 * 1", _TWO),
    "div": ("0", _TWO),
    "neg": ("0", ("input",)),
    "type_as": ("0", _TWO),
    "where": ("1 + 2", ("condition", "input", "other")),
    "masked_fill": ("0 + 2", ("input", "mask", "value")),
    "addcmul": ("0 + 1 * 2", ("input", "tensor1", "tensor2")),
    "addcdiv": ("0 + 1", ("input", "tensor1", "tensor2")),
}

NONLINEAR = frozenset(
    "pow square sqrt rsqrt reciprocal rdiv exp exp2 expm1 log log2 log1p sin cos tan tanh erf sigmoid relu relu6 "
    "silu gelu elu selu leaky_relu hardtanh hardswish hardsigmoid softplus logsigmoid mish abs sign clamp "
    "clamp_min clamp_max clip round floor ceil trunc floor_divide floordiv remainder mod fmod dropout isnan isinf "
    "isfinite gt lt ge le eq ne logical_and logical_or logical_not logical_xor and or xor not invert long int "
    "bool atan2".split()
)

# Element by element, whatever the elements are.
CONSTANT = frozenset("zeros_like ones_like full_like".split())

# Element by element, and the maximum (minimum) of maxima (minima).
EXTREMES = {"maximum": "max", "minimum": "min"}

# Along one dim, which is never split; the other dims are free: name -> (position of dim, its default, linear).
ALONG: dict[str, tuple[int, int | None, bool]] = {
    "softmax": (1, None, False),
    "log_softmax": (1, None, False),
    "cumsum": (1, None, True),
    "cumprod": (1, None, False),
    "sort": (1, -1, False),
    "argsort": (1, -1, False),
    "topk": (2, -1, False),
    "diff": (2, -1, True),
    "glu": (1, -1, False),
    "gather": (1, None, True),
    "normalize": (2, 1, False),
}

# Over dims that vanish: name -> what the split dims' results are terms of ("" : such a dim is never split), linear.
OVER: dict[str, tuple[str, bool]] = {
    "sum": ("sum", True),
    "mean": ("", True),
    "amax": ("max", False),
    "amin": ("min", False),
    "max": ("", False),
    "min": ("", False),
    "prod": ("", False),
    "any": ("", False),
    "all": ("", False),
    "argmax": ("", False),
    "argmin": ("", False),
    "var": ("", False),
    "std": ("", False),
    "logsumexp": ("", False),
    "norm": ("", False),
}

# Other names of the same operation; `x_` (in place), `__x__`, `__rx__` and `ix` are taken care of by `canonical`.
ALIASES = {
    "truediv": "div",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "multiply": "mul",
    "negative": "neg",
    "concat": "cat",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "and_": "and",
    "or_": "or",
    "special_softmax": "softmax",
}


def canonical(name: str) -> str:
    """The name under which the table knows an operation: `add_`, `__add__`, `__radd__` and `iadd` are all `add`."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        name = _OTHER_WAY.get(name, name)
    elif name.endswith("_") and name not in ALIASES:
        name = name[:-1]
    name = _IN_PLACE.get(name, name)
    return ALIASES.get(name, name)


# The operands change places: no harm to a sum or a product, and `rdiv` is an operation of its own.
_OTHER_WAY = {"rtruediv": "rdiv", **{"r" + one: one for one in ("add", "sub", "mul", "pow", "and", "or", "xor")}}
_IN_PLACE = {"i" + one: one for one in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "and", "or", "xor")}
