"""Attention over every variant's scores: values and gradients against the oracle, under every kind of mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from variants import VARIANTS, parametrized

import synthesizer_jax as sj
from synthesizer_jax.axes import Param
from synthesizer_jax.ops.attend import Dropout, attention_weights

DIMS = sj.Dims(features=5, heads=2, head_dim=3)
BATCH, LENGTH = 2, 6
TOLERANCE = 1e-5  # float32 at highest matmul precision: measured at most 2e-6, errors of a formula are above 1e-3

parametrize_variants = parametrized(VARIANTS)

KEY_MASK = np.array([[True] * 6, [True, True, False, True, False, False]])
LEFT_PADDED = np.array([[False, False, True, True, True, False], [False] * 6])  # causal rows 0, 1; the whole sequence
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]], np.int32)

# name -> (masks, positions or None, extra bias: None, "shared" by the batch, or "own" for each sequence and all heads)
CASES = {
    "no_mask": ({}, None, None),
    "key_mask": ({"key_mask": KEY_MASK}, None, None),
    "causal": ({"causal": True}, None, None),
    "causal_key_mask_bias": ({"causal": True, "key_mask": KEY_MASK}, None, "shared"),
    "packed": ({"q_segments": SEGMENTS, "k_segments": SEGMENTS}, POSITIONS, None),
    "causal_packed_bias": ({"causal": True, "q_segments": SEGMENTS, "k_segments": SEGMENTS}, POSITIONS, "own"),
    "no_keys": ({"causal": True, "key_mask": LEFT_PADDED}, None, None),
}
BIAS_SHAPES = {"shared": (1, DIMS.heads, LENGTH, LENGTH), "own": (BATCH, 1, LENGTH, LENGTH)}


def draw(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def drawn_parameters(spec, seed=1):
    flat, structure = jax.tree.flatten(spec.params(DIMS), is_leaf=lambda leaf: isinstance(leaf, Param))
    return structure.unflatten([jnp.asarray(draw(p.shape, seed + i)) / 2 for i, p in enumerate(flat)])


def drawn_tree(spec, case):
    bias = CASES[case][2]
    tree = {
        "x": jnp.asarray(draw((BATCH, LENGTH, DIMS.features), 0)),
        "value": jnp.asarray(draw((DIMS.features, DIMS.heads, DIMS.head_dim), 100)),
        "scores": drawn_parameters(spec),
    }
    return tree if bias is None else tree | {"bias": jnp.asarray(draw(BIAS_SHAPES[bias], 101))}


def asarrays(masks):
    return {name: jnp.asarray(m) if isinstance(m, np.ndarray) else m for name, m in masks.items()}


def heads(spec, path, case, tree):
    """[b, q, h, d] by the library."""
    masks, positions, _ = CASES[case]
    positions = None if positions is None else jnp.asarray(positions)
    s = spec(tree["scores"], tree["x"], tree["x"], positions, positions)
    values = jnp.einsum("bke,ehd->bkhd", tree["x"], tree["value"])
    return sj.attend(s, values, **asarrays(masks), bias=tree.get("bias"), path=path)


def reference(spec, case, tree):
    """[b, q, h, d] by the oracle."""
    masks, positions, _ = CASES[case]
    bias = tree.get("bias")
    logits = oracle.logits(spec, tree["scores"], tree["x"], q_positions=positions)
    shared = oracle.is_shared(spec, positions, bias=bias)
    return oracle.attend(logits, oracle.project(tree["x"], tree["value"]), shared=shared, bias=bias, **masks)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=oracle.QUICK_TO_COMPILE)
def all_cases(spec, path, trees, cotangent):
    """Outputs and gradients of every case, in one program."""

    def loss(tree, case):
        out = heads(spec, path, case, tree)
        return jnp.sum(out * cotangent), out

    with jax.default_matmul_precision("highest"):
        return {case: jax.value_and_grad(loss, has_aux=True)(tree, case) for case, tree in trees.items()}


def check_against_the_oracle(spec, path):
    trees = {case: drawn_tree(spec, case) for case in CASES}
    cotangent = draw((BATCH, LENGTH, DIMS.heads, DIMS.head_dim), 102)
    results = all_cases(spec, path, trees, cotangent)
    for case, tree in trees.items():
        (_, out), gradients = results[case]
        expected, expected_gradients = oracle.gradients(lambda t, case=case: reference(spec, case, t), tree, cotangent)
        assert oracle.relative_error(out, expected) < TOLERANCE, case
        # The summands of a gradient are of size 1; alpha's is a sum of hundreds of them that may cancel.
        assert oracle.worst(gradients, expected_gradients, floor=1.0) < (TOLERANCE, ""), case
    assert not np.any(results["no_keys"][0][1][1]), "a sequence without keys"
    assert not np.any(results["no_keys"][0][1][0, :2]), "causal rows before the first key"


@parametrize_variants
def test_equal_the_oracle(spec):
    check_against_the_oracle(spec, "auto")


@parametrized([(name, spec) for name, spec in VARIANTS if oracle.is_shared(spec)])
def test_shared_scores_on_the_general_path_equal_the_oracle(spec):
    check_against_the_oracle(spec, "xla")


@parametrize_variants
def test_weights_are_what_attend_applies(spec):
    tree = drawn_tree(spec, "no_keys")
    masks = asarrays(CASES["no_keys"][0])

    @jax.jit
    def both(tree):
        with jax.default_matmul_precision("highest"):
            s = spec(tree["scores"], tree["x"], tree["x"])
            values = jnp.einsum("bke,ehd->bkhd", tree["x"], tree["value"])
            weights = attention_weights(s, batch=BATCH, k_length=LENGTH, **masks)
            return weights, jnp.einsum("bhqk,bkhd->bqhd", weights, values), sj.attend(s, values, **masks)

    weights, weighted, attended = both(tree)
    np.testing.assert_allclose(weighted, attended, rtol=0, atol=2e-6)
    sums = np.asarray(weights).sum(-1)
    assert np.all((np.abs(sums - 1) < 1e-6) | (sums == 0))


@parametrize_variants
def test_layer_equals_the_oracle(spec):
    """The NNX layer: projections, positions and segments passed on, and gradients of its variables."""
    layer = nnx.eval_shape(lambda: sj.Attention(spec, 5, 2, 3, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    tree = {"value": draw((5, 2, 3), 100), "out": draw((2, 3, 5), 103), "scores": drawn_parameters(spec)}
    tree = jax.tree.map(jnp.asarray, tree)
    x, cotangent = draw((BATCH, LENGTH, 5), 0), draw((BATCH, LENGTH, 5), 104)
    segments, positions = jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS)
    nnx.replace_by_pure_dict(state, tree)
    is_trained = nnx.filterlib.to_predicate(nnx.Param)

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def run(state, x):
        trained, rest = nnx.split_state(state, is_trained, ...)

        def loss(trained, x):
            y = nnx.merge(graph, trained, rest)(x, causal=True, q_segments=segments, q_positions=positions)
            return jnp.sum(y * cotangent), y

        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(trained, x)

    (_, y), (gradients, x_gradient) = run(state, jnp.asarray(x))

    def function(t):
        masks = {"causal": True, "q_segments": SEGMENTS, "q_positions": POSITIONS}
        return oracle.attention_layer(spec, t, t["x"], **masks)

    expected, expected_gradients = oracle.gradients(function, tree | {"x": x}, cotangent)
    assert oracle.relative_error(y, expected) < TOLERANCE
    assert oracle.relative_error(x_gradient, expected_gradients["x"]) < TOLERANCE
    found = dict(nnx.to_flat_state(gradients))
    for path, variable in found.items():
        expected_leaf = functools.reduce(lambda node, name: node[name], path, expected_gradients)
        assert oracle.relative_error(variable[...], expected_leaf, floor=1.0) < TOLERANCE, path
    trained = [p for p in jax.tree.leaves(spec.params(DIMS), is_leaf=lambda p: isinstance(p, Param)) if p.trained]
    assert len(found) == 2 + len(trained)


# Scores shared by the batch, where the softmax is computed once for all sequences


def adversarial():
    """name -> (table [h, q, k], key_mask or None, causal)."""
    table = draw((2, 6, 6), 0)
    some = np.array([[True] * 6, [True, True, False, True, False, False], [False, True, True, False, True, True]])
    none = np.array([[True] * 6, [False] * 6, [False, False, False, True, False, True]])
    cases = {
        "plain": (table, None, False),
        "plus_minus_200": (np.sign(table) * 200 + table, some, False),
        "plus_minus_200_causal": (np.sign(table) * 200 + table, some, True),
        "masked_sequences": (table, none, False),
        "masked_sequences_causal": (table * 100, none, True),
        "rows_of_1e30": (np.where(np.arange(6) % 2, -1e30, table), some, False),
        "rows_of_1e30_causal": (np.where(table > 0, -1e30, table), some, True),
        "whole_row_of_1e30": (np.where(np.arange(6)[:, None] == 2, np.float32(-1e30), table), some, True),
        "large_offset": (table + 3e4, some, False),
        "small_differences": (table * 1e-3, some, False),
    }
    for lead in (50, 90, 99, 101, 150, 1e3, 1e4):
        # Sequence 2 masks keys 0 and 3; these lie far above the rest.
        raised = np.where(np.isin(np.arange(6), (0, 3)), table + np.float32(lead), table)
        cases[f"masked_keys_{lead:g}_above"] = (raised, some, False)
        cases[f"masked_keys_{lead:g}_above_causal"] = (raised, some, True)
    return {name: (t.astype(np.float32), mask, causal) for name, (t, mask, causal) in cases.items()}


ADVERSARIAL = adversarial()


@functools.partial(jax.jit, static_argnames=("causal", "path"))
def shared_gradients(tree, key_mask, cotangent, causal, path):
    def loss(tree):
        out = sj.attend(
            sj.Scores(bias=tree["table"][None]), tree["values"], key_mask=key_mask, causal=causal, path=path
        )
        return jnp.sum(out * cotangent), out

    with jax.default_matmul_precision("highest"):
        return jax.value_and_grad(loss, has_aux=True)(tree)


@pytest.mark.parametrize("path", ["shared", "xla"])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-20], ids=["", "tiny", "tiniest"])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_shared_softmax_on_hard_tables(name, scale, path):
    table, key_mask, causal = ADVERSARIAL[name]
    tree = {"table": table, "values": draw((3, 6, 2, 3), 1)}
    cotangent = draw((3, 6, 2, 3), 2) * np.float32(scale)
    (_, out), gradients = shared_gradients(tree, key_mask, cotangent, causal=causal, path=path)

    def function(t):
        logits = oracle.build((3, 2, 6, 6), lambda n, g, i, j: t["table"][g, i, j])
        return oracle.attend(logits, t["values"], shared=True, key_mask=key_mask, causal=causal)

    expected, expected_gradients = oracle.gradients(function, tree, cotangent)
    # A table's gradient is a difference e * (g v - c), which cancels where one key takes all of the weight.
    assert np.all(np.isfinite(out))
    assert oracle.relative_error(out, expected) < TOLERANCE
    assert oracle.relative_error(gradients["values"], expected_gradients["values"]) < TOLERANCE
    assert oracle.relative_error(gradients["table"], expected_gradients["table"], floor=scale) < TOLERANCE


def test_floor_changes_nothing_within_100_nats():
    """The clamped softmax equals the plain one wherever a key within 100 nats of the row's maximum is allowed."""
    table, key_mask, causal = ADVERSARIAL["masked_keys_90_above"]
    logits = np.broadcast_to(table, (3, 2, 6, 6))
    values = draw((3, 6, 2, 3), 1)
    plain = oracle.attend(logits, values, shared=False, key_mask=key_mask, causal=causal)
    out = sj.attend(sj.Scores(bias=jnp.asarray(table)[None]), jnp.asarray(values), key_mask=jnp.asarray(key_mask))
    assert oracle.relative_error(out, oracle.value(plain)) < TOLERANCE


