"""What a compiled program sends between devices: each collective with the mesh axes that it runs over, and its bytes."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from synthesizer_jax.analysis.hlo import Computation, Instruction, Module, goes_on, is_collective
from synthesizer_jax.analysis.traffic import Executed

# Bytes that a device sends, where n take part and each brings one byte: XLA's ring algorithms, the least possible.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program; numbers are of one device and one run of the program."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute, ...
    axes: str  # of the mesh: "data", "data x fsdp"; "part of data" where groups are smaller
    devices: int  # that take part in one group
    times: int  # how often it runs; a loop's trips count
    bytes: int  # of the whole arrays, all times together: what is reduced, gathered (as gathered), exchanged
    sent: int  # bytes that a device sends over its links, all times together
    shape: tuple[int, ...]  # of its largest array, as gathered
    dtype: str
    origin: str  # where in the traced function it comes from

    @property
    def size(self) -> int:
        """Entries of its largest array."""
        return math.prod(self.shape)


def collectives(module: Module, program: Executed, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives among the instructions that run; mesh: the size of each axis, in the mesh's order."""
    return [_collective(*found, mesh) for found in _found(module, program)]


def _found(module: Module, program: Executed) -> Iterator[tuple[str, Computation, Instruction, int]]:
    """(kind, where it stands, the collective, times), also of those inside fusions and asynchronous calls."""
    for computation, instruction, times in program:
        if is_collective(instruction):
            yield instruction.opcode.removesuffix("-start"), computation, instruction, times
        elif instruction.opcode in ("fusion", "async-start") and not goes_on(instruction):
            inner = module.computations.get(instruction.called() or "", {})
            for found in inner.values():
                if is_collective(found):
                    # TPU: an all-reduce of which each device keeps its slice is one operation.
                    scattered = "all-reduce-scatter" in f"{instruction.called()} {instruction.name}"
                    kind = "reduce-scatter" if scattered else found.opcode.removesuffix("-start")
                    yield kind, inner, found, times


def _collective(kind, computation, instruction, times, mesh) -> Collective:
    groups = device_groups(instruction.attributes, math.prod(mesh.values()))
    devices = groups.shape[1]
    arrays = [array for operand in computation.operands(instruction) for array in operand.results]
    largest = max(arrays, key=lambda array: array.size)
    total = sum(array.bytes for array in arrays)
    gathered = devices if kind == "all-gather" else 1
    return Collective(
        kind=kind,
        axes=axes_of(groups, mesh),
        devices=devices,
        times=times,
        bytes=times * total * gathered,
        sent=round(times * total * _SENT[kind](devices)),
        shape=_as_gathered(instruction, largest.shape, gathered),
        dtype=largest.dtype,
        origin=instruction.op_name,
    )


def _as_gathered(instruction: Instruction, shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    if devices == 1:
        return shape
    axis = int(re.search(r"\bdimensions=\{(\d+)", instruction.attributes)[1])
    return (*shape[:axis], shape[axis] * devices, *shape[axis + 1 :])


# Which devices, and which axes


def device_groups(attributes: str, devices: int) -> np.ndarray:
    """[groups, members]: the devices of a mesh, by their place in it, that exchange with each other.

    Of a collective-permute, its pairs. XLA writes groups in four ways: as lists, as a reshaped and transposed count, as
    axes of a mesh of its own, and {} for all devices.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        return np.array(re.findall(r"(\d+),(\d+)", pairs[1]), int)
    if lists := re.search(r"replica_groups=\{(\{.*?\})\}", attributes):
        return np.array([part.split(",") for part in re.findall(r"\{([\d,]+)\}", lists[1])], int)
    if counted := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return _counted(counted[2]).reshape(_ints(counted[1]))
    if meshed := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}", attributes):
        return _meshed(*meshed.groups())
    return np.arange(devices)[None]


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _counted(text: str) -> np.ndarray:
    """[2,4]T(1,0): 0, 1, 2, ... in these sizes, transposed, in a row."""
    sizes, order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    numbers = np.arange(math.prod(_ints(sizes))).reshape(_ints(sizes))
    return numbers.transpose(_ints(order) if order else None if numbers.ndim < 2 else range(numbers.ndim)).ravel()


def _meshed(sizes: str, order: str | None, chosen: str) -> np.ndarray:
    """'x'=2,'y'=4 with 'y' chosen: groups along y; 'y':(2)2 is the second half of y, cut into 2 x 2."""
    named = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
    shape, group_axes = [], []
    for name, size in named.items():
        cuts = [(int(before), int(part)) for found, before, part in parts if found == name and before]
        if not cuts:
            group_axes += [len(shape)] if any(found == name for found, _, _ in parts) else []
            shape.append(size)
            continue
        done = 1
        for before, part in sorted(cuts):
            shape.append(before // done)
            group_axes.append(len(shape))
            shape.append(part)
            done = before * part
        shape.append(size // done)
    ids = _counted(order) if order else np.arange(math.prod(shape))
    ids = np.moveaxis(ids.reshape(shape), group_axes, range(-len(group_axes), 0)) if group_axes else ids.reshape(-1, 1)
    return ids.reshape(-1, math.prod(shape[axis] for axis in group_axes))


def axes_of(groups: np.ndarray, mesh: Mapping[str, int]) -> str:
    """The axes along which the members of a group differ: "data", "fsdp x model", "part of data"; "none" for one member."""
    names, sizes = tuple(mesh), tuple(mesh.values())
    places = np.stack(np.unravel_index(groups, sizes), axis=-1)  # [groups, members, axes]
    differ = np.any(places != places[:, :1], axis=(0, 1))
    chosen = [name for name, differs in zip(names, differ, strict=True) if differs]
    if not chosen:
        return "none"
    whole = math.prod(mesh[name] for name in chosen) == groups.shape[1]
    return ("" if whole else "part of ") + " x ".join(chosen)


# Summaries


@dataclasses.dataclass(frozen=True)
class Summary:
    """All collectives of one kind over the same axes."""

    kind: str
    axes: str
    count: int  # trips of loops included
    bytes: int
    sent: int
    largest: str  # its largest array, such as f32[32128,768]


def summarize(found: Sequence[Collective]) -> list[Summary]:
    """By kind and axes, those that send most first."""
    rows: dict[tuple[str, str], list[Collective]] = {}
    for one in found:
        rows.setdefault((one.kind, one.axes), []).append(one)
    summaries = []
    for (kind, axes), members in rows.items():
        largest = max(members, key=lambda one: one.size)
        shown = f"{largest.dtype}[{','.join(map(str, largest.shape))}]"
        totals = (
            sum(one.times for one in members),
            sum(one.bytes for one in members),
            sum(one.sent for one in members),
        )
        summaries.append(Summary(kind, axes, *totals, shown))
    return sorted(summaries, key=lambda row: -row.sent)
