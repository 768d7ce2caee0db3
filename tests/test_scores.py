"""Scores: values and gradients against the oracle, declarations, the notation, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from variants import KERNELS, VARIANTS, parametrized

import synthesizer_jax as sj
from synthesizer_jax.axes import LOGICAL_AXES, Param

DIMS = sj.Dims(features=6, heads=2, head_dim=4)
BATCH, LENGTH = 2, 6
TOLERANCE = 1e-5  # float32: a few dozen roundings of 6e-8 on sums of a few dozen terms

POSITIONS = {
    "default": None,
    "shared": np.array([3, 0, 5, 1, 4, 2], np.int32),
    "per_sequence": np.array([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]], np.int32),
}

parametrize_variants = parametrized(VARIANTS)
parametrize_scores = parametrized(VARIANTS + KERNELS)


def draw(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def drawn_parameters(spec, seed=1):
    """Parameters of the declared shapes, biases and mixture weights away from 0."""
    declared = spec.params(DIMS)
    flat, structure = jax.tree.flatten(declared, is_leaf=lambda leaf: isinstance(leaf, Param))
    return structure.unflatten([jnp.asarray(draw(p.shape, seed + i)) / 2 for i, p in enumerate(flat)])


@functools.partial(jax.jit, static_argnums=0, compiler_options=oracle.QUICK_TO_COMPILE)
def logits_and_gradients(spec, tree, cotangents):
    """For each way of giving positions: logits [b, h, q, k] and the gradient of their product with the cotangent."""

    def loss(tree, positions, cotangent):
        positions = None if positions is None else jnp.asarray(positions)
        s = spec(tree["params"], tree["x"], tree["x"], positions, positions)
        logits = jnp.broadcast_to(s.logits(), cotangent.shape)
        return jnp.sum(logits * cotangent), logits

    with jax.default_matmul_precision("highest"):
        return {
            name: jax.value_and_grad(loss, has_aux=True)(tree, positions, cotangents[name])
            for name, positions in POSITIONS.items()
        }


@parametrize_variants
def test_equal_the_oracle(spec):
    tree = {"x": draw((BATCH, LENGTH, DIMS.features), 0), "params": drawn_parameters(spec)}
    cotangents = {name: draw((BATCH, DIMS.heads, LENGTH, LENGTH), 7 + i) for i, name in enumerate(POSITIONS)}
    results = logits_and_gradients(spec, tree, cotangents)
    for name, positions in POSITIONS.items():
        (_, logits), gradients = results[name]

        def reference(t, positions=positions):
            return oracle.logits(spec, t["params"], t["x"], q_positions=positions)

        expected, expected_gradients = oracle.gradients(reference, tree, cotangents[name])
        assert oracle.relative_error(logits, expected) < TOLERANCE, name
        assert oracle.worst(gradients, expected_gradients) < (TOLERANCE, ""), name


@parametrize_scores
def test_declarations(spec):
    declared = spec.params(DIMS)
    params = jax.eval_shape(lambda key: spec.init(key, DIMS), jax.random.key(0))
    flat, structure = jax.tree.flatten(declared, is_leaf=lambda leaf: isinstance(leaf, Param))
    assert structure == jax.tree.structure(params)
    for param, array in zip(flat, jax.tree.leaves(params), strict=True):
        assert param.shape == array.shape
        assert array.dtype == jnp.float32
        assert len(param.axes) == len(param.shape)
        assert all(axis is None or axis in LOGICAL_AXES for axis in param.axes)
    half = jax.eval_shape(lambda key: spec.init(key, DIMS, jnp.bfloat16), jax.random.key(0))
    assert {a.dtype for a in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


@parametrize_scores
def test_equal_and_hashable_by_value(spec):
    copy = dataclasses.replace(spec)
    assert copy == spec and copy is not spec and hash(copy) == hash(spec)


@parametrize_scores
def test_lengths_above_the_maximum_are_refused(spec):
    if spec.longest() is None:
        pytest.skip("any length")
    n = spec.longest()
    params = jax.eval_shape(lambda key: spec.init(key, DIMS), jax.random.key(0))

    def trace(q, k):
        inputs = [jax.ShapeDtypeStruct((1, length, 6), jnp.float32) for length in (q, k)]
        return jax.eval_shape(lambda params, x_q, x_k: spec(params, x_q, x_k).logits(), params, *inputs)

    for q, k in ((n + 1, n + 1), (1, n + 1), (n + 1, 1)):
        with pytest.raises(ValueError, match=rf"length {n + 1} is more than max_length={n}"):
            trace(q, k)
    trace(n, n)


@parametrize_scores
def test_known_positions_out_of_range_are_refused(spec):
    if spec.longest() is None:
        pytest.skip("any position")
    params, x = drawn_parameters(spec), jnp.zeros((1, 2, 6))
    for bad in (spec.longest(), -1):
        positions = jnp.array([0, bad], jnp.int32)
        with pytest.raises(ValueError, match=rf"expected positions from 0 to max_length - 1 = {spec.longest() - 1}"):
            spec(params, x, x, positions, positions)


@parametrize_scores
def test_traced_positions_out_of_range_give_nan(spec):
    """JAX would clamp or wrap them and read another position's scores."""
    if spec.longest() is None:
        pytest.skip("any position")
    params, x = jax.tree.map(jnp.abs, drawn_parameters(spec)), jnp.ones((1, 2, 6))
    logits = jax.jit(lambda positions: spec(params, x, x, positions, positions).logits())
    inputs = jax.jit(lambda positions: spec.value_inputs(params, x, positions))
    for bad in (spec.longest(), -1):
        for shape in ((2,), (1, 2)):
            positions = jnp.array([0, bad], jnp.int32).reshape(shape)
            found = logits(positions)
            in_values = np.isnan(inputs(positions)[:, 1]).all()
            assert np.isnan(found[..., 1]).all() or in_values, (bad, shape)
            assert np.isfinite(found[..., 0, 0]).all(), (bad, shape)


