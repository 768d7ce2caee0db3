"""The alphabet of shapes, the logical axis names, and the declaration of a parameter.

One letter means one thing in einsums, annotations, comments and tests:

    b batch   q query length   k key length   h heads   d size per head   e embedding
    m MLP     v vocabulary     n maximum synthesized length               r rank    w kernel width   c classes
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Logical axis names. sharding.py maps them to mesh axes; nothing in Flax acts on them.
LAYERS = "layers"  # leading axis of parameters that are scanned over depth
VOCAB = "vocab"
EMBED = "embed"
MLP = "mlp"
HEADS = "heads"
KV = "kv"  # size per head
RANK = "rank"
SYNTH_QUERY = "synth_query"  # n, indexed by the query's position
SYNTH_KEY = "synth_key"  # n, indexed by the key's position
PARTS = "parts"  # parts of a mixture
BUCKETS = "buckets"  # relative position buckets
BATCH = "batch"
LENGTH = "length"

LOGICAL_AXES = (LAYERS, VOCAB, EMBED, MLP, HEADS, KV, RANK, SYNTH_QUERY, SYNTH_KEY, PARTS, BUCKETS, BATCH, LENGTH)

Initializer = Callable[[jax.Array, tuple[int, ...], jax.typing.DTypeLike], jax.Array]


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter, declared once.

    shape: its sizes. axes: a logical axis name or None for each size. init: (key, shape, dtype) -> array.
    trained: False for a parameter that is drawn once, saved and restored, but never updated.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer
    trained: bool = True

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"Param.axes: expected one name per size of shape {self.shape}, got {self.axes}")
        unknown = [axis for axis in self.axes if axis is not None and axis not in LOGICAL_AXES]
        if unknown:
            raise ValueError(f"Param.axes: expected names from {LOGICAL_AXES} or None, got {unknown}")


def contract(equation: str, first: jax.Array, second: jax.Array) -> jax.Array:
    """The einsum of two arrays, accumulated and returned in float32.

    XLA's CPU backend has no bfloat16 product with a float32 result for every layout; there the operands are cast.
    """
    if first.dtype == second.dtype == jnp.float32:
        return jnp.einsum(equation, first, second)
    # Keeps for the gradient what goes in: of a choice between platforms JAX keeps what each would, the operands in float32.
    return jax.checkpoint(_contract_by_platform, static_argnums=0, prevent_cse=False)(equation, first, second)


def _contract_by_platform(equation, first, second):
    return jax.lax.platform_dependent(
        first,
        second,
        cpu=lambda a, b: jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32)),
        default=lambda a, b: jnp.einsum(equation, a, b, preferred_element_type=jnp.float32),
    )


def normal(std: float) -> Initializer:
    """Normal values of the given standard deviation."""
    return jax.nn.initializers.normal(std)


def fan_in(size: int) -> Initializer:
    """Normal values of standard deviation size ** -0.5: outputs keep the inputs' variance over `size` summands."""
    return normal(size**-0.5)


zeros: Initializer = jax.nn.initializers.zeros
ones: Initializer = jax.nn.initializers.ones
