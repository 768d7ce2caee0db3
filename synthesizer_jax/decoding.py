"""Decoding: from a step function and a cache to token ids. Knows no model.

The step protocol, which every strategy shares:

    logits, cache = step(tokens, cache)      # tokens [b, 1] int32, logits [b, 1, v] float

`cache` is any pytree of arrays. A strategy gives the next token of each row from its logits; the first token given to the
step is `start_id` (T5: the padding id 0).

Two more functions make it cheaper, where there are such:

    cache = grow(cache, length)              # with room for `length` tokens, a Python integer
    cache = read(tokens, cache, kept)        # after the first `kept` of tokens [b, s]; no logits
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Step = Callable[[jax.Array, Any], tuple[jax.Array, Any]]  # (tokens [b, 1], cache) -> (logits [b, 1, v], cache)

Grow = Callable[[Any, int], Any]
Read = Callable[[jax.Array, Any, jax.Array], Any]

# Tokens that the first cache has room for, and the most that are read at once. Half as many double the stages to compile,
# and below it attention is a small part of a step; TPUs pad the keys of fewer to as many.
_STAGE = 128

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
    prompt: jax.Array | None = None,
    grow: Grow | None = None,
    read: Read | None = None,
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
      prompt: [b, max_length] int32, the tokens that each row begins with, of any number, and zeros after them; they are
        part of the result.
      grow: see the module's docstring. With it decoding goes on in stages of 128, 256, 512, ... tokens, each with a cache
        for as many, so that the cost of a step depends on the tokens so far and not on max_length; the cache given may
        be for 1 token. Without it the cache has room for max_length tokens from the start.
      read: see the module's docstring. With it the tokens of `prompt` that all rows have are read at once, in blocks of up
        to 128; the others token by token.

    Returns:
      int32 [b, max_length]; after a row's `eos_id` only zeros. Runs no more steps than the longest row needs.
    """
    if batch < 1 or max_length < 1:
        raise ValueError(f"greedy: batch and max_length must be at least 1, got {batch} and {max_length}")

    def advance(progress: _Progress) -> _Progress:
        logits, new_cache = step(progress.last, progress.cache)
        chosen = _first_of_largest(_allowed(logits, vocab_size, eos_id))  # [b]
        if prompt is not None:
            given = lax.dynamic_slice_in_dim(prompt, progress.position, 1, axis=1)[:, 0]
            chosen = jnp.where(given > 0, given, chosen)
        chosen = jnp.where(progress.ended, PAD_ID, chosen)
        return _Progress(
            position=progress.position + 1,
            tokens=lax.dynamic_update_slice_in_dim(progress.tokens, chosen[:, None], progress.position, axis=1),
            last=chosen[:, None],
            ended=progress.ended | (chosen == eos_id),
            cache=new_cache,
        )

    progress = _Progress(
        position=jnp.zeros((), jnp.int32),
        tokens=jnp.full((batch, max_length), PAD_ID, jnp.int32),
        last=jnp.full((batch, 1), start_id, jnp.int32),
        ended=jnp.zeros((batch,), bool),
        cache=cache,
    )
    for before, length in _stages(max_length, grow is not None):
        if grow is not None:
            progress = progress._replace(cache=grow(progress.cache, length))
        if prompt is not None and read is not None:
            progress = _read_prompt(progress, read, prompt, start_id, eos_id, before, length)
        progress = lax.while_loop(lambda p, length=length: (p.position < length) & ~jnp.all(p.ended), advance, progress)
    return progress.tokens


def _stages(max_length: int, grows: bool) -> Iterator[tuple[int, int]]:
    """(first position, length of the cache) of each stage."""
    before, length = 0, _STAGE if grows else max_length
    while before < max_length:
        yield before, min(length, max_length)
        before, length = length, 2 * length


def _read_prompt(progress, read, prompt, start_id, eos_id, before, length):
    """After the part of a stage in which every row's prompt says what comes next; its tokens are known without logits."""
    batch = prompt.shape[0]
    says = jnp.all((prompt > 0) & (prompt != eos_id), axis=0)
    shared = jnp.sum(jnp.cumprod(says, dtype=jnp.int32))  # tokens
    inputs = jnp.concatenate([jnp.full((batch, 1), start_id, jnp.int32), prompt], axis=1)
    block = (length - before) // -(-(length - before) // _STAGE)  # equal ones, as one may not pass the cache's end

    def advance(progress):
        tokens = lax.dynamic_slice_in_dim(inputs, progress.position, block, axis=1)
        kept = jnp.minimum(shared - progress.position, block)
        return progress._replace(position=progress.position + kept, cache=read(tokens, progress.cache, kept))

    def unfinished(progress):
        return (progress.position < shared) & (progress.position + block <= length)

    progress = lax.while_loop(unfinished, advance, progress)
    decided = jnp.arange(prompt.shape[1]) < jnp.minimum(shared, progress.position)
    return progress._replace(
        tokens=jnp.where(decided, prompt, progress.tokens),
        last=jnp.where(
            progress.position <= shared,
            lax.dynamic_slice_in_dim(inputs, progress.position, 1, axis=1),
            progress.last,
        ),
    )


def _first_of_largest(logits: jax.Array) -> jax.Array:
    """argmax over the last axis, as int32. XLA's CPU backend reduces pairs of number and place one by one, 5 times slower."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    found = (logits == largest) | jnp.isnan(logits)  # NaN is the largest, as for argmax
    places = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.min(jnp.where(found, places, logits.shape[-1]), axis=-1)


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
