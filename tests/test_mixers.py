"""Every mixer as a layer against the slow reference, values and gradients, under every kind of mask; and on 8 devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_mixers
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from variants import MAX_LENGTH, MIXERS, parametrized

import synthesizer_jax as sj
from synthesizer_jax import sharding
from synthesizer_jax.axes import Param
from synthesizer_jax.mixers import Surroundings
from synthesizer_jax.nn.attention import as_mixer
from synthesizer_jax.scores import Spec

DIMS = sj.Dims(features=4, heads=2, head_dim=2)
BATCH, LENGTH = 2, 5
TOLERANCE = 1e-5  # float32 at highest matmul precision: errors of a formula are above 1e-3

KEY_MASK = np.array([[True, True, False, True, False], [False] * 5])
SEGMENTS = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 2, 2]], np.int32)
POSITIONS = np.array([[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]], np.int32)

# name -> (masks, whether a bias is added)
CASES = {
    "no_mask": ({}, False),
    "key_mask": ({"key_mask": KEY_MASK}, False),
    "packed": ({"segments": SEGMENTS, "positions": POSITIONS}, False),
    "causal": ({"causal": True}, True),
    "causal_key_mask": ({"causal": True, "key_mask": KEY_MASK}, False),
    "causal_packed": ({"causal": True, "segments": SEGMENTS, "positions": POSITIONS}, False),
}

parametrize_mixers = parametrized(MIXERS)


def draw(spec, shape, seed):
    """Numbers of size 1/2; positive ones for a linear kernel, whose sums are then far from 0."""
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 2
    return np.abs(numbers) if isinstance(spec, Spec) and spec.weighting_error() else numbers


def tree_of(spec, bias):
    mixer = as_mixer(spec)
    declared = {"own": mixer.params(DIMS), "shared": mixer.stack_params(DIMS)}
    flat, structure = jax.tree.flatten(declared, is_leaf=lambda leaf: isinstance(leaf, Param))
    tree = structure.unflatten([jnp.asarray(draw(spec, p.shape, 1 + i)) for i, p in enumerate(flat)])
    tree["x"] = jnp.asarray(draw(spec, (BATCH, LENGTH, DIMS.features), 0)) * 2
    return tree | ({"bias": jnp.asarray(draw(spec, (1, DIMS.heads, LENGTH, LENGTH), 99))} if bias else {})


def cases_of(spec):
    mixer = as_mixer(spec)
    cases = {name: case for name, case in CASES.items() if not (case[0].get("causal") and mixer.decoder_error())}
    return {name: (masks, bias and not mixer.bias_error()) for name, (masks, bias) in cases.items()}


def real_queries(masks):
    """What stands at a padded query has no meaning in all mixers alike."""
    mask = masks.get("key_mask")
    segments = masks.get("segments")
    real = np.ones((BATCH, LENGTH), bool) if mask is None else mask
    return real if segments is None else real & (segments > 0)


def surroundings(masks, tree):
    segments, positions = masks.get("segments"), masks.get("positions")
    return Surroundings(
        key_mask=None if "key_mask" not in masks else jnp.asarray(masks["key_mask"]),
        causal=masks.get("causal", False),
        q_segments=None if segments is None else jnp.asarray(segments),
        q_positions=None if positions is None else jnp.asarray(positions),
        bias=tree.get("bias"),
        shared=tree["shared"],
    )


@functools.partial(jax.jit, static_argnums=0, compiler_options=oracle.QUICK_TO_COMPILE)
def all_cases(spec, trees, cotangents):
    def loss(tree, name):
        y = as_mixer(spec)(tree["own"], tree["x"], None, surroundings(CASES[name][0], tree))
        return jnp.sum(y * cotangents[name]), y

    return {name: jax.value_and_grad(loss, has_aux=True)(tree, name) for name, tree in trees.items()}


@parametrize_mixers
def test_equal_the_oracle(spec):
    cases = cases_of(spec)
    trees = {name: tree_of(spec, bias) for name, (_, bias) in cases.items()}
    cotangent = np.random.default_rng(5).standard_normal((BATCH, LENGTH, DIMS.features)).astype(np.float32)
    cotangents = {name: cotangent * real_queries(masks)[..., None] for name, (masks, _) in cases.items()}
    results = all_cases(spec, trees, cotangents)
    for name, (masks, _) in cases.items():

        def reference(tree, masks=masks):
            return oracle_mixers.mix(spec, tree["own"], tree["x"], tree["shared"], bias=tree.get("bias"), **masks)

        expected, gradients = oracle.gradients(reference, trees[name], cotangents[name])
        real = real_queries(masks)
        (_, y), found = results[name]
        assert oracle.relative_error(np.asarray(y)[real], expected[real]) < TOLERANCE, name
        assert oracle.worst(found, gradients, floor=1.0) < (TOLERANCE, ""), name


@parametrize_mixers
def test_eight_devices_equal_one(spec):
    """Batch, features and heads split over data, fsdp and model axes: values and gradients."""
    mixer, dims = as_mixer(spec), sj.Dims(features=8, heads=2, head_dim=2)
    declared = {"own": mixer.params(dims), "shared": mixer.stack_params(dims)}
    flat, structure = jax.tree.flatten(declared, is_leaf=lambda leaf: isinstance(leaf, Param))
    tree = structure.unflatten([jnp.asarray(draw(spec, p.shape, 1 + i)) for i, p in enumerate(flat)])
    x = jnp.asarray(draw(spec, (4, LENGTH, 8), 0))
    mask = jnp.asarray(np.arange(LENGTH)[None] < np.array([[5], [3], [2], [5]]))

    def loss(tree, x, mask):
        around = Surroundings(key_mask=mask, causal=not mixer.decoder_error(), shared=tree["shared"])
        return jnp.mean(jnp.square(jnp.where(mask[..., None], mixer(tree["own"], x, None, around), 0)))

    run = jax.jit(jax.value_and_grad(loss), compiler_options=oracle.QUICK_TO_COMPILE)
    one = run(tree, x, mask)
    mesh = sharding.MeshShape(data=2, fsdp=2, model=2).build(jax.devices()[:8])
    placed = jax.device_put(tree, sharding.parameter_shardings(mesh, declared))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed)) or not _splits(declared)
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    with jax.set_mesh(mesh):
        many = run(placed, jax.device_put(x, rows), jax.device_put(mask, rows))
    floor = 1e-2 * max(1, float(one[0]))  # summands of a gradient that cancel are of the loss's size
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        assert oracle.relative_error(a, b, floor=floor) < TOLERANCE


def _splits(declared):
    """Whether any parameter has an axis that the mesh splits."""
    leaves = jax.tree.leaves(declared, is_leaf=lambda leaf: isinstance(leaf, Param))
    return any(axis in ("embed", "heads", "mlp", "vocab") for leaf in leaves for axis in leaf.axes)


def test_a_random_synthesizer_without_softmax_is_a_linear_token_mixer():
    """Synthesizer section 3.3 and MLP-Mixer: one head, no value and output projections, no softmax."""
    n, x = MAX_LENGTH, jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 6)), jnp.float32)
    random, mixing = sj.Random(n), sj.TokenMixing(n, bias=False)
    params = random.init(jax.random.key(0), sj.Dims(features=6, heads=1, head_dim=6))
    for causal in (False, True):
        logits = random(params, x, x).logits()
        logits = jnp.tril(logits) if causal else logits
        values = x[:, :, None]  # one head whose values are the tokens
        smoothed = jnp.einsum("hqk,bkhd->bqhd", logits[0], values)[:, :, 0]
        mixed = mixing({"W": params["R"][0]}, x, None, Surroundings(causal=causal))
        np.testing.assert_allclose(mixed, smoothed, rtol=0, atol=1e-5)
        # And with the softmax of R for its weights the token mixer is the Random Synthesizer.
        weights = sj.attention_weights(random(params, x, x), batch=2, k_length=7, causal=causal)[0, 0]
        matrix = jnp.zeros((n, n)).at[:7, :7].set(weights)
        attended = sj.attend(random(params, x, x), values, causal=causal)[:, :, 0]
        mixed = mixing({"W": matrix}, x, None, Surroundings(causal=causal))
        np.testing.assert_allclose(mixed, attended, rtol=0, atol=1e-5)


def test_rows_of_a_linear_kernel_whose_sum_cancels_are_zero():
    """Not inf or NaN, and without gradient: the quotient is not defined."""
    scores = sj.Scores(factor=jnp.array([[[[1.0, -1.0, 0.0], [1.0, 2.0, -1.0]]]]))
    values = jnp.arange(3.0)[None, :, None, None]
    np.testing.assert_array_equal(sj.attend(scores, values)[0, :, 0, 0], [0.0, (0 * 1 + 1 * 2 - 2 * 1) / 2])

    def total(factor):
        return jnp.sum(sj.attend(sj.Scores(factor=factor), values))

    gradient = jax.grad(total)(scores.factor)
    assert not np.any(gradient[0, 0, 0]) and np.all(np.isfinite(gradient))


MULTI_HEAD = [(name, as_mixer(spec)) for name, spec in MIXERS if isinstance(as_mixer(spec), sj.MultiHead)]


@parametrized(MULTI_HEAD)
def test_memory_is_what_came_before(spec):
    """Causal attention with a memory gives the last rows of attention over memory and tokens; weights span both."""
    mixer = spec
    tree, m = tree_of(mixer.scores if mixer.keys is None else mixer, bias=False), 2
    mask = jnp.asarray([[False] + [True] * (LENGTH - 1), [True] * LENGTH])

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def run(tree):
        x = tree["x"]
        whole = mixer(tree["own"], x, None, Surroundings(causal=True, key_mask=mask))
        memory = Surroundings(causal=True, key_mask=mask, memory=x[:, :m])
        rest = mixer(tree["own"], x[:, m:], None, memory)
        weights = mixer.weights(tree["own"], x[:, m:], None, memory)
        return whole, rest, weights, mixer.weights(tree["own"], x, None, Surroundings(causal=True, key_mask=mask))

    whole, rest, weights, all_weights = run(tree)
    np.testing.assert_allclose(rest, whole[:, m:], rtol=0, atol=2e-6 * max(1, np.abs(whole).max()))
    assert weights.shape[2:] == (LENGTH - m, LENGTH)
    np.testing.assert_allclose(weights, all_weights[:, :, m:], rtol=0, atol=2e-6)


def test_sparse_keys_are_those_of_the_definition():
    allowed = np.asarray(sj.Sparse(2, stride=3).allowed(5, 5))
    expected = [[abs(i - j) < 2 or (i - j) % 3 == 0 for j in range(5)] for i in range(5)]
    np.testing.assert_array_equal(allowed, expected)
    shifted = np.asarray(sj.Sparse(1, stride=2).allowed(2, 5, q_offset=3))
    np.testing.assert_array_equal(shifted, [[i + 3 == j or (i + 3 - j) % 2 == 0 for j in range(5)] for i in range(2)])


X = jnp.zeros((1, 4, 4))
SEGMENTS_4 = jnp.ones((1, 4), jnp.int32)


def call(spec, x_kv=None, weights=False, **around):
    mixer = as_mixer(spec)
    params = jax.tree.map(
        lambda p: jnp.zeros(p.shape), mixer.params(DIMS), is_leaf=lambda leaf: isinstance(leaf, Param)
    )
    return (mixer.weights if weights else mixer)(params, X, x_kv, Surroundings(**around))


@pytest.mark.parametrize(
    "make,text",
    [
        (lambda: sj.Sparse(0), "window: expected a positive whole number, got 0"),
        (lambda: sj.Sparse(4, stride=-1), "stride: expected a positive whole number, got -1"),
        (lambda: sj.MultiHead("R"), "scores: expected scores such as Random\\(512\\) or DotProduct\\(\\), got 'R'"),
        (
            lambda: sj.MultiHead(sj.DotProduct(), keys=3),
            "keys: expected Sparse\\(window=...\\) or None for all keys, got 3",
        ),
        (lambda: sj.Linformer(0), "max_length: expected a positive whole number, got 0"),
        (lambda: sj.Linformer(8, rank=0), "rank: expected a positive whole number, got 0"),
        (lambda: sj.Linformer(8, sharing="all"), "sharing: expected one of .*'layerwise'.*, got 'all'"),
        (lambda: sj.TokenMixing(8, hidden=0), "hidden: expected a positive whole number, got 0"),
        (lambda: call(sj.Linformer(8, 2, "layerwise")), "shared: expected the projection E .* stands alone shared="),
        (lambda: call(sj.Linformer(8, 2), bias=jnp.zeros((1, 1, 4, 4))), "bias: Linformer scores slots, not keys"),
        (lambda: call(sj.Linformer(8, 2), memory=X), "memory: Linformer has no keys to extend; use attention"),
        (
            lambda: call(
                sj.Linformer(8, 2), X + 1, q_segments=SEGMENTS_4, q_positions=SEGMENTS_4, k_segments=SEGMENTS_4
            ),
            "k_positions: expected the keys' positions within the segments beside k_segments",
        ),
        (lambda: call(sj.TokenMixing(8), bias=jnp.zeros((1, 1, 4, 4))), "bias: TokenMixing has no softmax"),
        (lambda: call(sj.TokenMixing(8, hidden=8), weights=True), "hidden: .* 8 hidden units is not linear"),
        (
            lambda: call(sj.TokenMixing(8, hidden=9), causal=True),
            "causal: hidden=9 units don't divide .* such as hidden=8",
        ),
        (lambda: call(sj.DotProduct(), X + 1, memory=X), "memory: it continues one sequence of x to the left"),
        (lambda: call(sj.DotProduct(), q_segments=SEGMENTS_4, memory=X), "memory: it continues .*, got q_segments"),
        (lambda: call(sj.MultiHead(sj.DotProduct(), keys=sj.Sparse(2)), X + 1), "x_kv: Sparse keys are neighbours"),
        (lambda: call(sj.Kernel(integration="lookup"), X + 1), "x_kv: Kernel scores with positions .* use Kernel"),
        (
            lambda: sj.t5_tiny("Linformer"),
            "decoder_attention: Linformer projects the whole sequence onto its slots.* use it in encoders",
        ),
    ],
)
def test_what_is_refused(make, text, unchecked_annotations):
    with pytest.raises(ValueError, match=f"^{text}"):
        make()


@pytest.mark.parametrize(
    "spec", [sj.Linformer(MAX_LENGTH, 3), sj.TokenMixing(MAX_LENGTH, hidden=8)], ids=lambda s: type(s).__name__
)
def test_segment_ids_may_be_any_numbers(spec):
    """Also past the row's length, where counting up to it would lose them."""
    tree = tree_of(spec, bias=False)
    names = jnp.asarray([0, 7, 3, 900])  # 1 -> 7, 2 -> 3

    def run(segments):
        around = Surroundings(q_segments=segments, q_positions=jnp.asarray(POSITIONS), shared=tree["shared"])
        return as_mixer(spec)(tree["own"], tree["x"], None, around)

    expected = run(jnp.asarray(SEGMENTS))
    assert np.any(expected)
    real = SEGMENTS > 0
    for ids in (names[SEGMENTS], jnp.asarray([0, 900, 1])[SEGMENTS]):
        np.testing.assert_allclose(np.asarray(run(ids))[real], np.asarray(expected)[real], rtol=0, atol=1e-6)


