"""One attention layer against values from outside the project: the authors' Mesh-TensorFlow code, and the paper's
variants written as loops by other hands (shared/goldens, sections 1 and 7). The oracle is held to the same values."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

import synthesizer_jax as sj

TOLERANCE = 1e-5  # stated beside the values: absolute; of gradients after division by max(1, largest)


class Case:
    """One situation of a golden layer: inputs, masks, and what is expected of them."""

    def __init__(self, data, name, segments, positions=None, causal=False, packed=False, bias=None):
        self.data, self.name, self.causal, self.packed, self.bias = data, name, causal, packed, bias
        self.segments = np.ones(data["x"].shape[:2], np.int32) if segments is None else data[segments]
        self.positions = positions
        self.real = self.segments > 0

    @property
    def cotangent(self):
        return self.data["cotangent"] * self.real[..., None]

    @property
    def has_gradients(self):
        return f"{self.name}.grad.x" in self.data.files

    def masks(self):
        if self.packed:
            return {"causal": self.causal, "q_segments": self.segments, "q_positions": self.positions}
        return {"causal": self.causal, "key_mask": self.real}

    def check(self, y, gradients):
        """gradients: the names of the goldens -> arrays."""
        np.testing.assert_allclose(
            np.asarray(y)[self.real], self.data[f"{self.name}.y"][self.real], rtol=0, atol=TOLERANCE
        )
        stored = [name for name in self.data.files if name.startswith(f"{self.name}.grad.")]
        for name in stored:
            expected, found = self.data[name], np.asarray(gradients[name.removeprefix(f"{self.name}.grad.")])
            assert found.shape == expected.shape, name
            scale = max(1.0, np.abs(expected).max())
            np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=TOLERANCE, err_msg=name)
        return len(stored)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=oracle.QUICK_TO_COMPILE)
def _run_library(spec, causal, with_gradients, tree, x, masks, bias, cotangent):
    features, heads, head_dim = tree["value"].shape

    def loss(tree, x, bias):
        graph, state = nnx.split(
            nnx.eval_shape(lambda: sj.Attention(spec, features, heads, head_dim, rngs=nnx.Rngs(0)))
        )
        nnx.replace_by_pure_dict(state, tree)
        y = nnx.merge(graph, state)(x, causal=causal, bias=bias, **masks)
        return jnp.sum(y * cotangent), y

    if not with_gradients:
        return loss(tree, x, bias)[1], None, None, None
    (_, y), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(tree, x, bias)
    return y, *gradients


def by_library(spec, tree, case, bias):
    """(y, gradients of the tree, of x, of the bias)."""
    masks = {name: jnp.asarray(mask) for name, mask in case.masks().items() if name != "causal"}
    tree = jax.tree.map(jnp.asarray, tree)
    length = case.data["x"].shape[1]
    bias = jnp.zeros((1, 1, length, length)) if bias is None else jnp.asarray(bias)  # one program for both
    x, cotangent = jnp.asarray(case.data["x"]), jnp.asarray(case.cotangent)
    return _run_library(spec, case.causal, case.has_gradients, tree, x, masks, bias, cotangent)


def by_oracle(spec, tree, case, bias):
    inputs = {"tree": tree, "x": case.data["x"]} | ({} if bias is None else {"bias": bias})

    def function(t):
        return oracle.attention_layer(spec, t["tree"], t["x"], bias=t.get("bias"), **case.masks())

    y, gradients = oracle.gradients(function, inputs, case.cotangent)
    return y, gradients["tree"], gradients["x"], gradients.get("bias")


implementations = pytest.mark.parametrize("run", [by_library, by_oracle], ids=["library", "oracle"])


def steps(spec, tree, x, bias=None):
    """Outputs of token-by-token decoding. bias [1, h, l, l]."""
    features, heads, head_dim = tree["value"].shape
    graph, state = nnx.split(nnx.eval_shape(lambda: sj.Attention(spec, features, heads, head_dim, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, tree))
    layer = nnx.merge(graph, state)
    step = jax.jit(lambda x, cache, bias: layer.step(x, cache, bias=bias))
    cache, outs = layer.init_cache(*x.shape[:2]), []
    for i in range(x.shape[1]):
        row = None if bias is None else jnp.asarray(bias[:, :, i : i + 1])
        y, cache = step(jnp.asarray(x[:, i : i + 1]), cache, row)
        outs.append(y)
    return np.concatenate(outs, axis=1)


# Section 1: the authors' code

AUTHORS_DENSE = sj.Dense(16, bias=False, share_w2=True)
MESH = {
    "vanilla": sj.DotProduct(),
    "random": sj.Random(16),
    "dense_minus": AUTHORS_DENSE,
    "random_plus": sj.Mixture((sj.Random(16), sj.DotProduct()), weights="sum"),
    "random_plus_alpha": sj.Mixture((sj.Random(16), sj.DotProduct()), weights="sigmoid", per_head=False),
    "dense_plus": sj.Mixture((AUTHORS_DENSE, sj.DotProduct()), weights="sum", share_query=True),
    "dense_plus_alpha": sj.Mixture(
        (AUTHORS_DENSE, sj.DotProduct()), weights="sigmoid", per_head=False, share_query=True
    ),
}
HEADS, HEAD_DIM = 2, 4


def inward(kernel):
    return kernel.reshape(kernel.shape[0], HEADS, HEAD_DIM)


def mesh_tree(mode, w):
    """w: name -> array, of weights or gradients -> the layer's parameters."""
    has = MESH[mode]
    scores = {}
    if mode.startswith("random"):
        scores["random"] = {"R": w("R").transpose(1, 0, 2)}
    if mode.startswith("dense"):
        scores["dense"] = {"w2": w("pi/kernel")} | ({"w1": inward(w("q"))} if mode == "dense_minus" else {})
    if mode == "vanilla" or "plus" in mode:
        scores["dot_product"] = {"query": inward(w("q")), "key": inward(w("k"))}
    if "alpha" in mode:
        scores["alpha"] = w("alpha").reshape(1, 1)
    if not isinstance(has, sj.Mixture):
        (scores,) = scores.values()
    value = "kv" if mode in ("random", "dense_minus") else "v"
    return {"value": inward(w(value)), "out": w("o").reshape(HEADS, HEAD_DIM, -1), "scores": scores}


