"""Positions: T5's relative bias, and what other scores make of positions and distances."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from synthesizer_jax.axes import BUCKETS, HEADS, Param
from synthesizer_jax.scores.base import Dims, Scores, Spec, check_flag, check_positive


@dataclasses.dataclass(frozen=True)
class RelativePositionBias(Spec):
    """logits_ij = table[h, bucket(j - i)], T5's relative position bias (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each, the other half grow logarithmically up to max_distance; bidirectional
    spends half of all on keys to the right of the query, otherwise those share bucket 0. Any length. As the bias of a
    stack of layers it is one table for all of them. Parameters per head: buckets.
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    name: ClassVar[str] = "relative_position"

    def __post_init__(self):
        check_positive("buckets", self.buckets)
        check_positive("max_distance", self.max_distance)
        check_flag("bidirectional", self.bidirectional)
        exact = self.buckets // (4 if self.bidirectional else 2)
        if exact < 1 or self.max_distance <= exact:
            raise ValueError(
                f"max_distance: expected more than the {exact} distances that have a bucket each "
                f"(buckets={self.buckets}), got {self.max_distance}"
            )

    def params(self, dims: Dims):
        bound = (3 * 2 / (dims.heads + self.buckets)) ** 0.5  # Glorot uniform, as in T5X

        def init(key, shape, dtype):
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        return {"rel_embedding": Param((dims.heads, self.buckets), (HEADS, BUCKETS), init)}

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        return self.bias(params, x_q.shape[1], k_length, q_positions, k_positions)

    def bias(self, params, q_length: int, k_length: int, q_positions=None, k_positions=None) -> Scores:
        """The scores for sequences of these lengths; they read no token."""
        query = jnp.atleast_2d(jnp.arange(q_length) if q_positions is None else q_positions)
        key = jnp.atleast_2d(jnp.arange(k_length) if k_positions is None else k_positions)
        buckets = self.bucket(key[:, None, :] - query[:, :, None])
        table = params["rel_embedding"].astype(jnp.float32)
        return Scores(bias=jnp.moveaxis(jnp.take(table, buckets, axis=1), 0, 1))

    def bucket(self, relative: Int[Array, "*_shape"]) -> Int[Array, "*_shape"]:
        """The bucket of each distance key position - query position."""
        buckets, offset = self.buckets, jnp.zeros_like(relative)
        if self.bidirectional:
            buckets //= 2
            offset = jnp.where(relative > 0, buckets, 0).astype(relative.dtype)
            distance = jnp.abs(relative)
        else:
            distance = jnp.maximum(-relative, 0)
        exact = buckets // 2
        growth = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(self.max_distance / exact)
        far = exact + (growth * (buckets - exact)).astype(relative.dtype)
        return offset + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))


def sinusoids(positions: Int[Array, "*_shape"], size: int) -> Float[Array, "*_shape size"]:
    """[sin(p w_0), ..., cos(p w_0), ...] with w_f = 10000^(-2 f / size), in float32 (Vaswani et al. 2017, as in
    Transformer-XL: all sines first). size is even."""
    angles = positions.astype(jnp.float32)[..., None] * _frequencies(size)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _frequencies(size):
    if size % 2:
        raise ValueError(
            f"features: sinusoids come in pairs of sine and cosine, expected an even size, got {size} (a sinusoidal look-up "
            "has the size of a head, head_dim)"
        )
    return 10_000.0 ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)


def sinusoid_features(
    query: Float[Array, "b q h c"], k_length: int, q_positions=None, k_positions=None
) -> tuple[Float[Array, "b q h c"], Float[Array, "_b k h c"]]:
    """Factors whose products are <query_i, sinusoids(i - j)>.

    With query = (s, c) per frequency w: s sin(w (i - j)) + c cos(w (i - j)) = A_i sin(w j) + B_i cos(w j), where
    A_i = c sin(w i) - s cos(w i) and B_i = s sin(w i) + c cos(w i).
    """
    b, q, h, size = query.shape
    at_query = _positions(q_positions, q)[:, :, None, None].astype(jnp.float32) * _frequencies(size)
    sine, cosine = jnp.split(query.astype(jnp.float32), 2, axis=-1)
    left = cosine * jnp.sin(at_query) - sine * jnp.cos(at_query)
    right = sine * jnp.sin(at_query) + cosine * jnp.cos(at_query)
    key = sinusoids(_positions(k_positions, k_length), size)[:, :, None]
    key = jnp.broadcast_to(key, (*key.shape[:2], h, size))
    return jnp.concatenate([left, right], axis=-1).astype(query.dtype), key.astype(query.dtype)


def distances_of(
    q_length: int, k_length: int, q_positions=None, k_positions=None, max_length: int | None = None
) -> Int[Array, "_b q k"]:
    """Query position - key position, [b|1, q, k]; where a position is not in [0, max_length), the number max_length."""
    query, key = (_positions(p, length) for p, length in ((q_positions, q_length), (k_positions, k_length)))
    distances = query[:, :, None] - key[:, None, :]
    if max_length is None:
        return distances
    inside = [(p >= 0) & (p < max_length) for p in (query, key)]
    return jnp.where(inside[0][:, :, None] & inside[1][:, None, :], distances, max_length)


def _positions(positions, length):
    return jnp.atleast_2d(jnp.arange(length) if positions is None else positions)


def shifted(rows: Float[Array, "b h q _o"], k_length: int) -> Float[Array, "b h q k"]:
    """out[i, j] = rows[i, j - i + q - 1]: from an entry per distance (q + k - 1 of them) to an entry per key.

    By padding and reshaping, which costs no gather (Dai et al. 2019, appendix B).
    """
    b, h, q, width = rows.shape
    flat = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(b, h, q * (width + 1))
    return flat[..., q - 1 : q - 1 + q * width].reshape(b, h, q, width)[..., :k_length]
