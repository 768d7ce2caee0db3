"""What every way to mix the tokens of a sequence has in common.

A mixer is the token-mixing sub-layer of a block: x [b, q, e] -> [b, q, e]. `MultiHead` is attention over any scores; the
others are its rivals. Each is a frozen spec that declares its parameters and computes with them, in pure JAX, so that a
layer for any library (nn/attention.py for NNX, nn/linen.py for Linen) is a few lines that hold the arrays.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax.ops.attend import Dropout
from synthesizer_jax.scores.base import Dims, Parameters, as_positions, check_positive

Cache = dict[str, Any]  # a pytree of arrays with constant shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a mixer is told of the tokens besides their vectors. None where there is nothing to say.

    key_mask: True = a real token, which may be attended to. Segments: ids from 1 for examples packed in one row, 0 for
    padding; a token sees its own segment alone. Positions count from 0 within a segment; None means 0, 1, 2, ... mask:
    any other rule for pairs of tokens, True = may attend. bias is added to the scores. memory: vectors of earlier tokens,
    seen by all tokens and written by none (key_mask then covers them first). shared: the parameters that the layers of a
    stack share (`Mixer.stack_params`). kept: of the tokens of a step, how many the cache is to hold, the first ones; None:
    all.
    """

    key_mask: Bool[Array, "b k"] | None = None
    q_segments: Int[Array, "b q"] | None = None
    k_segments: Int[Array, "b k"] | None = None
    q_positions: Int[Array, "*_b q"] | None = None
    k_positions: Int[Array, "*_b k"] | None = None
    mask: Bool[Array, "_b _h _q k"] | None = None
    bias: Float[Array, "_b _h _q k"] | None = None
    memory: Float[Array, "b m e"] | None = None
    dropout: Dropout | None = None
    shared: Parameters = dataclasses.field(default_factory=dict)
    kept: Int[Array, ""] | None = None
    causal: bool = dataclasses.field(default=False, metadata={"static": True})


class Mixer(abc.ABC):
    """A way to mix tokens: a frozen dataclass of plain values, equal and hashable by value.

    The errors say why something can't be, in words for the user, and are None when it can.
    """

    @abc.abstractmethod
    def params(self, dims: Dims) -> dict[str, Any]:
        """The parameters of one layer: a (nested) dict of `Param`."""

    def stack_params(self, dims: Dims) -> dict[str, Any]:
        """Parameters that all layers of a stack share; `Surroundings.shared` brings them to each layer."""
        return {}

    def of_layer(self, layer: int, depth: int) -> "Mixer":
        """The mixer of one layer of a stack, counted from 0. Raises ValueError where it is made for another depth."""
        return self

    @abc.abstractmethod
    def __call__(
        self,
        params: Parameters,
        x: Float[Array, "b q e"],
        x_kv: Float[Array, "b k e"] | None = None,
        around: Surroundings = Surroundings(),
    ) -> Float[Array, "b q e"]:
        """The mixed tokens [b, q, e]; of another sequence x_kv [b, k, e] where `cross_attention_error` allows it."""

    @abc.abstractmethod
    def weights(
        self,
        params: Parameters,
        x: Float[Array, "b q e"],
        x_kv: Float[Array, "b k e"] | None = None,
        around: Surroundings = Surroundings(),
    ) -> Float[Array, "b h q k"]:
        """What weight token i gives to token j in each head, [b, h, q, k] in float32: for looking at."""

    @abc.abstractmethod
    def init_cache(
        self, params: Parameters, features: int, batch: int, length: int, dtype: jax.typing.DTypeLike
    ) -> Cache:
        """An empty cache to decode up to `length` tokens with `step`."""

    @abc.abstractmethod
    def step(
        self,
        params: Parameters,
        x: Float[Array, "b s e"],
        cache: Cache,
        around: Surroundings = Surroundings(),
    ) -> tuple[Float[Array, "b s e"], Cache]:
        """The next s tokens of a causal sequence, and the cache with them.

        Of `around` only key_mask, mask and bias, over the cache's length, shared and kept are read. Steps past a cache
        that holds every token give NaN.
        """

    def grow_cache(self, params: Parameters, features: int, cache: Cache, length: int) -> Cache:
        """The cache with room for `length` tokens: zeros behind what it holds."""
        held = next(leaf for leaf in jax.tree.leaves(cache) if leaf.ndim)
        batch, dtype = held.shape[0], held.dtype
        longer = jax.eval_shape(lambda params: self.init_cache(params, features, batch, length, dtype), params)
        return jax.tree.map(_padded, cache, longer)

    def cross_attention_error(self) -> str | None:
        """Why it can't mix in tokens of another sequence."""
        return None

    def decoder_error(self) -> str | None:
        """Why it can't be causal."""
        return None

    def bias_error(self) -> str | None:
        """Why no bias, such as T5's relative position bias, can be added to its scores."""
        return None

    def mask_error(self) -> str | None:
        """Why no mask of pairs of tokens applies to it, only what key_mask, causal and segments say."""
        return (
            f"{type(self).__name__} has no weight for each pair of tokens that a mask could forbid; say it by key_mask, "
            "causal and q_segments, or use attention, such as DotProduct()"
        )

    def reads_positions(self) -> bool:
        """Whether the result depends on where in its segment a token stands, not on distances alone."""
        return False

    def longest(self) -> int | None:
        """The maximum length n that the parameters cover; None when any length will do."""
        return None


