"""Meshes, the one table from logical axes to mesh axes, and the shardings that follow from it.

A parameter declares its logical axes (axes.py). A laptop and a pod go the same way: a mesh with the axes data, fsdp and
model (one device is the smallest mesh), and a NamedSharding for each array from its creation on. Parameters are stored
split over fsdp and gathered where they are used (activations.py); over model they are computed with in parts.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from synthesizer_jax import activations
from synthesizer_jax import axes as ax
from synthesizer_jax.activations import MeshAxes

DATA, FSDP, MODEL = MESH_AXES = ("data", "fsdp", "model")

# R [h, n, n] is computed with by head, which costs no traffic; of T5 small over four chips, by query it costs 48 all-to-alls a
# step, by key 30 and 13 all-reduces, whole on each 18 all-gathers (docs/pods.md). It is stored by query as well, as it has no
# embed axis: of T5 11B 6.4 GB.
RULES: Mapping[str, MeshAxes] = {
    ax.BATCH: (DATA, FSDP),
    ax.VOCAB: MODEL,
    ax.MLP: MODEL,
    ax.HEADS: MODEL,
    ax.EMBED: FSDP,
    ax.LAYERS: None,
    ax.KV: None,
    ax.RANK: None,
    ax.SYNTH_QUERY: FSDP,
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
class Rules:
    """How logical axes are split over mesh axes: the table RULES, what differs from it, and parameters of their own rules.

    axes: logical axis -> mesh axis, several of them, or None. parameters: a regular expression that a parameter's whole
    path matches (model-info.txt lists them) -> the same for this parameter alone; the first that matches counts. What the
    optimizer keeps of a parameter follows it.
    """

    axes: Mapping[str, MeshAxes] = dataclasses.field(default_factory=dict)
    parameters: Mapping[str, Mapping[str, MeshAxes]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self._check("Rules.axes", self.axes)
        for pattern, rules in self.parameters.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"Rules.parameters: {pattern!r} is no regular expression: {error}") from error
            self._check(f"Rules.parameters[{pattern!r}]", rules)

    def _check(self, what: str, rules: Any) -> None:
        if not isinstance(rules, Mapping):
            raise ValueError(
                f"{what}: expected logical axis -> mesh axis, such as {{'synth_query': None}}, got {rules!r}"
            )
        for axis, part in rules.items():
            if axis == ax.BATCH:
                raise ValueError(f"{what}: the batch is split over data and fsdp in any case; leave {axis!r} out")
            if axis not in RULES:
                raise ValueError(f"{what}: unknown logical axis {axis!r}; known: {', '.join(RULES)}")
            wrong = [name for name in activations.names(part) if name not in MESH_AXES]
            if wrong:
                raise ValueError(
                    f"{what}[{axis!r}]: unknown mesh axis {wrong[0]!r}; known: {', '.join(MESH_AXES)}, or None"
                )

    def __hash__(self):
        return hash((tuple(sorted(self.axes)), tuple(self.parameters)))

    @property
    def table(self) -> dict[str, MeshAxes]:
        """Logical axis -> mesh axes, of all parameters without rules of their own."""
        return {**RULES, **self.axes}

    def of(self, path: str) -> Mapping[str, MeshAxes]:
        """What differs from the table for the parameter at a path."""
        return next((rules for pattern, rules in self.parameters.items() if re.fullmatch(pattern, path)), {})

    def of_state(self, path: str) -> Mapping[str, MeshAxes]:
        """The same for the path of a statistic, which ends with its parameter's."""
        starts = [0, *(match.end() for match in re.finditer("/", path))]
        return next((rules for start in starts if (rules := self.of(path[start:]))), {})


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How the devices are arranged; the product of the three must be their number."""

    data: int | None = (
        None  # copies of the model, each with its part of the batch; None: all devices that the others leave
    )
    fsdp: int = 1  # parts of the batch as well, and of the stored parameters' embed axis
    model: int = 1  # parts of the heads, the MLP and the vocabulary
    # Parts of the data axis that a slower network joins: slices of a TPU multislice, nodes of GPUs. None: as many as the
    # devices say they have slices; on devices without, 1.
    slices: int | None = None

    def __post_init__(self):
        for name in (*MESH_AXES, "slices"):
            size = getattr(self, name)
            if not (size is None and name in (DATA, "slices")) and (
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
                "or leave data=None to give it all devices that remain (in gin MESH_DATA, MESH_FSDP and MESH_MODEL)"
            )
        slices = _slices(devices) if self.slices is None else self.slices
        types = (AxisType.Auto,) * 3
        if slices == 1:
            return jax.make_mesh((data, self.fsdp, self.model), MESH_AXES, axis_types=types, devices=devices)
        return Mesh(_hybrid((data, self.fsdp, self.model), slices, devices), MESH_AXES, axis_types=types)


def _slices(devices) -> int:
    return len({getattr(device, "slice_index", 0) for device in devices})


def _hybrid(sizes, slices, devices) -> np.ndarray:
    """Devices such that only the data axis, and of it the outer part, crosses from one slice to another."""
    data, fsdp, model = sizes
    if data % slices:
        raise ValueError(
            f"mesh: data={data} does not divide over {slices} slices: fsdp and model stay within a slice, so that fsdp x "
            f"model must divide a slice's {len(devices) // slices} devices"
        )
    by_slice = _slices(devices) > 1
    groups = _slices(devices) if by_slice else len({device.process_index for device in devices})
    if groups != slices:
        what = "slices" if by_slice else "processes, which count as slices where devices have none"
        raise ValueError(f"MeshShape.slices: expected {groups}, as the devices are in {groups} {what}, got {slices}")
    inner = (data // slices, fsdp, model)
    return mesh_utils.create_hybrid_device_mesh(
        inner, (slices, 1, 1), devices, process_is_granule=not by_slice, allow_split_physical_axes=True
    )


def parameter_shardings(mesh: Mesh, declared: Any, rules: Rules = Rules()) -> Any:
    """A NamedSharding for each leaf of a tree of declarations (anything with `shape` and `axes`).

    Raises: ValueError that lists every leaf with an axis that is unknown, not divisible by its mesh axis, or two axes
    that are split over the same one.
    """
    faults = []

    def place(path, leaf):
        name = path_name(path)
        spec, fault = _partition_spec(mesh, leaf, {**rules.table, **rules.of_state(name)})
        if fault:
            faults.append(f"  {name} {tuple(leaf.shape)}: {fault}")
        return NamedSharding(mesh, spec)

    placed = jax.tree_util.tree_map_with_path(place, declared)
    if faults:
        own = [
            fault for fault in faults if not fault.startswith("  opt_state/")
        ]  # statistics are as their parameters are
        raise ValueError("parameters do not fit the mesh " + _shown(mesh) + ":\n" + "\n".join(own or faults))
    return placed


def check_rules(rules: Rules, *declared: Any) -> None:
    """ValueError where a rule is for parameters of which the trees of declarations have none."""
    names = [name for tree in declared for name, _ in named_leaves(tree)]
    for pattern in rules.parameters:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(
                f"Rules.parameters: {pattern!r} matches no parameter; paths are such as {', '.join(names[:3])}, and "
                "model-info.txt lists all"
            )


def shaped(mesh: Mesh, declared: Any, rules: Rules = Rules()) -> Any:
    """jax.ShapeDtypeStruct with its sharding for each leaf of a tree of declarations with `dtype`."""
    placed = parameter_shardings(mesh, declared, rules)
    return jax.tree.map(lambda d, s: jax.ShapeDtypeStruct(d.shape, d.dtype, sharding=s), declared, placed)


@contextlib.contextmanager
def on(mesh: Mesh, rules: Rules = Rules()) -> Iterator[None]:
    """Traced, called or lowered inside, functions have their activations on this mesh."""
    with jax.set_mesh(mesh), activations.placed(activations.Placement(rules.table, rules.of)):
        yield


def _partition_spec(mesh: Mesh, leaf: Declaration, rules: Mapping[str, MeshAxes]) -> tuple[PartitionSpec, str]:
    parts, taken = [], {}
    for size, axis in zip(leaf.shape, leaf.axes, strict=True):
        if axis is not None and axis not in rules:
            return PartitionSpec(), f"axis {axis!r} is in no rule; known: {', '.join(rules)}"
        part = None if axis is None else rules[axis]
        names = activations.names(part)
        shards = math.prod(mesh.shape[name] for name in names)
        if size % shards:
            return PartitionSpec(), (
                f"axis {axis!r} of size {size} does not divide over {'x'.join(names)}={shards}; change the mesh, or leave "
                f"the axis whole by Rules(axes={{{axis!r}: None}}), in gin Rules.axes = {{{axis!r}: None}} and train.rules = "
                "@Rules()"
            )
        for name in names:
            if name in taken:
                return PartitionSpec(), f"axes {taken[name]!r} and {axis!r} are both split over {name!r}"
            taken[name] = axis
        parts.append(part)
    return PartitionSpec(*parts), ""


def check_batch_size(mesh: Mesh, batch_size: int) -> None:
    """ValueError unless batch_size is a positive multiple of the devices that split the batch."""
    shards = batch_shards(mesh)
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size: expected a whole number >= 1, got {batch_size!r}")
    if batch_size % shards:
        nearest = max(shards, batch_size // shards * shards)
        raise ValueError(
            f"batch_size={batch_size} does not divide over data x fsdp = {mesh.shape[DATA]} x {mesh.shape[FSDP]} = "
            f"{shards} devices: use a multiple such as {nearest}, or another mesh"
        )


def batch_shards(mesh: Mesh) -> int:
    """In how many parts a batch is split."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


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


def described(mesh: Mesh) -> str:
    """A line for the user."""
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    processes = len({device.process_index for device in mesh.devices.flat})
    of_processes = f", of {processes} processes" if processes > 1 else ""
    return f"devices: {mesh.size} x {', '.join(kinds)}{of_processes}: {_shown(mesh)}"


def _shown(mesh: Mesh) -> str:
    return " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