@parametrize_mixers
def test_what_stands_in_the_padding_of_a_packed_row_is_irrelevant_be_it_nan(spec):
    tree = tree_of(spec, bias=False)
    padded = jnp.asarray(SEGMENTS == 0)[..., None]

    def run(filling):
        around = Surroundings(
            q_segments=jnp.asarray(SEGMENTS), q_positions=jnp.asarray(POSITIONS), shared=tree["shared"]
        )
        return as_mixer(spec)(tree["own"], jnp.where(padded, filling, tree["x"]), None, around)

    expected, found = np.asarray(run(1.0)), np.asarray(run(jnp.nan))
    np.testing.assert_array_equal(found[SEGMENTS > 0], expected[SEGMENTS > 0])


def test_keys_that_a_common_rule_forbids_may_be_nan():
    values = jnp.ones((1, 3, 1, 2)).at[0, 2].set(jnp.nan)
    allowed = jnp.array([[True, True, False]] * 3)
    for path in ("auto", "xla"):
        out = sj.attend(sj.Scores(bias=jnp.zeros((1, 1, 3, 3))), values, allowed=allowed, path=path)
        np.testing.assert_array_equal(out, np.ones((1, 3, 1, 2)))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int16])
@pytest.mark.parametrize(
    "spec",
    [sj.Toeplitz(200), sj.RelativePositionBias(), sj.Kernel(integration="lookup", positions="learned", max_length=200)],
    ids=lambda spec: type(spec).__name__,
)
def test_positions_of_any_whole_type_give_the_same(spec, dtype, unchecked_annotations):
    """Differences of narrow or unsigned numbers wrap around."""
    params = spec.init(jax.random.key(0), DIMS)
    x = jnp.asarray(draw(spec, (1, LENGTH, DIMS.features), 0))
    positions = jnp.asarray(np.arange(LENGTH), dtype)
    found, expected = spec(params, x, x, positions, positions).logits(), spec(params, x, x).logits()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@parametrize_mixers
