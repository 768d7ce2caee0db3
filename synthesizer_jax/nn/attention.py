"""Multi-head attention over any scores."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax.axes import EMBED, HEADS, KV, Param, fan_in
from synthesizer_jax.nn.layers import values, variable, variables
from synthesizer_jax.ops.attend import Dropout, Path, attend, attention_weights
from synthesizer_jax.scores.base import Dims, Spec, project

Cache = dict[str, Array | tuple | None]


class Attention(nnx.Module):
    """y = sum_h softmax(scores_h) (x W_v,h) W_o,h, without biases: T5's attention layer over exchangeable scores.

    scores: a spec such as Random(512) or synthesizer("R+V", max_length=512). features e, heads h, head_dim d.
    dropout_rate is that of the attention weights. The computation runs in x's dtype, scores and softmax in float32.

    Variables: `value` [e, h, d], `out` [h, d, e] and `scores`, as the spec declares them.
    """

    def __init__(
        self,
        scores: Spec,
        features: int,
        heads: int,
        head_dim: int,
        *,
        rngs: nnx.Rngs,
        dropout_rate: float = 0.0,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        path: Path = "auto",
    ):
        if not isinstance(scores, Spec):
            raise ValueError(
                f'scores: expected scores such as Random(512) or synthesizer("R+V", max_length=512), got {scores!r}'
            )
        check_rate("dropout_rate", dropout_rate)
        self.spec = scores
        self.dims = Dims(features, heads, head_dim)
        self.dropout_rate = dropout_rate
        self.path = path
        inward = Param((features, heads, head_dim), (EMBED, HEADS, KV), fan_in(features))
        outward = Param((heads, head_dim, features), (HEADS, KV, EMBED), fan_in(heads * head_dim))
        self.scores = variables(scores.params(self.dims), rngs, param_dtype)
        self.value = variable(inward, rngs, param_dtype)
        self.out = variable(outward, rngs, param_dtype)

    def __call__(
        self,
        x: Float[Array, "b q e"],
        x_kv: Float[Array, "b k e"] | None = None,
        *,
        key_mask: Bool[Array, "b k"] | None = None,
        causal: bool = False,
        q_segments: Int[Array, "b q"] | None = None,
        k_segments: Int[Array, "b k"] | None = None,
        q_positions: Int[Array, "*_b q"] | None = None,
        k_positions: Int[Array, "*_b k"] | None = None,
        bias: Float[Array, "_b _h _q k"] | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "b q e"]:
        """Self-attention of x [b, q, e], or attention of x to x_kv [b, k, e] where the scores allow it.

        Masks, segments and bias as in `attend`; positions as in `Spec.__call__`. In self-attention k_segments and
        k_positions are q_segments and q_positions unless given. No dropout without dropout_key.
        """
        x_kv, k_segments, k_positions = self._keys_of(x, x_kv, q_segments, k_segments, q_positions, k_positions)
        scores = self.spec(values(self.scores), x, x_kv, q_positions, k_positions)
        heads = attend(
            scores,
            project(x_kv, self.value[...]),
            key_mask=key_mask,
            causal=causal,
            q_segments=q_segments,
            k_segments=k_segments,
            bias=bias,
            dropout=None if dropout_key is None else Dropout(self.dropout_rate, dropout_key),
            path=self.path,
        )
        return self._merge_heads(heads)

    def weights(
        self,
        x: Float[Array, "b q e"],
        x_kv: Float[Array, "b k e"] | None = None,
        *,
        key_mask: Bool[Array, "b k"] | None = None,
        causal: bool = False,
        q_segments: Int[Array, "b q"] | None = None,
        k_segments: Int[Array, "b k"] | None = None,
        q_positions: Int[Array, "*_b q"] | None = None,
        k_positions: Int[Array, "*_b k"] | None = None,
        bias: Float[Array, "_b _h _q k"] | None = None,
    ) -> Float[Array, "b h q k"]:
        """The normalised attention weights [b, h, q, k] in float32, for looking at."""
        x_kv, k_segments, k_positions = self._keys_of(x, x_kv, q_segments, k_segments, q_positions, k_positions)
        scores = self.spec(values(self.scores), x, x_kv, q_positions, k_positions)
        return attention_weights(
            scores,
            batch=x.shape[0],
            k_length=x_kv.shape[1],
            key_mask=key_mask,
            causal=causal,
            q_segments=q_segments,
            k_segments=k_segments,
            bias=bias,
        )

    def init_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike = jnp.float32) -> Cache:
        """An empty cache to decode up to `length` tokens with `step`: values, and what the scores keep of keys."""
        longest = self.spec.longest()
        if longest is not None and length > longest:
            raise ValueError(
                f"length: expected at most max_length={longest} of the scores, got {length}; build them with a larger "
                "max_length, or decode fewer tokens"
            )
        x = jax.ShapeDtypeStruct((batch, length, self.dims.features), dtype)
        keys, value = jax.eval_shape(lambda x: self._key_value(x), x)
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), {"keys": keys, "value": value})
        return empty | {"index": jnp.zeros((), jnp.int32)}

    def step(
        self,
        x: Float[Array, "b s e"],
        cache: Cache,
        *,
        key_mask: Bool[Array, "b k"] | None = None,
        bias: Float[Array, "_b _h _s k"] | None = None,
    ) -> tuple[Float[Array, "b s e"], Cache]:
        """Causal self-attention of the next s tokens x [b, s, e]; returns their outputs and the cache with them.

        key_mask and bias span the cache's length. Steps past that length are the caller's to avoid: they overwrite its
        end.
        """
        index = cache["index"]
        new = dict(zip(("keys", "value"), self._key_value(x), strict=True))
        cached = jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, index, axis=1),
            {"keys": cache["keys"], "value": cache["value"]},
            new,
        )
        q_positions = index + jnp.arange(x.shape[1])
        k_length = cached["value"].shape[1]
        scores = self.spec.score(values(self.scores), x, cached["keys"], k_length, q_positions)
        heads = attend(scores, cached["value"], key_mask=key_mask, causal=True, q_offset=index, bias=bias)
        return self._merge_heads(heads), cached | {"index": index + x.shape[1]}

    def cross_cache(self, x_kv: Float[Array, "b k e"]) -> Cache:
        """What attention to x_kv [b, k, e] needs of it at each step of `cross_step`."""
        keys, value = self._key_value(x_kv)
        return {"keys": keys, "value": value}

    def cross_step(
        self, x: Float[Array, "b s e"], cache: Cache, *, key_mask: Bool[Array, "b k"] | None = None
    ) -> Float[Array, "b s e"]:
        """Attention of x [b, s, e] to the sequence of `cross_cache`."""
        scores = self.spec.score(values(self.scores), x, cache["keys"], cache["value"].shape[1])
        return self._merge_heads(attend(scores, cache["value"], key_mask=key_mask))

    def _keys_of(self, x, x_kv, q_segments, k_segments, q_positions, k_positions):
        if q_segments is not None and q_positions is None and self.spec.longest() is not None:
            raise ValueError(
                f"q_positions: expected the positions within the segments, from 0, beside q_segments: "
                f"{type(self.spec).__name__} scores are indexed by them; give jnp.arange(length) to index by slot"
            )
        if x_kv is None or x_kv is x:
            k_segments = q_segments if k_segments is None else k_segments
            k_positions = q_positions if k_positions is None else k_positions
            return x, k_segments, k_positions
        error = self.spec.cross_attention_error()
        if error:
            raise ValueError(f"x_kv: {error}")
        return x_kv, k_segments, k_positions

    def _key_value(self, x_kv):
        return self.spec.key_features(values(self.scores), x_kv), project(x_kv, self.value[...])

    def _merge_heads(self, heads):
        return jnp.einsum("bqhd,hde->bqe", heads, self.out[...].astype(heads.dtype))


def check_rate(name: str, rate: float) -> None:
    """Refuse a dropout rate outside [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"{name}: expected a rate from 0 to below 1, got {rate!r}")
