"""What compiled programs are said to do: read off programs whose collectives, loops and sizes are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from synthesizer_jax.analysis import traffic
from synthesizer_jax.analysis.collectives import axes_of, collectives, device_groups, summarize
from synthesizer_jax.analysis.hlo import Array, Module, arrays
from synthesizer_jax.sharding import MeshShape

MESH = {"data": 2, "fsdp": 2, "model": 2}


def mesh():
    return MeshShape(**MESH).build(jax.devices()[:8])


def program(function, *shapes, specs, **options):
    """(module, instructions that run) of a function compiled for 8 devices."""
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    with jax.set_mesh(mesh()):
        module = Module.parse(jax.jit(function, **options).lower(*structs).compile().as_text())
    return module, traffic.executed(module)


def per_device(body, out_specs):
    """`body` on each device's part of an array that is split over all axes."""
    return jax.shard_map(body, mesh=mesh(), in_specs=P(("data", "fsdp", "model")), out_specs=out_specs, check_vma=False)


# Collectives

ALL = P(("data", "fsdp", "model"))
BYTES = 4 * 5 * 3  # of a device's [5, 3] float32

KNOWN = {
    "psum over one axis": (lambda x: jax.lax.psum(x, "fsdp"), "all-reduce", "fsdp", 1, BYTES, BYTES),
    "psum over two axes": (lambda x: jax.lax.psum(x, ("data", "model")), "all-reduce", "data x model", 1, BYTES, 1.5 * BYTES),
    "all_gather": (lambda x: jax.lax.all_gather(x, "model"), "all-gather", "model", 1, 2 * BYTES, BYTES),
    "ppermute": (lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), "collective-permute", "data", 1, BYTES, BYTES),
    "psum in a loop of 5": (
        lambda x: jax.lax.scan(lambda c, _: (jnp.sin(jax.lax.psum(c, "model")), None), x, None, length=5)[0],
        "all-reduce", "model", 5, 5 * BYTES, 5 * BYTES,
    ),
    "psum in a loop of 3 in a loop of 4": (
        lambda x: jax.lax.fori_loop(
            0, 4, lambda _, c: jax.lax.fori_loop(0, 3, lambda _, d: jnp.sin(jax.lax.psum(d, "data")), c) + 1, x
        ),
        "all-reduce", "data", 12, 12 * BYTES, 12 * BYTES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_collective_is_found(name):
    body, *expected = KNOWN[name]
    module, executed = program(per_device(body, ALL), (40, 3), specs=[ALL])
    (found,) = summarize(collectives(module, executed, MESH))
    assert [found.kind, found.axes, found.count, found.bytes, found.sent] == expected


def test_a_reduction_that_leaves_each_device_its_part():
    module, executed = program(
        per_device(lambda x: jax.lax.psum_scatter(x, "model", scatter_dimension=0, tiled=True), ALL),
        (64, 3),
        specs=[ALL],
    )
    (found,) = collectives(module, executed, MESH)
    assert (found.kind, found.axes, found.shape, found.sent) == ("reduce-scatter", "model", (8, 3), 8 * 3 * 4 // 2)


def test_a_program_without_collectives_has_none():
    module, executed = program(per_device(jnp.sin, ALL), (40, 3), specs=[ALL])
    assert not collectives(module, executed, MESH)


def test_the_partitioner_splits_a_matrix_product_as_it_must():
    """Summed over a split axis: one all-reduce over it, of the device's part of the result."""
    specs = [P("data", "model"), P("model", None)]
    module, executed = program(lambda a, b: a @ b, (8, 6), (6, 10), specs=specs)
    (found,) = collectives(module, executed, MESH)
    assert (found.kind, found.axes, found.shape, found.devices) == ("all-reduce", "model", (4, 10), 2)
    assert traffic.matrix_flops(module, executed) == 2 * 4 * 3 * 10


GROUPS = {
    "replica_groups={{0,1},{2,3}}, x": [[0, 1], [2, 3]],
    "replica_groups={}, x": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "replica_groups=[4,2]<=[8], x": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "replica_groups=[4,2]<=[2,4]T(1,0), x": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "replica_groups=[2,4]<=[2,2,2]T(1,0,2), x": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "replica_groups=mesh['a'=2,'b'=1,'c'=4] {'c'}, x": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "replica_groups=mesh['a'=2,'b'=4] {'a'}, x": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, x": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}, x": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, x": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}, x": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "channel_id=1, source_target_pairs={{0,1},{1,0}}, x": [[0, 1], [1, 0]],
}


@pytest.mark.parametrize("text", GROUPS)
def test_all_ways_of_writing_groups(text):
    assert device_groups(text, 8).tolist() == GROUPS[text]


def test_groups_are_named_by_the_axes_of_the_mesh():
    def name(groups):
        return axes_of(np.array(groups), MESH)

    assert name([[0, 1], [2, 3], [4, 5], [6, 7]]) == "model"
    assert name([[0, 4], [1, 5], [2, 6], [3, 7]]) == "data"
    assert name([[0, 1, 4, 5], [2, 3, 6, 7]]) == "data x model"
    assert name([range(8)]) == "data x fsdp x model"
    assert name([[0], [1]]) == "none"
    assert name([[0, 7], [1, 6]]) == "part of data x fsdp x model"
    assert axes_of(np.array([[0, 1], [2, 3]]), {"data": 4, "model": 1}) == "part of data"


# Reading the text


def test_arrays_have_their_bytes_their_memory_and_their_padding():
    plain, packed, on_chip, minor, bits = arrays(
        "(f32[2,512]{1,0:T(8,128)}, /*index=1*/bf16[3,5]{1,0:T(8,128)(2,1)}, f32[]{:T(128)S(1)}, "
        "f32[1,2,512,512]{1,3,2,0:T(8,128)}, pred[7])"
    )
    assert plain == Array("f32", (2, 512), 0, (8, 512)) and (plain.bytes, plain.padded_bytes) == (4096, 16384)
    assert (packed.bytes, packed.padded_bytes) == (30, 8 * 128 * 2)
    assert (on_chip.space, on_chip.bytes, on_chip.in_memory) == (1, 4, 0)
    assert minor.padded_bytes == 64 * minor.bytes, "two heads innermost fill a tile of 128"
    assert (bits.bytes, str(bits)) == (7, "pred[7]")


TPU = """HloModule jit_step, is_scheduled=true

%fused (param_0: f32[4,100], param_1: s32[]) -> f32[1,100] {
  %param_0 = f32[4,100]{1,0:T(8,128)} parameter(0)
  %param_1 = s32[]{:T(128)S(2)} parameter(1)
  ROOT %slice.1 = f32[1,100]{1,0:T(8,128)} dynamic-slice(%param_0, %param_1, %param_1), dynamic_slice_sizes={1,100}
}

%update (param_0.1: f32[4,100], param_1.1: f32[1,100], param_2: s32[]) -> f32[4,100] {
  %param_0.1 = f32[4,100]{1,0} parameter(0)
  %param_1.1 = f32[1,100]{1,0} parameter(1)
  %param_2 = s32[]{S(2)} parameter(2)
  ROOT %dus = f32[4,100]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %param_2, %param_2)
}

%body (arg: (s32[], f32[4,100])) -> (s32[], f32[4,100]) {
  %arg = (s32[]{S(2)}, f32[4,100]{1,0}) parameter(0)
  %i = s32[]{S(2)} get-tuple-element(%arg), index=0
  %x = f32[4,100]{1,0} get-tuple-element(%arg), index=1
  %row = f32[1,100]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused
  %onchip = f32[1,100]{1,0:S(1)} negate(%row)
  %new = f32[4,100]{1,0} fusion(%x, %onchip, %i), kind=kLoop, calls=%update
  ROOT %out = (s32[]{S(2)}, f32[4,100]{1,0}) tuple(%i, %new)
}

%condition (arg.1: (s32[], f32[4,100])) -> pred[] {
  %arg.1 = (s32[]{S(2)}, f32[4,100]{1,0}) parameter(0)
  %j = s32[]{S(2)} get-tuple-element(%arg.1), index=0
  %limit = s32[]{:T(128)} constant(6)
  ROOT %less = pred[]{S(2)} compare(%j, %limit), direction=LT
}

ENTRY %main (p: f32[4,100]) -> f32[4,100] {
  %p = f32[4,100]{1,0} parameter(0)
  %zero = s32[]{S(2)} constant(0)
  %start = (s32[]{S(2)}, f32[4,100]{1,0}) tuple(%zero, %p)
  %loop = (s32[]{S(2)}, f32[4,100]{1,0}) while(%start), condition=%condition, body=%body
  %far = (f32[4,100]{1,0:S(1)}, f32[4,100]{1,0}, u32[]{S(2)}) copy-start(%p)
  %near = f32[4,100]{1,0:S(1)} copy-done(%far)
  ROOT %result = f32[4,100]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_bytes_through_memory_of_a_program_that_can_be_added_up_by_hand():
    module = Module.parse(TPU)
    executed = traffic.executed(module)
    row = 400
    # Each of 6 trips: a row read from x and written, the row read again, a row written in place; then x copied to the chip.
    assert traffic.memory_bytes(module, executed) == 6 * (2 * row + row + row) + 4 * row
    assert [times for _, one, times in executed if one.name == "row"] == [6]


def test_a_loop_that_goes_two_steps_at_a_time_has_half_the_trips():
    """As XLA makes them of a product and its collective, without saying how many trips they have."""
    text = TPU.replace(
        "  ROOT %out = (s32[]{S(2)}, f32[4,100]{1,0}) tuple(%i, %new)",
        "  %two = s32[]{:T(128)} constant(2)\n  %next = s32[]{S(2)} add(%i, %two)\n"
        "  ROOT %out = (s32[]{S(2)}, f32[4,100]{1,0}) tuple(%next, %new)",
    )
    for bound, trips in ((6, 3), (7, 4)):
        module = Module.parse(text.replace("constant(6)", f"constant({bound})"))
        assert [times for _, one, times in traffic.executed(module) if one.name == "row"] == [trips]


UNDER_WAY = """
%start (param_0: f32[2,100]) -> (f32[2,100], f32[8,100], u32[]) {
  %param_0 = f32[2,100]{1,0} parameter(0)
  %gather.1 = f32[8,100]{1,0} all-gather(%param_0), channel_id=6, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %tuple.1 = (f32[2,100]{1,0}, f32[8,100]{1,0}, u32[]{S(2)}) tuple(%param_0, %gather.1, %gather.1)
}

%async_collective_fusion.9 (param_1: f32[2,100], param_2: f32[8,100], param_3: f32[50]) -> (f32[50], f32[2,100], f32[8,100]) {
  %param_3 = f32[50]{0} parameter(2)
  %work = f32[50]{0} negate(%param_3)
  %param_1 = f32[2,100]{1,0} parameter(0)
  %param_2 = f32[8,100]{1,0} parameter(1)
  %gather.2 = f32[8,100]{1,0} all-gather(%param_1), channel_id=6, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %tuple.2 = (f32[50]{0}, f32[2,100]{1,0}, f32[8,100]{1,0}) tuple(%work, %param_1, %gather.2)
}

%done (param_4: f32[2,100], param_5: f32[8,100]) -> f32[8,100] {
  %param_4 = f32[2,100]{1,0} parameter(0)
  %param_5 = f32[8,100]{1,0} parameter(1)
  ROOT %gather.3 = f32[8,100]{1,0} all-gather(%param_4), channel_id=6, replica_groups=[2,4]<=[8], dimensions={0}
}

%all-reduce-scatter.1 (param_6: f32[8,100]) -> f32[2,100] {
  %param_6 = f32[8,100]{1,0} parameter(0)
  %place = s32[]{S(2)} partition-id()
  %sum.1 = f32[8,100]{1,0} all-reduce(%param_6), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %mine = f32[2,100]{1,0} dynamic-slice(%sum.1, %place, %place), dynamic_slice_sizes={2,100}
}

ENTRY %main (p: f32[2,100], q: f32[50]) -> f32[2,100] {
  %p = f32[2,100]{1,0} parameter(0)
  %q = f32[50]{0} parameter(1)
  %async-collective-start.5 = (f32[2,100]{1,0}, f32[8,100]{1,0}, u32[]{S(2)}) fusion(%p), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%start
  %one = f32[2,100]{1,0} get-tuple-element(%async-collective-start.5), index=0
  %all = f32[8,100]{1,0} get-tuple-element(%async-collective-start.5), index=1
  %fusion.9 = (f32[50]{0}, f32[2,100]{1,0}, f32[8,100]{1,0}) fusion(%one, %all, %q), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, calls=%async_collective_fusion.9
  %more = f32[8,100]{1,0} get-tuple-element(%fusion.9), index=2
  %async-collective-done.5 = f32[8,100]{1,0} fusion(%one, %more), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%done
  ROOT %fusion.2 = f32[2,100]{1,0} fusion(%async-collective-done.5), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_a_collective_that_goes_on_beside_other_work_counts_once():
    """TPU: it begins in one fusion, goes on in others, which hand its buffers on, and ends in a last one."""
    module = Module.parse(UNDER_WAY)
    executed = traffic.executed(module)
    gather, scatter = collectives(module, executed, MESH)
    assert (gather.kind, gather.axes, gather.times, gather.shape, gather.sent) == (
        "all-gather", "fsdp x model", 1, (8, 100), 3 * 800,
    )  # fmt: skip
    assert (scatter.kind, scatter.axes, scatter.bytes, scatter.sent) == ("reduce-scatter", "fsdp x model", 3200, 2400)
    assert traffic.memory_bytes(module, executed) == (800 + 3200) + (200 + 200) + (3200 + 800)


def test_a_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="text: expected a compiled program's, with an ENTRY computation"):
        Module.parse("module @jit_f {}")


CONVOLUTIONS = {  # as TPU programs write matrix products: 8 x 64 by 32 x 64, batched 8 x 2, and one along a window of padding
    "%c = f32[8,64,2,32] convolution(%a, %b), window={size=1x2 pad=0_0x1_1 rhs_reversal=0x1}, "
    "dim_labels=0bf1_i1o0->0b1f": ((8, 64, 128, 1), (128, 2, 32, 1), 2 * 8 * 64 * 128 * 2 * 32),
    "%c = f32[8,2,64,64] convolution(%a, %b), window={size=8x2 stride=7x1 lhs_dilate=8x2}, "
    "dim_labels=0b1f_0o1i->01bf": ((8, 64, 2, 32), (8, 64, 2, 32), 2 * 8 * 2 * 64 * 64 * 32),
    "%c = f32[64,16] convolution(%a, %b), dim_labels=bf_io->bf": ((64, 32), (32, 16), 2 * 64 * 32 * 16),
}


@pytest.mark.parametrize("line", CONVOLUTIONS)
def test_flops_of_matrix_products_written_as_convolutions(line):
    first, second, flops = CONVOLUTIONS[line]
    text = "ENTRY %main () -> f32[] {{\n  %a = f32[{}] parameter(0)\n  %b = f32[{}] parameter(1)\n  ROOT {}\n}}\n"
    module = Module.parse(text.format(*(",".join(map(str, shape)) for shape in (first, second)), line))
    assert traffic.matrix_flops(module, traffic.executed(module)) == flops
