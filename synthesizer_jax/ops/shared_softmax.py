"""Softmax of scores that the batch shares, and its gradients: [b, h, q, k] never exists.

The exponentials of the table [h, q, k] are taken once for the whole batch, and each sequence divides by its own sum over
the keys that its mask leaves. `ops/attend.py` has the definition of the scores' floor, which makes this right for every
table. Masks of the batch (causality) go into the exponentials; only the mask of each sequence's keys is a factor of its own.

What is in the exponentials' precision is the values': e is rounded to their dtype before it is summed, so that weights add
up to 1, and the gradient is that of the rounded weights.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from synthesizer_jax import activations
from synthesizer_jax.axes import BATCH, contract
from synthesizer_jax.ops.softmax import MASKED

# Nats below the row's maximum at which scores shared by the batch end.
FLOOR = 100.0

# Scale of the shared exponentials, exactly a power of 2. Entries lie between 2^40 e^-100 = 4e-32 and 2^40, so that sums,
# their reciprocals and gradients from 1e-23 up are all normal numbers in float32 and bfloat16.
_SCALE = 2.0**40


@jax.custom_vjp
def shared_softmax(
    table: Float[Array, "h q k"],
    values: Float[Array, "b k h d"],
    key_mask: Bool[Array, "b k"] | None,
    common: Bool[Array, "_h q k"] | None,
) -> Float[Array, "b q h d"]:
    """Softmax of the table over each sequence's keys, times the values.

    key_mask: True = may be attended to. common: False where no sequence may attend. A row without keys gets 0.
    """
    return _forward(table, values, key_mask, common)[0]


def _forward(table, values, key_mask, common):
    highest = row_max(table, common)
    e = exponentials(table, highest, common, values.dtype)
    seen = masked(values, key_mask)
    if key_mask is None:
        numerator = contract("hqk,bkhd->bqhd", e, seen)
        denominator = jnp.sum(e, axis=-1, dtype=jnp.float32).T[None]  # [1, q, h]: each sequence has all keys
    elif _a_column_forward(values):
        both = contract("hqk,bkhd->bqhd", e, _with_columns(seen, key_mask[:, :, None]))
        numerator, denominator = both[..., :-1], both[..., -1]
    else:
        numerator = contract("hqk,bkhd->bqhd", e, seen)
        denominator = contract("hqk,bk->bqh", e, key_mask.astype(e.dtype))
    inverse = inverse_of(denominator)
    out = (numerator * inverse[..., None]).astype(values.dtype)
    return out, (table, highest, values, key_mask, common, inverse, out)


def _backward(residuals, gradient):
    table, highest, values, key_mask, common, inverse, out = residuals
    e = exponentials(table, highest, common, values.dtype)
    scaled = (gradient.astype(jnp.float32) * inverse[..., None]).astype(values.dtype)  # g / den
    d_values = contract("hqk,bqhd->bkhd", e, scaled)
    # d_table = e * (sum_b g'_q v_k - c_q mask_k) with c_q = <g'_q, out_q>
    seen = masked(values, key_mask)
    if key_mask is None:
        difference = contract("bqhd,bkhd->hqk", scaled, seen) - jnp.sum(inner(scaled, out), axis=0).T[:, :, None]
    else:
        corrections = jnp.stack(_parts(inner(scaled, out), values.dtype), axis=-1)  # [b, q, h, 1|2]
        columns = jnp.broadcast_to(key_mask[:, :, None], (*key_mask.shape, corrections.shape[-1])).astype(values.dtype)
        if _a_column_backward(values):
            left = jnp.concatenate([scaled, -corrections], axis=-1)
            difference = contract("bqhd,bkhd->hqk", left, _with_columns(seen, columns))
        else:
            difference = contract("bqhd,bkhd->hqk", scaled, seen) - contract("bqhd,bkd->hqk", corrections, columns)
    d_table = jnp.where(e > lowest(e.dtype), e.astype(jnp.float32) * difference, 0)
    return d_table, masked(d_values, key_mask).astype(values.dtype), None, None


shared_softmax.defvjp(_forward, _backward)


def row_max(table: Float[Array, "h q k"], common: Bool[Array, "_h q k"] | None) -> Float[Array, "h q 1"]:
    """The largest entry that some sequence may attend to, of each row."""
    return jnp.max(table if common is None else jnp.where(common, table, MASKED), axis=-1, keepdims=True)


def exponentials(
    table: Float[Array, "h q k"],
    highest: Float[Array, "h q 1"],
    common: Bool[Array, "_h q k"] | None,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "h q k"]:
    """2^40 exp(R' - highest), 0 where no sequence may attend."""
    half = jnp.exp(jnp.maximum(table - highest, -FLOOR) / 2)
    e = (half * _SCALE) * half  # in this order no factor is below float32's normal range
    return (e if common is None else jnp.where(common, e, 0)).astype(dtype)


def lowest(dtype: jax.typing.DTypeLike) -> float:
    """The exponential of an entry at the floor, however it is rounded."""
    return math.exp(-FLOOR) * _SCALE * (1 + 8 * float(jnp.finfo(dtype).eps))


def inverse_of(denominator: Float[Array, "*_shape"]) -> Float[Array, "*_shape"]:
    """1 / x; 0 at 0, a row without keys."""
    return jnp.where(denominator > 0, 1 / jnp.where(denominator > 0, denominator, 1), 0)


# Whether the mask is better one more column of the values than contracted with the exponentials by itself. As a column it costs
# a copy of the values, backward of the gradients, too; by itself further passes over [h, q, k]. Found with the compiler for TPU
# v5e and heads of 64, in bytes of both passes; on CPU the rule backward is right, too.


def _a_column_forward(values):
    """-8 % at 4 sequences of 4096; at 2 to 32 of 2048 +4 to +14 %, but on CPU (time) -12 % at 2 of them."""
    b, k, _, d = values.shape
    return (k > 2048 or activations.on_cpu()) and k * activations.shards(BATCH) >= 2 * b * d


def _a_column_backward(values):
    """-20 % at 16 sequences of 2048, -6 % at 32, -15 % at 16 of 1024; at 64 of them +5 %."""
    b, k, _, d = values.shape
    return 2 * k * activations.shards(BATCH) > b * d


def _with_columns(values, columns):
    """values [b, k, h, d] beside columns [b, k, c] that the heads share, [b, k, h, d + c]."""
    columns = jnp.broadcast_to(columns[:, :, None], (*values.shape[:3], columns.shape[-1])).astype(values.dtype)
    return jnp.concatenate([values, columns], axis=-1)


def inner(first: Float[Array, "b q h d"], second: Float[Array, "b q h d"]) -> Float[Array, "b q h"]:
    """<first, second> of each token and head in float32, [b, q, h]."""
    return jnp.sum(first.astype(jnp.float32) * second.astype(jnp.float32), axis=-1)


def _parts(x, dtype):
    """Arrays of `dtype` whose sum is x, in float32 or all but: what cancels must not be rounded to bfloat16."""
    if dtype == jnp.float32:
        return [x]
    coarse = x.astype(dtype)
    return [coarse, (x - coarse.astype(jnp.float32)).astype(dtype)]


def masked(values: Float[Array, "b k h d"], key_mask: Bool[Array, "b k"] | None) -> Float[Array, "b k h d"]:
    """By selection, never by a product: padding may hold inf or NaN."""
    return values if key_mask is None else jnp.where(key_mask[:, :, None, None], values, 0)
