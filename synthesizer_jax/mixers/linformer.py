"""Linformer: attention over a fixed number of projections of the keys and values."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from synthesizer_jax.axes import EMBED, HEADS, KV, RANK, SYNTH_KEY, Param, contract, fan_in, normal
from synthesizer_jax.mixers.mixer import (
    Mixer,
    Surroundings,
    check_decoder,
    check_plain,
    check_positions,
    checked,
    is_own,
)
from synthesizer_jax.ops.attend import attend, attention_weights
from synthesizer_jax.ops.segments import each_segment
from synthesizer_jax.scores.base import Dims, Scores, check_positive, check_reach, project, take_positions

Sharing = Literal["none", "headwise", "key-value", "layerwise"]


@dataclasses.dataclass(frozen=True)
class Linformer(Mixer):
    """y = sum_h softmax(x W_q (E x W_k)^T / sqrt d) (F x W_v) W_o (Wang et al. 2020, equation 7).

    E and F [n, r] project the sequence onto r = rank slots, so that time and memory grow with n r in place of n^2. The
    equation's k is our r. sharing of the projections: "none": E and F for each head; "headwise": one E and one F for all
    heads; "key-value": E = F for all heads; "layerwise": one E = F for all heads and layers of a stack. A shorter sequence
    uses the first rows of E and F. Padding is zeroed before it is projected, so that its content is irrelevant. Packed
    rows project each segment by its own positions, at the cost of one attention per segment.

    Each slot mixes all tokens, so it can't be causal: encoders and cross-attention only. There are no scores for a bias.
    Parameters: 4 e h d and the projections, 2 h n r ("none"), 2 n r, n r, or n r for the stack.
    """

    max_length: int  # n
    rank: int = 64  # r; the paper: 128 or 256 at n = 512
    sharing: Sharing = "headwise"

    def __post_init__(self):
        check_positive("max_length", self.max_length)
        check_positive("rank", self.rank)
        if self.sharing not in get_args(Sharing):
            raise ValueError(f"sharing: expected one of {get_args(Sharing)}, got {self.sharing!r}")

    def params(self, dims: Dims):
        e, h, d = dims.features, dims.heads, dims.head_dim
        inward = Param((e, h, d), (EMBED, HEADS, KV), fan_in(e))
        outward = Param((h, d, e), (HEADS, KV, EMBED), fan_in(h * d))
        declared = {"query": inward, "key": inward, "value": inward, "out": outward}
        own = {"none": ("E", "F"), "headwise": ("E", "F"), "key-value": ("E",), "layerwise": ()}[self.sharing]
        return declared | {name: self._projection(dims) for name in own}

    def stack_params(self, dims: Dims):
        return {"E": self._projection(dims)} if self.sharing == "layerwise" else {}

    def _projection(self, dims):
        # A slot sums up to n tokens; the paper's code, and the others', start with entries of standard deviation n^-0.5.
        init = normal(self.max_length**-0.5)
        if self.sharing == "none":
            return Param((dims.heads, self.max_length, self.rank), (HEADS, SYNTH_KEY, RANK), init)
        return Param((self.max_length, self.rank), (SYNTH_KEY, RANK), init)

    def __call__(self, params, x, x_kv=None, around=Surroundings()):
        around = self._checked(x, x_kv, around)
        query = project(x, params["query"])

        def attended(keys, values, _):
            return attend(Scores(query * query.shape[-1] ** -0.5, keys), values, dropout=around.dropout)

        heads = self._over_segments(attended, params, x, x_kv, around, query)
        return jnp.einsum("bqhd,hde->bqe", heads, params["out"].astype(heads.dtype))

    def weights(self, params, x, x_kv=None, around=Surroundings()):
        """softmax(...) F^T: what each token's value counts for, [b, h, q, k] in float32. Rows don't sum to 1."""
        around = self._checked(x, x_kv, around)
        query = project(x, params["query"])
        b, q, h, d = query.shape
        k_length = x.shape[1] if x_kv is None else x_kv.shape[1]

        def slots(keys, values, projection):
            weights = attention_weights(Scores(query * d**-0.5, keys), batch=b, k_length=self.rank)
            return jnp.einsum(self._per_key(projection), weights, projection.astype(jnp.float32))

        like = jax.ShapeDtypeStruct((b, h, q, k_length), jnp.float32)
        return self._over_segments(slots, params, x, x_kv, around, like, query_axis=2)

    def init_cache(self, params, features, batch, length, dtype):
        raise ValueError(self.decoder_error())

    def step(self, params, x, cache, around=Surroundings()):
        raise ValueError(self.decoder_error())

    def decoder_error(self):
        return (
            "Linformer projects the whole sequence onto its slots, so that every token would see those after it; use "
            "it in encoders, and DotProduct() or LightweightConv(7) in decoders"
        )

    def bias_error(self):
        return "Linformer scores slots, not keys, and has no place for a bias of keys; use relative_bias=False"

    def reads_positions(self):
        return True

    def longest(self):
        return self.max_length

    def _over_segments(self, function, params, x, x_kv, around, like, query_axis=1):
        """function(keys, values, F) of the projected tokens; in packed rows the sum over segments, each by itself."""
        tokens, k_positions, k_segments = self._keys_of(x, x_kv, around)
        if self.sharing == "layerwise":
            params = {**params, "E": around.shared["E"]}
        if k_segments is None:
            return function(*self._projected(params, tokens, k_positions, around.key_mask))

        def of_segment(queries, keys):
            mask = keys if around.key_mask is None else keys & around.key_mask
            own = function(*self._projected(params, tokens, k_positions, mask))
            return jnp.where(jnp.expand_dims(queries, [i for i in range(1, own.ndim) if i != query_axis]), own, 0)

        return each_segment(of_segment, around.q_segments, k_segments, like)

    def _checked(self, x, x_kv, around):
        check_decoder(self, around)
        check_plain(self, x, x_kv, around)
        around = checked(x, x_kv, around)
        check_positions(self, around, "Linformer")
        projection, shape = around.shared.get("E"), (self.max_length, self.rank)
        if self.sharing == "layerwise" and (projection is None or projection.shape != shape):
            raise ValueError(
                f"shared: expected the projection E {shape} that the layers of a stack share, got "
                f"{'none' if projection is None else projection.shape}; give a layer that stands alone "
                f'shared={{"E": array of {shape}}}, or use sharing="key-value"'
            )
        return around

    def _keys_of(self, x, x_kv, around):
        if is_own(x, x_kv):
            k_positions = around.q_positions if around.k_positions is None else around.k_positions
            k_segments = around.q_segments if around.k_segments is None else around.k_segments
        else:
            x, k_positions, k_segments = x_kv, around.k_positions, around.k_segments
            if k_segments is not None and k_positions is None:
                raise ValueError("k_positions: expected the keys' positions within the segments beside k_segments")
        check_reach(type(self).__name__, self.max_length, 0, x.shape[1], None, k_positions)
        return x, k_positions, k_segments

    def _projected(self, params, tokens, k_positions, mask):
        """E x W_k and F x W_v [b, r, h, d], and F at the keys' positions."""
        if mask is not None:
            tokens = jnp.where(mask[:, :, None], tokens, 0)
        projections = [
            take_positions(params[name], k_positions, tokens.shape[1], axis=-2) for name in ("E", "F") if name in params
        ]
        projected = [
            self._project(projection.astype(tokens.dtype), tokens, params[name])
            for projection, name in zip((projections[0], projections[-1]), ("key", "value"), strict=True)
        ]
        last = projections[-1]
        return *projected, last if mask is None else self._zeroed(last, mask)

    def _per_key(self, projection):
        per_head, batched = self.sharing == "none", projection.ndim == (4 if self.sharing == "none" else 3)
        return f"bhqr,{'h' if per_head else ''}{'b' if batched else ''}kr->bhqk"

    def _project(self, projection, tokens, weight):
        """(projection x) W where the heads share it, which costs r rows of W; else projection (x W)."""
        if self.sharing != "none":
            both = "bke,bkr->bre" if projection.ndim == 3 else "bke,kr->bre"
            return project(contract(both, tokens, projection).astype(tokens.dtype), weight)
        both = "bkhd,hbkr->brhd" if projection.ndim == 4 else "bkhd,hkr->brhd"
        return contract(both, project(tokens, weight), projection).astype(tokens.dtype)

    def _zeroed(self, projection, mask):
        """The projection [(h,) (b,) k, r] with rows of padding 0, [(h,) b, k, r]."""
        if projection.ndim == (3 if self.sharing == "none" else 2):
            projection = jnp.expand_dims(projection, -3)
        return jnp.where(mask[:, :, None], projection, 0)
