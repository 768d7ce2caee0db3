"""A compiled program read from its text (`jax.stages.Compiled.as_text()`): arrays, instructions, computations, loops.

XLA's text is the only complete account of what a compiler made of a step, the same for TPU, GPU and CPU. An instruction of a
scheduled program that stands in no fusion runs by itself: it reads its operands from memory and writes its result there.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_BITS = {"pred": 8, "token": 0, "opaque": 0} | {
    f"{kind}{size}": size for kind in ("s", "u", "f", "bf", "c") for size in (2, 4, 8, 16, 32, 64, 128)
}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([\w\-]+)\(")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a result: its type, sizes and where it lies."""

    dtype: str  # as XLA writes it: f32, bf16, s32, pred, ...
    shape: tuple[int, ...]
    space: int = 0  # 0: the device's main memory; others are on the chip (TPU: VMEM, SMEM) or the host's
    tiled: tuple[int, ...] | None = (
        None  # the sizes in the order of memory, rounded up to whole tiles; None: as `shape`
    )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Without the padding to tiles."""
        return self._bytes(self.size)

    @property
    def padded_bytes(self) -> int:
        """With it: what it takes in memory."""
        return self._bytes(math.prod(self.shape if self.tiled is None else self.tiled))

    def _bytes(self, entries: int) -> int:
        return -(-entries * _BITS.get(self.dtype, 8) // 8)  # 8: f8e4m3fn and its kin

    def __str__(self):
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def in_memory(self) -> int:
        """Its bytes in the device's main memory (HBM)."""
        return self.bytes if self.space == 0 else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """%name = result opcode(operands), attributes."""

    name: str
    opcode: str
    results: tuple[Array, ...]  # one, or the leaves of a tuple
    operands: tuple[str, ...]
    arguments: str  # what stands between the parentheses
    attributes: str  # what follows them
    root: bool

    def called(self, key: str = "calls") -> str | None:
        """The computation that attribute `key` names."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found and found[1]

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from, such as jit(step)/jvp()/self_attention/dot_general."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @functools.cached_property
    def aliases(self) -> dict[int, int]:
        """Of a fusion: the results that are an operand's own buffer, by their numbers."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?\)\})", self.attributes)
        return (
            {int(out or 0): int(operand) for out, operand in re.findall(r"\{(\d*)\}: \((\d+)", found[1])}
            if found
            else {}
        )

    @functools.cached_property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.results)

    @functools.cached_property
    def in_memory(self) -> int:
        """The bytes of its result in the device's main memory."""
        return sum(array.in_memory for array in self.results)