def mesh_gradients(mode, tree):
    """The layer's gradients -> names of the goldens."""
    scores = tree["scores"] if isinstance(MESH[mode], sj.Mixture) else {MESH[mode].name: tree["scores"]}
    found = {"o": np.asarray(tree["out"]).reshape(HEADS * HEAD_DIM, -1)}
    found["kv" if mode in ("random", "dense_minus") else "v"] = np.asarray(tree["value"]).reshape(-1, HEADS * HEAD_DIM)
    for name, ours in (("q", "query"), ("k", "key")):
        if "dot_product" in scores:
            found[name] = np.asarray(scores["dot_product"][ours]).reshape(-1, HEADS * HEAD_DIM)
    if "random" in scores:
        found["R"] = np.asarray(scores["random"]["R"]).transpose(1, 0, 2)
    if "dense" in scores:
        found["pi/kernel"] = scores["dense"]["w2"]
        if mode == "dense_minus":
            found["q"] = np.asarray(scores["dense"]["w1"]).reshape(-1, HEADS * HEAD_DIM)
    if "alpha" in scores:
        found["alpha"] = np.asarray(scores["alpha"]).reshape(1)
    return found


def mesh_bias(data, causal, positions):
    """T5's bias [b|1, h, q, k], and the gradient of its table from the bias's gradient."""
    length = data["x"].shape[1]
    p = np.arange(length)[None] if positions is None else positions
    index = [[[oracle.bucket(int(k - q), 8, 128, not causal) for k in row] for q in row] for row in p]
    index = np.asarray(index)
    table = data["w.relative_attention_bias"]

    def back(gradient):
        return np.stack(
            [np.bincount(index.ravel(), g.ravel(), 8) for g in np.asarray(gradient, np.float64).swapaxes(0, 1)]
        )

    return np.moveaxis(table[:, index], 0, 1), back


