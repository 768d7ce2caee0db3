"""What works on whole sequences, for several sequences that are packed in one row."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax import activations


def each_segment(
    function: Callable[[Bool[Array, "b q"], Bool[Array, "b k"]], Float[Array, "..."]],
    q_segments: Int[Array, "b q"],
    k_segments: Int[Array, "b k"],
    like: jax.ShapeDtypeStruct | Array,
) -> Float[Array, "..."]:
    """The sum of function(queries, keys) over the segments of a row; it is of like's shape and dtype.

    For what projects a whole sequence or is not linear in its tokens. queries and keys are True at the segment's tokens;
    `function` gives 0 where the result is another segment's. Ids may be any numbers above 0, in any order. The function
    runs once for the first segment of all rows, once for the second, and so on.
    """
    order = _order(jnp.concatenate([q_segments, k_segments], axis=1))
    of_queries, of_keys = jnp.split(order, [q_segments.shape[1]], axis=1)

    def add(total, segment):
        queries = of_queries == segment
        return jax.lax.cond(
            activations.anywhere(queries), lambda: total + function(queries, of_keys == segment), lambda: total
        ), None

    numbers = jnp.arange(1, q_segments.shape[1] + 1, dtype=order.dtype)
    return jax.lax.scan(add, jnp.zeros(like.shape, like.dtype), numbers)[0]


def _order(segments):
    """1 at the tokens of a row's first segment, 2 at those of its second, ..., 0 at padding."""
    first = jnp.argmax(
        segments[:, :, None] == segments[:, None, :], axis=2
    )  # the slot where each token's id comes first
    opens = (first == jnp.arange(segments.shape[1])) & (segments > 0)
    numbers = jnp.take_along_axis(jnp.cumsum(opens, axis=1), first, axis=1)
    return jnp.where(segments > 0, numbers, 0)
