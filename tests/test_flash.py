"""The fused kernel for TPU, interpreted, against the other paths and the oracle; and when it is chosen."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_attend
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from variants import VARIANTS, parametrized

import synthesizer_jax as sj
from synthesizer_jax import activations, sharding
from synthesizer_jax.analysis import topologies
from synthesizer_jax.analysis.hlo import Module
from synthesizer_jax.ops import flash_plan, flash_tpu, fused
from synthesizer_jax.ops.attend import _Masks
from synthesizer_jax.ops.flash_plan import MiB
from synthesizer_jax.ops.flash_tpu import Arrays, Options
from synthesizer_jax.scores.base import Scores

TOLERANCE = 2e-6  # of the array's size: float32 at highest precision; measured at most 1e-6
SERVED = [(name, spec) for name, spec in VARIANTS if not isinstance(spec, sj.FactorizedDense)]


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def drawn(b, q, k, h, r, d, bias=True, dtype=jnp.float32):
    """(query, key, values, bias [h, q, k] or None), a cotangent of the output."""
    arrays = [draw(*shape, seed=i) for i, shape in enumerate([(b, q, h, r), (b, k, h, r), (b, k, h, d), (b, q, h, d)])]
    arrays = [x.astype(dtype) for x in (arrays[0] * r**-0.5, *arrays[1:])]
    return (*arrays[:3], draw(h, q, k, seed=4) if bias else None), arrays[3]


def segments(b, n, seed):
    """Some of 0 (padding), at the end."""
    return jnp.asarray(np.sort(np.random.default_rng(seed).integers(0, 4, (b, n)), axis=1)[:, ::-1].copy())


def some_keys(b, k):
    """The first sequence has none."""
    return jnp.asarray(np.random.default_rng(7).random((b, k)) < 0.7).at[0].set(False)


def by_attend(path, masks, query, key, values, bias):
    bias = None if bias is None else bias[None]
    return sj.attend(Scores(query=query, key=key, bias=bias), values, path=path, **masks)


def value_and_gradients(function, arrays, cotangent):
    with jax.default_matmul_precision("highest"):
        out, pull_back = jax.vjp(function, *arrays)
        return out, *(g for g in pull_back(cotangent) if g is not None)


def assert_equal(actual, expected, tolerance=TOLERANCE):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert oracle.relative_error(one, other) < tolerance


# What the kernel computes


@parametrized(SERVED)
def test_every_variant_that_it_serves_equals_the_oracle(spec):
    """Values and gradients of every parameter; what it does not serve is refused with the reason."""
    served = {}
    for case in test_attend.CASES:
        tree = test_attend.drawn_tree(spec, case)
        try:
            jax.eval_shape(functools.partial(test_attend.heads, spec, "flash", case), tree)
        except ValueError as error:
            assert "path: 'flash' can't serve these scores: " in str(error)
        else:
            served[case] = tree
    low_rank = spec(test_attend.drawn_parameters(spec), *[draw(2, 6, 5)] * 2).query is not None
    packed_low_rank = isinstance(spec, sj.FactorizedRandom)
    assert bool(served) == (low_rank or packed_low_rank)
    cotangent = test_attend.draw((2, 6, 2, 3), 102)
    results = test_attend.all_cases(spec, "flash", served, cotangent)
    for case, tree in served.items():
        (_, out), gradients = results[case]
        reference = functools.partial(test_attend.reference, spec, case)
        expected, expected_gradients = oracle.gradients(reference, tree, cotangent)
        assert oracle.relative_error(out, expected) < test_attend.TOLERANCE, case
        assert oracle.worst(gradients, expected_gradients, floor=1.0) < (test_attend.TOLERANCE, ""), case


CASES = {  # b, q, k, h, r, d, bias; masks; MiB of VMEM
    "one block": ((2, 32, 128, 2, 64, 64, True), {}, 16),
    "odd lengths": ((2, 300, 300, 3, 64, 64, True), {"causal": True, "key_mask": True}, 16),
    "several blocks": ((4, 512, 512, 2, 64, 64, True), {"causal": True, "segments": True}, 12),
    "several blocks without causality": ((3, 384, 256, 2, 64, 64, True), {"key_mask": True}, 8),
    "a head fills the lanes": ((2, 128, 128, 2, 128, 128, True), {"causal": True}, 16),
    "more lanes for queries": ((2, 128, 128, 2, 128, 64, True), {"segments": True}, 16),
    "more lanes for values": ((2, 48, 48, 2, 64, 256, False), {"key_mask": True}, 16),
    "odd sizes": ((2, 32, 48, 3, 5, 3, True), {"causal": True, "q_offset": 16, "segments": True}, 16),
    "key mask and segments": ((2, 32, 32, 2, 8, 8, False), {"key_mask": True, "segments": True}, 16),
    "memory": ((2, 256, 384, 1, 128, 128, True), {"causal": True, "q_offset": 128}, 9),
}


def masks_of(masks, b, q, k):
    masks = dict(masks)
    if masks.pop("segments", False):
        masks |= {"q_segments": segments(b, q, 1), "k_segments": segments(b, k, 2)}
    if "key_mask" in masks:
        masks["key_mask"] = some_keys(b, k)
    return masks


def by_kernel(masks, vmem):
    options = Options(masks.get("causal", False), masks.get("q_offset", 0), vmem * MiB)
    own = [masks.get(name) for name in ("key_mask", "q_segments", "k_segments")]
    return lambda *arrays: flash_tpu.attention(options, Arrays(*arrays, *own))


@pytest.mark.parametrize("case", CASES)
def test_blocks_groups_and_tiles_equal_the_general_path(case):
    sizes, masks, vmem = CASES[case]
    arrays, cotangent = drawn(*sizes)
    masks = masks_of(masks, *sizes[:3])
    found = value_and_gradients(by_kernel(masks, vmem), arrays, cotangent)
    assert_equal(found, value_and_gradients(functools.partial(by_attend, "xla", masks), arrays, cotangent))


def test_the_cases_have_several_blocks_and_tiles():
    """Otherwise the test above would show little."""
    plans = [
        flash_plan.plan(
            flash_plan.sizes_of((b, q, h, r), (b, k, h, r), (b, k, h, d), 4, bias), flash_plan.budget(vmem * MiB)
        )
        for (b, q, k, h, r, d, bias), _, vmem in CASES.values()
    ]
    assert any(forward.queries < 512 for forward, _ in plans)
    backward = [(blocks, sizes[0][:2]) for (_, blocks), sizes in zip(plans, CASES.values(), strict=True)]
    assert any(blocks.queries < q and 1 < blocks.tile for blocks, (b, q) in backward)
    assert any(blocks.queries < q and blocks.tile < b for blocks, (b, q) in backward)


def test_bfloat16_is_as_good_as_the_general_path():
    """Against float32: the error is that of the inputs' and the results' rounding, 2^-8 of the array's size."""
    sizes = (2, 64, 64, 2, 64, 64)
    arrays, cotangent = drawn(*sizes)
    masks = {"causal": True}
    exact = value_and_gradients(functools.partial(by_attend, "xla", masks), arrays, cotangent)
    rounded = [None if x is None else x.astype(jnp.bfloat16) for x in arrays[:3]] + [arrays[3]]
    errors = {}
    for path in ("flash", "xla"):
        found = value_and_gradients(functools.partial(by_attend, path, masks), rounded, cotangent.astype(jnp.bfloat16))
        errors[path] = [oracle.relative_error(np.asarray(x, np.float32), y) for x, y in zip(found, exact, strict=True)]
    assert max(errors["flash"]) < 2**-6
    assert max(a / b for a, b in zip(errors["flash"], errors["xla"], strict=True)) < 1.5