def mesh_cases(data):
    slots = np.broadcast_to(np.arange(9, dtype=np.int32), (2, 9))  # the authors index by slot, also in packed rows
    for stack, causal in (("encoder", False), ("decoder", True)):
        yield Case(data, stack, None, causal=causal), None
        yield Case(data, f"{stack}_pad", "pad_segment_ids", causal=causal), None
        yield Case(data, f"{stack}_pad_rel", "pad_segment_ids", causal=causal), mesh_bias(data, causal, None)
        packed = Case(data, f"{stack}_packed_rel", "packed_segment_ids", slots, causal, packed=True)
        yield packed, mesh_bias(data, causal, data["packed_positions"])


@implementations
@pytest.mark.parametrize("mode", MESH)
def test_mesh_layer(shared, mode, run):
    data = np.load(shared / "goldens" / f"mtf_layer_{mode}.npz")
    tree = mesh_tree(mode, lambda name: data[f"w.{name}"])
    compared = 0
    for case, relative in mesh_cases(data):
        bias, back = (None, None) if relative is None else relative
        y, gradients, x_gradient, bias_gradient = run(MESH[mode], tree, case, bias)
        found = mesh_gradients(mode, gradients) | {"x": x_gradient}
        if back:
            found["relative_attention_bias"] = back(bias_gradient)
        compared += case.check(y, found)
    assert compared >= 8 * 3


@pytest.mark.parametrize("mode", MESH)
def test_mesh_layer_step_by_step(shared, mode):
    data = np.load(shared / "goldens" / f"mtf_layer_{mode}.npz")
    tree = mesh_tree(mode, lambda name: data[f"w.{name}"])
    y = steps(MESH[mode], tree, data["x"])
    np.testing.assert_allclose(y, data["incremental.y"], rtol=0, atol=TOLERANCE)
    relative = steps(MESH[mode], tree, data["x"], mesh_bias(data, True, None)[0])
    np.testing.assert_allclose(relative, data["incremental_rel.y"], rtol=0, atol=TOLERANCE)
    at_position = y[np.arange(2), data["incremental_mixed.positions"]]
    np.testing.assert_allclose(at_position, data["incremental_mixed.y"], rtol=0, atol=TOLERANCE)


def test_mesh_factorized():
    pytest.skip(
        "the authors' `factorized` gives every query the same row, which is not the paper's R1 R2^T: not offered"
    )


# Section 7: the paper's variants

N = 12
PARTS = {
    "random": (sj.Random(N), {"R": "R"}),
    "fixed_random": (sj.Random(N, trained=False), {"R": "R"}),
    "factorized_random": (sj.FactorizedRandom(N, rank=3), {"R1": "R1", "R2": "R2"}),
    "dense": (sj.Dense(N), {"w1": "W1", "b1": "b1", "w2": "W2", "b2": "b2"}),
    "factorized_dense": (
        sj.FactorizedDense(N, a=3, b=4),
        {"w1": "W1", "b1": "b1", "wa": "WA", "ba": "bA", "wb": "WB", "bb": "bB"},
    ),
    "factorized_dense_separate": (
        sj.FactorizedDense(N, a=3, b=4, shared_hidden=False),
        {"wa1": "WA1", "ba1": "bA1", "wb1": "WB1", "bb1": "bB1", "wa": "WA", "ba": "bA", "wb": "WB", "bb": "bB"},
    ),
    "vanilla": (sj.DotProduct(), {"query": "W_q", "key": "W_k"}),
    "scaled": (sj.DotProduct(scale=0.5), {"query": "W_q", "key": "W_k"}),
}
SINGLE = ("random", "fixed_random", "factorized_random", "dense", "factorized_dense", "factorized_dense_separate")
MIXED = {
    "random_dense": ("random", "dense"),
    "factorized_random_vanilla": ("factorized_random", "vanilla"),
    "random_vanilla": ("random", "vanilla"),
    "dense_vanilla": ("dense", "vanilla"),
    "factorized_dense_vanilla": ("factorized_dense", "vanilla"),
    "random_dense_vanilla": ("random", "dense", "vanilla"),
}
FORMS = [(name, "") for name in SINGLE]
FORMS += [(name, form) for name in MIXED for form in ("", "sigmoid.", "scaled.")]
SYNTH_CASES = ("encoder_pad", "decoder_pad", "decoder_pad_bias", "encoder_packed", "decoder_packed")
PER_HEAD_FIRST = ("W1", "W_q", "W_k", "WA1", "WB1", "W_v")  # [h, e, r] there, [e, h, r] here


