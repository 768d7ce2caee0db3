"""How the fused kernel's work is cut into blocks: what fits into a TPU's fast memory (VMEM), and moves the fewest bytes."""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

LANES = 128
SUBLANES = 16  # rows of a tile of 16-bit numbers
MASKED = -2e38  # lower than any score; a row whose maximum is below half of it has no key
_LARGEST_BLOCK = 1024  # queries: more would fetch little less
_LARGEST_LOGITS = 2**20  # queries x keys, 4 MiB of which several are alive at a time

MiB = 2**20
VMEM = {  # of a core, and what of it a kernel is given; the rest is XLA's
    "TPU v4": 16 * MiB,
    "TPU v5 lite": 128 * MiB,
    "TPU v5e": 128 * MiB,
    "TPU v5": 64 * MiB,
    "TPU v5p": 64 * MiB,
    "TPU v6 lite": 128 * MiB,
    "TPU v6e": 128 * MiB,
    "TPU7x": 64 * MiB,
}
SMALLEST_VMEM = min(VMEM.values())


class Sizes(NamedTuple):
    """The shapes that a plan depends on, as the kernel sees them: lengths and sizes padded."""

    batch: int
    q_length: int
    k_length: int
    groups: int  # of heads
    heads: int  # in a group
    query: int  # lanes of a group's queries and keys
    values: int  # lanes of a group's values
    itemsize: int  # bytes of a number of these
    bias: bool


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work of one pass is cut: queries in a block, sequences in a tile."""

    queries: int
    tile: int
    vmem: int  # bytes, by the formulas below
    moved: int  # bytes to and from HBM, counting what is fetched again


def forward_vmem(sizes: Sizes, queries: int) -> int:
    """Bytes of VMEM of a forward instance: blocks twice, as the next ones are fetched meanwhile, and logits."""
    blocks = queries * (sizes.query + sizes.values) + sizes.k_length * (sizes.query + sizes.values)
    bias = 4 * sizes.heads * queries * sizes.k_length if sizes.bias else 0
    logits = queries * sizes.k_length * (3 * 4 + sizes.itemsize)
    return 2 * (blocks * sizes.itemsize + bias) + logits + 2 * 4 * queries * sizes.values + _in_parts(sizes, queries)


def backward_vmem(sizes: Sizes, queries: int, tile: int) -> int:
    """Bytes of VMEM of a backward instance."""
    widths = sizes.query + sizes.values
    blocks = queries * (sizes.query + widths) + 2 * sizes.k_length * widths
    bias = 2 * 4 * sizes.heads * queries * sizes.k_length if sizes.bias else 0
    logits = queries * sizes.k_length * (5 * 4 + 2 * sizes.itemsize)
    sums = 4 * sizes.k_length * widths * (1 + (tile if queries < sizes.q_length else 1))
    return 2 * (blocks * sizes.itemsize + bias) + logits + sums + _in_parts(sizes, queries)


def _in_parts(sizes, queries):
    """Operands of products in float32 are taken apart into three arrays of bfloat16."""
    rows = (queries + sizes.k_length) * (sizes.query + sizes.values)
    return 0 if sizes.itemsize < 4 else 3 * 2 * rows


def _forward_moved(sizes, queries):
    """Keys and values are fetched for every block of queries; the bias once."""
    rows = sizes.batch * sizes.groups * sizes.itemsize * (sizes.query + sizes.values)
    again = math.ceil(sizes.q_length / queries)
    table = 4 * sizes.groups * sizes.heads * sizes.q_length * sizes.k_length if sizes.bias else 0
    return rows * (sizes.q_length + again * sizes.k_length) + table


def _backward_moved(sizes, queries, tile):
    widths, again, tiles = sizes.query + sizes.values, math.ceil(sizes.q_length / queries), sizes.batch // tile
    rows = sizes.batch * sizes.groups * sizes.itemsize
    rows *= sizes.q_length * (sizes.query + widths) + (1 + again) * sizes.k_length * widths
    table = 4 * sizes.groups * sizes.heads * sizes.q_length * sizes.k_length if sizes.bias else 0
    return rows + table * (
        tiles + (1 if tiles == 1 else 2 * tiles + 1)
    )  # one sum for each tile is written, and read again


@functools.cache
def plan(sizes: Sizes, vmem: int) -> tuple[Blocks, Blocks] | None:
    """The blocks of the forward and the backward pass that move the fewest bytes within `vmem`; None where none fits."""
    largest = min(sizes.q_length, _LARGEST_BLOCK, max(SUBLANES, _LARGEST_LOGITS // sizes.k_length))
    queries = [n for n in range(SUBLANES, largest + 1, SUBLANES) if sizes.q_length % n == 0]
    tiles = [n for n in range(1, sizes.batch + 1) if sizes.batch % n == 0]
    forward = [Blocks(n, 1, forward_vmem(sizes, n), _forward_moved(sizes, n)) for n in queries]
    backward = [
        Blocks(n, tile, backward_vmem(sizes, n, tile), _backward_moved(sizes, n, tile))
        for n, tile in itertools.product(queries, tiles)
        if n < sizes.q_length or tile == sizes.batch  # a single block of queries needs no sums over blocks
    ]
    found = [
        min((b for b in blocks if b.vmem <= vmem), key=lambda b: (b.moved, b.vmem), default=None)
        for blocks in (forward, backward)
    ]
    return None if None in found else tuple(found)


def budget(vmem: int) -> int:
    """What a plan may fill by its formulas: the compiler needs some more, and XLA keeps other arrays there."""
    return vmem * 3 // 4 if vmem > 16 * MiB else vmem - 5 * MiB


def limit(blocks, vmem):
    """Bytes of VMEM that the compiler may use."""
    return min(max(blocks.vmem + 2 * MiB, 16 * MiB), vmem - MiB)


def sizes_of(query: tuple[int, ...], key: tuple[int, ...], values: tuple[int, ...], itemsize: int, bias: bool) -> Sizes:
    """What the kernel makes of shapes [b, n, h, size]: lanes filled by groups of heads, lengths padded to whole tiles."""
    size = _lane_size(values[3])
    heads = max(LANES // size, 1)
    rank = max(_lane_size(query[3]), LANES // heads)
    return Sizes(
        batch=query[0],
        q_length=up(query[1], LANES if query[1] > LANES else SUBLANES),
        k_length=up(key[1], LANES),
        groups=math.ceil(query[2] / heads),
        heads=heads,
        query=heads * rank,
        values=heads * size,
        itemsize=itemsize,
        bias=bias,
    )


def _lane_size(size):
    """A head's lanes: a part of 128 that is a power of 2, or a multiple of 128."""
    return up(size, LANES) if size > LANES else max(8, 1 << (size - 1).bit_length())


def up(size, multiple):
    return -(-size // multiple) * multiple
