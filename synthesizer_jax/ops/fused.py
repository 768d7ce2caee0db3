"""Which algorithm serves scores with a low-rank part: a fused kernel where there is one, and why not elsewhere.

- "flash", on TPU from v4 on: the Pallas kernel of flash_tpu.py.
- "cudnn", on GPU: cuDNN's attention through jax.nn.dot_product_attention.

Both need scores that differ between the sequences of a batch by their low-rank part alone, and masks that are causality, a
mask of keys, segments, or rules of the whole batch.
"""

import functools
import logging

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from synthesizer_jax import activations
from synthesizer_jax.ops import flash_plan, flash_tpu

_FEWEST = 64  # tokens, queries or keys: the kernel fills up to 128, and of few logits little is to be saved

_log = logging.getLogger(__name__)


def choose(path: str, scores, values, masks) -> str:
    """ "flash", "cudnn" or "xla": for path "auto" what is fastest here, else path itself.

    masks: see ops.attend. The reason is logged, once for each. Raises ValueError where path can't serve the scores.
    """
    if path == "xla":
        return path
    refusals = {"flash": _flash_refusal, "cudnn": _cudnn_refusal}
    general = _refusal(scores, values, masks)
    if path != "auto":
        reason = general or refusals[path](scores, values, masks)
        if reason:
            raise ValueError(f"path: {path!r} can't serve these scores: {reason}; use path='auto'")
        return path
    kind = {"tpu": "flash", "gpu": "cudnn"}.get(activations.device()[0])
    if kind is None:
        return "xla"
    few = scores.query is not None and min(scores.query.shape[1], values.shape[1]) < _FEWEST
    reason = general or (f"there are fewer than {_FEWEST} queries or keys" if few else None) or _unknown(kind)
    reason = reason or _mesh_refusal() or refusals[kind](scores, values, masks)
    _tell("xla" if reason else kind, reason or "scores with a low-rank part and no bias of each sequence's own")
    return "xla" if reason else kind


def attend(kind: str, scores, values, masks) -> Float[Array, "b q h d"]:
    """Attention by the kernel that `choose` named."""
    rule = masks.rules()
    if rule is not None:
        values = jnp.where(_seen(rule), values, 0)
    query, key, bias = _factors(scores, values, rule)
    if kind == "cudnn":
        return cudnn(query, key, values, bias, masks)
    arrays = flash_tpu.Arrays(query, key, values, bias, masks.key_mask, masks.q_segments, masks.k_segments)
    return flash_tpu.attention(flash_tpu.Options(masks.causal, masks.q_offset, _vmem()), arrays)


def cudnn(query, key, values, bias, masks, implementation="cudnn") -> Float[Array, "b q h d"]:
    """jax.nn.dot_product_attention with our masks: a query without a key gets 0, not the mean of the values."""
    own = masks.own()
    if own is not None:  # it takes masks of its own with all queries
        own = jnp.broadcast_to(own, (values.shape[0], 1, query.shape[1], key.shape[1]))
    for seen in (masks.key_mask, None if masks.k_segments is None else masks.k_segments > 0):
        if seen is not None:  # what stands at padding may be inf or NaN
            key, values = (jnp.where(seen[:, :, None, None], x, 0) for x in (key, values))
    if bias is not None:
        bias = bias[None].astype(query.dtype)
    out = jax.nn.dot_product_attention(
        query, key, values, bias, own, scale=1.0, is_causal=masks.causal, implementation=implementation
    )
    if own is None:
        return out
    if masks.causal:
        own = own & (jnp.arange(key.shape[1])[None, :] <= jnp.arange(query.shape[1])[:, None])
    return jnp.where(jnp.any(own, axis=-1)[:, 0, :, None, None], out, 0)