@parametrize_variants
def test_bfloat16_keeps_float32_logits(spec):
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), drawn_parameters(spec))
    x = jnp.asarray(draw((BATCH, LENGTH, 6), 0), jnp.bfloat16)
    logits = jax.jit(lambda params, x: spec(params, x, x).logits())
    found = logits(params, x)
    assert found.dtype == jnp.float32
    exact = logits(*jax.tree.map(lambda a: a.astype(jnp.float32), (params, x)))
    # bfloat16 rounds to 2^-9; two or three projections in a row.
    assert oracle.relative_error(found, exact) < 2e-2


def test_shared_scores_have_no_batch_axis():
    x = jnp.zeros((3, 4, 6))
    for notation in ("R", "fixedR", "FR", "R+FR"):
        spec = sj.synthesizer(notation, max_length=8)
        s = spec(drawn_parameters(spec), x, x)
        assert s.shared_by_batch and s.bias.shape == (1, 2, 4, 4), notation
    for notation in ("V", "D", "FD", "R+V", "R+D"):
        spec = sj.synthesizer(notation, max_length=8)
        assert not spec(drawn_parameters(spec), x, x).shared_by_batch, notation


def test_scores_of_parts_add_up():
    """Scores.__add__ puts low-rank parts side by side, whatever their batch axes."""
    q, k = jnp.asarray(draw((2, 3, 2, 4), 0)), jnp.asarray(draw((2, 5, 2, 4), 1))
    shared_q, shared_k = jnp.asarray(draw((1, 3, 2, 2), 2)), jnp.asarray(draw((1, 5, 2, 2), 3))
    bias = jnp.asarray(draw((1, 2, 3, 5), 4))
    parts = [sj.Scores(q, k), sj.Scores(shared_q, shared_k), sj.Scores(bias=bias), sj.Scores(q, shared_k[..., :1] * k)]
    whole = sum(parts[1:], parts[0])
    assert whole.query.shape == (2, 3, 2, 10)
    expected = sum(np.asarray(part.logits(), np.float64) for part in parts)
    assert oracle.relative_error(whole.logits(), expected) < TOLERANCE


# Single variants


