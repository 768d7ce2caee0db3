"""Decoding: from a step function and a cache to token ids. Knows no model.

The step protocol, which every strategy shares:

    logits, cache = step(tokens, cache)      # tokens [b, 1] int32, logits [b, 1, v] float

`cache` is any pytree of arrays with constant shapes. A strategy gives the next token of each row from its logits;
the first token given to the step is `start_id` (T5: the padding id 0).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Step = Callable[[jax.Array, Any], tuple[jax.Array, Any]]  # (tokens [b, 1], cache) -> (logits [b, 1, v], cache)

PAD_ID = 0  # what follows the end of a sequence, in T5 and seqio alike


class _Progress(NamedTuple):
    position: jax.Array  # [], the number of tokens decoded so far
    tokens: jax.Array  # [b, n] int32, PAD_ID where nothing is decoded yet
    last: jax.Array  # [b, 1] int32, what the next step is given
    ended: jax.Array  # [b] bool, rows with an end-of-sequence token
    cache: Any


def greedy(
    step: Step,
    cache: Any,
    *,
    batch: int,
    max_length: int,
    eos_id: int = 1,
    start_id: int = 0,
    vocab_size: int | None = None,
) -> jax.Array:
    """The most probable token at each position, until every row has ended.

    Args:
      step: one decoding step, see the module's docstring.
      cache: the state before the first token.
      batch: b, the number of rows.
      max_length: the most tokens decoded; a row that has not ended by then has no `eos_id`.
      eos_id: the id that ends a row; it is part of the result.
      start_id: the first token given to the step; it is not part of the result.
      vocab_size: ids from here on are never produced (an embedding table is often longer than its vocabulary);
        None allows all.

    Returns:
      int32 [b, max_length]; after a row's `eos_id` only zeros. Runs no more steps than the longest row needs.
    """
    if batch < 1 or max_length < 1:
        raise ValueError(f"greedy: batch and max_length must be at least 1, got {batch} and {max_length}")

    def advance(progress: _Progress) -> _Progress:
        logits, new_cache = step(progress.last, progress.cache)
        chosen = jnp.argmax(_allowed(logits, vocab_size, eos_id), axis=-1).astype(jnp.int32)  # [b]
        chosen = jnp.where(progress.ended, PAD_ID, chosen)
        return _Progress(
            position=progress.position + 1,
            tokens=lax.dynamic_update_slice_in_dim(progress.tokens, chosen[:, None], progress.position, axis=1),
            last=chosen[:, None],
            ended=progress.ended | (chosen == eos_id),
            cache=new_cache,
        )

    def unfinished(progress: _Progress) -> jax.Array:
        return (progress.position < max_length) & ~jnp.all(progress.ended)

    start = _Progress(
        position=jnp.zeros((), jnp.int32),
        tokens=jnp.full((batch, max_length), PAD_ID, jnp.int32),
        last=jnp.full((batch, 1), start_id, jnp.int32),
        ended=jnp.zeros((batch,), bool),
        cache=cache,
    )
    return lax.while_loop(unfinished, advance, start).tokens


def _allowed(logits: jax.Array, vocab_size: int | None, eos_id: int) -> jax.Array:
    """The logits [b, v] of the ids that may be produced, from a step's [b, 1, v]."""
    rows = logits.shape[-1]
    if vocab_size is None:
        vocab_size = rows
    if not 0 < vocab_size <= rows:
        raise ValueError(
            f"vocab_size must be between 1 and the logits' size {rows}, got {vocab_size}; "
            "is this the vocabulary that the model was trained with?"
        )
    if not 0 <= eos_id < vocab_size:
        raise ValueError(f"eos_id must be an id of the vocabulary (0 to {vocab_size - 1}), got {eos_id}")
    return logits[:, -1, :vocab_size]