def _factors(scores, values, rule):
    """(query [b, q, h, r], key [b, k, h, r], bias [h, q, k] or None), with what the whole batch may not see in the bias."""
    b, k, h = values.shape[:3]
    query = jnp.broadcast_to(scores.query, (b, scores.query.shape[1], h, scores.query.shape[3]))
    key = jnp.broadcast_to(scores.key, (b, k, h, scores.key.shape[3]))
    if rule is not None:  # what nobody sees may be inf or NaN
        key = jnp.where(_seen(rule), key, 0)
    if scores.bias is None and rule is None:
        return query, key, None
    bias = 0.0 if scores.bias is None else scores.bias[0]
    if rule is not None:
        bias = jnp.where(rule[0], bias, flash_plan.MASKED)
    return query, key, jnp.broadcast_to(bias, (h, query.shape[1], k)).astype(jnp.float32)


def _seen(rule):
    """[1, k, h|1, 1]: the keys that some query may attend to."""
    return jnp.swapaxes(jnp.any(rule, axis=2), 1, 2)[..., None]


def _refusal(scores, values, masks) -> str | None:
    if scores.factor is not None:
        return "a kernel without a logarithm has no low-rank form"
    if scores.query is None:
        return "they have no low-rank part"
    if scores.bias is not None and scores.bias.shape[0] > 1:
        return "each sequence has a bias of its own"
    if masks.differ_by_mask:
        return "each sequence has a mask of its own; key_mask, causal and segments are understood"
    if not isinstance(masks.q_offset, int):
        return "q_offset is not known before the program runs"
    if not scores.query.dtype == scores.key.dtype == values.dtype:
        return f"queries, keys and values are {scores.query.dtype}, {scores.key.dtype} and {values.dtype}"
    return None


def _flash_refusal(scores, values, masks):
    if values.dtype not in (jnp.float32, jnp.bfloat16):
        return f"numbers are {values.dtype}, not float32 or bfloat16"
    h, q, k = values.shape[2], scores.query.shape[1], values.shape[1]
    bias = None if scores.bias is None and masks.rules() is None else jax.ShapeDtypeStruct((h, q, k), jnp.float32)
    shapes = [
        jax.ShapeDtypeStruct((values.shape[0], *x.shape[1:2], h, x.shape[3]), values.dtype)
        for x in (scores.query, scores.key)
    ]
    if not flash_tpu.fits(flash_tpu.Arrays(*shapes, values, bias), _vmem()):
        return f"a block of queries with {k} keys does not fit into {_vmem() / flash_plan.MiB:.0f} MiB of VMEM"
    return None


def _cudnn_refusal(scores, values, masks):
    if values.dtype not in (jnp.float16, jnp.bfloat16):
        return f"cuDNN's attention is for float16 and bfloat16, not {values.dtype}"
    rank, size = scores.query.shape[3], values.shape[3]
    if rank != size or size % 8 or size > 128:
        return f"queries of size {rank} and values of size {size} are not of one size that is a multiple of 8 up to 128"
    if scores.query.shape[1] % 2 or values.shape[1] % 2:
        return "a length is odd"
    if masks.q_offset:
        return "queries do not start at the first key"
    if (scores.bias is not None or masks.rules() is not None) and (
        masks.key_mask is not None or masks.k_segments is not None
    ):
        return "bias and mask would be added up to [b, h, q, k]"
    if activations.in_part():
        return "its batching rule is wrong for a bias that is shared (JAX pull request 34920)"
    return None


def _mesh_refusal():
    """Why a kernel can't be split over the devices: XLA's partitioner does not see into it."""
    mesh = jax.sharding.get_abstract_mesh()
    if activations.is_placed() or mesh.size == 1 or (not mesh.empty and mesh.are_all_axes_manual):
        return None
    if mesh.empty:
        return (
            None if jax.device_count() == 1 else "there are several devices, and no mesh says how they share the work"
        )
    return "on a mesh that is not this library's, a kernel needs shard_map around it"


def _unknown(path):
    kind = activations.device()[1]
    return f"there is no kernel for {kind}" if path == "flash" and kind not in flash_plan.VMEM else None


def _vmem():
    return flash_plan.VMEM.get(activations.device()[1], flash_plan.SMALLEST_VMEM)


@functools.cache
def _tell(kind: str, reason: str) -> None:
    _log.info("attention: path %r: %s", kind, reason)
