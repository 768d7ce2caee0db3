"""The fused kernel as libtpu compiles it: for each generation, within the planned VMEM, and what it moves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import synthesizer_jax as sj
from synthesizer_jax.analysis import topologies, traffic
from synthesizer_jax.analysis.hlo import Module
from synthesizer_jax.ops import flash_kernels, flash_plan, flash_tpu
from synthesizer_jax.ops.flash_plan import MiB
from synthesizer_jax.ops.flash_tpu import Arrays, Options
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.optimizer import Adafactor, Constant
from synthesizer_jax.training.step import Trainer

pytest.importorskip("libtpu")

V5E = "v5e:2x2"


def compiled(function, shapes, topology):
    """function compiled for one device."""
    mesh = Mesh(np.array(topologies.topology(topology).devices[:1]), ("x",))
    one = NamedSharding(mesh, PartitionSpec())
    return jax.jit(function, in_shardings=one, out_shardings=one).lower(*shapes).compile()


def shapes_of(b, n, h, r, d, dtype, bias=True, k=None):
    """Of query, key, values, bias, and the cotangent."""
    sizes = [(b, n, h, r), (b, k or n, h, r), (b, k or n, h, d), (b, n, h, d)]
    query, key, values, cotangent = [jax.ShapeDtypeStruct(size, dtype) for size in sizes]
    return query, key, values, jax.ShapeDtypeStruct((h, n, k or n), jnp.float32) if bias else None, cotangent


def both_passes(attention):
    def run(query, key, values, bias, cotangent, marks=None):
        out, pull_back = jax.vjp(functools.partial(attention, marks), query, key, values, bias)
        return out, pull_back(cotangent)

    return run


def by_kernel(topology, causal, mask):
    vmem = flash_plan.VMEM[topologies.topology(topology).devices[0].device_kind]

    def attention(marks, *arrays):
        own = {"key_mask": (marks, None, None), "segments": (None, marks, marks), None: (None,) * 3}[mask]
        return flash_tpu.attention(Options(causal, 0, vmem), Arrays(*arrays, *own))

    return attention


def by_xla(marks, query, key, values, bias):
    """Unfused, with JAX's own gradients."""
    logits = jnp.einsum("bqhr,bkhr->bhqk", query, key, preferred_element_type=jnp.float32) + bias
    length = query.shape[1]
    logits = jnp.where(jnp.tril(jnp.ones((length, length), bool)), logits, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits).astype(values.dtype), values)


