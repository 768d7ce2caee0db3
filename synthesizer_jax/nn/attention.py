"""The token-mixing layer: attention over any scores, or any other mixer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax.axes import Param
from synthesizer_jax.mixers import Mixer, MultiHead
from synthesizer_jax.mixers.mixer import Cache, Surroundings, is_own
from synthesizer_jax.nn.layers import values, variable, variables
from synthesizer_jax.ops.attend import Dropout, Path
from synthesizer_jax.scores.base import Dims, Parameters, Spec


class Attention(nnx.Module):
    """Mixes the tokens of a sequence, [b, q, e] -> [b, q, e].

    scores: what is exchangeable. Scores such as Random(512) or synthesizer("R+V", max_length=512) make multi-head
    attention, y = sum_h softmax(scores_h) (x W_v,h) W_o,h without biases, as in T5. Another mixer, such as
    LightweightConv(7, heads=8), takes attention's place. features e, heads h, head_dim d. dropout_rate is that of the
    attention weights (of a convolution's kernels). The computation runs in x's dtype, scores and softmax in float32.
    path: the algorithm of attention, see ops/attend.py.

    Variables: as the mixer declares them; of attention `value` [e, h, d], `out` [h, d, e] and `scores`.
    """

    def __init__(
        self,
        scores: Spec | Mixer,
        features: int,
        heads: int,
        head_dim: int,
        *,
        rngs: nnx.Rngs,
        dropout_rate: float = 0.0,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        path: Path = "auto",
    ):
        check_rate("dropout_rate", dropout_rate)
        self.mixer = as_mixer(scores, path)
        self.dims = Dims(features, heads, head_dim)
        self.dropout_rate = dropout_rate
        for name, declared in self.mixer.params(self.dims).items():
            make = variable if isinstance(declared, Param) else variables
            setattr(self, name, make(declared, rngs, param_dtype))

    def __call__(
        self,
        x: Float[Array, "b q e"],
        x_kv: Float[Array, "b k e"] | None = None,
        *,
        key_mask: Bool[Array, "b _k"] | None = None,
        causal: bool = False,
        q_segments: Int[Array, "b q"] | None = None,
        k_segments: Int[Array, "b _k"] | None = None,
        q_positions: Int[Array, "*_b q"] | None = None,
        k_positions: Int[Array, "*_b _k"] | None = None,
        mask: Bool[Array, "_b _h _q _k"] | None = None,
        bias: Float[Array, "_b _h _q _k"] | None = None,
        memory: Float[Array, "b m e"] | None = None,
        shared: Parameters | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "b q e"]:
        """Self-attention of x [b, q, e], or attention of x to x_kv [b, k, e] where the scores allow it.

        Masks, segments and bias as in `attend`; mask, of pairs of tokens, with attention alone. Positions as in
        `Spec.__call__`. In self-attention k_segments and k_positions are q_segments and q_positions unless given.
        memory [b, m, e]: tokens before x, which x sees and which see nothing (Transformer-XL); key_mask, mask and bias
        then span m + q keys. shared: see `Mixer.stack_params`. No dropout without dropout_key.
        """
        around = Surroundings(
            key_mask=key_mask,
            causal=causal,
            q_segments=q_segments,
            k_segments=k_segments,
            q_positions=q_positions,
            k_positions=k_positions,
            mask=mask,
            bias=bias,
            memory=memory,
            shared=shared or {},
            dropout=None if dropout_key is None else Dropout(self.dropout_rate, dropout_key),
        )
        self._check_features(x)
        with jax.named_scope("self_attention" if is_own(x, x_kv) else "cross_attention"):
            return self.mixer(self._params(), x, x_kv, around)

    def weights(
        self,
        x: Float[Array, "b q e"],
        x_kv: Float[Array, "b k e"] | None = None,
        *,
        key_mask: Bool[Array, "b _k"] | None = None,
        causal: bool = False,
        q_segments: Int[Array, "b q"] | None = None,
        k_segments: Int[Array, "b _k"] | None = None,
        q_positions: Int[Array, "*_b q"] | None = None,
        k_positions: Int[Array, "*_b _k"] | None = None,
        mask: Bool[Array, "_b _h _q _k"] | None = None,
        bias: Float[Array, "_b _h _q _k"] | None = None,
        memory: Float[Array, "b m e"] | None = None,
        shared: Parameters | None = None,
    ) -> Float[Array, "b _h q _k"]:
        """What weight each token gives to each other, [b, h, q, k] in float32: for looking at.

        Attention's normalised weights; a convolution's kernels as a band; Linformer's softmax times its projection.
        """
        around = Surroundings(
            key_mask=key_mask,
            causal=causal,
            q_segments=q_segments,
            k_segments=k_segments,
            q_positions=q_positions,
            k_positions=k_positions,
            mask=mask,
            bias=bias,
            memory=memory,
            shared=shared or {},
        )
        self._check_features(x)
        return self.mixer.weights(self._params(), x, x_kv, around)

    def init_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike = jnp.float32) -> Cache:
        """An empty cache to decode up to `length` tokens with `step`: values, and what the scores keep of keys."""
        return self.mixer.init_cache(self._params(), self.dims.features, batch, length, dtype)

    def step(
        self,
        x: Float[Array, "b s e"],
        cache: Cache,
        *,
        key_mask: Bool[Array, "b k"] | None = None,
        bias: Float[Array, "_b _h _s k"] | None = None,
        shared: Parameters | None = None,
        kept: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "b s e"], Cache]:
        """Causal self-attention of the next s tokens x [b, s, e]; returns their outputs and the cache with them.

        key_mask and bias span the cache's length. Steps past that length give NaN. kept: the number of tokens, the first
        ones of x, that the cache is to hold; None: all.
        """
        around = Surroundings(key_mask=key_mask, bias=bias, shared=shared or {}, kept=kept)
        return self.mixer.step(self._params(), x, cache, around)

    def grow_cache(self, cache: Cache, length: int) -> Cache:
        """The cache with room for `length` tokens."""
        return self.mixer.grow_cache(self._params(), self.dims.features, cache, length)

    def cross_cache(self, x_kv: Float[Array, "b k e"], *, key_mask: Bool[Array, "b k"] | None = None) -> Cache:
        """What attention to x_kv [b, k, e] needs of it at each step of `cross_step`; 0 where key_mask is False.

        Attention over scores only.
        """
        return self._attention().cross_cache(self._params(), x_kv, key_mask)

    def cross_step(
        self,
        x: Float[Array, "b s e"],
        cache: Cache,
        *,
        key_mask: Bool[Array, "b k"] | None = None,
        bias: Float[Array, "_b _h _s k"] | None = None,
    ) -> Float[Array, "b s e"]:
        """Attention of x [b, s, e] to the sequence of `cross_cache`, see `MultiHead.cross_step`."""
        return self._attention().cross_step(self._params(), x, cache, key_mask, bias)

    def _attention(self):
        if not isinstance(self.mixer, MultiHead):
            why = self.mixer.cross_attention_error() or f"{type(self.mixer).__name__} keeps nothing of another sequence"
            raise ValueError(f"x_kv: {why}")
        return self.mixer

    def _check_features(self, x):
        if x.ndim != 3 or x.shape[-1] != self.dims.features:
            raise ValueError(f"x: expected vectors of tokens [b, q, e] with e = {self.dims.features}, got {x.shape}")

    def _params(self):
        held = {name: getattr(self, name) for name in self.mixer.params(self.dims)}
        return {name: values(v) if isinstance(v, nnx.Dict) else v[...] for name, v in held.items()}


def as_mixer(scores: Spec | Mixer, path: Path = "auto") -> Mixer:
    """Scores as multi-head attention over them; a mixer as it is."""
    if isinstance(scores, Spec):
        return MultiHead(scores, path=path)
    if path != "auto":
        raise ValueError(
            f"path: expected 'auto' beside a mixer that is built, got {path!r}; say it in MultiHead(..., path=)"
        )
    if not isinstance(scores, Mixer):
        raise ValueError(
            f'scores: expected scores such as Random(512) or synthesizer("R+V", max_length=512), or a mixer such as '
            f"MultiHead(DotProduct()), got {scores!r}"
        )
    return scores


def check_rate(name: str, rate: float) -> None:
    """Refuse a dropout rate outside [0, 1)."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ValueError(f"{name}: expected a rate from 0 to below 1, got {rate!r}")
