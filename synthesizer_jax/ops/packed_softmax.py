"""Softmax of a table's entries at the positions of packed rows, and its gradients: [b, h, q, k] never exists.

A row holds several sequences (segments), and each sees the table [h, n, n] at its own positions. Where these count 0, 1, 2, ...
in every segment, as packing makes them, all segments read the same upper left corner of the table. They are moved, the
longest of each row first: the k-th longest of a row of q tokens has at most q / k. So the longest goes to a row of its own,
the second and third to the two halves of another, the next four to quarters of a third, and the corner, twice on the
diagonal, four times, ..., is a table that the batch shares as in `ops/shared_softmax.py`. Rows of up to 31 segments, in any
mixture of lengths, take five such products, rows of one take one; how many are needed is seen at run time.

Any other positions, and segments in pieces, are looked up entry by entry, one row of the batch after the other. Which of
the two is needed is seen at run time.

Scores that are moved have the floor of ops/attend.py, over the positions that a row has: a sequence gets the numbers that it
gets alone, padded to the row's length. Those that are looked up one by one have none.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax import activations
from synthesizer_jax.axes import BATCH, HEADS, contract
from synthesizer_jax.ops.shared_softmax import exponentials, inner, inverse_of, lowest, row_max
from synthesizer_jax.ops.softmax import MASKED
from synthesizer_jax.scores.base import entries

_SHORTEST = 16  # tokens of the smallest blocks


class Rows(NamedTuple):
    """How packed rows are laid out."""

    q_segments: Int[Array, "b q"]
    k_segments: Int[Array, "b k"]
    q_positions: Int[Array, "b q"]
    k_positions: Int[Array, "b k"]
    key_mask: Bool[Array, "b k"] | None

    def seen(self):
        """[b, k], True at the keys that somebody may attend to."""
        real = self.k_segments > 0
        return real if self.key_mask is None else real & self.key_mask


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def packed_softmax(
    table: Float[Array, "h n n"], values: Float[Array, "b k h d"], rows: Rows, causal: bool
) -> Float[Array, "b q h d"]:
    """Attention with the logits table[:, q_positions, k_positions] within each segment, rows without keys 0.

    causal: a query sees the keys up to its own place in the row. A position that the table does not have gives NaN.
    """
    return _forward(table, values, rows, causal)[0]


def _forward(table, values, rows, causal):
    values = jnp.where(rows.seen()[:, :, None, None], values, 0)
    out, inverse = _by_layout(rows, _counted_forward, _any_forward, causal, table, values, rows)
    return out, (table, values, rows, inverse, out)


def _backward(causal, residuals, gradient):
    table, values, rows, inverse, out = residuals
    given = table, values, rows, inverse, out, gradient
    d_table, d_values = _by_layout(rows, _counted_backward, _any_backward, causal, *given)
    return d_table, jnp.where(rows.seen()[:, :, None, None], d_values, 0), None


packed_softmax.defvjp(_forward, _backward)


def _by_layout(rows, counted, otherwise, causal, *arguments):
    """counted(...) where positions count up in each segment of every row, else otherwise(...)."""
    if rows.q_segments.shape != rows.k_segments.shape:
        return otherwise(causal, *arguments)
    token = _tokens(rows.k_segments)
    place = jnp.arange(token.start.shape[1]) - token.start
    differ = (rows.q_positions != rows.k_positions) | (rows.k_positions != place) | (place >= token.length)
    differ = (rows.q_segments != rows.k_segments) | (differ & (rows.k_segments > 0))
    calls = [functools.partial(function, causal) for function in (otherwise, counted)]
    return jax.lax.cond(activations.anywhere(differ), *calls, *arguments)


# Positions that count up: segments move


class _Tokens(NamedTuple):
    """Of each token [b, q]: what it needs to know of its segment."""

    start: Array  # the place of the segment's first token
    length: Array  # its number of tokens
    rank: Array  # 1: the row's longest; 0: padding


def _tokens(segments):
    same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, :, None]
    start, length = jnp.argmax(same, axis=2).astype(jnp.int32), jnp.sum(same, axis=2, dtype=jnp.int32)
    opens = (start == jnp.arange(segments.shape[1])) & (segments > 0)
    # One number orders segments by length, and those of the same length by their place.
    order = length * segments.shape[1] - start
    rank = 1 + jnp.sum(opens[:, None, :] & (order[:, None, :] > order[:, :, None]), axis=2, dtype=jnp.int32)
    return _Tokens(start, length, jnp.where(segments > 0, rank, 0))


class _Plan(NamedTuple):
    """Which segments a pass takes: blocks[i] of them, the first of rank first[i], each in a block of size // blocks[i]."""

    size: int  # places of a row, its tokens and what is needed to halve it
    blocks: tuple[int, ...]
    first: tuple[int, ...]