# Masks of pairs


def draw_mask(batch, heads, seed):
    """About half of the pairs; some rows of the first sequence have none, and nobody sees key 2."""
    mask = np.random.default_rng(seed).random((batch, heads, LENGTH, LENGTH)) < 0.5
    mask[0, :, (1, 4)] = False
    mask[..., 2] = False
    return mask


MASKS = {
    "each_sequence_and_head": (draw_mask(2, DIMS.heads, 0), {}),
    "each_sequence": (draw_mask(2, 1, 1), {"causal": True}),
    "each_head": (draw_mask(1, DIMS.heads, 2), {"key_mask": KEY_MASK}),
    "alone": (draw_mask(1, 1, 8), {}),
    "one_for_all": (draw_mask(1, 1, 3), {"causal": True, "key_mask": KEY_MASK}),
    "packed": (draw_mask(1, DIMS.heads, 4), {"q_segments": SEGMENTS, "k_segments": SEGMENTS}),
}
MASKED_SPECS = {
    "R": sj.Random(12),
    "V": sj.DotProduct(),
    "D": sj.Dense(12),
    "R+V": sj.synthesizer("R+V", 12),
}


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=oracle.QUICK_TO_COMPILE)
def masked_gradients(spec, path, tree, cotangent):
    def loss(tree, mask, masks):
        s = spec(tree["scores"], tree["x"], tree["x"])
        values = jnp.einsum("bke,ehd->bkhd", tree["x"], tree["value"])
        out = sj.attend(s, values, mask=jnp.asarray(mask), **asarrays(masks), path=path)
        return jnp.sum(out * cotangent), out

    with jax.default_matmul_precision("highest"):
        return {name: jax.value_and_grad(loss, has_aux=True)(tree, *both) for name, both in MASKS.items()}