def swap(name, array):
    return np.asarray(array).swapaxes(0, 1) if name in PER_HEAD_FIRST else np.asarray(array)


def synth_spec(variant, form):
    names = MIXED.get(variant, (variant,))
    names = ["scaled" if form == "scaled." and name == "vanilla" else name for name in names]
    specs = [PARTS[name][0] for name in names]
    weights = "sigmoid" if form == "sigmoid." else "softmax"
    return specs[0] if variant in SINGLE else sj.Mixture(tuple(specs), weights=weights), names


def synth_tree(variant, form, data):
    spec, names = synth_spec(variant, form)
    scores = {
        PARTS[name][0].name: {ours: swap(theirs, data[f"w.{theirs}"]) for ours, theirs in PARTS[name][1].items()}
        for name in names
    }
    if variant in SINGLE:
        (scores,) = scores.values()
    else:
        scores["alpha"] = data["w.alpha_raw"].T[:1] if form == "sigmoid." else data["w.alpha_raw"].T
    # The same layer in our names and layouts.
    return spec, {"value": swap("W_v", data["w.W_v"]), "out": data["w.W_o"], "scores": scores}


def synth_gradients(variant, form, tree):
    _, names = synth_spec(variant, form)
    found = {"W_v": swap("W_v", tree["value"]), "W_o": tree["out"]}
    for name in names:
        part = tree["scores"] if variant in SINGLE else tree["scores"][PARTS[name][0].name]
        found |= {theirs: swap(theirs, part[ours]) for ours, theirs in PARTS[name][1].items()}
    if variant in MIXED:
        found["alpha_raw"] = np.asarray(tree["scores"]["alpha"]).T
        if form == "sigmoid.":  # its second column is not used
            found["alpha_raw"] = np.pad(found["alpha_raw"], ((0, 0), (0, 1)))
    return found


@implementations
@pytest.mark.parametrize(("variant", "form"), FORMS, ids=[form + name for name, form in FORMS])
def test_synthesizer_variant(shared, variant, form, run):
    data = np.load(pathlib.Path(shared, "goldens", f"synth_{variant}.npz"))
    cases = [case for case in SYNTH_CASES if f"{form}{case}.y" in data.files]
    if not cases:
        pytest.skip(f"no values of this form of {variant}")
    spec, tree = synth_tree(variant, form, data)
    for name in cases:
        packed = "packed" in name
        segments = "packed_segment_ids" if packed else "pad_segment_ids"
        positions = data["packed_positions"] if packed else None
        case = Case(data, form + name, segments, positions, causal=name.startswith("decoder"), packed=packed)
        bias = data["bias"][None, :, :9, :9] if name.endswith("bias") else None
        y, gradients, x_gradient, _ = run(spec, tree, case, bias)
        found = synth_gradients(variant, form, gradients) | {"x": x_gradient} if case.has_gradients else {}
        case.check(y, found)


@pytest.mark.parametrize("variant", [*SINGLE, *MIXED])
def test_synthesizer_variant_step_by_step(shared, variant):
    data = np.load(shared / "goldens" / f"synth_{variant}.npz")
    spec, tree = synth_tree(variant, "", data)
    real = data["pad_segment_ids"] > 0
    y = steps(spec, tree, data["x"])
    np.testing.assert_allclose(y[real], data["decoder_pad.y"][real], rtol=0, atol=TOLERANCE)


def test_factorized_dense_expansion(shared):
    data = np.load(shared / "goldens" / "synth_factorized_dense.npz")
    spec = sj.FactorizedDense(N, a=3, b=4)
    params = jax.tree.map(
        lambda p: jnp.zeros(p.shape), spec.params(sj.Dims(1, 1, 1)), is_leaf=lambda p: isinstance(p, sj.Param)
    )
    params |= {"ba": jnp.asarray(data["expand.A"])[None], "bb": jnp.asarray(data["expand.B"])[None]}
    x = jnp.zeros((1, N, 1))
    np.testing.assert_allclose(spec(params, x, x).logits()[0, 0, 5], data["expand.C"], rtol=1e-6)
