"""From scores to outputs: masks, softmax, and the choice of algorithm by the form of the scores.

out_i = sum_j softmax_j(logits_ij) v_j over the keys j that query i may attend to; a query without any key gets 0, and
gradient 0. Exact algorithms:

- "shared", for scores that are a bias shared by the batch (R, FR and their sums): exponentiate the [h, q, k] table once
  for the whole batch and divide by each sequence's own sum over its keys. [b, h, q, k] never exists.
- packed rows of R: the same for the entries of a table at positions within segments (ops/packed_softmax.py).
- "flash" (TPU) and "cudnn" (GPU), for a low-rank part, maybe with a bias that the batch shares: a fused kernel, see
  ops/fused.py. [b, h, q, k] never exists.
- "xla", for every form: logits [b, h, q, k] in float32, masked softmax, product with the values.

Scores shared by the batch are defined with a floor: R'_ij = max(R_ij, max_j' R_ij' - 100), the maximum over the keys that
causality and sparsity allow, the floor constant for the gradient. Without it a sequence whose own keys all lie far below
the row's maximum would divide by an underflowed sum; with it nothing underflows and no branch is needed. It changes the
softmax only where every key of a sequence is more than 100 nats below the largest entry of its row. Under a mask of
each sequence's own nothing is shared, and there is no floor.

Kernels without a logarithm (`Scores.factor`) are divided by their sum over the keys. Where a signed kernel's sum is less
than 1e-6 of the sum of the sizes, the quotient is not defined in float32, and output and gradient are 0.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax import activations
from synthesizer_jax.ops import fused
from synthesizer_jax.ops.packed_softmax import Rows, packed_softmax
from synthesizer_jax.ops.shared_softmax import FLOOR, masked, shared_softmax
from synthesizer_jax.ops.softmax import MASKED, product, softmax_product
from synthesizer_jax.scores.base import Scores

Path = Literal["auto", "shared", "flash", "cudnn", "xla"]

# Kernels that may be negative are normalised by their sum where it is at least this part of the sum of their sizes: below
# it, float32 has cancelled all digits.
_SMALLEST_SUM = 1e-6


class Dropout(NamedTuple):
    """Dropout of attention weights, shared by the queries: each head of a sequence loses whole keys' values."""

    rate: float
    key: Array