@pytest.mark.parametrize(("name", "path"), [*((name, "auto") for name in MASKED_SPECS), ("R", "xla")])
def test_masks_of_pairs_equal_the_oracle(name, path):
    spec = MASKED_SPECS[name]
    tree = drawn_tree(spec, "no_mask")
    cotangent = draw((BATCH, LENGTH, DIMS.heads, DIMS.head_dim), 102)
    for case, ((_, out), gradients) in masked_gradients(spec, path, tree, cotangent).items():
        mask, masks = MASKS[case]

        def function(t, mask=mask, masks=masks):
            logits, values = oracle.logits(spec, t["scores"], t["x"]), oracle.project(t["x"], t["value"])
            return oracle.attend(logits, values, shared=oracle.is_shared(spec), mask=mask, **masks)

        expected, expected_gradients = oracle.gradients(function, tree, cotangent)
        assert oracle.relative_error(out, expected) < TOLERANCE, case
        error, where = oracle.worst(jax.tree.map(np.asarray, gradients), expected_gradients, floor=1.0)
        assert error < TOLERANCE, (case, where)
        empty = ~np.any(np.broadcast_to(mask, (BATCH, DIMS.heads, LENGTH, LENGTH)), axis=-1)
        assert empty.any() and not np.asarray(out).swapaxes(1, 2)[empty].any(), case