def test_steps_past_the_cache_give_nan_or_need_no_room(spec):
    mixer = as_mixer(spec)
    if mixer.decoder_error():
        pytest.skip("does not decode")
    tree = tree_of(spec, bias=False)
    cache = mixer.init_cache(tree["own"], DIMS.features, BATCH, 3, jnp.float32)
    inside, cache = mixer.step(tree["own"], tree["x"][:, :3], cache)
    outside, cache = mixer.step(tree["own"], tree["x"][:, 3:4], cache)
    assert np.all(np.isfinite(inside))
    if "value" in cache:
        assert np.all(np.isnan(outside))
        with pytest.raises(ValueError, match="x: 4 tokens don't fit a cache for 3; give init_cache a larger length"):
            mixer.step(tree["own"], tree["x"][:, :4], cache)
    with pytest.raises(
        ValueError, match="x: expected tokens like those of the cache, float32 with batch 2, got bfloat16"
    ):
        mixer.step(tree["own"], tree["x"][:, :1].astype(jnp.bfloat16), cache)
    with pytest.raises(
        ValueError, match="x: expected tokens like those of the cache, .* batch 1; make it with init_cache"
    ):
        mixer.step(tree["own"], tree["x"][:1, :1], cache)


ONE_OF_EACH = [
    sj.DotProduct(),
    sj.Random(8),
    sj.LightweightConv(3),
    sj.DynamicConv(3),
    sj.Linformer(8, 2),
    sj.TokenMixing(8),
]


