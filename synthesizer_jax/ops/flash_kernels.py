"""The programs of the fused kernel, forward and backward: see ops/flash_tpu.py for what they compute and in which order."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.ops.flash_plan import LANES, MASKED, SMALLEST_VMEM, Blocks, Sizes, limit, up

_PREFIXES = 4  # parts of the queries with their own number of keys under a causal mask: 62.5 % of the work of all pairs


class Options(NamedTuple):
    """What the kernel is told beside arrays."""

    causal: bool = False
    q_offset: int = 0  # query i sees keys up to i + q_offset
    vmem: int = SMALLEST_VMEM  # bytes of fast memory that may be planned with
    interpret: bool | None = None  # as JAX operations, slowly; None: wherever there is no TPU


class Static(NamedTuple):
    """What is known when the program is traced."""

    q_length: int  # before padding
    k_length: int
    heads: int
    rank: int
    size: int  # of a head of the values
    sizes: Sizes
    forward: Blocks
    backward: Blocks
    options: Options


def _by_block(q_marks, queries):
    """[b, q] -> [b, blocks, 1, queries]: any number of queries is a whole row."""
    return None if q_marks is None else q_marks.reshape(q_marks.shape[0], -1, 1, queries)


def run_forward(static: Static, interpret: bool, query, key, values, bias, q_marks, k_marks):
    """[b, q, groups * lanes] from query, key and values [b, n, groups * lanes], bias [groups * heads, q, k] or None, and masks
    of sequences as whole numbers [b, q] or None and [b, 1, k] or None."""
    sizes, queries = static.sizes, static.forward.queries
    blocks = sizes.q_length // queries

    def rows(g, i, b):
        return b, i, g

    def all_keys(g, i, b):
        return b, 0, g

    arrays = _Refs(
        query=(query, pl.BlockSpec((None, queries, sizes.query), rows)),
        key=(key, pl.BlockSpec((None, sizes.k_length, sizes.query), all_keys)),
        values=(values, pl.BlockSpec((None, sizes.k_length, sizes.values), all_keys)),
        bias=(bias, pl.BlockSpec((sizes.heads, queries, sizes.k_length), lambda g, i, b: (g, i, 0))),
        q_marks=(_by_block(q_marks, queries), pl.BlockSpec((None, None, 1, queries), lambda g, i, b: (b, i, 0, 0))),
        k_marks=(k_marks, pl.BlockSpec((None, 1, sizes.k_length), lambda g, i, b: (b, 0, 0))),
    )
    given, names = _present(arrays)

    def kernel(*refs):
        refs, (out,) = _Refs(**dict(zip(names, refs, strict=False))), refs[len(names) :]
        block = pl.program_id(1)

        def instance(rows, length):
            sums = jnp.zeros((rows.stop - rows.start, sizes.values), jnp.float32)
            for head in range(sizes.heads):
                weights, inverse = _weights(static, refs, head, block * queries, rows, length)
                window, own = _lanes(sizes, sizes.values, head)
                value = refs.values[:length, window]
                heads_sums = _product(weights.astype(value.dtype), value, ((1,), (0,))) * inverse
                sums = _with_lanes(sums, heads_sums, window, own)
            out[rows] = sums.astype(out.dtype)

        _for_prefixes(static, block, queries, instance)

    return pl.pallas_call(
        kernel,
        grid=(sizes.groups, blocks, sizes.batch),
        in_specs=[spec for _, spec in given],
        out_specs=pl.BlockSpec((None, queries, sizes.values), rows),
        out_shape=jax.ShapeDtypeStruct((sizes.batch, sizes.q_length, sizes.groups * sizes.values), values.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=limit(static.forward, static.options.vmem),
        ),
        cost_estimate=_cost(static, queries, products=2),
        interpret=interpret,
        name="synthesizer_attention",
    )(*[array for array, _ in given])


def run_backward(static: Static, interpret: bool, query, key, values, bias, q_marks, k_marks, gradient):
    """Gradients of query, key, values and bias, in their shapes; gradient [b, q, groups * lanes] is that of the output."""
    sizes, queries, tile = static.sizes, static.backward.queries, static.backward.tile
    blocks, tiles = sizes.q_length // queries, sizes.batch // tile
    summed = (
        blocks > 1 or static.options.causal
    )  # gradients of keys and values, over the blocks of queries or their parts

    def rows(g, t, i, b):
        return t * tile + b, i, g

    def all_keys(g, t, i, b):
        return t * tile + b, 0, g

    def keys_out(g, t, i, b):
        # Until the last block of queries all stay with the tile's first sequence, so that nothing is written.
        return (t * tile + (jnp.where(i == blocks - 1, b, 0) if blocks > 1 else b), 0, g)

    arrays = _Refs(
        query=(query, pl.BlockSpec((None, queries, sizes.query), rows)),
        key=(key, pl.BlockSpec((None, sizes.k_length, sizes.query), all_keys)),
        values=(values, pl.BlockSpec((None, sizes.k_length, sizes.values), all_keys)),
        bias=(bias, pl.BlockSpec((sizes.heads, queries, sizes.k_length), lambda g, t, i, b: (g, i, 0))),
        q_marks=(
            _by_block(q_marks, queries),
            pl.BlockSpec((None, None, 1, queries), lambda g, t, i, b: (t * tile + b, i, 0, 0)),
        ),
        k_marks=(k_marks, pl.BlockSpec((None, 1, sizes.k_length), lambda g, t, i, b: (t * tile + b, 0, 0))),
        gradient=(gradient, pl.BlockSpec((None, queries, sizes.values), rows)),
    )
    given, names = _present(arrays)
    outs = [
        (query, pl.BlockSpec((None, queries, sizes.query), rows)),
        (key, pl.BlockSpec((None, sizes.k_length, sizes.query), keys_out)),
        (values, pl.BlockSpec((None, sizes.k_length, sizes.values), keys_out)),
    ]
    if bias is not None:
        table = jax.ShapeDtypeStruct((tiles, *bias.shape), jnp.float32)
        outs.append(
            (table, pl.BlockSpec((None, sizes.heads, queries, sizes.k_length), lambda g, t, i, b: (t, g, i, 0)))
        )
    kept = tile if blocks > 1 else 1
    scratch = [pltpu.VMEM((kept, sizes.k_length, width), jnp.float32) for width in (sizes.query, sizes.values)]

    def kernel(*refs):
        refs, rest = _Refs(**dict(zip(names, refs, strict=False))), refs[len(names) :]
        d_query, d_key, d_values = rest[:3]
        d_bias = rest[3] if bias is not None else None
        block, b = pl.program_id(2), pl.program_id(3)
        if d_bias is not None:

            @pl.when(b == 0)
            def _():
                d_bias[...] = jnp.zeros_like(d_bias)

        if summed:
            sums = [ref.at[b if blocks > 1 else 0] for ref in rest[-2:]]

            @pl.when(block == 0)
            def _():
                for ref in sums:
                    ref[...] = jnp.zeros_like(ref)

        def instance(rows, length):
            dq = jnp.zeros((rows.stop - rows.start, sizes.query), jnp.float32)
            dk = jnp.zeros((length, sizes.query), jnp.float32)
            dv = jnp.zeros((length, sizes.values), jnp.float32)
            for head in range(sizes.heads):
                exponentials, inverse = _weights(static, refs, head, block * queries, rows, length)
                weights = exponentials * inverse
                window, own = _lanes(sizes, sizes.query, head)
                value_window, value_own = _lanes(sizes, sizes.values, head)
                g = _own_lanes(refs.gradient[rows, value_window], value_own)
                d_weights = _product(g, refs.values[:length, value_window], ((1,), (1,)))
                mean = jnp.sum(weights * d_weights, axis=1, keepdims=True)
                d_logits = weights * (d_weights - mean)
                if d_bias is not None:
                    d_bias[head, rows, :length] += d_logits
                d_logits = d_logits.astype(g.dtype)
                q = _own_lanes(refs.query[rows, window], own)
                dq = _with_lanes(dq, _product(d_logits, refs.key[:length, window], ((1,), (0,))), window, own)
                dk = _plus_lanes(dk, _product(d_logits, q, ((0,), (0,))), window)
                dv = _plus_lanes(dv, _product(weights.astype(g.dtype), g, ((0,), (0,))), value_window)
            d_query[rows] = dq.astype(d_query.dtype)
            if summed:
                sums[0][:length] += dk
                sums[1][:length] += dv
            else:
                d_key[...] = dk.astype(d_key.dtype)
                d_values[...] = dv.astype(d_values.dtype)

        _for_prefixes(static, block, queries, instance)
        if summed:

            @pl.when(block == blocks - 1)
            def _():
                d_key[...] = sums[0][...].astype(d_key.dtype)
                d_values[...] = sums[1][...].astype(d_values.dtype)

    d_query, d_key, d_values, *d_bias = pl.pallas_call(
        kernel,
        grid=(sizes.groups, tiles, blocks, tile),
        in_specs=[spec for _, spec in given],
        out_specs=[spec for _, spec in outs],
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array, _ in outs],
        scratch_shapes=scratch if summed else [],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=limit(static.backward, static.options.vmem),
        ),
        cost_estimate=_cost(static, queries, products=5),
        interpret=interpret,
        name="synthesizer_attention_gradient",
    )(*[array for array, _ in given])
    if not d_bias:
        return d_query, d_key, d_values, None
    return d_query, d_key, d_values, d_bias[0][0] if tiles == 1 else jnp.sum(d_bias[0], axis=0)


class _Refs(NamedTuple):
    """What a kernel reads; None where it is not given."""

    query: object
    key: object
    values: object
    bias: object = None
    q_marks: object = None
    k_marks: object = None
    gradient: object = None


def _present(arrays):
    """((array, spec) of all that are given, their names)."""
    pairs = {name: pair for name, pair in arrays._asdict().items() if pair is not None and pair[0] is not None}
    return list(pairs.values()), tuple(pairs)


def _for_prefixes(static, block, queries, instance):
    """instance(rows of the block, keys that they look at): under a causal mask, keys after the last of them are left out."""
    blocks = static.sizes.q_length // queries
    for first, last, rows, length in _prefixes(static, queries):
        run = functools.partial(instance, rows, length)
        if (first, last) == (0, blocks):
            run()
        else:
            pl.when((block >= first) & (block < last))(run)


def _prefixes(static, queries):
    """(blocks of queries from, to, which of their rows, how many keys) of all that is computed apart."""
    length, blocks = static.sizes.k_length, static.sizes.q_length // queries
    if not static.options.causal:
        return [(0, blocks, slice(0, queries), length)]

    def seen(rows):
        return min(up(max(rows + static.options.q_offset, 1), LANES), length)

    if blocks > 1:
        count = min(_PREFIXES, blocks)
        lasts = [-(-blocks * (i + 1) // count) for i in range(count)]
        return [
            (first, last, slice(0, queries), seen(last * queries))
            for first, last in zip([0, *lasts], lasts, strict=False)
        ]
    part = up(-(-queries // _PREFIXES), LANES)
    ends = [min(start + part, queries) for start in range(0, queries, part)]
    return [(0, 1, slice(start, end), seen(end)) for start, end in zip([0, *ends], ends, strict=False)]


def _weights(static, refs, head, first, rows, length):
    """(exp(logits - row maximum) [rows, length], 1 / their sum or 0 [rows, 1]) of one head, in float32."""
    window, own = _lanes(static.sizes, static.sizes.query, head)
    query = _own_lanes(refs.query[rows, window], own)
    logits = _product(query, refs.key[:length, window], ((1,), (1,)))
    if refs.bias is not None:
        logits = logits + refs.bias[head, rows, :length]
    allowed = _allowed(static, refs, first, rows, length)
    if allowed is not None:
        logits = jnp.where(allowed, logits, MASKED)
    top = jnp.max(logits, axis=1, keepdims=True)
    exponentials = jnp.exp(logits - top)
    total = jnp.sum(exponentials, axis=1, keepdims=True)
    return exponentials, jnp.where(top > MASKED / 2, 1 / total, 0.0)


def _allowed(static, refs, first, rows, length):
    """[rows, length] or [1, length]: which keys these rows of the block may attend to; None: all."""
    rules, count = [], rows.stop - rows.start
    column = jax.lax.broadcasted_iota(jnp.int32, (count, length), 1)
    if static.options.causal:
        row = jax.lax.broadcasted_iota(jnp.int32, (count, length), 0)
        rules.append(column - row <= first + rows.start + static.options.q_offset)
    if static.k_length < length:
        rules.append(column < static.k_length)
    if refs.q_marks is not None:
        marks = jnp.broadcast_to(refs.q_marks[:, rows], (8, count)).T[:, :1]  # a row as a column
        rules.append(refs.k_marks[:, :length] == marks)
    elif refs.k_marks is not None:
        rules.append(refs.k_marks[:, :length] > 0)
    return functools.reduce(jnp.logical_and, rules) if rules else None


def _lanes(sizes, width, head):
    """(the whole registers that hold a head's lanes, which of their lanes are its own or None for all)."""
    size = width // sizes.heads
    if size >= LANES:
        return slice(head * size, (head + 1) * size), None
    start = head * size // LANES * LANES
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1) + start
    return slice(start, start + LANES), (lane >= head * size) & (lane < (head + 1) * size)