def attend(
    scores: Scores,
    values: Float[Array, "b k h d"],
    key_mask: Bool[Array, "b k"] | None = None,
    causal: bool = False,
    q_offset: int | Int[Array, ""] = 0,
    q_segments: Int[Array, "b q"] | None = None,
    k_segments: Int[Array, "b k"] | None = None,
    allowed: Bool[Array, "q k"] | None = None,
    mask: Bool[Array, "_b _h _q k"] | None = None,
    bias: Float[Array, "_b _h _q k"] | None = None,
    dropout: Dropout | None = None,
    path: Path = "auto",
) -> Float[Array, "b q h d"]:
    """Attention of `scores` over `values` [b, k, h, d]; returns [b, q, h, d] in the values' dtype.

    key_mask: True = may be attended to. causal: query i sees keys up to i + q_offset. q_segments, k_segments: a query
    sees keys of its own segment; segment 0 is padding, whose keys nobody sees. allowed [q, k]: False where a query never
    sees a key, whatever the sequence (sparse attention). mask [b|1, h|1, q|1, k]: any other rule, True = may attend. A
    key is seen where all of these allow it; what stands at keys that no query sees is irrelevant, be it inf or NaN. bias
    [b|1, h|1, q|1, k] is added to the scores. dropout acts on the weights after normalisation. path: "auto" takes
    "shared" where it applies, else a fused kernel where there is one for the device (ops/fused.py says when), else "xla".
    "flash" can be asked for on any device: without a TPU it is interpreted, which is slow. Gradients of gradients and
    forward-mode differentiation need "xla", the others have a gradient of their own.

    A mask of each sequence's own costs [b, h, q, k] even with scores that the batch shares: prefer key_mask, causal and
    segments where they say the same. One with batch axis 1 keeps the shared algorithm.

    Raises ValueError for shapes that don't fit and for a path that can't serve the scores.
    """
    scores = _plus(scores, bias)
    masks = _Masks(key_mask, causal, q_offset, q_segments, k_segments, allowed, mask)
    packed = path == "auto" and scores.only_looked_up and masks.are_segments
    scores = scores if packed else scores.looked_up()
    _check(scores, values, masks, path)
    if dropout is not None and dropout.rate > 0:
        values = drop_keys(values, dropout)
    if packed:
        lookup, batch = scores.lookup, values.shape[0]
        positions = [jnp.broadcast_to(p, (batch, p.shape[1])) for p in (lookup.q_positions, lookup.k_positions)]
        return packed_softmax(lookup.table, values, Rows(q_segments, k_segments, *positions, key_mask), causal)
    shared = scores.shared_by_batch and q_segments is None and not masks.differ_by_mask
    if path == "shared" and not shared:
        raise ValueError(
            "path: 'shared' needs scores that are a bias with batch axis 1, no segments and no mask of each sequence's "
            f"own, got {_describe(scores)}, {'no ' if q_segments is None else ''}segments, "
            f"mask of shape {None if mask is None else mask.shape}; use path='auto'"
        )
    if shared and (path == "shared" or path == "auto" and masks.q_length(scores) > 1):
        common = masks.common(scores, values.shape[1])
        values = values if mask is None and allowed is None else _seen(values, common)
        table = jnp.broadcast_to(scores.bias[0], (values.shape[2], masks.q_length(scores), values.shape[1]))
        return shared_softmax(table, values, key_mask, None if common is None else common[0])
    kind = fused.choose(path, scores, values, masks)
    if kind != "xla":
        return fused.attend(kind, scores, values, masks)
    logits, bias, may_attend, has_key = _logits(scores, values.shape[1], masks)
    values = masked(masked(values, key_mask), None if k_segments is None else k_segments > 0)
    values = values if mask is None and allowed is None else _seen(values, may_attend)
    if scores.factor is None:
        if (
            logits is None and bias.shape[2] == 1
        ):  # a step of decoding: in the order of its cache, which no batch shares
            bias = jnp.broadcast_to(bias, (values.shape[0], *bias.shape[1:]))
        out = softmax_product(logits, bias, may_attend, values)
    else:
        weights = _normalised_by_sum(_sum(logits, bias), scores.factor, may_attend)
        out = product(weights.astype(values.dtype), values)
    if has_key is not None:
        out = jnp.where(jnp.swapaxes(has_key, 1, 2), out, 0)
    return out.astype(values.dtype)


def attention_weights(
    scores: Scores,
    batch: int,
    k_length: int,
    key_mask: Bool[Array, "b k"] | None = None,
    causal: bool = False,
    q_offset: int | Int[Array, ""] = 0,
    q_segments: Int[Array, "b q"] | None = None,
    k_segments: Int[Array, "b k"] | None = None,
    allowed: Bool[Array, "q k"] | None = None,
    mask: Bool[Array, "_b _h _q k"] | None = None,
    bias: Float[Array, "_b _h _q k"] | None = None,
) -> Float[Array, "b h q k"]:
    """The normalised weights [b, h, q, k] in float32 that `attend` would apply to the values: for looking at."""
    scores = _plus(scores, bias).looked_up()
    masks = _Masks(key_mask, causal, q_offset, q_segments, k_segments, allowed, mask)
    weights, _, has_key = _weights(scores, k_length, masks)
    if has_key is not None:
        weights = jnp.where(has_key, weights, 0)
    return jnp.broadcast_to(weights, (batch, *weights.shape[1:]))


def _plus(scores, bias):
    if bias is None:
        return scores
    if bias.ndim != 4 or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(
            f"bias: expected numbers [b|1, h|1, q|1, k] that are added to the scores, got {bias.dtype} {bias.shape}; "
            "booleans that say who may attend go to mask"
        )
    return scores + Scores(bias=bias.astype(jnp.float32))


