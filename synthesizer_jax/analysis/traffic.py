"""What a compiled program does in one run: bytes through the device's main memory, operations of matrix products.

XLA's own `cost_analysis` counts a loop once; here a loop counts as often as it runs, and of a conditional the branch that moves
most. All numbers are of one device.
"""

import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

from synthesizer_jax.analysis.hlo import Computation, Instruction, Module, goes_on, is_collective

FREE = {  # neither read nor write main memory by themselves
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "opt-barrier", "domain",
}  # fmt: skip
_FREE_CALLS = ("AllocateBuffer", "Sharding", "AssumeGatherIndicesInBound")
_SLICES = ("dynamic-slice", "slice", "gather")
_FILLS = ("iota", "broadcast", "rng-bit-generator")

Executed = Iterable[tuple[Computation, Instruction, int]]


def executed(module: Module) -> list[tuple[Computation, Instruction, int]]:
    """The instructions that run by themselves: each with its computation and how often it runs."""
    return list(_executed(module, module.entry, 1))


def _executed(module: Module, computation: Computation, times: int) -> Iterator[tuple[Computation, Instruction, int]]:
    for instruction in computation.values():
        match instruction.opcode:
            case "while":
                body = module.computations[instruction.called("body")]
                yield from _executed(module, body, times * module.trips(instruction))
            case "conditional":
                branches = [list(_executed(module, branch, times)) for branch in module.branches(instruction)]
                yield from max(branches, key=lambda branch: memory_bytes(module, branch))
            case "call":
                yield from _executed(module, module.computations[instruction.called("to_apply")], times)
            case _:
                yield computation, instruction, times


# Bytes through main memory


def memory_bytes(module: Module, program: Executed) -> int:
    """The bytes that the instructions read from main memory (HBM) and write to it.

    A buffer on the chip costs nothing, a slice of a buffer its own size, an update in place what it writes. A cache, as
    CPUs and GPUs have, is not taken into account.
    """
    return sum(times * _moved(module, computation, instruction) for computation, instruction, times in program)


def _moved(module: Module, computation: Computation, instruction: Instruction) -> int:
    opcode, operands = instruction.opcode, computation.operands(instruction)
    if opcode in FREE or opcode.endswith(("-done", "-update")) or instruction.name.startswith("async-collective-done"):
        return 0
    if opcode == "custom-call" and any(f'"{name}"' in instruction.attributes for name in _FREE_CALLS):
        return 0
    if opcode == "fusion":
        return _fusion(module, instruction, operands)
    if opcode == "copy-start":
        target, source = instruction.results[0], operands[0]
        return (target.bytes if source.in_memory else 0) + target.in_memory
    if opcode in ("slice-start", "dynamic-slice-start"):
        piece = instruction.results[1]
        return (piece.bytes if operands[0].in_memory else 0) + piece.in_memory
    if opcode == "async-start":
        return _async(module, instruction, operands)
    if opcode == "dynamic-update-slice":
        update = operands[1]
        return update.in_memory + (update.bytes if instruction.in_memory else 0)
    if opcode in _SLICES[:2]:
        return (instruction.bytes if operands[0].in_memory else 0) + instruction.in_memory
    read = sum(operand.in_memory for operand in operands)
    written = instruction.in_memory
    if opcode.endswith("-start"):  # of a collective: its result repeats the operands
        written = max(written - read, 0) or written
    return read + written


def _async(module: Module, instruction: Instruction, operands: list[Instruction]) -> int:
    """Of what an async-start calls: a copy or a slice of what it reads."""
    inner = module.computations.get(instruction.called() or "")
    source = operands[0].in_memory if operands else 0
    if inner is None:
        return source
    result = inner.root
    read = sum(operand.in_memory for operand in operands) if is_collective(result) else min(result.bytes, source)
    return read + result.in_memory


def _fusion(module: Module, instruction: Instruction, operands: list[Instruction]) -> int:
    inner = module.computations[instruction.called()]
    passed = set(instruction.aliases.values()) if goes_on(instruction) else set()  # buffers of a collective under way
    read = 0
    for number, operand in enumerate(operands):
        whole = operand.in_memory
        if whole and number in inner.parameters and number not in passed:
            read += min(whole, _read(module, inner, inner.parameters[number], whole))
    return read + _written(module, instruction, inner)


def _read(module: Module, computation: Computation, source: Instruction, whole: int) -> int:
    """The bytes of `source` that its users in a fusion read: slices of it, or the whole."""
    if source.root and source.opcode == "parameter":
        return 0
    read = 0
    for user in computation.users.get(source.name, ()):
        first = user.operands[0] == source.name
        if user.opcode in _SLICES and first:
            read += user.bytes
        elif user.opcode == "dynamic-update-slice" and first and user.operands.count(source.name) == 1:
            continue  # written in place
        elif user.opcode == "bitcast":
            read += whole if user.root else _read(module, computation, user, whole)
        elif user.opcode == "fusion" and user.called() in module.computations:
            inner = module.computations[user.called()]
            number = user.operands.index(source.name)
            parameter = inner.parameters.get(number)
            if parameter is None:
                return whole
            if _passes(inner, parameter):
                read += whole if user.root else _read(module, computation, user, whole)
            else:
                read += _read(module, inner, parameter, whole)
        else:
            return whole
    return min(read, whole)