def _own_lanes(x, own):
    return x if own is None else jnp.where(own, x, jnp.zeros_like(x))


def _with_lanes(whole, part, window, own):
    """whole with a head's lanes taken from part, which has those of the window."""
    part = part if own is None else jnp.where(own, part, whole[:, window])
    return _put(whole, part, window)


def _plus_lanes(whole, part, window):
    return _put(whole, whole[:, window] + part, window)


def _put(whole, part, window):
    pieces = [whole[:, : window.start], part, whole[:, window.stop :]]
    pieces = [piece for piece in pieces if piece.shape[1]]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def _product(first, second, axes):
    # Of 16-bit numbers Mosaic knows one precision alone; of 32-bit ones bfloat16's and float32's.
    exact = first.dtype == jnp.float32 and jax.config.jax_default_matmul_precision not in (None, "default", "bfloat16")
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(first, second, (axes, ((), ())), precision, preferred_element_type=jnp.float32)


def _cost(static, queries, products):
    """For XLA's scheduler and its cost analysis, which do not see into a kernel."""
    sizes, blocks = static.sizes, static.forward if products == 2 else static.backward
    pairs = sum(
        (last - first) * (rows.stop - rows.start) * length for first, last, rows, length in _prefixes(static, queries)
    )
    logits = sizes.batch * static.heads * pairs
    size = static.rank + static.size if products == 2 else 3 * static.rank + 2 * static.size
    return pl.CostEstimate(flops=2 * size * logits, transcendentals=logits, bytes_accessed=blocks.moved)
