"""Cross-entropy with z-loss and label smoothing, in float32, after T5X's definition.

For one position with logits l [v], target t, log_z = logsumexp(l), and p the smoothed target, which is 1 - s at t and
s / (v - 1) elsewhere:

    loss = - sum_i p_i (l_i - log_z)  -  entropy(p)  +  z_loss * log_z ** 2

The entropy is subtracted so that a perfect prediction has loss 0. Source: t5x/losses.py.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num


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
    loss, z_part, correct, nats = _token_loss(logits, targets, z_loss, label_smoothing)
    weights = weights.astype(jnp.float32)

    def weighted(values):  # by where, as a position of weight 0 may hold anything: NaN * 0 is NaN
        return jnp.sum(jnp.where(weights != 0, values * weights, 0))

    return LossSums(weighted(loss), weighted(z_part), weighted(correct), jnp.sum(weights), weighted(nats))


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
    on, off = _smoothed(label_smoothing, rows.shape[-1])
    expected = (on - off) * at_target
    if off:
        expected += off * jnp.sum(rows, axis=-1)
    z_part = z_loss * jnp.square(log_z)
    loss = log_z - expected - _entropy(on, off, rows.shape[-1]) + z_part
    correct = (at_target == largest).astype(jnp.float32)
    return (loss, z_part, correct, log_z - at_target), (logits, targets, log_z)


def _backward(z_loss, label_smoothing, residuals, cotangents):
    logits, targets, log_z = residuals
    loss_bar, z_bar, _, nats_bar = cotangents
    on, off = _smoothed(label_smoothing, logits.shape[-1])
    by_log_z = loss_bar + nats_bar + (loss_bar + z_bar) * (2 * z_loss) * log_z
    softmax = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    is_target = jnp.arange(logits.shape[-1], dtype=targets.dtype) == targets[..., None]
    by_logit = jnp.where(is_target, (on * loss_bar + nats_bar)[..., None], (off * loss_bar)[..., None])
    gradient = softmax * by_log_z[..., None] - by_logit
    return gradient.astype(logits.dtype), np.zeros(targets.shape, jax.dtypes.float0)


_token_loss.defvjp(_forward, _backward)


def _smoothed(label_smoothing: float, vocab_size: int) -> tuple[float, float]:
    """The smoothed target's value at the target and elsewhere."""
    return 1.0 - label_smoothing, label_smoothing / (vocab_size - 1)


def _entropy(on: float, off: float, vocab_size: int) -> float:
    return -sum(count * p * float(np.log(p)) for count, p in ((1, on), (vocab_size - 1, off)) if p > 0)