@pytest.mark.parametrize(
    ("buckets", "max_distance", "bidirectional"),
    [(32, 128, True), (32, 128, False), (8, 16, True), (8, 128, False), (4, 20, True)],
)
def test_relative_position_buckets(buckets, max_distance, bidirectional):
    spec = sj.RelativePositionBias(buckets, max_distance, bidirectional)
    distances = np.arange(-300, 301, dtype=np.int32)
    expected = [oracle.bucket(int(d), buckets, max_distance, bidirectional) for d in distances]
    np.testing.assert_array_equal(spec.bucket(jnp.asarray(distances)), expected)
    np.testing.assert_array_equal(jax.jit(spec.bucket)(jnp.asarray(distances)), expected)


def test_factorized_dense_reaches_every_column():
    """repeat_interleave(A, b) * tile(B, a): n distinct products."""
    spec = sj.FactorizedDense(6, a=2, b=3)
    params = drawn_parameters(spec)
    params["w1"] *= 0
    params["ba"], params["bb"] = np.float32([[2, 3]] * 2), np.float32([[5, 7, 11]] * 2)
    params["wa"], params["wb"] = params["wa"] * 0, params["wb"] * 0
    x = jnp.zeros((1, 6, 6))
    np.testing.assert_allclose(spec(params, x, x).logits()[0, 1, 4], [10, 14, 22, 15, 21, 33])


def test_factorized_dense_factors():
    assert sj.FactorizedDense(512).factors() == (16, 32)
    assert sj.FactorizedDense(256).factors() == (16, 16)
    assert sj.FactorizedDense(12, a=2).factors() == (2, 6)
    assert sj.FactorizedDense(12, b=2).factors() == (6, 2)
    with pytest.raises(ValueError, match=r"a \* b = max_length = 12, got a=5 \* b=2"):
        sj.FactorizedDense(12, a=5)
    with pytest.raises(ValueError, match=r"a \* b = max_length = 12, got a=3 \* b=3"):
        sj.FactorizedDense(12, a=3, b=3)


def test_mixtures_start_equal_and_sum_to_one():
    spec = sj.synthesizer("R+D+V", max_length=8)
    alpha = jax.jit(lambda key: spec.init(key, DIMS)["alpha"])(jax.random.key(0))
    np.testing.assert_allclose(spec.mixture_weights({"alpha": alpha}), np.full((3, 2), 1 / 3), rtol=1e-6)
    alpha = jnp.asarray(draw((3, 2), 0))
    np.testing.assert_allclose(spec.mixture_weights({"alpha": alpha}).sum(0), 1, rtol=1e-6)


def test_the_authors_dense_plus_has_no_first_layer_of_its_own():
    spec = sj.synthesizer(
        "D[bias=False,share_w2=True]+V", max_length=8, weights="sigmoid", per_head=False, share_query=True
    )
    shapes = jax.tree.map(lambda p: p.shape, spec.params(DIMS), is_leaf=lambda leaf: isinstance(leaf, Param))
    assert shapes == {
        "dense": {"w2": (4, 8)},
        "dot_product": {"query": (6, 2, 4), "key": (6, 2, 4)},
        "alpha": (1, 1),
    }


def test_parts_of_one_kind_have_names_of_their_own():
    spec = sj.Mixture((sj.Random(8), sj.DotProduct(), sj.Random(8, trained=False)))
    assert sorted(spec.params(DIMS)) == ["alpha", "dot_product", "random", "random_1"]


@pytest.mark.parametrize("name", ["R", "fixedR", "FR"])
def test_initial_scores_have_unit_scale(name):
    spec = sj.synthesizer(name, max_length=64)
    params = spec.init(jax.random.key(0), sj.Dims(8, 4, 4))
    x = jnp.zeros((1, 64, 8))
    assert 0.9 < np.std(spec(params, x, x).logits()) < 1.1


def test_glorot_initial_values_of_the_authors():
    spec = sj.Random(512, init_std=None)
    params = spec.init(jax.random.key(0), sj.Dims(8, 8, 4))
    assert 0.0025 < np.std(params["R"]) < 0.0030  # sqrt(2 / (512 * 520)) = 0.0027


# The notation


