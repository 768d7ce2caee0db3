"""Attention with a low-rank part and a bias that the batch shares, as a Pallas kernel for TPU, forward and backward.

Flash attention (Dao et al. 2022) with another order of the work: the innermost grid axis is the batch, so that a block of
the bias [h, q, k] is fetched once and used by all sequences, and its gradient is summed over the batch in fast memory
(VMEM) before it is written once. [b, h, q, k] never exists: a program instance holds the logits of a block of queries to
all keys, and the backward pass computes them again.

Arrays are laid out as [b, n, h * size], without padding in memory; heads below 128 lanes go through in groups that fill
them. A head's products take the group's 128 lanes with the other heads' set to zero: as many steps of the matrix unit as
a head alone would take, and nothing is shifted between lanes.

How many queries make a block, and how many sequences' gradients of keys and values are kept in VMEM at a time, is chosen by
`plan`: what moves the fewest bytes and fits.
"""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax import activations
from synthesizer_jax.axes import BATCH, HEADS

_LANES = 128
_SUBLANES = 16  # rows of a tile of 16-bit numbers
MASKED = -2e38  # lower than any score; a row whose maximum is below half of it has no key
_LARGEST_BLOCK = 1024  # queries: more would fetch little less
_LARGEST_LOGITS = 2**20  # queries x keys, 4 MiB of which several are alive at a time
_PREFIXES = 4  # parts of the queries with their own number of keys under a causal mask: 62.5 % of the work of all pairs

MiB = 2**20
VMEM = {  # of a core, and what of it a kernel is given; the rest is XLA's
    "TPU v4": 16 * MiB,
    "TPU v5 lite": 128 * MiB,
    "TPU v5e": 128 * MiB,
    "TPU v5": 64 * MiB,
    "TPU v5p": 64 * MiB,
    "TPU v6 lite": 128 * MiB,
    "TPU v6e": 128 * MiB,
    "TPU7x": 64 * MiB,
}
_SMALLEST_VMEM = min(VMEM.values())


