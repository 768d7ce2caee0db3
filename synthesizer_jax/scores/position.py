"""Scores that depend on the distance of two positions alone."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from synthesizer_jax.axes import BUCKETS, HEADS, Param
from synthesizer_jax.scores.base import Dims, Scores, Spec, check_positive


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