class _Masks(NamedTuple):
    """All that says which keys a query may attend to, see `attend`."""

    key_mask: Array | None
    causal: bool
    q_offset: int | Array
    q_segments: Array | None
    k_segments: Array | None
    allowed: Array | None
    mask: Array | None

    @property
    def differ_by_mask(self) -> bool:
        """True where `mask` is each sequence's own."""
        return self.mask is not None and self.mask.shape[0] > 1

    @property
    def are_segments(self) -> bool:
        """True where nothing but segments, causality and padding keys restricts who sees whom."""
        return (
            self.q_segments is not None
            and self.allowed is None
            and self.mask is None
            and not isinstance(self.q_offset, jax.Array)
            and self.q_offset == 0
        )

    def q_length(self, scores):
        """The number of queries, that any of the arguments may say."""
        lengths = [scores.query.shape[1]] if scores.query is not None else [_table(scores).shape[2]]
        lengths += [] if self.q_segments is None else [self.q_segments.shape[1]]
        lengths += [] if self.allowed is None else [self.allowed.shape[0]]
        return max(lengths + ([] if self.mask is None else [self.mask.shape[2]]))

    def common(self, scores, k_length):
        """[1, h|1, q, k], False where no sequence may attend by a rule of the batch; None where nothing is forbidden."""
        causal = _causal(self.q_length(scores), k_length, self.q_offset)[None, None] if self.causal else None
        return _both(causal, self.rules())

    def rules(self):
        """As `common`, without causality."""
        rule = None if self.allowed is None else self.allowed[None, None]
        return rule if self.differ_by_mask else _both(rule, self.mask)

    def own(self):
        """[b|1, h|1, q|1, k], False where other rules than these forbid; None where there are none."""
        rule = None if self.key_mask is None else self.key_mask[:, None, None, :]
        if self.q_segments is not None:
            keys = self.k_segments[:, None, None, :]
            rule = _both(rule, (self.q_segments[:, None, :, None] == keys) & (keys > 0))
        return _both(rule, self.mask)


def _weights(scores, k_length, masks):
    """(weights [b|1, h, q, k] in float32, which keys are allowed, [b|1, h|1, q|1, k] or None, and where a row has any).

    Rows without keys are not zeroed here; has_key [b|1, h|1, q|1, 1] is None where each has one.
    """
    logits, bias, allowed, has_key = _logits(scores, k_length, masks)
    logits = _sum(logits, bias)
    if scores.factor is not None:
        return _normalised_by_sum(logits, scores.factor, allowed), allowed, has_key
    if allowed is not None:
        logits = jnp.where(allowed, logits, MASKED)
    return jax.nn.softmax(logits, axis=-1), allowed, has_key


def _logits(scores, k_length, masks):
    """(logits [b|1, h, q, k], a bias that is to be added, which keys are allowed, where a row has any), see `_weights`.

    Logits or bias may be None, both where there is a factor alone.
    """
    logits, bias, common, own = scores.low_rank(), scores.bias, masks.common(scores, k_length), masks.own()
    if logits is None and bias is not None:
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], masks.q_length(scores), k_length))
    if scores.shared_by_batch and not masks.differ_by_mask:
        shifted = bias - _row_max(bias, common)  # a constant of the row, that the softmax doesn't see
        bias = jnp.where(shifted < -FLOOR, -FLOOR, shifted)  # not maximum: it halves the gradient of a tie
    allowed = _both(common, own)
    # A causal row always has its first key; only the other masks can leave a row without any.
    has_key = None if own is None and masks.allowed is None else jnp.any(allowed, axis=-1, keepdims=True)
    return logits, bias, allowed, has_key


def _normalised_by_sum(logits, factor, allowed):
    """factor * exp(logits) over its sum along the keys; 0, with gradient 0, where the sum cancels to nothing."""
    if logits is not None:
        shifted = logits - _row_max(logits, allowed)
        # Masked before the exponential: in a row without keys the maximum is the mask's value, and all overflow.
        factor = factor * jnp.exp(shifted if allowed is None else jnp.where(allowed, shifted, MASKED))
    if allowed is not None:
        factor = jnp.where(allowed, factor, 0)
    total = jnp.sum(factor, axis=-1, keepdims=True)
    defined = jnp.abs(total) > _SMALLEST_SUM * jnp.sum(jnp.abs(factor), axis=-1, keepdims=True)
    return jnp.where(defined, factor / jnp.where(defined, total, 1), 0)


