"""What every way to make attention scores has in common.

Every attention of our sources computes out_i = sum_j softmax_j(logits_ij) v_j and differs in the logits alone, which
can all be written as

    logits_ij = <query_i, key_j> + bias_ij

`Scores` holds these factors; a `Spec` is a frozen description that declares its parameters and computes them.
"""

import abc
import dataclasses
import inspect
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from synthesizer_jax import activations
from synthesizer_jax.axes import Param, contract

Parameters = Mapping[str, Any]  # nested: names -> arrays
Features = Float[Array, "b k h r"] | tuple | None  # of keys; a tuple has one entry per part of a mixture


# Factors below it count as this one before they are raised to a power; keeps the power's gradient finite.
_SMALLEST_FACTOR = 1e-30


@dataclasses.dataclass(frozen=True)
class Dims:
    """Sizes that a layer gives to its scores: features e, heads h, head_dim d."""

    features: int
    heads: int
    head_dim: int

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            check_positive(name, value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lookup:
    """Entries of a table [h, n, n] in float32 at positions of each sequence's own, as in packed rows."""

    table: Float[Array, "h n n"]
    q_positions: Int[Array, "_b q"]
    k_positions: Int[Array, "_c k"]

    def entries(self) -> Float[Array, "_b h q k"]:
        """table[:, q_position, k_position], [b, h, q, k]; NaN where the table has no such position."""
        return jnp.moveaxis(entries(self.table, self.q_positions, self.k_positions), 0, 1)


def entries(
    table: Float[Array, "h n n"], q_positions: Int[Array, "*_b q"], k_positions: Int[Array, "*_c k"]
) -> Float[Array, "h *_d q k"]:
    """table[:, q_position, k_position]; NaN where the table has no such position."""
    rows = from_zero(q_positions, table.shape[1])[..., :, None]
    columns = from_zero(k_positions, table.shape[2])[..., None, :]
    return table.at[:, rows, columns].get(mode="fill", fill_value=jnp.nan)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """Attention scores in factored form; an axis of size 1 is shared by the batch, the heads or the queries.

    query [b|1, q, h, r] and key [b|1, k, h, r], both or neither; bias [b|1, h|1, q|1, k] in float32. factor
    [b|1, h, q, k] in float32 is a kernel that has no logarithm everywhere: the weights are factor * exp(<query, key> +
    bias), divided by their sum over the keys. lookup stands for a bias of each sequence's own and may be cheaper than it.
    """

    query: Float[Array, "_b q h r"] | None = None
    key: Float[Array, "_c k h r"] | None = None
    bias: Float[Array, "_b _h _q k"] | None = None
    factor: Float[Array, "_b h q k"] | None = None
    lookup: Lookup | None = None

    def logits(self) -> Float[Array, "_b h q k"]:
        """The scores before masks and softmax, [b|1, h, q|1, k] in float32; NaN where a factor is negative."""
        exponent = self.exponent()
        if self.factor is None:
            return exponent
        return jnp.log(self.factor) + (0 if exponent is None else exponent)

    def exponent(self) -> Float[Array, "_b h q k"] | None:
        """<query, key> + bias, [b|1, h, q|1, k] in float32; None where there is a factor alone."""
        bias, low_rank = self.looked_up().bias, self.low_rank()
        return bias if low_rank is None else low_rank if bias is None else low_rank + bias

    def low_rank(self) -> Float[Array, "_b h q k"] | None:
        """<query, key>, [b|1, h, q, k] in float32; None where there is none."""
        return None if self.query is None else _products(self.query, self.key)

    def looked_up(self) -> "Scores":
        """The same scores, with a bias in place of a lookup."""
        if self.lookup is None:
            return self
        looked_up = self.lookup.entries()
        bias = looked_up if self.bias is None else self.bias + looked_up
        return Scores(self.query, self.key, bias, self.factor)

    @property
    def shared_by_batch(self) -> bool:
        """True when the scores are a bias that all sequences of the batch share."""
        return self.query is None and self.factor is None and self.lookup is None and self.bias.shape[0] == 1

    @property
    def only_looked_up(self) -> bool:
        """True when the scores are entries of a table and nothing else."""
        return self.lookup is not None and self.query is None and self.bias is None and self.factor is None

    def __add__(self, other: "Scores") -> "Scores":
        """The sum of both: low-rank parts side by side along r, biases added, factors multiplied."""
        self, other = self.looked_up(), other.looked_up()
        biases = [s.bias for s in (self, other) if s.bias is not None]
        factors = [s.factor for s in (self, other) if s.factor is not None]
        query, key = _concatenate([s for s in (self, other) if s.query is not None])
        return Scores(query, key, sum(biases[1:], biases[0]) if biases else None, _product(factors))

    def scaled(self, alpha: Float[Array, "_h"]) -> "Scores":
        """The scores times alpha, [h] for a weight per head or [1]; a factor, which has to be >= 0, to its power."""
        query = None if self.query is None else self.query * alpha.astype(self.query.dtype)[:, None]
        bias = None if self.bias is None else self.bias * alpha.astype(self.bias.dtype)[:, None, None]
        factor = self.factor
        if factor is not None:
            factor = jnp.exp(alpha[:, None, None] * jnp.log(jnp.maximum(factor, _SMALLEST_FACTOR)))
        lookup = self.lookup
        if lookup is not None:
            lookup = dataclasses.replace(lookup, table=lookup.table * alpha.astype(lookup.table.dtype)[:, None, None])
        return Scores(query, self.key, bias, factor, lookup)


def _product(factors):
    return None if not factors else factors[0] if len(factors) == 1 else factors[0] * factors[1]


def _products(query, key):
    match query.shape[0], key.shape[0]:
        case 1, 1:
            return contract("qhr,khr->hqk", query[0], key[0])[None]
        case _, 1:
            return contract("bqhr,khr->bhqk", query, key[0])
        case 1, _:
            return contract("qhr,bkhr->bhqk", query[0], key)
    return contract("bqhr,bkhr->bhqk", query, key)


def _concatenate(parts):
    if len(parts) < 2:
        return (parts[0].query, parts[0].key) if parts else (None, None)

    def side_by_side(arrays):
        batch = max(a.shape[0] for a in arrays)
        return jnp.concatenate(
            [jnp.broadcast_to(a, (batch, *a.shape[1:])).astype(arrays[0].dtype) for a in arrays], axis=-1
        )

    return side_by_side([p.query for p in parts]), side_by_side([p.key for p in parts])


class Spec(abc.ABC):
    """A way to make attention scores: a frozen dataclass of plain values, equal and hashable by value.

    `spec(params, x_q, x_kv)` computes `Scores`. For decoding the same is done in two halves: `key_features` gives what
    must be remembered of each key (None: nothing, the cache holds values alone; a tuple: one entry per part of a
    mixture), and `score` needs only that.
    """

    name: ClassVar[str]  # of the part's parameters inside a mixture; where a class has none, its own in snake case

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if not hasattr(cls, "name"):
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @abc.abstractmethod
    def params(self, dims: Dims) -> dict[str, Any]:
        """The parameters of a layer of these sizes: a (nested) dict of `Param`."""

    @abc.abstractmethod
    def score(
        self,
        params: Parameters,
        x_q: Float[Array, "b q e"],
        keys: Features,
        k_length: int,
        q_positions: Int[Array, "*_b q"] | None = None,
        k_positions: Int[Array, "*_b k"] | None = None,
    ) -> Scores:
        """Scores of the queries against keys given by their features; positions as in `__call__`."""

    def key_features(
        self, params: Parameters, x_kv: Float[Array, "b k e"], k_positions: Int[Array, "*_b k"] | None = None
    ) -> Features:
        """What the scores must remember of each key, [b, k, h, r]; None when they read nothing."""
        return None

    def value_inputs(
        self, params: Parameters, x_kv: Float[Array, "b k e"], k_positions: Int[Array, "*_b k"] | None = None
    ) -> Float[Array, "b k e"]:
        """What the values are made of, [b, k, e]: the tokens, or tokens with their positions."""
        return x_kv

    def weighting_error(self) -> str | None:
        """Why the scores can't be multiplied by a learned weight; None when they can."""
        return None

    def scaled_parameters(self, params: Parameters, alpha: Float[Array, "_h"]) -> Parameters | None:
        """Parameters whose scores are alpha times these parameters'; None where only the scores themselves can be scaled."""
        return None

    def reads_positions(self) -> bool:
        """Whether scores or values depend on where in its segment a token stands, not on distances alone."""
        return False

    def cross_attention_error(self) -> str | None:
        """Why the scores can't serve attention to another sequence; None when they can."""
        return None

    def longest(self) -> int | None:
        """The maximum length n that the parameters cover; None when any length will do."""
        return None

    def init(self, key: jax.Array, dims: Dims, dtype: jax.typing.DTypeLike = jnp.float32) -> dict[str, Any]:
        """Initial values of all parameters, a (nested) dict of arrays."""
        declared, structure = jax.tree.flatten(self.params(dims), is_leaf=lambda leaf: isinstance(leaf, Param))
        keys = jax.random.split(key, max(len(declared), 1))
        return structure.unflatten([p.init(k, p.shape, dtype) for p, k in zip(declared, keys, strict=False)])

    def __call__(
        self,
        params: Parameters,
        x_q: Float[Array, "b q e"],
        x_kv: Float[Array, "b k e"],
        q_positions: Int[Array, "*_b q"] | None = None,
        k_positions: Int[Array, "*_b k"] | None = None,
    ) -> Scores:
        """Scores of queries x_q [b, q, e] against keys x_kv [b, k, e].

        Positions, [q] or [b, q] and [k] or [b, k], count from 0 within a segment; None means 0, 1, 2, ... for every
        sequence. Raises ValueError where a length or a known position passes the parameters' maximum n; a traced
        position that does so gives NaN, never another position's scores.
        """
        q_positions = as_positions("q_positions", q_positions, x_q.shape[1])
        k_positions = as_positions("k_positions", k_positions, x_kv.shape[1])
        keys = self.key_features(params, x_kv, k_positions)
        return self.score(params, x_q, keys, x_kv.shape[1], q_positions, k_positions)


class Synthetic(Spec):
    """Scores that are indexed by position and so belong to self-attention over at most `max_length` tokens."""

    max_length: int

    def cross_attention_error(self) -> str | None:
        return (
            f"{type(self).__name__} scores are synthesized for the positions of one sequence and can't attend to "
            "another: use DotProduct() for cross-attention"
        )

    def longest(self) -> int | None:
        return self.max_length

    def reads_positions(self) -> bool:
        return True

    def check_lengths(self, q_length: int, k_length: int, q_positions, k_positions) -> None:
        """Refuse lengths and known positions that pass max_length."""
        check_reach(type(self).__name__, self.max_length, q_length, k_length, q_positions, k_positions)


def check_reach(what: str, max_length: int, q_length: int, k_length: int, q_positions, k_positions) -> None:
    """Refuse lengths and known positions that pass max_length. what: the name of the thing that is limited."""
    for side, length, positions in (("query", q_length, q_positions), ("key", k_length, k_positions)):
        if length > max_length:
            raise ValueError(
                f"{what}: {side} length {length} is more than max_length={max_length}; "
                "build the scores with a larger max_length, or shorten the sequences"
            )
        _check_positions(f"{side[0]}_positions", positions, max_length)


def _check_positions(name: str, positions, max_length: int) -> None:
    if positions is None or positions.size == 0:
        return
    try:
        known = np.asarray(positions)
    except jax.errors.TracerArrayConversionError:
        return  # checked by value at run time: out of range gives NaN
    if known.min() < 0 or known.max() >= max_length:
        raise ValueError(
            f"{name}: expected positions from 0 to max_length - 1 = {max_length - 1}, got {known.min()} to "
            f"{known.max()}; positions count within a segment, from 0"
        )


def take_positions(table: Array, positions: Array | None, length: int, axis: int) -> Array:
    """Entries of `table` at positions along `axis`; a slice for None. Out of range gives NaN, where JAX would clamp."""
    if positions is None:
        return jax.lax.slice_in_dim(table, 0, length, axis=axis)
    if positions.shape == (1,):  # a step of decoding: one slice, where a gather would want the whole table beside it
        size = table.shape[axis]
        entry = jax.lax.dynamic_slice_in_dim(table, positions[0], 1, axis=axis)
        return jnp.where((positions[0] >= 0) & (positions[0] < size), entry, jnp.nan)
    return jnp.take(table, from_zero(positions, table.shape[axis]), axis=axis, mode="fill", fill_value=jnp.nan)


def from_zero(positions: Array, size: int) -> Array:
    """Positions with negative ones moved past the end: gathers would count them from the end of the table."""
    return jnp.where(positions < 0, size, positions)


def project(x: Float[Array, "b q e"], weight: Float[Array, "e h r"], as_matrix: bool = True) -> Float[Array, "b q h r"]:
    """x W for each head, in x's dtype.

    as_matrix: as a product with [e, h * r], whose result a fused kernel for TPU takes as it lies. Otherwise XLA puts heads
    before tokens, which its own products with a table [h, q, k] want.
    """
    e, h, r = weight.shape
    if not as_matrix and not activations.on_cpu():
        return jnp.einsum("bqe,ehr->bqhr", x, weight.astype(x.dtype))
    return activations.linear(x, weight.reshape(e, h * r)).reshape(*x.shape[:2], h, r)


def subclasses(kind: type) -> list[type]:
    """All concrete classes below `kind`, users' included, without copies of them by the same name, as gin makes them."""
    children = [child for child in kind.__subclasses__() if child.__name__ != kind.__name__]
    below = [found for child in children for found in (child, *subclasses(child))]
    return [found for found in below if not inspect.isabstract(found)]


def check_flag(name: str, value: bool) -> None:
    """Refuse what is neither True nor False: any text would count as True."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")


def check_std(name: str, value: float) -> None:
    """Refuse what is no positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {value!r}")


def as_positions(name: str, positions: Array | None, length: int) -> Array | None:
    """Positions [length] or [b, length] as int32: in narrower or unsigned types differences of them would wrap."""
    if positions is None:
        return None
    if not hasattr(positions, "shape") or not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"{name}: expected an array of whole numbers, got {getattr(positions, 'dtype', positions)}")
    if positions.ndim not in (1, 2) or positions.shape[-1] != length:
        raise ValueError(
            f"{name}: expected shape [{length}] or [b, {length}], a position for each token, got {positions.shape}"
        )
    return positions.astype(jnp.int32)


def check_positive(name: str, value: int) -> None:
    """Refuse what is no positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name}: expected a positive whole number, got {value!r}")