@pytest.mark.parametrize(
    ("notation", "expected"),
    [
        ("V", sj.DotProduct()),
        ("R", sj.Random(16)),
        ("fixedR", sj.Random(16, trained=False)),
        ("FR", sj.FactorizedRandom(16)),
        ("D", sj.Dense(16)),
        ("FD", sj.FactorizedDense(16)),
        ("R+V", sj.Mixture((sj.Random(16), sj.DotProduct()))),
        (" FR[rank=4] + V ", sj.Mixture((sj.FactorizedRandom(16, rank=4), sj.DotProduct()))),
        ("D[bias=False, share_w2=True]", sj.Dense(16, bias=False, share_w2=True)),
        ("V[scale=0.125]", sj.DotProduct(scale=0.125)),
        ("V[scale=1e+1]+R", sj.Mixture((sj.DotProduct(scale=10.0), sj.Random(16)))),
        ("R[max_length=8]+R", sj.Mixture((sj.Random(8), sj.Random(16)))),
        ("FD[a=2]+R+V", sj.Mixture((sj.FactorizedDense(16, a=2), sj.Random(16), sj.DotProduct()))),
    ],
)
def test_notation(notation, expected):
    assert sj.synthesizer(notation, max_length=16) == expected


def test_notation_passes_specs_and_mixture_options():
    spec = sj.Random(4)
    assert sj.synthesizer(spec, max_length=16) is spec
    mixed = sj.synthesizer("R+V", 16, weights="sigmoid", per_head=False)
    assert mixed == sj.Mixture((sj.Random(16), sj.DotProduct()), weights="sigmoid", per_head=False)


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        ("", r"'' in '' is not understood"),
        ("Q", r"'Q' in 'Q' is not understood; expected a sum of V, R, fixedR"),
        ("R+", r"'' in 'R\+' is not understood"),
        ("r+V", r"'r' in 'r\+V' is not understood"),
        ("FR[k=3]", r"has an option that FactorizedRandom does not know; expected some of .*rank"),
        ("FR[rank=abc]", r"option 'rank=abc' .* is not understood"),
        ("FR[rank]", r"option 'rank' .* is not understood"),
        ("FR[rank=0]", r"rank: expected a positive whole number, got 0"),
        ("FR[rank=2", r"is not understood"),
        ("fixedR[trained=True]", r"does not know|is not understood"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_notation_errors(notation, text):
    with pytest.raises(ValueError, match=text):
        sj.synthesizer(notation, max_length=16)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sj.synthesizer("R", 0), r"max_length: expected a positive whole number, got 0"),
        (lambda: sj.synthesizer(3, 16), r"notation: expected text such as \"R\+V\""),
        (lambda: sj.synthesizer("R", 16, weights="sum"), r"'R' is no mixture"),
        (lambda: sj.Random(2.5), r"max_length: expected a positive whole number, got 2.5"),
        (lambda: sj.Random(True), r"max_length: expected a positive whole number, got True"),
        (lambda: sj.Random(4, init_std=-1.0), r"init_std: expected a positive number, got -1.0"),
        (lambda: sj.FactorizedRandom(4, rank=-1), r"rank: expected a positive whole number, got -1"),
        (lambda: sj.DotProduct(scale=float("nan")), r"scale: expected a finite number or None, got nan"),
        (lambda: sj.Mixture((sj.Random(4),)), r"parts: expected at least two scores to mix, got 1"),
        (lambda: sj.Mixture((sj.Random(4), "V")), r"parts: expected scores such as Random\(512\).*got 'V'"),
        (lambda: sj.Mixture((sj.Random(4), sj.DotProduct()), weights="max"), r"weights: expected one of .* got 'max'"),
        (
            lambda: sj.Mixture((sj.Random(4), sj.Dense(4), sj.DotProduct()), weights="sigmoid"),
            r"'sigmoid' weighs two parts, got 3",
        ),
        (
            lambda: sj.Mixture((sj.Random(4), sj.DotProduct()), share_query=True),
            r"share_query: expected one DotProduct",
        ),
        (
            lambda: sj.Mixture((sj.Dense(4, rank=3), sj.DotProduct()), share_query=True).params(DIMS),
            r"share_query: expected Dense of rank head_dim = 4, got rank=3",
        ),
        (lambda: sj.RelativePositionBias(buckets=0), r"buckets: expected a positive whole number, got 0"),
        (lambda: sj.RelativePositionBias(32, max_distance=8), r"max_distance: expected more than the 8 distances"),
        (lambda: sj.Dims(8, 0, 4), r"heads: expected a positive whole number, got 0"),
        (lambda: Param((2, 3), ("heads",), None), r"Param.axes: expected one name per size of shape \(2, 3\)"),
        (lambda: Param((2,), ("head",), None), r"Param.axes: expected names from .*got \['head'\]"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_values_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    "make,text",
    [
        (
            lambda: sj.Kernel("gauss"),
            r"kernel: expected one of \('exponential', 'rbf', 'polynomial', 'linear'\), got 'gauss'",
        ),
        (lambda: sj.Kernel(integration="sum"), "integration: expected one of .*'direct_sum'.*got 'sum'"),
        (lambda: sj.Kernel(positions="rope"), "positions: expected one of .*'sinusoidal'.*got 'rope'"),
        (
            lambda: sj.Kernel(positions="learned", integration="lookup"),
            "max_length: expected the number of positions that are learned, got None",
        ),
        (lambda: sj.Kernel(integration="direct_sum", positions="t5"), "positions: 't5' knows distances alone"),
        (lambda: sj.Kernel(value_positions=True, positions="t5"), "positions: 't5' knows distances alone"),
        (lambda: sj.Kernel(biases=True), "biases: they belong to integration='product_asymmetric', got 'none'"),
        (lambda: sj.Kernel(scaled_lookup=True), "scaled_lookup: it belongs to integration='lookup', got 'none'"),
        (lambda: sj.Kernel(max_length=0), "max_length: expected a positive whole number, got 0"),
        (
            lambda: sj.Kernel(positions="t5", integration="lookup", max_distance=3),
            "max_distance: expected more than the 8",
        ),
        (
            lambda: sj.Mixture((sj.Random(4), sj.Kernel("linear"))),
            "weights: expected 'sum', got 'softmax': the scores of a linear kernel may be negative",
        ),
        (
            lambda: sj.synthesizer("Kernel[kernel='rbf', symmetrical=True]", 8),
            "has an option that Kernel does not know; expected some of kernel, symmetric,",
        ),
        (
            lambda: sj.synthesizer("R+Linformer", 8),
            "notation: Linformer in 'R\\+Linformer' makes no scores that could be summed",
        ),
        (lambda: sj.synthesizer("Kernel['rbf']", 8), "is not understood; expected name=value"),
    ],
)
def test_what_kernels_and_the_notation_refuse(make, text, unchecked_annotations):
    with pytest.raises(ValueError, match=text):
        make()


