"""Cross-entropy with z-loss and label smoothing, in float32, after T5X's definition.

For one position with logits l [v], target t, log_z = logsumexp(l), and p the smoothed target, which is 1 - s at t and
s / (v - 1) elsewhere:

    loss = - sum_i p_i (l_i - log_z)  -  entropy(p)  +  z_loss * log_z ** 2

The entropy is subtracted so that a perfect prediction has loss 0. Source: t5x/losses.py.

Logits [b, t, v] in float32 are the largest array of a small model's step. `chunked_cross_entropy` never makes them: it
goes through the vocabulary in chunks, forward with a running maximum and sum of exponentials (Milakov and Gimelshein
2018), and backward once more, for one more product with the softmax's matrix.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from synthesizer_jax import activations
from synthesizer_jax.axes import BATCH, VOCAB, contract


class LossSums(NamedTuple):
    """Sums over a batch; divide by `weight` for means over real targets. Sums of several batches add up."""

    total: Float[Array, ""]  # weighted loss, the z part included
    z_loss: Float[Array, ""]  # its z part
    correct: Float[Array, ""]  # weight of the positions whose target has the largest logit, alone or in a tie
    weight: Float[Array, ""]  # number of real targets when weights are 0 and 1
    nats: Float[Array, ""]  # weighted - log p(target): no smoothing, no z part


def cross_entropy(
    logits: Float[Array, "*b v"],
    targets: Int[Array, "*b"],
    weights: Num[Array, "*b"],
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> LossSums:
    """Sums of the loss over the positions, each times its weight. A weighted target outside [0, v) makes them NaN.

    Positions are [b, t] for tokens, [b] for the classes of whole sequences, whose number is then v.

    Raises: ValueError for a negative z_loss or a label_smoothing outside [0, 1).
    """
    check_loss_settings(z_loss, label_smoothing)
    return _sums(_token_loss(logits, targets, z_loss, label_smoothing), weights)


def chunked_cross_entropy(
    x: Float[Array, "b t e"],
    table: Float[Array, "v e"],
    targets: Int[Array, "b t"],
    weights: Num[Array, "b t"],
    *,
    chunks: int,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> LossSums:
    """`cross_entropy` of the logits <x, row of table>, of which there is one chunk of the vocabulary at a time.

    Products in x's dtype, accumulated in float32. chunks must divide v; where v is split over a mesh axis, each device's
    part of it.

    Raises: ValueError where chunks does not divide, and as `cross_entropy`.
    """
    check_loss_settings(z_loss, label_smoothing)
    shards = activations.shards(VOCAB)
    check_chunks(chunks, table.shape[0], shards)
    losses = _chunked_loss(x, table, targets, (chunks, shards), z_loss, label_smoothing)
    return _sums(losses, weights)


def check_chunks(chunks: int, vocab_size: int, shards: int = 1) -> None:
    """ValueError unless each of `shards` parts of the vocabulary can be cut into `chunks` of one size."""
    part = vocab_size // shards
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"loss_chunks: expected a whole number >= 1, got {chunks!r}")
    if part % chunks:
        of = f"a device's {part} rows of the vocabulary" if shards > 1 else f"the vocabulary's {part} rows"
        usable = [str(n) for n in range(1, min(part, 256) + 1) if part % n == 0]
        raise ValueError(f"loss_chunks={chunks} does not divide {of}; usable: {', '.join(usable)}")


def _sums(losses, weights) -> LossSums:
    weights = weights.astype(jnp.float32)

    def weighted(values):  # by where, as a position of weight 0 may hold anything: NaN * 0 is NaN
        return jnp.sum(jnp.where(weights != 0, values * weights, 0))

    loss, z_part, correct, nats = map(weighted, losses)
    return LossSums(loss, z_part, correct, jnp.sum(weights), nats)


def check_loss_settings(z_loss: float, label_smoothing: float) -> None:
    """ValueError unless z_loss >= 0 and 0 <= label_smoothing < 1."""
    if not z_loss >= 0:
        raise ValueError(f"z_loss: expected a number >= 0 (T5 uses 1e-4), got {z_loss}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing: expected a number in [0, 1) (0.1 in translation), got {label_smoothing}")


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _token_loss(logits, targets, z_loss, label_smoothing):
    return _forward(logits, targets, z_loss, label_smoothing)[0]


def _forward(logits, targets, z_loss, label_smoothing):
    """All reductions over v in one pass after the maximum. The gradient keeps nothing with a v axis but the logits."""
    rows = logits.astype(jnp.float32)
    largest = jnp.max(rows, axis=-1)
    log_z = largest + jnp.log(jnp.sum(jnp.exp(rows - largest[..., None]), axis=-1))
    indices = jnp.where(targets < 0, rows.shape[-1], targets)[..., None]  # else -1 is the last entry
    at_target = jnp.take_along_axis(rows, indices, axis=-1, mode="fill")[..., 0]
    total = jnp.sum(rows, axis=-1) if label_smoothing else None
    losses = _losses(largest, log_z, at_target, total, rows.shape[-1], z_loss, label_smoothing)
    return losses, (logits, targets, log_z)


def _losses(largest, log_z, at_target, total, vocab_size, z_loss, label_smoothing):
    """(loss, its z part, whether it is right, nats) of each position, from what is needed of its logits."""
    on, off = _smoothed(label_smoothing, vocab_size)
    expected = (on - off) * at_target
    if off:
        expected += off * total
    z_part = z_loss * jnp.square(log_z)
    loss = log_z - expected - _entropy(on, off, vocab_size) + z_part
    correct = (at_target == largest).astype(jnp.float32)
    return loss, z_part, correct, log_z - at_target


def _backward(z_loss, label_smoothing, residuals, cotangents):
    logits, targets, log_z = residuals
    is_target = jnp.arange(logits.shape[-1], dtype=targets.dtype) == targets[..., None]
    gradient = _by_logits(logits, is_target, log_z, cotangents, logits.shape[-1], z_loss, label_smoothing)
    return gradient.astype(logits.dtype), np.zeros(targets.shape, jax.dtypes.float0)


def _by_logits(logits, is_target, log_z, cotangents, vocab_size, z_loss, label_smoothing):
    """The gradient by logits, some or all of the vocabulary's, in float32."""
    loss_bar, z_bar, _, nats_bar = cotangents
    on, off = _smoothed(label_smoothing, vocab_size)
    by_log_z = loss_bar + nats_bar + (loss_bar + z_bar) * (2 * z_loss) * log_z
    softmax = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    by_logit = jnp.where(is_target, (on * loss_bar + nats_bar)[..., None], (off * loss_bar)[..., None])
    return softmax * by_log_z[..., None] - by_logit