@pytest.mark.parametrize("spec", ONE_OF_EACH, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize(
    "around,text",
    [
        ({"key_mask": jnp.ones((1, 4), jnp.int32)}, r"key_mask: expected booleans, .* of shape \(1, 4\), got int32"),
        ({"key_mask": jnp.ones((1, 5), bool)}, r"key_mask: expected booleans, .* of shape \(1, 4\), got bool \(1, 5\)"),
        ({"q_segments": jnp.ones((1, 1), jnp.int32)}, r"q_segments: expected whole numbers of shape \(1, 4\), got"),
        (
            {"q_segments": SEGMENTS_4, "q_positions": jnp.zeros((1,), jnp.int32)},
            r"q_positions: expected shape \[4\] or \[b, 4\], a position for each token, got \(1,\)",
        ),
        (
            {"q_segments": SEGMENTS_4, "q_positions": jnp.zeros((4,))},
            "q_positions: expected an array of whole numbers, got float32",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_every_mixer(spec, around, text, unchecked_annotations):
    with pytest.raises(ValueError, match=f"^{text}"):
        call(spec, **around)


@pytest.mark.parametrize(
    "make,text",
    [
        (lambda: call(sj.Linformer(8, 2), X + 1, q_segments=SEGMENTS_4, q_positions=SEGMENTS_4), "q_segments, k_segments: expected both"),
        (lambda: call(sj.Linformer(8, 2), k_segments=SEGMENTS_4), "q_segments, k_segments: expected both or neither"),
        (lambda: call(sj.DotProduct(), jnp.zeros((2, 4, 4))), r"x_kv: expected the batch and the features of x \(1, 4, 4\)"),
        (lambda: call(sj.DotProduct(), memory=jnp.zeros((1, 2, 5))), "memory: expected the batch and the features of x"),
        (lambda: call(sj.Random(8), memory=jnp.zeros((1, 5, 4)), causal=True), "memory: 5 tokens of memory and 4 of x are more than max_length=8"),
        (lambda: call(sj.Linformer(8, 2, "layerwise"), shared={"E": jnp.ones((8, 3))}), r"shared: expected the projection E \(8, 2\)"),
        (lambda: call(sj.DotProduct(), bias=jnp.ones((1, 1, 4, 4), bool)), "bias: expected numbers .* booleans .* go to mask"),
        (lambda: call(sj.TokenMixing(8), k_segments=SEGMENTS_4), "k_segments: TokenMixing mixes one sequence with itself"),
        (lambda: as_mixer(sj.DotProduct())({}, jnp.ones((1, 4, 4), jnp.int32)), "x: expected vectors of tokens, .* token ids go through"),
        (lambda: as_mixer(sj.MultiHead(sj.DotProduct()), path="shared"), "path: expected 'auto' beside a mixer"),
        (lambda: sj.MultiHead(sj.DotProduct(), path="fast"), "path: expected one of"),
        (lambda: sj.Random(8, trained="no"), "trained: expected True or False, got 'no'"),
        (lambda: sj.Random(8, init_std="a"), "init_std: expected a positive number, got 'a'"),
        (lambda: sj.Toeplitz(8, init_std=None), "init_std: expected a positive number, got None"),
        (lambda: sj.Dense(8, bias="False"), "bias: expected True or False, got 'False'"),
        (lambda: sj.FactorizedDense(8, shared_hidden="no"), "shared_hidden: expected True or False, got 'no'"),
        (lambda: sj.TokenMixing(8, bias="no"), "bias: expected True or False, got 'no'"),
        (lambda: sj.Kernel(symmetric="no"), "symmetric: expected True or False, got 'no'"),
        (lambda: sj.Kernel(positions="learned", max_length=8), "positions: 'learned' has no effect without an integration"),
        (lambda: sj.DotProduct(scale=True), "scale: expected a finite number or None, got True"),
        (lambda: sj.Mixture(sj.Random(8)), r"parts: expected a tuple of scores such as \(Random"),
        (lambda: sj.RelativePositionBias(bidirectional="no"), "bidirectional: expected True or False, got 'no'"),
        (lambda: sj.synthesizer("lightconv", 8), "notation: 'lightconv' .* did you mean LightConv"),
        (lambda: sj.synthesizer("LightConv[width=9", 8), "notation: .* a bracket is not closed"),
        (lambda: sj.synthesizer("Convolution[width=3]", 8), "notation: 'Convolution.*' in .* is not understood"),
        (lambda: sj.synthesizer("R+LightConv", 8), "notation: LightConv in .* makes no scores that could be summed"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(make, text, unchecked_annotations):
    with pytest.raises(ValueError, match=f"^{text}"):
        make()


@dataclasses.dataclass(frozen=True)
class Nearest(sj.Spec):
    """A user's own scores, without a name for its parameters."""

    def params(self, dims):
        return {}

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        distance = jnp.arange(x_q.shape[1])[:, None] - jnp.arange(k_length)
        return sj.Scores(bias=-jnp.abs(distance).astype(jnp.float32)[None, None])


def test_scores_of_the_users_own_are_known_by_their_class():
    assert sj.synthesizer("Nearest+V", 8) == sj.Mixture((Nearest(), sj.DotProduct()))
    assert sj.Mixture((Nearest(), sj.DotProduct())).part_names() == ("nearest", "dot_product")
    layer = nnx.eval_shape(lambda: sj.Attention(sj.synthesizer("Nearest+V", 8), 4, 2, 2, rngs=nnx.Rngs(0)))
    assert set(layer.scores) == {"dot_product", "alpha"}


@pytest.mark.parametrize("spec", ONE_OF_EACH, ids=lambda spec: type(spec).__name__)
def test_keys_that_are_the_tokens_themselves_are_self_attention(spec):
    """As T5X-like code calls a layer: layer(x, x)."""
    tree = tree_of(spec, bias=False)
    mixer, around = as_mixer(spec), Surroundings(key_mask=jnp.asarray(KEY_MASK))
    expected = mixer(tree["own"], tree["x"], None, around)
    np.testing.assert_array_equal(mixer(tree["own"], tree["x"], tree["x"], around), expected)