def test_the_notation_reads_every_kind():
    assert sj.synthesizer("R+Kernel[kernel='rbf', symmetric=True]", 8) == sj.Mixture(
        (sj.Random(8), sj.Kernel("rbf", symmetric=True, max_length=8))
    )
    assert sj.synthesizer("Linformer[rank=4, sharing='layerwise']", 8) == sj.Linformer(8, 4, "layerwise")
    assert sj.synthesizer("TokenMixing[hidden=16]", 8) == sj.TokenMixing(8, 16)


def test_odd_features_have_no_sinusoids():
    spec, dims = sj.Kernel(integration="direct_sum"), sj.Dims(features=5, heads=1, head_dim=4)
    x = jnp.zeros((1, 2, 5))
    with pytest.raises(ValueError, match="features: sinusoids come in pairs .* expected an even size, got 5"):
        spec(spec.init(jax.random.key(0), dims), x, x)


def test_squares_of_rbf_keys_keep_float32_in_bfloat16():
    """-|w|^2 in one bfloat16 column would be off by 2^-9 of itself, here by 0.07 nats."""
    spec, dims = sj.Kernel("rbf"), sj.Dims(features=16, heads=1, head_dim=16)
    params = spec.init(jax.random.key(0), dims)
    x = jnp.asarray(3 * draw((1, 4, 16), 0), jnp.bfloat16)
    features = spec.key_features(params, x).astype(jnp.float32)
    w, squares = features[..., :16], features[..., 16:].sum(-1)
    exact = -np.square(np.asarray(w, np.float64)).sum(-1) / 4
    assert np.abs(exact).max() > 30
    np.testing.assert_allclose(squares, exact, rtol=1e-6)
