"""Depth-wise convolution over the sequence whose kernels are shared by the channels of a head (Wu et al. 2019).

    y[i, c] = sum_t kernel[t, i, head of c] u[i + t - left, c],    head of c = c // (e / h), zeros outside the row

with left = w - 1 (causal) or w // 2 (centred) taps before i, for `width` w taps. The kernels are the same for all i
(lightweight) or each token's own (dynamic). No [b, h, q, k] matrix is built but in `band`, which is for looking at.
Two exact algorithms, by what moves the fewest bytes on TPU (benchmarks/convolution.py):

- products: the sum of w shifted products, one fused pass over u; its gradients are such sums too. For lightweight
  kernels, and for dynamic ones of narrow heads.
- blocks: for dynamic kernels of heads of 32 channels and more, whose repetition over the channels would be the traffic.
  A block of 128 tokens and the w - 1 around them are multiplied by the [128, 128 + w - 1] piece of the band.

Bytes to and from main memory of one whole layer in bfloat16, forward and backward, e = 768, w = 9, from TPU v5e's compiler:

| batch x length, heads | here | sum of products, JAX's gradients | XLA's convolution | whole band |
|---|---|---|---|---|
| light, 4 x 4096, 8 | 232 MB | 980 | 661 | 1174 |
| light, 16 x 512, 12 (most of it stays in fast memory) | 106 | 238 | 68 | 113 |
| dynamic, 4 x 4096, 8 | 836 | 4021 | | 1322, 3 x the FLOPs |
| dynamic, 16 x 512, 12 | 119 | 2543 | | 157 |
| dynamic, 4 x 4096, 768 (a kernel for each channel) | 4198 | 8484 | | |

The letter w is the width, t a tap.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax import activations
from synthesizer_jax.ops.attend import Dropout

# Tokens of a block: the matrix unit's side. With 256 the band's pieces are twice as large for the same result.
_BLOCK = 128

# Channels of a head from which on `blocks` is used: the band's pieces then hold at most (128 + w) / 32 numbers a channel.
_WIDE_HEAD = 32


def taps_before(width: int, causal: bool) -> int:
    """How many taps lie before the token itself."""
    return width - 1 if causal else width // 2


def inside(
    length: int,
    width: int,
    causal: bool,
    segments: Int[Array, "b q"] | None = None,
    before: int | Int[Array, ""] = 0,
) -> Bool[Array, "w _b q"]:
    """True where tap t of token i reads a token of the same row, or of the same segment where segments are given.

    before: the number of tokens of the row that come before the first one (a decoder's earlier steps).
    """
    offsets = jnp.arange(width)[:, None] - taps_before(width, causal)
    read = jnp.arange(length)[None, :] + offsets  # [w, q]
    in_row = ((read + before >= 0) & (read < length))[:, None]
    if segments is None:
        return in_row
    theirs = jnp.stack(_moved(segments, length, width, taps_before(width, causal)))
    return in_row & (theirs == segments) & (segments > 0)


def exclude(logits: Float[Array, "w _b _q h"], within: Bool[Array, "w _b _q"]) -> Float[Array, "w _b _q h"]:
    """Logits whose softmax over the taps is that over the taps `within` alone."""
    excluded = jnp.finfo(logits.dtype).min / 2  # finite, and its softmax is 0 beside any other
    return jnp.where(within[..., None], logits, jnp.asarray(excluded, logits.dtype))


def drop_taps(shape: tuple[int, ...], dropout: Dropout) -> Float[Array, "w b *axes"]:
    """DropConnect: factors of kernels [w, b, ...], 0 with probability rate, else 1 / (1 - rate)."""
    keep = activations.bernoulli(dropout.key, 1 - dropout.rate, shape, batch=1)
    return jnp.where(keep, 1 / (1 - dropout.rate), 0).astype(jnp.float32)


def convolve(
    u: Float[Array, "b q e"],
    kernels: Float[Array, "w _b _q h"],
    causal: bool,
    within: Bool[Array, "w _b q"] | None = None,
) -> Float[Array, "b q e"]:
    """y[i] = sum_t kernels[t, i] u[i + t - left] over the taps `within`, in u's dtype.

    Axes of size 1 of the kernels are shared by the batch or the tokens. Kernels, products and sums are float32.
    """
    left = taps_before(kernels.shape[0], causal)
    if kernels.shape[2] == 1 or u.shape[2] // kernels.shape[3] < _WIDE_HEAD:
        return _products(u, kernels, within, left)
    return _blocks(u, kernels if within is None else jnp.where(within[..., None], kernels, 0), left)


def convolve_normalised(
    u: Float[Array, "b q e"],
    logits: Float[Array, "w b q h"],
    causal: bool,
    factors: Float[Array, "w _b q _h"] | None = None,
) -> Float[Array, "b q e"]:
    """`convolve` with kernels factors * softmax(logits), the softmax over the taps and in float32.

    factors are constants: 0 where a tap is left out, 1 / (1 - rate) where DropConnect keeps it.
    """
    left = taps_before(logits.shape[0], causal)
    if u.shape[2] // logits.shape[3] < _WIDE_HEAD:
        return _soft_products(u, logits, factors, left)
    kernels = jax.nn.softmax(logits.astype(jnp.float32), axis=0)
    return _blocks(u, kernels if factors is None else kernels * factors, left)


def band(kernels: Float[Array, "w _b _q h"], length: int, causal: bool) -> Float[Array, "_b h q q"]:
    """The matrix [b|1, h, q, k] that `convolve` applies to the sequence, in float32: for looking at."""
    width = kernels.shape[0]
    tap = jnp.arange(length)[None, :] - jnp.arange(length)[:, None] + taps_before(width, causal)
    kernels = jnp.broadcast_to(kernels, (*kernels.shape[:2], length, kernels.shape[3]))
    return _spread(kernels.astype(jnp.float32), tap)


def _spread(kernels, tap):
    """[..., h, q, k] from kernels [w, ..., q, h]: kernels[tap[i, j], ..., i, h] where tap is one, else 0."""
    by_head = jnp.moveaxis(kernels, -1, -2)[..., None]  # [w, ..., h, q, 1]
    return sum(jnp.where(tap == t, by_head[t], 0) for t in range(kernels.shape[0]))


# Blocks.


def _blocks(u, kernels, left):
    width, _, length, heads = kernels.shape
    batch, _, features = u.shape
    size = min(_BLOCK, length)
    count = -(-length // size)
    windows = _windows(u, size, count, width, left).reshape(batch, count, size + width - 1, heads, features // heads)
    kernels = jnp.pad(kernels, ((0, 0), (0, 0), (0, count * size - length), (0, 0)))
    kernels = kernels.reshape(width, kernels.shape[1], count, size, heads)
    tap = jnp.arange(size + width - 1)[None, :] - jnp.arange(size)[:, None]
    pieces = jnp.broadcast_to(_spread(kernels, tap), (batch, count, heads, size, size + width - 1))
    out = jnp.einsum("bnhqk,bnkhd->bnqhd", pieces.astype(u.dtype), windows)
    return out.reshape(batch, count * size, features)[:, :length]


def _windows(u, size, count, width, left):
    """[b, count, size + w - 1, e]: each block of `size` tokens with what its taps read."""
    more = -(-(width - 1) // size)  # blocks that a window reaches beyond its own
    whole = (count + more) * size
    padded = jnp.pad(u, ((0, 0), (left, max(0, whole - u.shape[1] - left)), (0, 0)))[:, :whole]
    blocks = padded.reshape(u.shape[0], count + more, size, u.shape[2])
    parts = [blocks[:, i : i + count] for i in range(more + 1)]
    return jnp.concatenate(parts, axis=2)[:, :, : size + width - 1]


# Products.


def _moved(array, length, width, left):
    """For each tap, the entries [b, q, ...] that it reads; zeros outside the row. What all tokens share stays in place."""
    if array.shape[1] < length:
        return [array] * width
    padded = jnp.pad(array, [(0, 0), (left, width - 1 - left), *[(0, 0)] * (array.ndim - 2)])
    return [padded[:, t : t + length] for t in range(width)]


def _moved_back(array, length, width, left, tap):
    """The entries [b, q, ...] of the tokens that read a token by this tap: the other way."""
    return _moved(array, length, width, width - 1 - left)[width - 1 - tap]


def _to_channels(kernel, features):
    """[..., h] -> [..., e]."""
    return jnp.repeat(kernel, features // kernel.shape[-1], axis=-1)


def _to_heads(products, heads):
    """[..., e] -> [..., h], summed over the channels of a head."""
    if products.shape[-1] == heads:
        return products
    return jnp.sum(products.reshape(*products.shape[:-1], heads, -1), axis=-1)


def _sum_of_products(entries, kernels, like):
    """sum_t entries_t kernel_t in float32. Every array is moved as it is stored, so that one pass reads it once."""
    return sum(
        entry.astype(jnp.float32) * _to_channels(kernel, like.shape[2])
        for entry, kernel in zip(entries, kernels, strict=True)
    ).astype(like.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(u, kernels, within, left):
    entries = [_where(within, t, entry) for t, entry in enumerate(_moved(u, u.shape[1], len(kernels), left))]
    return _sum_of_products(entries, kernels, u)


def _products_forward(u, kernels, within, left):
    return _products(u, kernels, within, left), (u, kernels, within)


def _products_backward(left, residuals, gradient):
    u, kernels, within = residuals
    width, heads = kernels.shape[0], kernels.shape[3]
    shared = tuple(axis for axis in (0, 1) if kernels.shape[1 + axis] == 1)
    g = gradient.astype(jnp.float32)
    d_kernels = [
        _to_heads(jnp.sum(_where(within, t, entry).astype(jnp.float32) * g, axis=shared, keepdims=True), heads)
        for t, entry in enumerate(_moved(u, u.shape[1], width, left))
    ]

    def moved_back(array, t):
        return _moved_back(array, u.shape[1], width, left, t)

    gradients = [moved_back(_where(within, t, gradient), t) for t in range(width)]
    d_u = _sum_of_products(gradients, [moved_back(kernel, t) for t, kernel in enumerate(kernels)], u)
    return d_u, jnp.stack(d_kernels).astype(kernels.dtype), None


def _where(within, t, entry):
    return entry if within is None else jnp.where(within[t][..., None], entry, 0)


_products.defvjp(_products_forward, _products_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _soft_products(u, logits, factors, left):
    return _soft_products_forward(u, logits, factors, left)[0]


def _soft_products_forward(u, logits, factors, left):
    # The residuals are the logits and one number a token and head, not the float32 kernels.
    width = logits.shape[0]
    normaliser = jax.nn.logsumexp(logits.astype(jnp.float32), axis=0)
    kernels = [_soft_kernel(logits[t], normaliser, _entry(factors, t)) for t in range(width)]
    return _sum_of_products(_moved(u, u.shape[1], width, left), kernels, u), (u, logits, factors, normaliser)


def _soft_products_backward(left, residuals, gradient):
    u, logits, factors, normaliser = residuals
    width, heads = logits.shape[0], logits.shape[3]
    g = gradient.astype(jnp.float32)
    normalised = [_soft_kernel(logits[t], normaliser) for t in range(width)]
    d_kernels = [_to_heads(entry.astype(jnp.float32) * g, heads) for entry in _moved(u, u.shape[1], width, left)]
    if factors is not None:
        d_kernels = [d * factors[t] for t, d in enumerate(d_kernels)]
    mean = sum(kernel * d for kernel, d in zip(normalised, d_kernels, strict=True))
    d_logits = [(kernel * (d - mean)).astype(logits.dtype) for kernel, d in zip(normalised, d_kernels, strict=True)]

    def moved_back(array, t):
        return None if array is None else _moved_back(array, u.shape[1], width, left, t)

    moved_kernels = [
        _soft_kernel(moved_back(logits[t], t), moved_back(normaliser, t), moved_back(_entry(factors, t), t))
        for t in range(width)
    ]
    d_u = _sum_of_products([moved_back(gradient, t) for t in range(width)], moved_kernels, u)
    return d_u, jnp.stack(d_logits), None


def _soft_kernel(logits, normaliser, factors=None):
    """A tap's softmax [b, q, h], times its factors."""
    kernel = jnp.exp(logits.astype(jnp.float32) - normaliser)
    return kernel if factors is None else kernel * factors


def _entry(factors, t):
    return None if factors is None else factors[t]


_soft_products.defvjp(_soft_products_forward, _soft_products_backward)
