"""What every way to mix the tokens of a sequence has in common.

A mixer is the token-mixing sub-layer of a block: x [b, q, e] -> [b, q, e]. `MultiHead` is attention over any scores; the
others are its rivals. Each is a frozen spec that declares its parameters and computes with them, in pure JAX, so that a
layer for any library (nn/attention.py for NNX, nn/linen.py for Linen) is a few lines that hold the arrays.
"""

import abc
import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax.ops.attend import Dropout
from synthesizer_jax.scores.base import Dims, Parameters

Cache = dict[str, Any]  # a pytree of arrays with constant shapes

NOTHING_SHARED: Parameters = {}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a mixer is told of the tokens besides their vectors. None where there is nothing to say.

    key_mask: True = a real token, which may be attended to. Segments: ids from 1 for examples packed in one row, 0 for
    padding; a token sees its own segment alone. Positions count from 0 within a segment; None means 0, 1, 2, ... mask:
    any other rule for pairs of tokens, True = may attend. bias is added to the scores. memory: vectors of earlier tokens,
    seen by all tokens and written by none (key_mask then covers them first). shared: the parameters that the layers of a
    stack share (`Mixer.stack_params`).
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

        Of `around` only key_mask, mask and bias, over the cache's length, and shared are read.
        """

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


def check_cache_length(mixer: Mixer, length: int) -> None:
    """Refuse to decode past the maximum length."""
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


def check_plain(mixer: Mixer, x_kv: Array | None, around: Surroundings) -> None:
    """Refuse what only attention can use: another sequence, a memory, a mask of pairs, a bias."""
    if x_kv is not None and mixer.cross_attention_error():
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