class Sizes(NamedTuple):
    """The shapes that a plan depends on, as the kernel sees them: lengths and sizes padded."""

    batch: int
    q_length: int
    k_length: int
    groups: int  # of heads
    heads: int  # in a group
    query: int  # lanes of a group's queries and keys
    values: int  # lanes of a group's values
    itemsize: int  # bytes of a number of these
    bias: bool


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work of one pass is cut: queries in a block, sequences in a tile."""

    queries: int
    tile: int
    vmem: int  # bytes, by the formulas below
    moved: int  # bytes to and from HBM, counting what is fetched again


def forward_vmem(sizes: Sizes, queries: int) -> int:
    """Bytes of VMEM of a forward instance: blocks twice, as the next ones are fetched meanwhile, and logits."""
    blocks = queries * (sizes.query + sizes.values) + sizes.k_length * (sizes.query + sizes.values)
    bias = 4 * sizes.heads * queries * sizes.k_length if sizes.bias else 0
    logits = queries * sizes.k_length * (3 * 4 + sizes.itemsize)
    return 2 * (blocks * sizes.itemsize + bias) + logits + 2 * 4 * queries * sizes.values + _in_parts(sizes, queries)


def backward_vmem(sizes: Sizes, queries: int, tile: int) -> int:
    """Bytes of VMEM of a backward instance."""
    widths = sizes.query + sizes.values
    blocks = queries * (sizes.query + widths) + 2 * sizes.k_length * widths
    bias = 2 * 4 * sizes.heads * queries * sizes.k_length if sizes.bias else 0
    logits = queries * sizes.k_length * (5 * 4 + 2 * sizes.itemsize)
    sums = 4 * sizes.k_length * widths * (1 + (tile if queries < sizes.q_length else 1))
    return 2 * (blocks * sizes.itemsize + bias) + logits + sums + _in_parts(sizes, queries)


def _in_parts(sizes, queries):
    """Operands of products in float32 are taken apart into three arrays of bfloat16."""
    rows = (queries + sizes.k_length) * (sizes.query + sizes.values)
    return 0 if sizes.itemsize < 4 else 3 * 2 * rows


def _forward_moved(sizes, queries):
    """Keys and values are fetched for every block of queries; the bias once."""
    rows = sizes.batch * sizes.groups * sizes.itemsize * (sizes.query + sizes.values)
    again = math.ceil(sizes.q_length / queries)
    table = 4 * sizes.groups * sizes.heads * sizes.q_length * sizes.k_length if sizes.bias else 0
    return rows * (sizes.q_length + again * sizes.k_length) + table


def _backward_moved(sizes, queries, tile):
    widths, again, tiles = sizes.query + sizes.values, math.ceil(sizes.q_length / queries), sizes.batch // tile
    rows = sizes.batch * sizes.groups * sizes.itemsize
    rows *= sizes.q_length * (sizes.query + widths) + (1 + again) * sizes.k_length * widths
    table = 4 * sizes.groups * sizes.heads * sizes.q_length * sizes.k_length if sizes.bias else 0
    return rows + table * (
        tiles + (1 if tiles == 1 else 2 * tiles + 1)
    )  # one sum for each tile is written, and read again


@functools.cache
def plan(sizes: Sizes, vmem: int) -> tuple[Blocks, Blocks] | None:
    """The blocks of the forward and the backward pass that move the fewest bytes within `vmem`; None where none fits."""
    largest = min(sizes.q_length, _LARGEST_BLOCK, max(_SUBLANES, _LARGEST_LOGITS // sizes.k_length))
    queries = [n for n in range(_SUBLANES, largest + 1, _SUBLANES) if sizes.q_length % n == 0]
    tiles = [n for n in range(1, sizes.batch + 1) if sizes.batch % n == 0]
    forward = [Blocks(n, 1, forward_vmem(sizes, n), _forward_moved(sizes, n)) for n in queries]
    backward = [
        Blocks(n, tile, backward_vmem(sizes, n, tile), _backward_moved(sizes, n, tile))
        for n, tile in itertools.product(queries, tiles)
        if n < sizes.q_length or tile == sizes.batch  # a single block of queries needs no sums over blocks
    ]
    found = [
        min((b for b in blocks if b.vmem <= vmem), key=lambda b: (b.moved, b.vmem), default=None)
        for blocks in (forward, backward)
    ]
    return None if None in found else tuple(found)


class Options(NamedTuple):
    """What the kernel is told beside arrays."""

    causal: bool = False
    q_offset: int = 0  # query i sees keys up to i + q_offset
    vmem: int = _SMALLEST_VMEM  # bytes of fast memory that may be planned with
    interpret: bool | None = None  # as JAX operations, slowly; None: wherever there is no TPU


class Arrays(NamedTuple):
    """What attention reads, see `attention`; a bias may be None, and so may all that follow."""

    query: Float[Array, "b q h r"]
    key: Float[Array, "b k h r"]
    values: Float[Array, "b k h d"]
    bias: Float[Array, "h q k"] | None = None
    key_mask: Bool[Array, "b k"] | None = None
    q_segments: Int[Array, "b q"] | None = None
    k_segments: Int[Array, "b k"] | None = None


_AXES = Arrays(
    query=(BATCH, None, HEADS, None),
    key=(BATCH, None, HEADS, None),
    values=(BATCH, None, HEADS, None),
    bias=(HEADS, None, None),
    key_mask=(BATCH, None),
    q_segments=(BATCH, None),
    k_segments=(BATCH, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(options: Options, arrays: Arrays) -> Float[Array, "b q h d"]:
    """softmax(<query, key> + bias) values, the softmax over the keys that a query may attend to; 0 where it has none.

    Masks as in ops.attend. query, key and values have one dtype, float32 or bfloat16; the bias is in float32. Gradients reach
    query, key, values and bias. On a mesh that is `placed`, each device works on its own rows and heads.

    Raises ValueError where no block fits into the VMEM (see `fits`).
    """
    axes = _axes_of(arrays)
    return activations.per_device(functools.partial(_forward, options), (axes,), axes.values)(arrays)


def _attention_forward(options, arrays):
    return attention(options, arrays), arrays


def _attention_backward(options, arrays, gradient):
    axes = _axes_of(arrays)
    gradients = (axes.query, axes.key, axes.values, axes.bias)
    run = activations.per_device(functools.partial(_backward, options), (axes, axes.values), gradients)
    return (Arrays(*_once(run, arrays, gradient)),)


attention.defvjp(_attention_forward, _attention_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(run, arrays, gradient):
    return run(arrays, gradient)


@_once.defjvp
def _twice(run, primals, tangents):
    raise NotImplementedError(
        "attention: the gradient of the fused kernel can't be differentiated again; use path='xla', as in "
        "MultiHead(scores, path='xla')"
    )


def _axes_of(arrays):
    return Arrays(*(None if array is None else axes for array, axes in zip(arrays, _AXES, strict=True)))


class _Static(NamedTuple):
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


def _forward(options, arrays):
    static = _static(options, arrays)
    out = _anywhere(options, functools.partial(_run_forward, static), *_packed(static, arrays), *_marks(static, arrays))
    return _unpacked(static, out)


def _backward(options, arrays, gradient):
    """Gradients of query, key, values and bias, of the rows and heads of one device; the bias's is summed over all."""
    static = _static(options, arrays)
    packed, pull_back = jax.vjp(lambda *own: _packed(static, arrays._replace(**dict(zip(_LEARNED, own)))), *arrays[:4])
    gradient = _lanes_filled(gradient, static.sizes.heads, static.sizes.values, static.sizes.q_length)
    run = functools.partial(_run_backward, static)
    query, key, values, bias = pull_back(_anywhere(options, run, *packed, *_marks(static, arrays), gradient))
    return query, key, values, None if bias is None else activations.summed(bias, BATCH)