ADVERSARIES = {
    "entries of +-200": lambda bias: jnp.sign(bias) * 200,
    "masked keys far above": lambda bias: bias.at[:, :, 5].set(1e4),
    "entries of -1e30": lambda bias: bias.at[:, 3].set(-1e30),
    "entries of 1e30": lambda bias: bias.at[:, 3, ::2].set(1e30),
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_adversarial_bias(name):
    arrays, cotangent = drawn(2, 32, 32, 2, 8, 8)
    arrays = (*arrays[:3], ADVERSARIES[name](arrays[3]))
    masks = {"key_mask": some_keys(2, 32).at[1].set(True).at[1, 5].set(False)}
    found = value_and_gradients(functools.partial(by_attend, "flash", masks), arrays, cotangent)
    assert not np.any(found[0][0]), "a sequence without keys"
    assert_equal(found, value_and_gradients(functools.partial(by_attend, "xla", masks), arrays, cotangent))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("mask", ["key_mask", "segments", "allowed", "mask"])
def test_what_nobody_sees_is_irrelevant(mask, poison):
    arrays, cotangent = drawn(2, 32, 32, 2, 8, 8)
    seen = np.ones((2, 32), bool)
    seen[:, 20:] = False
    everybodys = jnp.asarray(np.broadcast_to(seen[0], (32, 32)))
    numbers = jnp.asarray(seen.astype(np.int32))
    masks = {
        "key_mask": {"key_mask": jnp.asarray(seen)},
        "segments": {"q_segments": jnp.ones_like(numbers), "k_segments": numbers},
        "allowed": {"allowed": everybodys},
        "mask": {"mask": everybodys[None, None]},
    }[mask]
    run = functools.partial(by_attend, "flash", masks)
    hidden = [x.at[:, 20:].set(poison) for x in arrays[1:3]]
    clean = value_and_gradients(run, arrays, cotangent)
    found = value_and_gradients(run, (arrays[0], *hidden, arrays[3]), cotangent)
    for one, other in zip(found, clean, strict=True):
        np.testing.assert_array_equal(one, other)
    assert_equal(clean, value_and_gradients(functools.partial(by_attend, "xla", masks), arrays, cotangent))


@pytest.mark.parametrize("data,model", [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_each_device_of_a_mesh_works_on_its_rows_and_heads(data, model):
    """4 heads do not divide over 8 devices: there each has all of them. Microbatches, too, that see a part of the batch."""
    arrays, cotangent = drawn(8, 24, 24, 4, 8, 8)
    own = segments(8, 24, 3)
    masks = {"causal": True, "q_segments": own, "k_segments": own}
    expected = value_and_gradients(functools.partial(by_attend, "xla", masks), arrays, cotangent)
    mesh = sharding.MeshShape(data=data, model=model).build(jax.devices())
    split = NamedSharding(mesh, PartitionSpec("data", None, "model" if 4 % model == 0 else None))
    whole = NamedSharding(mesh, PartitionSpec())
    with sharding.on(mesh):
        run = jax.jit(lambda *a: value_and_gradients(functools.partial(by_attend, "flash", masks), a, cotangent))
        placed = [jax.device_put(x, split if x.ndim == 4 else whole) for x in arrays]
        compiled = run.lower(*placed).compile()
        assert_equal(compiled(*placed), expected)
        found = {
            one.opcode
            for computation in Module.parse(compiled.as_text()).computations.values()
            for one in computation.values()
        }
        assert "all-gather" not in found and "all-to-all" not in found
        assert ("all-reduce" in found) == (data > 1), "the bias's gradient, and nothing else"
        if data > 1:
            assert_equal(jax.jit(functools.partial(in_parts, data))(arrays, cotangent, own), expected)


def in_parts(count, arrays, cotangent, own):
    query, key, values, bias = arrays

    def parted(x):
        return x.reshape(count, -1, *x.shape[1:])

    def of_part(query, key, values, cotangent, own):
        masks = {"causal": True, "q_segments": own, "k_segments": own}
        return value_and_gradients(functools.partial(by_attend, "flash", masks), (query, key, values, bias), cotangent)

    of_parts = activations.part_by_part(of_part, "data")
    *rows, d_bias = of_parts(*map(parted, (query, key, values, cotangent, own)))
    return *(x.reshape(-1, *x.shape[2:]) for x in rows), jnp.sum(d_bias, axis=0)


# When it is chosen


def on_one(kind):
    """A mesh of one described device of this kind, or of a CPU."""
    devices = jax.devices() if kind == "cpu" else topologies.topology(kind).devices
    return Mesh(np.array(devices[:1]).reshape(1, 1, 1), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def chosen(topology, scores, values, **masks):
    """The path that "auto" takes, read off the program."""
    with sharding.on(on_one(topology)):
        text = str(jax.make_jaxpr(lambda s, v: sj.attend(s, v, **masks))(scores, values))
    return "flash" if "synthesizer_attention" in text else "xla"


def test_auto_takes_the_kernel_on_tpus_and_says_why_not(caplog):
    pytest.importorskip("libtpu")
    fused._tell.cache_clear()
    caplog.set_level(logging.INFO, logger="synthesizer_jax.ops.fused")
    arrays, _ = drawn(2, 64, 64, 2, 8, 8)
    query, key, values, bias = arrays
    scores = Scores(query=query, key=key, bias=bias[None])
    own = Scores(query=query, key=key, bias=jnp.stack([bias, bias]))
    assert chosen("v5e:2x2", scores, values, causal=True) == "flash"
    assert chosen("v5e:2x2", scores, values) == "flash"
    assert chosen("cpu", scores, values) == "xla"
    reasons = {
        "there is no kernel for TPU v3": chosen("v3:2x2", scores, values),
        "each sequence has a bias of its own": chosen("v5e:2x2", own, values),
        "fewer than 64 queries or keys": chosen("v5e:2x2", Scores(query=query[:, :1], key=key), values),
        "numbers are float16": chosen(
            "v5e:2x2", Scores(*(x.astype(jnp.float16) for x in (query, key))), values.astype("float16")
        ),
        "does not fit into 16 MiB": chosen("v4:2x2x1", *long()),
        "a mask of its own": chosen("v5e:2x2", scores, values, mask=jnp.ones((2, 1, 64, 64), bool)),
    }
    assert set(reasons.values()) == {"xla"}
    messages = [record.getMessage() for record in caplog.records]
    for reason in reasons:
        assert sum(reason in message for message in messages) == 1, reason
    assert sum("'flash'" in message for message in messages) == 1, "once, though it was taken twice"


def long():
    rows = jnp.zeros((1, 1 << 14, 1, 8))
    return Scores(query=rows, key=rows), rows


def test_a_mesh_that_is_not_ours_needs_shard_map():
    pytest.importorskip("libtpu")
    arrays, _ = drawn(2, 64, 64, 2, 8, 8, bias=False)
    scores, values = Scores(*arrays[:2]), arrays[2]
    devices = np.array(topologies.topology("v5e:2x2").devices[:2])
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert "synthesizer_attention" not in str(jax.make_jaxpr(sj.attend)(scores, values))
        rows = PartitionSpec("x")
        inside = jax.shard_map(sj.attend, in_specs=(rows, rows), out_specs=rows, check_vma=False)
        assert "synthesizer_attention" in str(jax.make_jaxpr(inside)(scores, values))


@pytest.mark.parametrize(
    "change,expected",
    [
        (lambda s: Scores(bias=s.bias), "they have no low-rank part"),
        (lambda s: Scores(query=s.query, key=s.key, bias=jnp.concatenate([s.bias] * 2)), "a bias of its own"),
        (lambda s: Scores(query=s.query, key=s.key, factor=jnp.ones((1, 2, 32, 32))), "without a logarithm"),
        (lambda s: Scores(query=s.query.astype(jnp.bfloat16), key=s.key), "queries, keys and values are bfloat16"),
    ],
)
def test_what_it_can_not_serve_is_refused(change, expected):
    (query, key, values, bias), _ = drawn(2, 32, 32, 2, 8, 8)
    with pytest.raises(ValueError, match=f"path: 'flash' can't serve these scores: .*{expected}.*use path='auto'"):
        sj.attend(change(Scores(query=query, key=key, bias=bias[None])), values, path="flash")


def test_a_second_derivative_is_refused():
    (query, key, values, bias), _ = drawn(2, 16, 16, 2, 8, 8)

    def gradient(path, bias):
        return jnp.sum(jax.grad(lambda bias: jnp.sum(by_attend(path, {}, query, key, values, bias) ** 2))(bias))

    assert np.any(jax.grad(functools.partial(gradient, "xla"))(bias))
    with pytest.raises(NotImplementedError, match="can't be differentiated again; use path='xla'"):
        jax.grad(functools.partial(gradient, "flash"))(bias)


# On GPU: cuDNN's attention itself needs a GPU; all around it is shown with XLA's


@pytest.mark.parametrize("case", ["nothing", "causal", "key_mask", "segments", "bias", "causal bias"])
def test_around_cudnn(case):
    arrays, cotangent = drawn(2, 32, 32, 2, 8, 8, bias="bias" in case)
    masks = {"causal": "causal" in case}
    if case in ("key_mask", "segments"):
        masks = masks_of({case: True}, 2, 32, 32)
    full = dict.fromkeys(("key_mask", "q_segments", "k_segments", "allowed", "mask")) | {"causal": False, "q_offset": 0}
    from_attend = _Masks(**(full | masks))

    def run(query, key, values, bias):
        return fused.cudnn(query, key, values, bias, from_attend, implementation="xla")

    found = value_and_gradients(run, arrays, cotangent)
    assert_equal(found, value_and_gradients(functools.partial(by_attend, "xla", masks), arrays, cotangent))
    if case == "segments":
        hidden = (masks["k_segments"] == 0)[:, :, None, None]
        poisoned = [jnp.where(hidden, jnp.nan, x) for x in arrays[1:3]]
        for one, other in zip(value_and_gradients(run, (arrays[0], *poisoned, None), cotangent), found, strict=True):
            np.testing.assert_array_equal(one, other)
