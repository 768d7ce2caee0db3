"""What works on whole sequences, for several sequences that are packed in one row."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def each_segment(
    function: Callable[[Int[Array, ""]], Float[Array, "..."]],
    segments: Int[Array, "b q"],
    like: jax.ShapeDtypeStruct | Array,
) -> Float[Array, "..."]:
    """The sum of function(segment) over the ids 1, 2, ... in `segments`; it is of like's shape and dtype.

    For what projects a whole sequence or is not linear in its tokens. `function` gives 0 where the result is another
    segment's. It runs once for each id that occurs in the batch; ids that nobody has are skipped, up to q of them.
    """

    def add(total, segment):
        return jax.lax.cond(jnp.any(segments == segment), lambda: total + function(segment), lambda: total), None

    ids = jnp.arange(1, segments.shape[1] + 1, dtype=segments.dtype)
    return jax.lax.scan(add, jnp.zeros(like.shape, like.dtype), ids)[0]
