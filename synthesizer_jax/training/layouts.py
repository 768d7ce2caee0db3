"""The two layouts of a stack's layers, and reading arrays of one, in their own dtype, into the other.

config.scan_layers stacks what all layers have along a leading axis: `encoder/layers/mlp/wi` [layers, e, m] holds what
`encoder/layers/0/mlp/wi` [e, m], `encoder/layers/1/mlp/wi`, ... hold without it. Names of optimizer states end alike.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

How = Literal["as it is", "taken apart", "stacked"]

_ONE_LAYER = re.compile(r"((?:.*/)?layers/)(\d+)/(.+)")


class Shaped(Protocol):
    """What is known of an array that is not here."""

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike


@dataclasses.dataclass(frozen=True)
class Part:
    """Arrays that become one another: one as it is, a stacked one and its layers, or layers and what they are stacked to."""

    saved: tuple[str, ...]
    wanted: tuple[str, ...]
    how: How

    def shape(self, saved: Mapping[str, Shaped]) -> tuple[int, ...]:
        """Of each of the arrays that are wanted."""
        shape = tuple(saved[self.saved[0]].shape)
        return {"as it is": shape, "taken apart": shape[1:], "stacked": (len(self.saved), *shape)}[self.how]


def parts(saved: Mapping[str, Shaped], wanted: Collection[str]) -> list[Part]:
    """How all that is saved becomes, as far as it can, what is wanted.

    What has no counterpart in the other layout is left as it is: layers of unlike shapes, for one.
    """
    saved_layers, wanted_layers = _layers(saved), _layers(wanted)
    found = []
    for name, array in saved.items():
        stacked = _stacked_name(name)
        if name in wanted_layers and name not in wanted and array.shape:
            found.append(Part((name,), tuple(_layer_name(name, i) for i in range(array.shape[0])), "taken apart"))
        elif stacked in wanted and _alike(saved_layers[stacked], saved):
            if name == saved_layers[stacked][0]:
                found.append(Part(tuple(saved_layers[stacked].values()), (stacked,), "stacked"))
        else:
            found.append(Part((name,), (name,), "as it is"))
    return found


def sharding_to_read(part: Part, wanted: Sharding) -> Sharding:
    """Of each saved array, from that of a wanted one, so that no device ever holds more than its part."""
    if not isinstance(wanted, NamedSharding) or part.how == "as it is":
        return wanted
    spec = (None, *wanted.spec) if part.how == "taken apart" else wanted.spec[1:]
    return NamedSharding(wanted.mesh, PartitionSpec(*spec))


def convert(part: Part, arrays: Sequence[jax.Array], wanted: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """The wanted arrays, with their dtypes and shardings, from the saved ones."""
    if part.how == "as it is" and arrays[0].dtype == wanted[0].dtype:
        return list(arrays)
    shardings = tuple(leaf.sharding for leaf in wanted)
    return _converter(part.how, len(wanted), jnp.dtype(wanted[0].dtype), shardings)(*arrays)


def changes(part: Part, saved: Mapping[str, Shaped], wanted: Mapping[str, Shaped]) -> bool:
    """Whether a part has another layout or dtype."""
    return part.how != "as it is" or saved[part.saved[0]].dtype != wanted[part.wanted[0]].dtype


def groups(changing: Sequence[Part], saved: Mapping[str, Shaped], limit: int) -> Iterator[list[Part]]:
    """The parts in order, in groups whose saved arrays have at most `limit` bytes together, or of a single part."""
    group, size = [], 0
    for part in changing:
        own = sum(math.prod(saved[name].shape) * jnp.dtype(saved[name].dtype).itemsize for name in part.saved)
        if group and size + own > limit:
            yield group
            group, size = [], 0
        group.append(part)
        size += own
    if group:
        yield group


@functools.lru_cache(maxsize=512)
def _converter(how, count, dtype, shardings):
    def change(*arrays):
        if how == "taken apart":
            arrays = [arrays[0][layer] for layer in range(count)]
        elif how == "stacked":
            arrays = [jnp.stack(arrays)]
        return [array.astype(dtype) for array in arrays]

    return jax.jit(change, out_shardings=list(shardings))


def _stacked_name(name: str) -> str | None:
    """a/layers/b of a/layers/3/b."""
    match = _ONE_LAYER.fullmatch(name)
    return match[1] + match[3] if match else None


def _layer_name(stacked: str, layer: int) -> str:
    """a/layers/3/b of a/layers/b."""
    before, layers, after = stacked.rpartition("layers/")
    return f"{before}{layers}{layer}/{after}"


def _layers(names: Collection[str]) -> dict[str, dict[int, str]]:
    """stacked name -> layer -> name, of the arrays of single layers, in their order."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        match = _ONE_LAYER.fullmatch(name)
        if match:
            found.setdefault(match[1] + match[3], {})[int(match[2])] = name
    return {stacked: dict(sorted(layers.items())) for stacked, layers in found.items()}


def _alike(layers: Mapping[int, str], saved: Mapping[str, Shaped]) -> bool:
    """Whether layers 0, 1, ... are all there with one shape and dtype."""
    kinds = {(tuple(saved[name].shape), str(saved[name].dtype)) for name in layers.values()}
    return list(layers) == list(range(len(layers))) and len(kinds) == 1