_token_loss.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _chunked_loss(x, table, targets, cut, z_loss, label_smoothing):
    return _chunked_forward(x, table, targets, cut, z_loss, label_smoothing)[0]


def _chunked_forward(x, table, targets, cut, z_loss, label_smoothing):
    vocab_size = table.shape[0]

    def one(carry, chunk):
        largest, exponentials, at_target, total = carry
        logits, is_target = _chunk_of_logits(x, chunk, targets)
        higher = jnp.maximum(largest, jnp.max(logits, axis=(-2, -1)))
        exponentials = exponentials * jnp.exp(largest - higher)
        exponentials += jnp.sum(jnp.exp(logits - higher[..., None, None]), axis=(-2, -1))
        at_target += jnp.sum(jnp.where(is_target, logits, 0), axis=(-2, -1))
        if label_smoothing:
            total += jnp.sum(logits, axis=(-2, -1))
        return (higher, exponentials, at_target, total), None

    zero = jnp.zeros(targets.shape, jnp.float32)
    # A target that is no token finds no logit: NaN, as without chunks.
    known = jnp.where((targets >= 0) & (targets < vocab_size), zero, jnp.nan)
    start = (jnp.full(targets.shape, -jnp.inf, jnp.float32), zero, known, zero)
    (largest, exponentials, at_target, total), _ = jax.lax.scan(one, start, _chunks_of(table.astype(x.dtype), cut))
    log_z = largest + jnp.log(exponentials)
    losses = _losses(largest, log_z, at_target, total, vocab_size, z_loss, label_smoothing)
    return losses, (x, table, targets, log_z)


def _chunked_backward(cut, z_loss, label_smoothing, residuals, cotangents):
    x, table, targets, log_z = residuals
    wide = [cotangent[..., None] for cotangent in cotangents]  # over (shards, rows) of a chunk

    def one(by_x, chunk):
        rows, _ = chunk
        logits, is_target = _chunk_of_logits(x, chunk, targets)
        gradient = _by_logits(logits, is_target, log_z[..., None], wide, table.shape[0], z_loss, label_smoothing)
        gradient = gradient.astype(x.dtype)
        by_x += contract("btsv,sve->bte", gradient, rows)
        return by_x, contract("btsv,bte->sve", gradient, x)

    by_x, by_chunks = jax.lax.scan(one, jnp.zeros(x.shape, jnp.float32), _chunks_of(table.astype(x.dtype), cut))
    by_table = jnp.moveaxis(by_chunks, 0, 1).reshape(table.shape)
    no_gradient = np.zeros(targets.shape, jax.dtypes.float0)
    return by_x.astype(x.dtype), by_table.astype(table.dtype), no_gradient


_chunked_loss.defvjp(_chunked_forward, _chunked_backward)


def _chunks_of(table, cut):
    """(rows [chunks, shards, v / (chunks shards), e], their ids): of each device's part of the vocabulary one piece."""
    chunks, shards = cut
    ids = jnp.arange(table.shape[0], dtype=jnp.int32).reshape(shards, chunks, -1)
    rows = activations.constrain(table.reshape(*ids.shape, -1), (VOCAB, None, None, None))
    return jnp.moveaxis(rows, 1, 0), jnp.moveaxis(ids, 1, 0)


def _chunk_of_logits(x, chunk, targets):
    """Logits [b, t, shards, rows] in float32, and which of them are the target's."""
    rows, ids = chunk
    logits = activations.constrain(contract("bte,sve->btsv", x, rows), (BATCH, None, VOCAB, None))
    return logits, ids == targets[..., None, None]


def _smoothed(label_smoothing: float, vocab_size: int) -> tuple[float, float]:
    """The smoothed target's value at the target and elsewhere."""
    return 1.0 - label_smoothing, label_smoothing / (vocab_size - 1)


def _entropy(on: float, off: float, vocab_size: int) -> float:
    return -sum(count * p * float(np.log(p)) for count, p in ((1, on), (vocab_size - 1, off)) if p > 0)
