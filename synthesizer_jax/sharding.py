"""Meshes, the one table from logical axes to mesh axes, and the shardings that follow from it.

A parameter declares its logical axes (axes.py). A laptop and a pod go the same way: a mesh with the axes data, fsdp and
model (one device is the smallest mesh), and a NamedSharding for each array from its creation on.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from synthesizer_jax import axes as ax

DATA, FSDP, MODEL = MESH_AXES = ("data", "fsdp", "model")

Rules = Mapping[str, str | tuple[str, ...] | None]

# R [h, n, n] is split by head, which costs no traffic; by query it costs 168 all-to-alls a step, by key 96 all-reduces.
RULES: Rules = {
    ax.BATCH: (DATA, FSDP),
    ax.VOCAB: MODEL,
    ax.MLP: MODEL,
    ax.HEADS: MODEL,
    ax.EMBED: FSDP,
    ax.LAYERS: None,
    ax.KV: None,
    ax.RANK: None,
    ax.SYNTH_QUERY: None,
    ax.SYNTH_KEY: None,
    ax.PARTS: None,
    ax.BUCKETS: None,
    ax.LENGTH: None,
}


class Declaration(Protocol):
    """What is known of an array before it exists: its shape and a logical axis name or None for each size."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How the devices are arranged; the product of the three must be their number."""

    data: int | None = (
        None  # copies of the model, each with its part of the batch; None: all devices that the others leave
    )
    fsdp: int = 1  # parts of the batch as well, and of the parameters' embed axis
    model: int = 1  # parts of the heads, the MLP and the vocabulary

    def __post_init__(self):
        for name in MESH_AXES:
            size = getattr(self, name)
            if not (size is None and name == DATA) and (
                not isinstance(size, int) or isinstance(size, bool) or size < 1
            ):
                raise ValueError(f"MeshShape.{name}: expected a whole number >= 1, got {size!r}")

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh over `devices` (default: all, of all hosts). ValueError when the product is not their number."""
        devices = jax.devices() if devices is None else devices
        rest = self.fsdp * self.model
        data = len(devices) // rest if self.data is None else self.data
        if data * rest != len(devices):
            shown = f"data={self.data} x fsdp={self.fsdp} x model={self.model}"
            product = f"a multiple of {rest}" if self.data is None else f"{data * rest}"
            raise ValueError(
                f"mesh: {shown} needs {product} devices, but there are {len(devices)}: change an axis, "
                "or leave data=None to give it all devices that remain"
            )
        return jax.make_mesh((data, self.fsdp, self.model), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def parameter_shardings(mesh: Mesh, declared: Any, rules: Rules = RULES) -> Any:
    """A NamedSharding for each leaf of a tree of declarations (anything with `shape` and `axes`).

    Raises: ValueError that lists every leaf with an axis that is unknown, not divisible by its mesh axis, or two axes
    that are split over the same one.
    """
    faults = []

    def place(path, leaf):
        spec, fault = _partition_spec(mesh, leaf, rules)
        if fault:
            faults.append(f"  {path_name(path)} {tuple(leaf.shape)}: {fault}")
        return NamedSharding(mesh, spec)

    placed = jax.tree_util.tree_map_with_path(place, declared)
    if faults:
        raise ValueError("parameters do not fit the mesh " + _shown(mesh) + ":\n" + "\n".join(faults))
    return placed


def shaped(mesh: Mesh, declared: Any, rules: Rules = RULES) -> Any:
    """jax.ShapeDtypeStruct with its sharding for each leaf of a tree of declarations with `dtype`."""
    placed = parameter_shardings(mesh, declared, rules)
    return jax.tree.map(lambda d, s: jax.ShapeDtypeStruct(d.shape, d.dtype, sharding=s), declared, placed)


def _partition_spec(mesh: Mesh, leaf: Declaration, rules: Rules) -> tuple[PartitionSpec, str]:
    parts, taken = [], {}
    for size, axis in zip(leaf.shape, leaf.axes, strict=True):
        if axis is not None and axis not in rules:
            return PartitionSpec(), f"axis {axis!r} is in no rule; known: {', '.join(rules)}"
        part = None if axis is None else rules[axis]
        names = (part,) if isinstance(part, str) else (part or ())
        shards = math.prod(mesh.shape[name] for name in names)
        if size % shards:
            return PartitionSpec(), f"axis {axis!r} of size {size} does not divide over {'x'.join(names)}={shards}"
        for name in names:
            if name in taken:
                return PartitionSpec(), f"axes {taken[name]!r} and {axis!r} are both split over {name!r}"
            taken[name] = axis
        parts.append(part)
    return PartitionSpec(*parts), ""


def check_batch_size(mesh: Mesh, batch_size: int) -> None:
    """ValueError unless batch_size is a positive multiple of the devices that split the batch."""
    shards = mesh.shape[DATA] * mesh.shape[FSDP]
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size: expected a whole number >= 1, got {batch_size!r}")
    if batch_size % shards:
        nearest = max(shards, batch_size // shards * shards)
        raise ValueError(
            f"batch_size={batch_size} does not divide over data x fsdp = {mesh.shape[DATA]} x {mesh.shape[FSDP]} = "
            f"{shards} devices: use a multiple such as {nearest}, or another mesh"
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The first axis split over data and fsdp, all others whole."""
    return NamedSharding(mesh, PartitionSpec(RULES[ax.BATCH]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Global arrays from this process's rows of the batch."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}


def path_name(path: Sequence[Any]) -> str:
    """encoder/layers/mlp/wi from a jax.tree_util key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the tree's order."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield path_name(path), leaf


def _shown(mesh: Mesh) -> str:
    return " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