@pytest.mark.parametrize("own", [False, True], ids=["shared_by_the_batch", "own"])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_masks_of_pairs_on_hard_tables(name, own):
    """A mask that is shared keeps the shared algorithm and its floor; one of each sequence's own is the exact softmax."""
    table, key_mask, causal = ADVERSARIAL[name]
    mask = draw_mask(3 if own else 1, 2, 5)
    tree = {"table": table, "values": draw((3, 6, 2, 3), 1)}
    cotangent = draw((3, 6, 2, 3), 2)
    masks = {"key_mask": key_mask, "causal": causal, "mask": mask}

    @jax.jit
    def run(tree):
        def loss(tree):
            out = sj.attend(sj.Scores(bias=tree["table"][None]), tree["values"], **asarrays(masks))
            return jnp.sum(out * cotangent), out

        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(loss, has_aux=True)(tree)

    (_, out), gradients = run(tree)

    def function(t):
        logits = oracle.build((3, 2, 6, 6), lambda n, g, i, j: t["table"][g, i, j])
        return oracle.attend(logits, t["values"], shared=True, **masks)

    expected, expected_gradients = oracle.gradients(function, tree, cotangent)
    assert oracle.relative_error(out, expected) < TOLERANCE
    assert oracle.relative_error(gradients["values"], expected_gradients["values"]) < TOLERANCE
    assert oracle.relative_error(gradients["table"], expected_gradients["table"], floor=1.0) < TOLERANCE


@pytest.mark.parametrize("notation", ["R", "V", "R+V", "D"])
@pytest.mark.parametrize("batch", [1, BATCH])
def test_a_mask_says_what_the_keywords_say(notation, batch):
    """Causality, padding and segments as one mask [b, 1, q, k]; to the bit where the same algorithm serves both."""
    spec = sj.synthesizer(notation, max_length=8)
    tree = drawn_tree(spec, "no_mask")
    x, key_mask, segments = tree["x"][:batch], jnp.asarray(KEY_MASK)[:batch], jnp.asarray(SEGMENTS)[:batch]
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None, None]
    same = (segments[:, None, :, None] == segments[:, None, None, :]) & (segments[:, None, None, :] > 0)

    @jax.jit
    def run(scores):
        s, values = spec(scores, x, x), jnp.einsum("bke,ehd->bkhd", x, tree["value"])
        padded = sj.attend(s, values, key_mask=key_mask, causal=True, path="xla")
        packed = sj.attend(s, values, q_segments=segments, k_segments=segments, causal=True)
        return (
            (padded, sj.attend(s, values, mask=causal & key_mask[:, None, None, :], path="xla")),
            (packed, sj.attend(s, values, mask=causal & same)),
            (sj.attend(s, values, causal=True), sj.attend(s, values, mask=causal)),
        )

    for keywords, mask in run(tree["scores"]):
        np.testing.assert_allclose(keywords, mask, rtol=0, atol=1e-6)


