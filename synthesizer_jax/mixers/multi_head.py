"""Multi-head attention over any scores, as a mixer."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from synthesizer_jax import activations
from synthesizer_jax.axes import EMBED, HEADS, KV, Param, fan_in
from synthesizer_jax.mixers.mixer import (
    Cache,
    Mixer,
    Surroundings,
    check_cache_length,
    check_positions,
    check_step,
    checked,
    is_own,
    next_index,
    within_cache,
)
from synthesizer_jax.ops.attend import Path, attend, attention_weights
from synthesizer_jax.scores.base import Dims, Parameters, Spec, check_positive, project


@dataclasses.dataclass(frozen=True)
class Sparse:
    """The keys that a query may attend to: its neighbours, and every stride-th key (Child et al. 2019, section 4.2).

    Key j is seen by query i when |i - j| < window, or when stride is given and i - j is a multiple of it. With a causal
    mask, only those up to i. A set filter of Transformer Dissection (section 2.1).
    """

    window: int
    stride: int | None = None

    def __post_init__(self):
        check_positive("window", self.window)
        if self.stride is not None:
            check_positive("stride", self.stride)

    def allowed(self, q_length: int, k_length: int, q_offset=0) -> Bool[Array, "q k"]:
        """True where query i + q_offset sees key j."""
        distance = jnp.arange(q_length)[:, None] + q_offset - jnp.arange(k_length)[None, :]
        near = jnp.abs(distance) < self.window
        return near if self.stride is None else near | (distance % self.stride == 0)


@dataclasses.dataclass(frozen=True)
class MultiHead(Mixer):
    """y = sum_h softmax(scores_h) (x W_v,h) W_o,h, without biases: T5's attention over exchangeable scores.

    scores: how the attention matrix is made. keys: which keys a query may see beside what masks and causality say; None:
    all. Parameters: `scores` as the scores declare them, `value` [e, h, d], `out` [h, d, e]. Wherever a mixer is expected,
    scores alone stand for MultiHead(scores).
    """

    scores: Spec
    keys: Sparse | None = None
    path: Path = "auto"  # the algorithm, see ops/attend.py

    def __post_init__(self):
        if self.path not in get_args(Path):
            raise ValueError(f"path: expected one of {get_args(Path)}, got {self.path!r}")
        if not isinstance(self.scores, Spec):
            raise ValueError(f"scores: expected scores such as Random(512) or DotProduct(), got {self.scores!r}")
        if not isinstance(self.keys, Sparse | None):
            raise ValueError(f"keys: expected Sparse(window=...) or None for all keys, got {self.keys!r}")

    def params(self, dims: Dims):
        e, h, d = dims.features, dims.heads, dims.head_dim
        return {
            "scores": self.scores.params(dims),
            "value": Param((e, h, d), (EMBED, HEADS, KV), fan_in(e)),
            "out": Param((h, d, e), (HEADS, KV, EMBED), fan_in(h * d)),
        }

    def __call__(self, params, x, x_kv=None, around=Surroundings()):
        seen = self._seen(x, x_kv, around)
        scores = self.scores(params["scores"], x, seen.x, seen.q_positions, seen.k_positions)
        low_rank = scores.query is not None
        values = self._values(params, seen.x, seen.k_positions, low_rank)
        heads = attend(scores, values, dropout=around.dropout, path=self.path, **seen.masks(self))
        return _merge_heads(params, heads, low_rank)

    def weights(self, params, x, x_kv=None, around=Surroundings()):
        seen = self._seen(x, x_kv, around)
        scores = self.scores(params["scores"], x, seen.x, seen.q_positions, seen.k_positions)
        return attention_weights(scores, batch=x.shape[0], k_length=seen.x.shape[1], **seen.masks(self))

    def init_cache(self, params, features, batch, length, dtype):
        check_cache_length(self, length)
        x = jax.ShapeDtypeStruct((batch, length, features), dtype)
        like = jax.eval_shape(lambda params, x: self._cached(params, x, None), params, x)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like) | {"index": jnp.zeros((), jnp.int32)}

    def step(self, params, x, cache, around=Surroundings()):
        index = cache["index"]
        check_step(x, cache["value"], cache["value"].shape[3])
        positions = index + jnp.arange(x.shape[1])
        cached = jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, index, axis=3),
            {name: cache[name] for name in ("keys", "value")},
            self._cached(params, x, positions),
        )
        k_length = cached["value"].shape[3]
        keys, values = _by_token(cached["keys"]), _by_token(cached["value"])
        scores = self.scores.score(params["scores"], x, keys, k_length, positions)
        heads = attend(
            scores,
            values,
            key_mask=around.key_mask,
            causal=True,
            q_offset=index,
            allowed=None if self.keys is None else self.keys.allowed(x.shape[1], k_length, index),
            mask=around.mask,
            bias=around.bias,
            path=self.path,
        )
        y = within_cache(_merge_heads(params, heads), index, k_length)
        return y, cached | {"index": next_index(index, x, around)}

    def cross_cache(
        self, params: Parameters, x_kv: Float[Array, "b k e"], key_mask: Bool[Array, "b k"] | None = None
    ) -> Cache:
        """What attention to x_kv [b, k, e] needs of it at each step of `cross_step`; 0 where key_mask is False."""
        self._check_cross()
        cached = self._cached(params, x_kv, None)
        if key_mask is None:
            return cached
        return jax.tree.map(lambda array: jnp.where(key_mask[:, None, None, :], array, 0), cached)

    def cross_step(
        self,
        params: Parameters,
        x: Float[Array, "b s e"],
        cache: Cache,
        key_mask: Bool[Array, "b k"] | None = None,
        bias: Float[Array, "_b _h _s k"] | None = None,
    ) -> Float[Array, "b s e"]:
        """Attention of x [b, s, e] to the sequence of `cross_cache`.

        Where that had the key_mask, `mask_as_bias` of it as bias says the same to each step, which need not look for
        padding among the values again.
        """
        keys, values = _by_token(cache["keys"]), _by_token(cache["value"])
        scores = self.scores.score(params["scores"], x, keys, values.shape[1])
        heads = attend(scores, values, key_mask=key_mask, bias=bias, path=self.path)
        return _merge_heads(params, heads)

    def cross_attention_error(self):
        if self.keys is not None:
            return "Sparse keys are neighbours within one sequence; use MultiHead(scores) without keys"
        return self.scores.cross_attention_error()

    def mask_error(self):
        return None

    def reads_positions(self):
        return self.scores.reads_positions()

    def longest(self):
        return self.scores.longest()

    def _check_cross(self):
        if self.cross_attention_error():
            raise ValueError(f"x_kv: {self.cross_attention_error()}")

    def _cached(self, params, x, positions):
        """What a cache holds of tokens [b, k, e]: of the keys [b, h, r, k], and the values [b, h, d, k].

        In this order products over the keys read them as they are, and a TPU pads 64 numbers per head to 128 in no array
        whose last axis is k.
        """
        features = self.scores.key_features(params["scores"], x, positions)
        cached = {"keys": features, "value": self._values(params, x, positions)}
        return jax.tree.map(lambda array: jnp.transpose(array, (0, 2, 3, 1)), cached)

    def _values(self, params, x, positions, as_matrix=True):
        return project(self.scores.value_inputs(params["scores"], x, positions), params["value"], as_matrix)

    def _seen(self, x, x_kv, around):
        """Keys with their positions and masks: those of x itself, of a memory and x, or of another sequence."""
        around = checked(x, x_kv, around)
        check_positions(self, around, type(self.scores).__name__)
        if around.memory is not None:
            return self._with_memory(x, x_kv, around)
        if not is_own(x, x_kv):
            self._check_cross()
            return _Seen(x_kv, around, around.q_positions, around.k_positions, around.k_segments, 0, x.shape[1])
        k_positions = around.q_positions if around.k_positions is None else around.k_positions
        k_segments = around.q_segments if around.k_segments is None else around.k_segments
        return _Seen(x, around, around.q_positions, k_positions, k_segments, 0, x.shape[1])

    def _with_memory(self, x, x_kv, around):
        given = [
            name
            for name in ("q_segments", "k_segments", "q_positions", "k_positions")
            if getattr(around, name) is not None
        ]
        if not is_own(x, x_kv) or given:
            raise ValueError(
                f"memory: it continues one sequence of x to the left and goes with neither x_kv nor segments nor "
                f"positions, got {', '.join(given) or 'x_kv'}"
            )
        m, q = around.memory.shape[1], x.shape[1]
        if self.longest() is not None and m + q > self.longest():
            raise ValueError(
                f"memory: {m} tokens of memory and {q} of x are more than max_length={self.longest()} of the scores; keep "
                "less memory, or build the scores with a larger max_length"
            )
        both = jnp.concatenate([around.memory.astype(x.dtype), x], axis=1)
        return _Seen(both, around, m + jnp.arange(q), None, None, m, q)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The tokens that serve as keys, and how queries stand to them."""

    x: Array  # [b, k, e]
    around: Surroundings
    q_positions: Array | None
    k_positions: Array | None
    k_segments: Array | None
    q_offset: int  # the slot of the first query among the keys
    q_length: int

    def masks(self, mixer):
        keys = mixer.keys
        return {
            "key_mask": self.around.key_mask,
            "causal": self.around.causal,
            "q_offset": self.q_offset,
            "q_segments": self.around.q_segments,
            "k_segments": self.k_segments,
            "allowed": None if keys is None else keys.allowed(self.q_length, self.x.shape[1], self.q_offset),
            "mask": self.around.mask,
            "bias": self.around.bias,
        }


def _by_token(cached):
    """[b, k, h, d] from [b, h, d, k], of each array."""
    return jax.tree.map(lambda array: jnp.transpose(array, (0, 3, 1, 2)), cached)


def _merge_heads(params, heads, as_matrix=True):
    """Their sum through W_o; as_matrix as in scores.base.project."""
    h, d, e = params["out"].shape
    if not as_matrix and not activations.on_cpu():
        return jnp.einsum("bqhd,hde->bqe", heads, params["out"].astype(heads.dtype))
    return activations.linear(heads.reshape(*heads.shape[:2], h * d), params["out"].reshape(h * d, e))
