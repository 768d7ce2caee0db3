"""From scores to outputs: masks, softmax, and the choice of algorithm by the form of the scores.

out_i = sum_j softmax_j(logits_ij) v_j over the keys j that query i may attend to; a query without any key gets 0, and
gradient 0. Two exact algorithms:

- "shared", for scores that are a bias shared by the batch (R, FR and their sums): exponentiate the [h, q, k] table once
  for the whole batch and divide by each sequence's own sum over its keys. [b, h, q, k] never exists.
- "xla", for every form: logits [b, h, q, k] in float32, masked softmax, product with the values.

Scores shared by the batch are defined with a floor: R'_ij = max(R_ij, max_j' R_ij' - 100), the maximum over the keys that
causality and sparsity allow, the floor constant for the gradient. Without it a sequence whose own keys all lie far below
the row's maximum would divide by an underflowed sum; with it nothing underflows and no branch is needed. It changes the
softmax only where every key of a sequence is more than 100 nats below the largest entry of its row.

Kernels without a logarithm (`Scores.factor`) are divided by their sum over the keys. Where a signed kernel's sum is less
than 1e-6 of the sum of the sizes, the quotient is not defined in float32, and output and gradient are 0.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax.axes import contract
from synthesizer_jax.scores.base import Scores

Path = Literal["auto", "shared", "xla"]

# In one place: the value of masked logits. Lower than any score, finite, so that no row is all -inf.
_MASKED = float(jnp.finfo(jnp.float32).min)

# Nats below the row's maximum at which scores shared by the batch end.
_FLOOR = 100.0

# Kernels that may be negative are normalised by their sum where it is at least this part of the sum of their sizes: below
# it, float32 has cancelled all digits.
_SMALLEST_SUM = 1e-6

# Scale of the shared exponentials, exactly a power of 2. Entries lie between 2^40 e^-100 = 4e-32 and 2^40, so that sums,
# their reciprocals and gradients from 1e-23 up are all normal numbers in float32 and bfloat16.
_SCALE = 2.0**40


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
    bias: Float[Array, "_b _h _q k"] | None = None,
    dropout: Dropout | None = None,
    path: Path = "auto",
) -> Float[Array, "b q h d"]:
    """Attention of `scores` over `values` [b, k, h, d]; returns [b, q, h, d] in the values' dtype.

    key_mask: True = may be attended to. causal: query i sees keys up to i + q_offset. q_segments, k_segments: a query
    sees keys of its own segment; segment 0 is padding, whose keys nobody sees. allowed [q, k]: False where a query never
    sees a key, whatever the sequence (sparse attention). bias [b|1, h|1, q|1, k] is added to the scores. dropout acts on
    the weights after normalisation. path: "auto" takes "shared" where it applies.

    Raises ValueError for shapes that don't fit and for a path that can't serve the scores.
    """
    if bias is not None:
        scores = scores + Scores(bias=bias.astype(jnp.float32))
    _check(scores, values, key_mask, q_segments, k_segments, path)
    if dropout is not None and dropout.rate > 0:
        values = _drop_keys(values, dropout)
    shared = scores.shared_by_batch and q_segments is None
    if path == "shared" and not shared:
        raise ValueError(
            "path: 'shared' needs scores that are a bias with batch axis 1 and no segments, got "
            f"{_describe(scores)}, {'no ' if q_segments is None else ''}segments; use path='auto'"
        )
    if shared and path != "xla":
        q_length = scores.bias.shape[2] if allowed is None else allowed.shape[0]
        common = _common_mask(q_length, values.shape[1], causal, q_offset, allowed)
        return _attend_shared(scores.bias, values, key_mask, common)
    weights, has_key = _weights(scores, values.shape[1], key_mask, causal, q_offset, q_segments, k_segments, allowed)
    if key_mask is not None:
        values = jnp.where(key_mask[:, :, None, None], values, 0)
    weights = weights.astype(values.dtype)
    if weights.shape[0] == 1:
        out = contract("hqk,bkhd->bqhd", weights[0], values)
    else:
        out = contract("bhqk,bkhd->bqhd", weights, values)
    if has_key is not None:
        out = jnp.where(has_key[:, :, None, None], out, 0)
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
    bias: Float[Array, "_b _h _q k"] | None = None,
) -> Float[Array, "b h q k"]:
    """The normalised weights [b, h, q, k] in float32 that `attend` would apply to the values: for looking at."""
    if bias is not None:
        scores = scores + Scores(bias=bias.astype(jnp.float32))
    weights, has_key = _weights(scores, k_length, key_mask, causal, q_offset, q_segments, k_segments, allowed)
    if has_key is not None:
        weights = jnp.where(has_key[:, None, :, None], weights, 0)
    return jnp.broadcast_to(weights, (batch, *weights.shape[1:]))


def _weights(scores, k_length, key_mask, causal, q_offset, q_segments, k_segments, never):
    """(weights [b|1, h, q, k] in float32, has_key [b|1, q] or None): rows without keys are not zeroed here."""
    logits = scores.exponent()
    q_length = _q_length(scores, q_segments)
    if logits is not None:
        logits = jnp.broadcast_to(logits, (*logits.shape[:2], q_length, k_length))
    common = _common_mask(q_length, k_length, causal, q_offset, never)
    if scores.shared_by_batch:
        shifted = logits - _row_max(logits, common)  # a constant of the row, that the softmax doesn't see
        logits = jnp.where(shifted < -_FLOOR, -_FLOOR, shifted)  # not maximum: it halves the gradient of a tie
    allowed = None if common is None else common[None]
    if key_mask is not None:
        allowed = _both(allowed, key_mask[:, None, :])
    if q_segments is not None:
        same = (q_segments[:, :, None] == k_segments[:, None, :]) & (k_segments[:, None, :] > 0)
        allowed = _both(allowed, same)
    # A causal row always has its first key; only the other masks can leave a row without any.
    has_key = None if key_mask is None and q_segments is None and never is None else jnp.any(allowed, axis=-1)
    if scores.factor is not None:
        return _normalised_by_sum(logits, scores.factor, allowed), has_key
    if allowed is None:
        return jax.nn.softmax(logits, axis=-1), None
    return jax.nn.softmax(jnp.where(allowed[:, None], logits, _MASKED), axis=-1), has_key


def _normalised_by_sum(logits, factor, allowed):
    """factor * exp(logits) over its sum along the keys; 0, with gradient 0, where the sum cancels to nothing."""
    if logits is not None:
        factor = factor * jnp.exp(logits - _row_max(logits, None if allowed is None else allowed[:, None]))
    if allowed is not None:
        factor = jnp.where(allowed[:, None], factor, 0)
    total = jnp.sum(factor, axis=-1, keepdims=True)
    defined = jnp.abs(total) > _SMALLEST_SUM * jnp.sum(jnp.abs(factor), axis=-1, keepdims=True)
    return jnp.where(defined, factor / jnp.where(defined, total, 1), 0)


def _common_mask(q_length, k_length, causal, q_offset, allowed):
    """[q, k], what no sequence may attend to; None where nothing is forbidden."""
    return _both(_causal(q_length, k_length, q_offset) if causal else None, allowed)


def _both(first, second):
    return second if first is None else first if second is None else first & second


def _q_length(scores, q_segments):
    if scores.query is not None:
        return scores.query.shape[1]
    if scores.factor is not None:
        return scores.factor.shape[2]
    return scores.bias.shape[2] if q_segments is None else q_segments.shape[1]


def _causal(q_length, k_length, q_offset):
    """[q, k], True where the key is not after the query."""
    return jnp.arange(k_length)[None, :] <= jnp.arange(q_length)[:, None] + q_offset


def _row_max(logits, allowed):
    """The largest allowed entry of each row, constant for the gradient."""
    return jax.lax.stop_gradient(
        jnp.max(logits if allowed is None else jnp.where(allowed, logits, _MASKED), axis=-1, keepdims=True)
    )


def _drop_keys(values, dropout):
    keep = jax.random.bernoulli(dropout.key, 1 - dropout.rate, values.shape[:3])[..., None]
    return jnp.where(keep, values / (1 - dropout.rate), 0)


def _attend_shared(bias, values, key_mask, causal_mask):
    heads = values.shape[2]
    table = jnp.broadcast_to(bias[0], (heads, *bias.shape[2:]))
    return _shared_softmax(table, values, key_mask, causal_mask)


def _exponentials(table, causal_mask):
    """(e [h, q, k] = 2^40 exp(R' - rowmax), 0 where not causally allowed; whether R is above its floor)."""
    shifted = table - _row_max(table, causal_mask)
    half = jnp.exp(jnp.maximum(shifted, -_FLOOR) / 2)
    e = (half * _SCALE) * half  # in this order no factor is below float32's normal range
    if causal_mask is not None:
        e = jnp.where(causal_mask, e, 0)
    return e, shifted >= -_FLOOR


@jax.custom_vjp
def _shared_softmax(table, values, key_mask, causal_mask):
    """Softmax of table [h, q, k] over each sequence's keys, times values [b, k, h, d]; [b, q, h, d]."""
    return _shared_softmax_forward(table, values, key_mask, causal_mask)[0]


def _shared_softmax_forward(table, values, key_mask, causal_mask):
    e = _exponentials(table, causal_mask)[0].astype(values.dtype)
    numerator = contract("hqk,bkhd->bqhd", e, _masked(values, key_mask))
    if key_mask is None:
        denominator = jnp.sum(e, axis=-1, dtype=jnp.float32).T[None]  # [1, q, h]: each sequence has all keys
    else:
        denominator = contract("hqk,bk->bqh", e, key_mask.astype(e.dtype))
    inverse = jnp.where(denominator > 0, 1 / jnp.where(denominator > 0, denominator, 1), 0)
    out = (numerator * inverse[..., None]).astype(values.dtype)
    return out, (table, values, key_mask, causal_mask, inverse, out)


def _shared_softmax_backward(residuals, gradient):
    table, values, key_mask, causal_mask, inverse, out = residuals
    e, above_floor = _exponentials(table, causal_mask)
    scaled = gradient.astype(jnp.float32) * inverse[..., None]  # g / den
    correction = jnp.sum(scaled * out.astype(jnp.float32), axis=-1)  # [b, q, h]
    scaled = scaled.astype(values.dtype)
    d_values = contract("hqk,bqhd->bkhd", e.astype(values.dtype), scaled)
    d_table = contract("bqhd,bkhd->hqk", scaled, _masked(values, key_mask))
    if key_mask is None:
        d_table = d_table - jnp.sum(correction, axis=0).T[:, :, None]
    else:
        d_table = d_table - jnp.einsum("bqh,bk->hqk", correction, key_mask.astype(jnp.float32))
    d_table = jnp.where(above_floor, e * d_table, 0)
    return d_table, _masked(d_values, key_mask).astype(values.dtype), None, None


_shared_softmax.defvjp(_shared_softmax_forward, _shared_softmax_backward)


def _masked(values, key_mask):
    """By selection, never by a product: padding may hold inf or NaN."""
    return values if key_mask is None else jnp.where(key_mask[:, :, None, None], values, 0)


def _table(scores):
    return scores.factor if scores.bias is None else scores.bias


def _describe(scores):
    if scores.factor is not None:
        return "a kernel without a logarithm"
    if scores.query is not None:
        return f"a low-rank part of rank {scores.query.shape[-1]}"
    return f"a bias with batch axis {scores.bias.shape[0]}"


def _check(scores, values, key_mask, q_segments, k_segments, path):
    if path not in get_args(Path):
        raise ValueError(f"path: expected one of {get_args(Path)}, got {path!r}")
    batch, k_length, heads = values.shape[:3]
    found = scores.key.shape[1:3] if scores.key is not None else _table(scores).shape[3:0:-2]
    if found[0] != k_length or found[1] not in (heads, 1):
        raise ValueError(
            f"values: expected [b, k, h, d] with the scores' k, h = {found}, got shape {values.shape}; scores and "
            "values must come from the same keys"
        )
    if key_mask is not None and (key_mask.shape != (batch, k_length) or key_mask.dtype != jnp.bool_):
        raise ValueError(
            f"key_mask: expected booleans of shape [b, k] = {(batch, k_length)}, True = may be attended to, got "
            f"{key_mask.dtype} {key_mask.shape}"
        )
    if (q_segments is None) != (k_segments is None):
        raise ValueError("q_segments, k_segments: expected both or neither; give both, also in self-attention")
    if k_segments is not None and k_segments.shape != (batch, k_length):
        raise ValueError(f"k_segments: expected shape [b, k] = {(batch, k_length)}, got {k_segments.shape}")