def test_a_mask_shared_by_the_batch_keeps_the_shared_algorithm():
    """[b, h, q, k] is in the program for a mask of each sequence's own, and for no other."""
    table, values = jnp.zeros((1, 2, 7, 9)), jnp.zeros((5, 9, 2, 3))

    def program(*shape):
        mask = jnp.ones(shape, bool)
        return str(jax.make_jaxpr(lambda t, v: sj.attend(sj.Scores(bias=t), v, mask=mask))(table, values))

    assert "f32[5,2,7,9]" not in program(1, 2, 7, 9) and "f32[5,2,7,9]" not in program(1, 1, 7, 9)
    assert "f32[5,2,7,9]" in program(5, 1, 7, 9)
    with pytest.raises(ValueError, match=r"path: 'shared' needs .* mask of shape \(5, 1, 7, 9\)"):
        sj.attend(sj.Scores(bias=table), values, mask=jnp.ones((5, 1, 7, 9), bool), path="shared")


@pytest.mark.parametrize("path", ["shared", "xla"])
def test_a_mask_gives_scores_of_keys_alone_their_queries(path):
    """A bias [1, 1, 1, k], the same for all queries, under a causal mask [1, 1, q, k]."""
    bias, values = jnp.asarray(draw((1, 1, 1, LENGTH), 0)), jnp.asarray(draw((BATCH, LENGTH, 2, 3), 1))
    whole = jnp.broadcast_to(bias, (1, 1, LENGTH, LENGTH))

    def gradient(bias, **masks):
        return jax.value_and_grad(lambda b: jnp.sum(sj.attend(sj.Scores(bias=b), values, path=path, **masks) ** 2))(
            bias
        )

    out, d_bias = gradient(bias, mask=jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH), bool)))
    expected, d_whole = gradient(whole, causal=True)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    np.testing.assert_allclose(d_bias[0, 0, 0], d_whole.sum((0, 1, 2)), rtol=1e-5, atol=1e-6)


def test_weights_under_a_mask_are_what_attend_applies():
    tree = drawn_tree(sj.DotProduct(), "no_mask")
    mask = jnp.asarray(draw_mask(BATCH, DIMS.heads, 6))
    s = sj.DotProduct()(tree["scores"], tree["x"], tree["x"])
    values = jnp.einsum("bke,ehd->bkhd", tree["x"], tree["value"])
    weights = attention_weights(s, batch=BATCH, k_length=LENGTH, mask=mask)
    np.testing.assert_allclose(
        jnp.einsum("bhqk,bkhd->bqhd", weights, values), sj.attend(s, values, mask=mask), rtol=0, atol=2e-6
    )
    np.testing.assert_allclose(weights.sum(-1), jnp.any(mask, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (BATCH, 1), (BATCH, DIMS.heads)])
@pytest.mark.parametrize("notation", ["R", "V", "R+V"])
def test_keys_that_no_query_may_see_may_hold_anything(notation, shape):
    """Key 2 of draw_mask: neither inf nor NaN in its value reaches outputs and gradients."""
    spec = sj.synthesizer(notation, max_length=8)
    tree, mask = drawn_tree(spec, "no_mask"), jnp.asarray(draw_mask(*shape, 7))
    for content in (jnp.inf, jnp.nan):
        values = jnp.asarray(draw((2, 6, 2, 3), 0)).at[:, 2].set(content)

        def loss(tree, values):
            return jnp.sum(sj.attend(spec(tree["scores"], tree["x"], tree["x"]), values, mask=mask))

        loss, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(tree, values)
        assert np.isfinite(loss) and all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))
        assert not np.any(gradients[1][:, 2])


def test_large_values_behind_the_mask_do_not_leak():
    """Masked by selection: inf in padded values gives neither inf nor NaN, nor a gradient."""
    key_mask = jnp.asarray(KEY_MASK)
    values = jnp.where(key_mask[:, :, None, None], jnp.asarray(draw((2, 6, 2, 3), 0)), jnp.inf)
    for notation in ("R", "V", "R+V"):
        spec = sj.synthesizer(notation, max_length=8)
        tree = drawn_tree(spec, "no_mask")

        def loss(tree, values, spec=spec):
            return jnp.sum(sj.attend(spec(tree["scores"], tree["x"], tree["x"]), values, key_mask=key_mask))

        gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(tree, values)
        assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients)), notation
        assert not np.any(np.asarray(gradients[1])[~KEY_MASK]), notation