_LEARNED = ("query", "key", "values", "bias")


def _anywhere(options, run, *arrays):
    if options.interpret is not None:
        return run(options.interpret, *arrays)
    return jax.lax.platform_dependent(*arrays, tpu=functools.partial(run, False), default=functools.partial(run, True))


def _static(options, arrays):
    query, key, values, bias = arrays[:4]
    sizes = sizes_of(query.shape, key.shape, values.shape, values.dtype.itemsize, bias is not None)
    found = plan(sizes, budget(options.vmem))
    if found is None:
        raise ValueError(
            f"attention: a block of {_SUBLANES} queries with {key.shape[1]} keys does not fit into "
            f"{options.vmem / MiB:.0f} MiB of VMEM; use path='xla'"
        )
    return _Static(*query.shape[1:2], key.shape[1], *query.shape[2:], values.shape[3], sizes, *found, options)


def _packed(static, arrays):
    """(query, key, values [b, n, groups * lanes], bias [groups * heads, q, k] or None), zeros where they are filled up."""
    query, key, values, bias = arrays[:4]
    sizes = static.sizes
    seen = arrays.key_mask
    if arrays.k_segments is not None:
        seen = arrays.k_segments > 0 if seen is None else seen & (arrays.k_segments > 0)
    if seen is not None:  # what stands at padding may be inf or NaN
        key, values = (jnp.where(seen[:, :, None, None], x, 0) for x in (key, values))
    if bias is not None:
        h, q, k = bias.shape
        bias = _pad(bias, (sizes.groups * sizes.heads - h, sizes.q_length - q, sizes.k_length - k))
    return (
        _lanes_filled(query, sizes.heads, sizes.query, sizes.q_length),
        _lanes_filled(key, sizes.heads, sizes.query, sizes.k_length),
        _lanes_filled(values, sizes.heads, sizes.values, sizes.k_length),
        bias,
    )