def _sum(first, second):
    return second if first is None else first if second is None else first + second


def _both(first, second):
    return second if first is None else first if second is None else first & second


def _causal(q_length, k_length, q_offset):
    """[q, k], True where the key is not after the query."""
    return jnp.arange(k_length)[None, :] <= jnp.arange(q_length)[:, None] + q_offset


def _row_max(logits, allowed):
    """The largest allowed entry of each row, constant for the gradient."""
    return jax.lax.stop_gradient(
        jnp.max(logits if allowed is None else jnp.where(allowed, logits, MASKED), axis=-1, keepdims=True)
    )


def mask_as_bias(mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """0 where True; where False what leaves a key no weight beside one that is allowed. Values there are to be finite."""
    return jnp.where(mask, 0, MASKED / 2)  # the half: added to a score it stays finite


def drop_keys(values: Float[Array, "b k h d"], dropout: Dropout) -> Float[Array, "b k h d"]:
    """The values without those that are dropped, whole keys of a head, the others scaled up."""
    keep = activations.bernoulli(dropout.key, 1 - dropout.rate, values.shape[:3])[..., None]
    return jnp.where(keep, values / (1 - dropout.rate), 0)


def _seen(values, allowed):
    """Values [b, k, h, d] of the keys that some query may attend to, 0 at the others."""
    seen = jnp.any(allowed, axis=2)  # [b|1, h|1, k]
    return jnp.where(jnp.swapaxes(seen, 1, 2)[..., None], values, 0)


def _keys_and_heads(scores):
    if scores.lookup is not None:
        return scores.lookup.k_positions.shape[1], scores.lookup.table.shape[0]
    return scores.key.shape[1:3] if scores.key is not None else _table(scores).shape[3:0:-2]


def _table(scores):
    return scores.factor if scores.bias is None else scores.bias


def _describe(scores):
    if scores.factor is not None:
        return "a kernel without a logarithm"
    if scores.query is not None:
        return f"a low-rank part of rank {scores.query.shape[-1]}"
    return f"a bias with batch axis {scores.bias.shape[0]}"


def _check(scores, values, masks, path):
    if path not in get_args(Path):
        raise ValueError(f"path: expected one of {get_args(Path)}, got {path!r}")
    batch, k_length, heads = values.shape[:3]
    found = _keys_and_heads(scores)
    if found[0] != k_length or found[1] not in (heads, 1):
        raise ValueError(
            f"values: expected [b, k, h, d] with the scores' k, h = {found}, got shape {values.shape}; scores and "
            "values must come from the same keys"
        )
    key_mask, q_segments, k_segments = masks.key_mask, masks.q_segments, masks.k_segments
    if key_mask is not None and (key_mask.shape != (batch, k_length) or key_mask.dtype != jnp.bool_):
        raise ValueError(
            f"key_mask: expected booleans of shape [b, k] = {(batch, k_length)}, True = may be attended to, got "
            f"{key_mask.dtype} {key_mask.shape}"
        )
    if (q_segments is None) != (k_segments is None):
        raise ValueError("q_segments, k_segments: expected both or neither; give both, also in self-attention")
    if k_segments is not None and k_segments.shape != (batch, k_length):
        raise ValueError(f"k_segments: expected shape [b, k] = {(batch, k_length)}, got {k_segments.shape}")
    if masks.mask is not None:
        _check_mask(masks.mask, (batch, heads, masks.q_length(scores), k_length))


def _check_mask(mask, shape):
    fits = mask.ndim == 4 and mask.shape[3] == shape[3]
    fits = fits and all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True))
    if not fits or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask: expected booleans of shape [b|1, h|1, q|1, k] with b, h, q, k = {shape}, True = may attend, got "
            f"{mask.dtype} {mask.shape}"
        )