@pytest.mark.parametrize("topology", ["v4:2x2x1", V5E, "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize(
    "sizes,dtype,causal,mask",
    [
        ((2, 256, 2, 64, 64), "bfloat16", True, "segments"),
        ((2, 384, 1, 128, 128), "bfloat16", False, "key_mask"),
        ((2, 200, 3, 128, 64), "float32", True, "key_mask"),
        pytest.param((2, 1024, 4, 64, 64), "bfloat16", True, "segments", marks=pytest.mark.slow),
        pytest.param((2, 1024, 4, 64, 64), "float32", True, "segments", marks=pytest.mark.slow),
    ],
)
def test_it_compiles_within_the_planned_vmem(monkeypatch, topology, sizes, dtype, causal, mask):
    """With no byte more than the formula says, libtpu finds room for each pass."""
    monkeypatch.setattr(flash_kernels, "limit", lambda blocks, vmem: blocks.vmem)
    shapes = shapes_of(*sizes, jnp.dtype(dtype))
    marks = jax.ShapeDtypeStruct(sizes[:2], jnp.bool_ if mask == "key_mask" else jnp.int32)
    program = compiled(both_passes(by_kernel(topology, causal, mask)), (*shapes, marks), topology)
    assert program.as_text().count("tpu_custom_call") == 2


def test_too_little_vmem_is_noticed(monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(flash_kernels, "limit", lambda blocks, vmem: blocks.vmem // 16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)vmem|scoped"):
        compiled(both_passes(by_kernel(V5E, True, None)), shapes_of(2, 512, 2, 64, 64, jnp.bfloat16), V5E)


@pytest.mark.parametrize("vmem", [16, 64, 128])
@pytest.mark.parametrize("length", [128, 640, 1024, 4096])
def test_a_plan_fits_and_divides(vmem, length):
    sizes = flash_plan.sizes_of((6, length, 12, 64), (6, length, 12, 64), (6, length, 12, 64), 2, True)
    found = flash_plan.plan(sizes, flash_plan.budget(vmem * MiB))
    if found is None:
        assert vmem == 16 and length == 4096, "a row of 4,096 keys for two heads does not fit into a v4's 16 MiB"
        return
    for blocks in found:
        assert blocks.vmem <= flash_plan.budget(vmem * MiB)
        assert sizes.q_length % blocks.queries == 0 and sizes.batch % blocks.tile == 0


def moved(program):
    module = Module.parse(program.as_text())
    return traffic.memory_bytes(module, traffic.executed(module))


def flops(program):
    module = Module.parse(program.as_text())
    return traffic.matrix_flops(module, traffic.executed(module))


def elements(program):
    """Of the largest array of the program."""
    module = Module.parse(program.as_text())
    return max(
        shape.size for computation in module.computations.values() for i in computation.values() for shape in i.results
    )


@pytest.mark.parametrize(
    "sizes,most",
    [
        ((128, 512), 0.28),
        pytest.param((16, 1024), 0.17, marks=pytest.mark.slow),
        pytest.param((16, 2048), 0.08, marks=pytest.mark.slow),
    ],
)
def test_bytes_beside_xlas_unfused_attention(sizes, most):
    """12 x 64 heads, bfloat16, a bias for each head, causal; both passes."""
    shapes = shapes_of(*sizes, 12, 64, 64, jnp.bfloat16)
    kernel = compiled(both_passes(by_kernel(V5E, True, None)), shapes, V5E)
    unfused = compiled(both_passes(by_xla), shapes, V5E)
    assert moved(kernel) < most * moved(unfused)
    b, n = sizes
    logits = b * 12 * n**2
    products = flops(kernel)
    # 2 products of 64 forward and 5 backward; of a causal row's pairs, 62.5 % are computed.
    assert products == pytest.approx(0.625 * 7 * 2 * 64 * logits)
    assert products < flops(unfused)
    assert elements(kernel) < logits <= elements(unfused)


def step(config, mesh, batch, lengths, topology=V5E):
    trainer = Trainer(config, Adafactor(Constant(1e-3)), mesh.build(topologies.topology(topology).devices))
    shapes = config.batch.shapes(batch, lengths, packed=False)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    return trainer.train_step().lower(trainer.abstract_state(), batch).compile()


@pytest.mark.parametrize(
    "heads,batch,lengths",
    [(4, 16, (128, 128)), pytest.param(12, 128, (512, 114), marks=pytest.mark.slow)],
)
def test_a_training_step_of_r_and_v_has_the_kernel(heads, batch, lengths):
    """On a data x model mesh, without an array of the b * h * q * k numbers of a device."""
    lengths = dict(zip(("inputs", "targets"), lengths, strict=True))
    config = sj.paper_c4_base(attention="R+V", dtype="bfloat16", max_length=lengths["inputs"])
    if heads == 4:
        sizes = {"features": 160, "mlp_features": 384, "vocab_size": 640, "encoder_layers": 3, "decoder_layers": 3}
        config = dataclasses.replace(config, heads=heads, head_dim=64, cross_heads=heads, cross_head_dim=64, **sizes)
    program = step(config, MeshShape(data=2, model=2), batch, lengths)
    text = program.as_text()
    assert text.count("tpu_custom_call") == 3 * 2  # self-attention of both stacks and cross-attention, both passes
    of_device = (batch // 2) * (config.heads // 2) * lengths["inputs"] ** 2
    assert not with_shape(program, of_device)


def with_shape(program, size):
    module = Module.parse(program.as_text())
    return [i.name for c in module.computations.values() for i in c.values() for s in i.results if s.size == size]