class Computation(Mapping[str, Instruction]):
    """Instructions by name, in the order in which they run."""

    def __init__(self, instructions: dict[str, Instruction]):
        self._instructions = instructions

    def __getitem__(self, name: str) -> Instruction:
        return self._instructions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._instructions)

    def __len__(self) -> int:
        return len(self._instructions)

    @functools.cached_property
    def root(self) -> Instruction:
        return next(found for found in self.values() if found.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """By their number."""
        return {int(found.arguments): found for found in self.values() if found.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads each instruction."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that it reads, in order."""
        return [self[name] for name in instruction.operands if name in self]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations, one of which is the entry."""

    computations: Mapping[str, Computation]
    entry: Computation

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Of the text of a compiled program. ValueError where it has no entry."""
        computations, entry, name, lines = {}, None, None, {}
        for line in text.splitlines():
            if name is None:
                if header := _HEADER.match(line):
                    name, lines = header[2], {}
                    entry = name if header[1] else entry
            elif line.startswith("}"):
                computations[name], name = Computation(lines), None
            elif instruction := _instruction(line):
                lines[instruction.name] = instruction
        if entry is None:
            raise ValueError("text: expected a compiled program's, with an ENTRY computation, got none")
        return cls(computations, computations[entry])

    def trips(self, loop: Instruction) -> int:
        """How often the body of a `while` runs: what XLA says, or else the bound in its condition by the step to it.

        A loop that may end before its bound, as decoding does, counts to the bound. Those that XLA makes of a product and
        its collective (windowed einsum) go two steps at a time, and it does not say how many there are.
        """
        if known := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes):
            return int(known[1])
        bounds = [
            int(found.arguments)
            for found in self._with_inner(self.computations[loop.called("condition")])
            if found.opcode == "constant" and re.fullmatch(r"\d+", found.arguments)
        ]
        return -(-max(bounds, default=1) // self._step(loop))

    def _step(self, loop: Instruction) -> int:
        """What a trip adds to the number that the condition compares with its bound."""
        condition, body = self.computations[loop.called("condition")], self.computations[loop.called("body")]
        read = {found.attributes for found in condition.values() if found.opcode == "get-tuple-element"}
        index = re.search(r"index=(\d+)", read.pop()) if len(read) == 1 else None
        if index is None or int(index[1]) >= len(body.root.operands):
            return 1
        moved = body.get(body.root.operands[int(index[1])])
        if moved is None or moved.opcode != "add":
            return 1
        steps = [int(found.arguments) for found in body.operands(moved) if found.opcode == "constant"]
        return steps[0] if len(steps) == 1 and steps[0] > 0 else 1

    def _with_inner(self, computation: Computation) -> Iterator[Instruction]:
        for instruction in computation.values():
            yield instruction
            if (inner := instruction.called()) in self.computations:
                yield from self._with_inner(self.computations[inner])

    def branches(self, conditional: Instruction) -> list[Computation]:
        """The computations of a `conditional`."""
        if listed := re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes):
            names = [name.strip().lstrip("%") for name in listed[1].split(",")]
        else:
            names = [conditional.called("true_computation"), conditional.called("false_computation")]
        return [self.computations[name] for name in names]


_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip


def goes_on(instruction: Instruction) -> bool:
    """Whether a TPU's fusion only goes on with a collective that an earlier one, async-collective-start, has begun."""
    return instruction.name.startswith("async-collective-done") or (instruction.called() or "").startswith(
        "async_collective_fusion"
    )


def is_collective(instruction: Instruction) -> bool:
    """Whether devices exchange data in it, or begin to."""
    return instruction.opcode.removesuffix("-start") in _COLLECTIVES


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a written result type: f32[8,128]{1,0:T(8,128)S(1)}, or a tuple of them."""
    found = []
    for dtype, sizes, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        shape = tuple(int(size) for size in sizes.split(",") if size)
        found.append(Array(dtype, shape, int(space[1]) if space else 0, _tiled(shape, layout)))
    return tuple(found)


def _tiled(shape: tuple[int, ...], layout: str) -> tuple[int, ...] | None:
    """{1,0,2:T(8,128)}: axis 2 is the outermost in memory, and the two innermost are cut into tiles of 8 x 128."""
    order, _, tiles = layout.partition(":")
    if not (tile := re.match(r"T\(([\d,]+)\)", tiles)):
        return None
    sizes = [shape[int(axis)] for axis in reversed(order.split(",")) if axis]
    edges = [int(edge) for edge in tile[1].split(",")]
    sizes = [1] * (len(edges) - len(sizes)) + sizes
    inner = [-(-size // edge) * edge for size, edge in zip(sizes[-len(edges) :], edges, strict=True)]
    return (*sizes[: -len(edges)], *inner)


def _instruction(line: str) -> Instruction | None:
    if not (found := _LINE.match(line)):
        return None
    rest = found[3]
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    if not (opcode := _OPCODE.match(rest, _skip_spaces(rest, end))):
        return None
    opened = opcode.end() - 1
    closed = _closing(rest, opened)
    arguments = rest[opened + 1 : closed - 1]
    return Instruction(
        name=found[2],
        opcode=opcode[1],
        results=arrays(rest[:end]),
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        arguments=arguments.strip(),
        attributes=rest[closed:],
        root=bool(found[1]),
    )


def _closing(text: str, start: int = 0) -> int:
    """The place after the parenthesis that closes the one at `start`."""
    depth = 0
    for bracket in re.finditer(r"[()]", text[start:]):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return start + bracket.end()
    return len(text)


def _skip_spaces(text: str, start: int) -> int:
    return start + len(text[start:]) - len(text[start:].lstrip())
