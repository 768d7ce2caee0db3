"""Softmax attention over logits [b, h, q, k], with a gradient that keeps one array of that size and reads it little.

With e_ij = exp(l_ij - max_j l_ij) over the allowed keys and out_i = sum_j e_ij v_j / sum_j e_ij, a change of the logits moves

    sum_j e_ij   out_i  by  sum_j e_ij (dl_ij - mean_i) v_j + sum_j e_ij dv_j      mean_i = sum_j e_ij dl_ij / sum_j e_ij

so that neither normalised weights nor masked logits are needed: e alone is kept, the division acts on [b, q, h, d], and
where a key is masked e is 0 and so is the gradient. The rule is written for forward mode; JAX transposes it, and can
differentiate it once more.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from synthesizer_jax.axes import contract

# In one place: the value of masked logits. Lower than any score, finite, so that no row is all -inf.
MASKED = float(jnp.finfo(jnp.float32).min)


@jax.custom_jvp
def softmax_product(
    logits: Float[Array, "_b h _q k"] | None,
    bias: Float[Array, "_c _h _q k"] | None,
    allowed: Bool[Array, "_d _h _q k"] | None,
    values: Float[Array, "b k h d"],
) -> Float[Array, "b q h d"]:
    """softmax(logits + bias) over the allowed keys, times the values; [b, q, h, d] in the values' dtype.

    logits and bias in float32, one of them may be None. Axes of size 1 are shared: by the batch, the heads or the queries.
    A row without an allowed key gets the mean of all values, with a gradient: the caller selects.
    """
    return _forward(logits, bias, allowed, values)[0]


def _forward(logits, bias, allowed, values):
    """(out [b, q, h, d], e [b|1, h, q, k] in the values' dtype, 1 / sum of e [b|1, h, q, 1])."""
    terms = [term for term in (logits, bias) if term is not None]
    summed = sum(terms[1:], terms[0])
    if allowed is not None:
        summed = jnp.where(allowed, summed, MASKED)
    e = jnp.exp(summed - jnp.max(summed, axis=-1, keepdims=True)).astype(values.dtype)
    inverse = 1 / jnp.sum(e, axis=-1, keepdims=True, dtype=jnp.float32)
    return (product(e, values) * jnp.swapaxes(inverse, 1, 2)).astype(values.dtype), e, inverse


@softmax_product.defjvp
def _jvp(primals, tangents):
    logits, bias, allowed, values = primals
    by_logits, by_bias, _, by_values = tangents
    out, e, inverse = _forward(logits, bias, allowed, values)
    batch = e.shape[0]
    changes = [] if logits is None else [by_logits]
    changes += [] if bias is None else [_for_all(by_bias, batch)]
    moved = _moved(e, inverse, sum(changes[1:], changes[0]))
    turned = product(moved.astype(values.dtype), values) + product(e, by_values)
    return out, (turned * jnp.swapaxes(inverse, 1, 2)).astype(values.dtype)


def product(weights: Float[Array, "_b _h q k"], values: Float[Array, "b k h d"]) -> Float[Array, "b q h d"]:
    """The sums of the values by these weights, in float32."""
    if weights.shape[0] == 1:
        return contract("hqk,bkhd->bqhd", weights[0], values)
    return contract("bkhd,bhqk->bqhd", values, weights)  # in this order einsum makes queries rows: 3 % of a step on CPU


def _moved(e, inverse, change):
    """e (change - its mean by these weights), in float32, of which narrower exponentials are kept as they are.

    The mean is made of the very products that it is taken from: a row with one key alone has gradient 0, not the rounding
    of two ways to the same number, which Adafactor would take for a direction.
    """

    def by_weights(e, inverse, change):
        e = e.astype(jnp.float32)
        product = e * change
        return product - e * (inverse * jnp.sum(product, axis=-1, keepdims=True))

    keeping_narrow = jax.checkpoint(by_weights, prevent_cse=False)
    return (by_weights if e.dtype == jnp.float32 else keeping_narrow)(e, inverse, change)


def _for_all(bias, batch):
    """The bias of each sequence. Transposed, a sum over the batch: on CPU as a contraction, which is the faster."""
    if bias.shape[0] == batch:
        return bias
    return jax.lax.platform_dependent(
        bias,
        cpu=lambda bias: jnp.einsum("b,hqk->bhqk", jnp.ones(batch, bias.dtype), bias[0]),
        default=lambda bias: jnp.broadcast_to(bias, (batch, *bias.shape[1:])),
    )