@pytest.mark.parametrize("path", ["shared", "xla"])
def test_bfloat16_softmax_is_float32(path):
    """Weights are normalised in float32: in bfloat16 a row of 300 equal keys would not sum to 1."""
    table, values = jnp.zeros((1, 1, 300, 300)), jnp.ones((1, 300, 1, 1), jnp.bfloat16)
    out = sj.attend(sj.Scores(bias=table), values, causal=True, path=path)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), 1, atol=2**-8)


# Dropout


def test_dropout_drops_whole_keys_of_the_values():
    key = jax.random.key(3)
    for notation in ("R", "R+V"):
        spec = sj.synthesizer(notation, max_length=8)
        tree = drawn_tree(spec, "no_mask")
        s = spec(tree["scores"], tree["x"], tree["x"])
        # Each value is its own unit vector, twice over, so that the outputs are the weights, twice.
        twice = jnp.tile(jnp.eye(LENGTH), (1, 2))
        values = jnp.broadcast_to(twice[None, :, None, :], (BATCH, LENGTH, 2, 2 * LENGTH))
        plain = np.asarray(sj.attend(s, values))
        dropped = np.asarray(sj.attend(s, values, dropout=Dropout(0.5, key)))
        np.testing.assert_array_equal(dropped[..., :LENGTH], dropped[..., LENGTH:])
        kept = np.any(dropped != 0, axis=1)  # [b, h, k twice]
        assert 8 <= kept.sum() <= 40
        np.testing.assert_allclose(dropped, np.where(kept[:, None], 2 * plain, 0), rtol=1e-6)
        assert not np.array_equal(kept[0], kept[1])
        assert not np.array_equal(kept[:, 0], kept[:, 1])
        np.testing.assert_array_equal(sj.attend(s, values, dropout=Dropout(0.0, key)), plain)


# What is refused


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"path": "fast"}, r"path: expected one of .* got 'fast'"),
        (
            {"path": "shared", "bias": jnp.zeros((2, 2, 6, 6))},
            r"path: 'shared' needs scores .* a bias with batch axis 2",
        ),
        ({"key_mask": jnp.ones((2, 6))}, r"key_mask: expected booleans of shape \[b, k\] = \(2, 6\).*got float32"),
        ({"key_mask": jnp.ones((2, 5), bool)}, r"key_mask: expected booleans of shape \[b, k\] = \(2, 6\).*\(2, 5\)"),
        ({"mask": jnp.ones((2, 1, 6, 6))}, r"mask: expected booleans .* b, h, q, k = \(2, 2, 6, 6\).*got float32"),
        ({"mask": jnp.ones((2, 6, 6), bool)}, r"mask: expected booleans of shape \[b\|1, h\|1, q\|1, k\]"),
        ({"mask": jnp.ones((2, 3, 6, 6), bool)}, r"mask: expected booleans .* got bool \(2, 3, 6, 6\)"),
        ({"mask": jnp.ones((2, 1, 6, 5), bool)}, r"mask: expected booleans .* got bool \(2, 1, 6, 5\)"),
        ({"q_segments": jnp.ones((2, 6), jnp.int32)}, r"q_segments, k_segments: expected both or neither"),
        (
            {"q_segments": jnp.ones((2, 6), jnp.int32), "k_segments": jnp.ones((2, 5), jnp.int32)},
            r"k_segments: expected shape \[b, k\] = \(2, 6\), got \(2, 5\)",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_arguments_are_refused(change, text):
    s = sj.Scores(bias=jnp.zeros((1, 2, 6, 6)))
    with pytest.raises(ValueError, match=text):
        sj.attend(s, jnp.zeros((2, 6, 2, 3)), **change)


def test_low_rank_scores_have_no_shared_path():
    s = sj.Scores(jnp.zeros((2, 6, 2, 3)), jnp.zeros((2, 6, 2, 3)))
    with pytest.raises(ValueError, match=r"path: 'shared' needs .* a low-rank part of rank 3"):
        sj.attend(s, jnp.zeros((2, 6, 2, 3)), path="shared")


def test_values_of_other_keys_are_refused():
    s = sj.Scores(bias=jnp.zeros((1, 2, 6, 6)))
    with pytest.raises(ValueError, match=r"values: expected \[b, k, h, d\] with the scores' k, h = \(6, 2\)"):
        sj.attend(s, jnp.zeros((2, 5, 2, 3)))