def _passes(computation: Computation, parameter: Instruction) -> bool:
    """Whether a fusion gives a parameter back as it is."""
    result = computation.root
    while result.opcode == "bitcast":
        result = computation[result.operands[0]]
    return result is parameter


def _written(module: Module, instruction: Instruction, inner: Computation) -> int:
    """A fusion's result, of updates in place what is new."""
    results = _behind(inner, inner.root, ("bitcast", "copy"))
    parts = inner.operands(results) if results.opcode == "tuple" else [results]
    if len(parts) != len(instruction.results):
        return 0 if goes_on(instruction) else instruction.in_memory
    passed = (
        instruction.aliases if goes_on(instruction) or instruction.name.startswith("async-collective-start") else {}
    )
    written = 0
    for number, (array, part) in enumerate(zip(instruction.results, parts, strict=True)):
        if array.space == 0 and number not in passed:
            written += min(array.bytes, _update_bytes(module, inner, part, array.bytes))
    return written


def _update_bytes(module: Module, computation: Computation, part: Instruction, whole: int) -> int:
    part = _behind(computation, part, ("bitcast",))
    if part.opcode == "fusion" and part.called() in module.computations:
        computation = module.computations[part.called()]
        part = _behind(computation, computation.root, ("bitcast",))
    if part.opcode == "dynamic-update-slice" and part.operands[1] in computation:
        return computation[part.operands[1]].bytes
    return whole


def _behind(computation: Computation, instruction: Instruction, opcodes: tuple[str, ...]) -> Instruction:
    while instruction.opcode in opcodes and instruction.operands and instruction.operands[0] in computation:
        instruction = computation[instruction.operands[0]]
    return instruction


# Operations


def matrix_flops(module: Module, program: Executed) -> int:
    """The operations of matrix products and convolutions, 2 for each multiplication and addition.

    Of a hand-written kernel (a custom call), what it says of itself.
    """
    return sum(times * _flops(module, computation, instruction) for computation, instruction, times in program)


def _flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    match instruction.opcode:
        case "dot":
            first = computation[instruction.operands[0]].results[0].shape
            contracted = _numbers(instruction.attributes, "lhs_contracting_dims")
            return 2 * instruction.results[0].size * math.prod(first[axis] for axis in contracted)
        case "convolution":
            return _convolution_flops(computation, instruction)
        case "custom-call":
            said = re.search(r'"cost_estimate":\{"flops":"(\d+)"', instruction.attributes)
            return int(said[1]) if said else 0
        case "fusion" | "async-start" | "call":
            inner = module.computations.get(instruction.called() or instruction.called("to_apply") or "")
            return sum(_flops(module, inner, found) for found in inner.values()) if inner else 0
    return 0


def _numbers(attributes: str, name: str) -> list[int]:
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", attributes)
    return [int(number) for number in found[1].split(",") if number] if found else []


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    """TPU programs write every matrix product as a convolution, most of whose window may lie on padding."""
    first, second = (computation[name].results[0].shape for name in instruction.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    image, kernel, result = labels.groups()
    groups = [int(n) for n in re.findall(r"(?:feature|batch)_group_count=(\d+)", instruction.attributes)]
    channels = first[image.index("f")] * second[kernel.index("o")] * first[image.index("b")] // math.prod(groups)
    window = _window(instruction.attributes)
    places = 1
    for digit in filter(str.isdigit, result):
        axis = int(digit)
        sizes = (
            first[image.index(digit)],
            second[kernel.index(digit)],
            instruction.results[0].shape[result.index(digit)],
        )
        places *= _real_products(*sizes, **{name: values[axis] for name, values in window.items()})
    return 2 * channels * places


def _window(attributes: str) -> dict[str, list]:
    """stride, low padding, dilation of image and kernel, reversal, of each spatial axis that has them."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in found[1].split()) if found else {}
    axes = len(fields.get("size", "").split("x")) if "size" in fields else 0
    numbers = {
        name: [int(n) for n in fields[key].split("x")] if key in fields else [1] * axes
        for name, key in (("stride", "stride"), ("dilation", "lhs_dilate"), ("kernel_dilation", "rhs_dilate"))
    }
    pads = fields.get("pad")
    return numbers | {"pad": [int(part.split("_")[0]) for part in pads.split("x")] if pads else [0] * axes}


def _real_products(image, kernel, result, stride, dilation, kernel_dilation, pad) -> int:
    """The (place of the result, place of the kernel) pairs along one axis that meet an entry of the image."""
    at = np.arange(result)[:, None] * stride + np.arange(kernel)[None, :] * kernel_dilation - pad
    return int(np.sum((at >= 0) & (at % dilation == 0) & (at < image * dilation)))
