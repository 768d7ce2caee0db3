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

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax import activations
from synthesizer_jax.axes import BATCH, HEADS
from synthesizer_jax.ops.flash_kernels import Options, Static, run_backward, run_forward
from synthesizer_jax.ops.flash_plan import SUBLANES, MiB, budget, plan, sizes_of


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


def _forward(options, arrays):
    static = _static(options, arrays)
    out = _anywhere(options, functools.partial(run_forward, static), *_packed(static, arrays), *_marks(static, arrays))
    return _unpacked(static, out)


def _backward(options, arrays, gradient):
    """Gradients of query, key, values and bias, of the rows and heads of one device; the bias's is summed over all."""
    static = _static(options, arrays)
    packed, pull_back = jax.vjp(lambda *own: _packed(static, arrays._replace(**dict(zip(_LEARNED, own)))), *arrays[:4])
    gradient = _lanes_filled(gradient, static.sizes.heads, static.sizes.values, static.sizes.q_length)
    run = functools.partial(run_backward, static)
    query, key, values, bias = pull_back(_anywhere(options, run, *packed, *_marks(static, arrays), gradient))
    return query, key, values, None if bias is None else activations.summed(bias, BATCH)


_LEARNED = ("query", "key", "values", "bias")


def _anywhere(options, run, *arrays):
    if options.interpret is not None:
        return run(options.interpret, *arrays)
    return jax.lax.platform_dependent(*arrays, tpu=functools.partial(run, False), default=functools.partial(run, True))


def _static(options, arrays):
    query, key, values = arrays[:3]
    sizes = _sizes(arrays)
    found = plan(sizes, budget(options.vmem))
    if found is None:
        raise ValueError(
            f"attention: a block of {SUBLANES} queries with {key.shape[1]} keys does not fit into "
            f"{options.vmem / MiB:.0f} MiB of VMEM; use path='xla'"
        )
    return Static(*query.shape[1:2], key.shape[1], *query.shape[2:], values.shape[3], sizes, *found, options)


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


def fits(arrays: Arrays, vmem: int) -> bool:
    """Whether the kernel can be planned for arrays of these shapes, those of one device, see `attention`."""
    return plan(_sizes(arrays), budget(vmem)) is not None


def _sizes(arrays):
    query, key, values, bias = arrays[:4]
    return sizes_of(query.shape, key.shape, values.shape, values.dtype.itemsize, bias is not None)


def _pad(x, missing):
    return jnp.pad(x, [(0, n) for n in missing]) if any(missing) else x