def _plan(length):
    halvings = max((length // _SHORTEST).bit_length() - 1, 0)
    finest = 2**halvings
    blocks = tuple(2**i for i in range(halvings))
    first = blocks + tuple(range(finest, length + 1, finest))  # the finest blocks serve all segments that remain
    return _Plan(-(-length // finest) * finest, blocks + (finest,) * (len(first) - halvings), first)


class _Moves(NamedTuple):
    """Between tokens [b, q] and places [b, p] of a pass."""

    token: Array  # of each place
    filled: Array  # whether it has one, [b, p]
    place: Array  # of each token
    belongs: Array  # whether it has one, [b, q]


def _moves(plan, number, tokens):
    blocks, first = jnp.asarray(plan.blocks)[number], jnp.asarray(plan.first)[number]
    size, places = plan.size // blocks, jnp.arange(plan.size)
    rank = first + places // size
    opens = (tokens.start == jnp.arange(tokens.start.shape[1])) & (tokens.rank > 0)
    mine = (tokens.rank[:, None, :] == rank[:, None]) & opens[:, None, :]  # [b, p, q], one True or none
    start, length = (jnp.sum(jnp.where(mine, x[:, None], 0), axis=2) for x in (tokens.start, tokens.length))
    filled = places % size < length
    belongs = (tokens.rank >= first) & (tokens.rank < first + blocks)
    place = (tokens.rank - first) * size + jnp.arange(tokens.start.shape[1]) - tokens.start
    return _Moves(jnp.where(filled, start + places % size, 0), filled, jnp.where(belongs, place, 0), belongs)


def _to_places(x, moves):
    """x [b, q, ...] as [b, p, ...], 0 at places without a token."""
    return _where(moves.filled, _take(x, moves.token), jnp.zeros((), x.dtype))


def _to_tokens(x, moves, otherwise):
    """x [b, p, ...] as [b, q, ...], with what the tokens of other passes have."""
    return _where(moves.belongs, _take(x, moves.place), otherwise)


def _take(x, places):
    return jnp.take_along_axis(x, _beside(places, x), axis=1, mode="clip")


def _where(mask, x, otherwise):
    return jnp.where(_beside(mask, x), x, otherwise)


def _beside(x, like):
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def _over_passes(add, total, tokens, plan):
    """add(number, total) for each pass that a row has segments for."""
    count = jnp.sum(jnp.asarray(plan.first) <= activations.largest(tokens.rank))
    return jax.lax.fori_loop(0, count, add, total)


def _halvings(plan, number):
    """The sizes that blocks are halved to, size / 2, size / 4, ..., and how many of them a pass needs."""
    return lambda i: plan.size // 2 ** (i + 1), jnp.asarray([b.bit_length() - 1 for b in plan.blocks])[number]


def _repeated(corner, plan, number):
    """corner [h, p, p] as blocks on the diagonal: its upper left corner of their size, again and again."""
    size, count = _halvings(plan, number)

    def halve(i, table):
        half, places = size(i), jnp.arange(plan.size)
        second = places // half % 2 == 1
        table = jnp.where(second[:, None], jnp.roll(table, (half, half), axis=(1, 2)), table)
        return jnp.where((places // half)[:, None] == places // half, table, 0)

    return jax.lax.fori_loop(0, count, halve, corner)


def _folded(table, plan, number):
    """The sum of the blocks on the diagonal of table [h, p, p], in the upper left corner of it."""
    size, count = _halvings(plan, number)

    def unfold(i, table):
        half, places = size(count - 1 - i), jnp.arange(plan.size)
        second = (places // half % 2 == 1)[:, None]
        table = jnp.where((places // half)[:, None] == places // half, table, 0)
        moved = jnp.roll(jnp.where(second, table, 0), (-half, -half), axis=(1, 2))
        return jnp.where(second, 0, table) + moved

    return jax.lax.fori_loop(0, count, unfold, table)


def _corner(table, length, size, causal, dtype):
    """Exponentials of the entries that rows of this length see, [h, size, size]."""
    corner = table[:, :length, :length]
    common = jnp.tril(jnp.ones((1, length, length), bool)) if causal else None
    e = exponentials(corner, row_max(corner, common), common, dtype)
    return jnp.pad(e, ((0, 0), (0, size - length), (0, size - length)))


def _counted_forward(causal, table, values, rows):
    length = values.shape[1]
    tokens, plan, seen = _tokens(rows.k_segments), _plan(length), rows.seen()
    e = _corner(table, length, plan.size, causal, values.dtype)

    def add(number, total):
        moves, repeated = _moves(plan, number, tokens), _repeated(e, plan, number)
        inverse = inverse_of(contract("hqk,bk->bqh", repeated, _to_places(seen, moves).astype(e.dtype)))
        out = contract("hqk,bkhd->bqhd", repeated, _to_places(values, moves)) * inverse[..., None]
        return tuple(
            _to_tokens(x, moves, before) for x, before in zip((out.astype(values.dtype), inverse), total, strict=True)
        )

    zeros = jnp.zeros(values.shape, values.dtype), jnp.zeros(values.shape[:3], jnp.float32)
    return _over_passes(add, zeros, tokens, plan)


def _counted_backward(causal, table, values, rows, inverse, out, gradient):
    scaled = (gradient.astype(jnp.float32) * inverse[..., None]).astype(values.dtype)  # g / den
    correction, length = inner(scaled, out), values.shape[1]
    tokens, plan, seen = _tokens(rows.k_segments), _plan(length), rows.seen()
    e = _corner(table, length, plan.size, causal, values.dtype)

    def add(number, total):
        d_corner, d_values = total
        moves, repeated = _moves(plan, number, tokens), _repeated(e, plan, number)
        moved = _to_places(scaled, moves)
        difference = contract("bqhd,bkhd->hqk", moved, _to_places(values, moves))
        of_rows, mask = _to_places(correction, moves), _to_places(seen, moves).astype(jnp.float32)
        difference -= jnp.einsum("bqh,bk->hqk", of_rows, mask, precision="highest")
        back = contract("hqk,bqhd->bkhd", repeated, moved).astype(values.dtype)
        return d_corner + _folded(difference, plan, number), _to_tokens(back, moves, d_values)

    zeros = jnp.zeros(e.shape, jnp.float32), jnp.zeros(values.shape, values.dtype)
    difference, d_values = _over_passes(add, zeros, tokens, plan)
    d_corner = jnp.where(e > lowest(e.dtype), e.astype(jnp.float32) * difference, 0)[:, :length, :length]
    rest = table.shape[1] - length
    return jnp.pad(d_corner, ((0, 0), (0, rest), (0, rest))), d_values


# Any positions: entry by entry, row by row


def _any_forward(causal, table, values, rows):
    def forward(values, row):
        return _of_row(causal, table, values, row)

    _, out = jax.lax.scan(lambda _, row: (None, jax.vmap(forward)(*row)), None, _one_by_one((values, rows)))
    out = _together(out)
    return out, jnp.zeros(out.shape[:3], jnp.float32)  # the backward pass starts anew


def _any_backward(causal, table, values, rows, inverse, out, gradient):
    del inverse, out

    def backward(values, row, gradient):
        return jax.vjp(lambda table, values: _of_row(causal, table, values, row), table, values)[1](gradient)

    def add(total, row):
        d_table, d_values = jax.vmap(backward)(*row)
        return activations.constrain(total + d_table, (BATCH, HEADS, None, None)), d_values

    start = jnp.zeros((activations.shards(BATCH), *table.shape), jnp.float32)
    d_table, d_values = jax.lax.scan(add, start, _one_by_one((values, rows, gradient)))
    return jnp.sum(d_table, axis=0), _together(d_values)


def _of_row(causal, table, values, row):
    """[q, h, d] of one row: values [k, h, d], `row` without the batch axis."""
    q, k = row.q_segments[:, None], row.k_segments[None, :]
    allowed = (q == k) & row.seen()[None, :]
    allowed = allowed & jnp.tril(jnp.ones(allowed.shape, bool)) if causal else allowed
    logits = jnp.where(allowed, entries(table, row.q_positions, row.k_positions), MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype)
    out = contract("hqk,khd->qhd", weights, values).astype(values.dtype)
    return jnp.where(jnp.any(allowed, axis=1)[:, None, None], out, 0)


def _one_by_one(tree):
    """Arrays [b, ...] as [b / s, s, ...], s the parts that the batch is split in: each device goes through its own rows."""
    shards = activations.shards(BATCH)
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(shards, -1, *x.shape[1:]), 0, 1), tree)


def _together(x):
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])