def _lanes_filled(x, heads, lanes, length):
    """[b, n, h, size] -> [b, length, groups * lanes]."""
    b, n, h, size = x.shape
    return _pad(x, (0, length - n, -h % heads, lanes // heads - size)).reshape(b, length, -1)


def _unpacked(static, out):
    """[b, length, groups * lanes] -> [b, q, h, d]."""
    rows = out[:, : static.q_length].reshape(
        out.shape[0], static.q_length, -1, static.sizes.values // static.sizes.heads
    )
    return rows[:, :, : static.heads, : static.size]


def _marks(static, arrays):
    """Masks of sequences as whole numbers, [b, q] and [b, 1, k]: a query sees keys of its own; where it has none, all above 0."""
    key_mask, q_segments, k_segments = arrays[4:]
    missing = static.sizes.k_length - static.k_length
    if q_segments is None:
        return None, None if key_mask is None else _pad(key_mask.astype(jnp.int32), (0, missing))[:, None]
    keys = k_segments.astype(jnp.int32)
    keys = jnp.where(keys > 0 if key_mask is None else (keys > 0) & key_mask, keys, -1)  # no query's
    queries = _pad(q_segments.astype(jnp.int32), (0, static.sizes.q_length - static.q_length))
    return queries, jnp.pad(keys, ((0, 0), (0, missing)), constant_values=-1)[:, None]


def budget(vmem: int) -> int:
    """What a plan may fill by its formulas: the compiler needs some more, and XLA keeps other arrays there."""
    return vmem * 3 // 4 if vmem > 16 * MiB else vmem - 5 * MiB


def _limit(blocks, vmem):
    """Bytes of VMEM that the compiler may use."""
    return min(max(blocks.vmem + 2 * MiB, 16 * MiB), vmem - MiB)


def fits(arrays: Arrays, vmem: int) -> bool:
    """Whether the kernel can be planned for arrays of these shapes, those of one device, see `attention`."""
    query, key, values, bias = arrays[:4]
    sizes = sizes_of(query.shape, key.shape, values.shape, values.dtype.itemsize, bias is not None)
    return plan(sizes, budget(vmem)) is not None


def sizes_of(query: tuple[int, ...], key: tuple[int, ...], values: tuple[int, ...], itemsize: int, bias: bool) -> Sizes:
    """What the kernel makes of shapes [b, n, h, size]: lanes filled by groups of heads, lengths padded to whole tiles."""
    size = _lane_size(values[3])
    heads = max(_LANES // size, 1)
    rank = max(_lane_size(query[3]), _LANES // heads)
    return Sizes(
        batch=query[0],
        q_length=_up(query[1], _LANES if query[1] > _LANES else _SUBLANES),
        k_length=_up(key[1], _LANES),
        groups=math.ceil(query[2] / heads),
        heads=heads,
        query=heads * rank,
        values=heads * size,
        itemsize=itemsize,
        bias=bias,
    )


def _lane_size(size):
    """A head's lanes: a part of 128 that is a power of 2, or a multiple of 128."""
    return _up(size, _LANES) if size > _LANES else max(8, 1 << (size - 1).bit_length())


def _up(size, multiple):
    return -(-size // multiple) * multiple


def _pad(x, missing):
    return jnp.pad(x, [(0, n) for n in missing]) if any(missing) else x


def _by_block(q_marks, queries):
    """[b, q] -> [b, blocks, 1, queries]: any number of queries is a whole row."""
    return None if q_marks is None else q_marks.reshape(q_marks.shape[0], -1, 1, queries)


# The kernels


def _run_forward(static, interpret, query, key, values, bias, q_marks, k_marks):
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
            vmem_limit_bytes=_limit(static.forward, static.options.vmem),
        ),
        cost_estimate=_cost(static, queries, products=2),
        interpret=interpret,
        name="synthesizer_attention",
    )(*[array for array, _ in given])


def _run_backward(static, interpret, query, key, values, bias, q_marks, k_marks, gradient):
    """Gradients of query, key, values and bias."""
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
            vmem_limit_bytes=_limit(static.backward, static.options.vmem),
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
        return min(_up(max(rows + static.options.q_offset, 1), _LANES), length)

    if blocks > 1:
        count = min(_PREFIXES, blocks)
        lasts = [-(-blocks * (i + 1) // count) for i in range(count)]
        return [
            (first, last, slice(0, queries), seen(last * queries))
            for first, last in zip([0, *lasts], lasts, strict=False)
        ]
    part = _up(-(-queries // _PREFIXES), _LANES)
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
    if size >= _LANES:
        return slice(head * size, (head + 1) * size), None
    start = head * size // _LANES * _LANES
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, _LANES), 1) + start
    return slice(start, start + _LANES), (lane >= head * size) & (lane < (head + 1) * size)


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