def checked(x: Array, x_kv: Array | None, around: Surroundings) -> Surroundings:
    """`around`, its positions as int32, after a check that all of it fits x [b, q, e] and x_kv [b, k, e]."""
    _check_tokens("x", x)
    own = is_own(x, x_kv)
    for name, other in (("x_kv", None if own else x_kv), ("memory", around.memory)):
        if other is not None:
            _check_tokens(name, other)
            if (other.shape[0], other.shape[2]) != (x.shape[0], x.shape[2]):
                raise ValueError(
                    f"{name}: expected the batch and the features of x {x.shape}, [{x.shape[0]}, _, {x.shape[2]}], got "
                    f"{other.shape}"
                )
    b, q = x.shape[:2]
    k = q if own else x_kv.shape[1]
    earlier = 0 if around.memory is None else around.memory.shape[1]
    _check_array("key_mask", around.key_mask, (b, earlier + k), jnp.bool_, "booleans, True = may be attended to,")
    _check_array("q_segments", around.q_segments, (b, q), jnp.integer, "whole numbers")
    _check_array("k_segments", around.k_segments, (b, k), jnp.integer, "whole numbers")
    if (
        around.q_segments is None
        and around.k_segments is not None
        or (around.q_segments is not None and around.k_segments is None and not own)
    ):
        raise ValueError(
            "q_segments, k_segments: expected both or neither; in self-attention q_segments alone says both"
        )
    return dataclasses.replace(
        around,
        q_positions=as_positions("q_positions", around.q_positions, q),
        k_positions=as_positions("k_positions", around.k_positions, k),
    )


def _check_tokens(name, x):
    if x.ndim != 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{name}: expected vectors of tokens, [b, length, e] in a floating type, got {x.dtype} {x.shape}; token ids "
            "go through an embedding first"
        )


def _check_array(name, array, shape, kind, what):
    if array is not None and (array.shape != shape or not jnp.issubdtype(array.dtype, kind)):
        raise ValueError(f"{name}: expected {what} of shape {shape}, got {array.dtype} {array.shape}")


def check_step(x: Array, held: Array, length: int | None = None) -> None:
    """Refuse tokens x [b, s, e] that don't fit an array of the cache [b, ...]: other rows, dtype, or more than length."""
    _check_tokens("x", x)
    if x.shape[0] != held.shape[0] or x.dtype != held.dtype:
        raise ValueError(
            f"x: expected tokens like those of the cache, {held.dtype} with batch {held.shape[0]}, got {x.dtype} with "
            f"batch {x.shape[0]}; make it with init_cache(batch, length, dtype)"
        )
    if length is not None and x.shape[1] > length:
        raise ValueError(f"x: {x.shape[1]} tokens don't fit a cache for {length}; give init_cache a larger length")


def _padded(array: Array, like: jax.ShapeDtypeStruct) -> Array:
    missing = [(0, long - short, 0) for short, long in zip(array.shape, like.shape, strict=True)]
    return jax.lax.pad(array, jnp.zeros((), array.dtype), missing)


def next_index(index: Array, x: Array, around: Surroundings) -> Array:
    """The number of tokens in a cache after a step of the tokens x [b, s, e]."""
    return index + (x.shape[1] if around.kept is None else around.kept)


def within_cache(y: Array, index: Array, length: int) -> Array:
    """Outputs [b, s, e] of the tokens from slot `index` on; NaN where they pass the cache's length and overwrote its end."""
    return jnp.where(index + y.shape[1] <= length, y, jnp.nan)


def check_cache_length(mixer: Mixer, length: int) -> None:
    """Refuse to decode past the maximum length."""
    check_positive("length", length)
    longest = mixer.longest()
    if longest is not None and length > longest:
        raise ValueError(
            f"length: expected at most max_length={longest} of the scores, got {length}; build them with a larger "
            "max_length, or decode fewer tokens"
        )


def check_decoder(mixer: Mixer, around: Surroundings) -> None:
    """Refuse a causal call of what can't be causal."""
    if around.causal and mixer.decoder_error():
        raise ValueError(f"causal: {mixer.decoder_error()}")


def check_positions(mixer: Mixer, around: Surroundings, what: str) -> None:
    """Refuse packed rows whose tokens don't say where in their segment they stand."""
    if around.q_segments is not None and around.q_positions is None and mixer.reads_positions():
        raise ValueError(
            f"q_positions: expected the positions within the segments, from 0, beside q_segments: {what} is indexed by "
            "them; give jnp.arange(length) to index by slot"
        )


def check_plain(mixer: Mixer, x: Array, x_kv: Array | None, around: Surroundings) -> None:
    """Refuse what only attention can use: another sequence, a memory, a mask of pairs, a bias."""
    if not is_own(x, x_kv) and mixer.cross_attention_error():
        raise ValueError(f"x_kv: {mixer.cross_attention_error()}")
    if around.memory is not None:
        raise ValueError(f"memory: {type(mixer).__name__} has no keys to extend; use attention, such as DotProduct()")
    if around.mask is not None and mixer.mask_error():
        raise ValueError(f"mask: {mixer.mask_error()}")
    if around.bias is not None and mixer.bias_error():
        raise ValueError(f"bias: {mixer.bias_error()}")


def is_own(x: Array, x_kv: Array | None) -> bool:
    """True in self-attention: x_kv is left out, or x itself."""
    return x_kv is None or x_kv is x
