"""The kernel family and Transformer-XL against values from outside the project (shared/goldens, sections 6 and 8)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import synthesizer_jax as sj
from synthesizer_jax.mixers import MultiHead, Surroundings
from synthesizer_jax.scores.position import sinusoids

TOLERANCE = 1e-5  # stated beside the values
KERNELS = ("exponential", "rbf", "polynomial", "linear")
LENGTH = 6

# The names of the goldens -> options of Kernel.
POSITION_PARTS = {
    "none": {},
    "direct_sum": {"integration": "direct_sum"},
    "lookup": {"integration": "lookup", "positions": "learned"},
    "lookup_scaled": {"integration": "lookup", "positions": "learned", "scaled_lookup": True},
    "product_asym": {"integration": "product_asymmetric"},
    "product_asym_bias": {"integration": "product_asymmetric", "biases": True},
    "product_sym": {"integration": "product_symmetric"},
}


def spec_of(kernel, name):
    symmetry, part, value, *_ = name.split(".")
    return sj.Kernel(
        kernel,
        symmetric=symmetry == "sym",
        value_positions=value == "v_pos",
        max_length=LENGTH,
        **POSITION_PARTS[part],
    )


def learned(spec):
    """The same with positions from a table, for goldens whose positions are no sinusoids."""
    if spec.integration == "lookup" or not (spec.integration != "none" or spec.value_positions):
        return spec
    return sj.Kernel(**{**vars(spec), "positions": "learned"})


def params_of(data, spec):
    """Values of the goldens for all that the spec declares."""
    declared = MultiHead(spec).params(sj.Dims(8, 2, 4))["scores"]
    table = "w.a" if spec.integration == "lookup" else "w.r"
    names = {
        "query": "w.W_q",
        "key": "w.W_k",
        "positions": "t",
        "relative": table,
        "position_key": "w.W_R" if spec.integration == "product_asymmetric" else "w.W_T",
        "content_bias": "w.u",
        "position_bias": "w.v",
    }
    return {name: jnp.asarray(data[names[name]]) for name in declared}


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=oracle.QUICK_TO_COMPILE)
def run(spec, causal, params, f, key_mask):
    around = Surroundings(causal=causal, key_mask=key_mask)
    mixer = MultiHead(spec)
    with jax.default_matmul_precision("highest"):
        return mixer(params, f, None, around), mixer.weights(params, f, None, around)


def check(data, spec, name):
    layer = {"scores": params_of(data, spec), "value": data["w.W_v"], "out": data["w.W_o"]}
    case = name.split(".")[3]
    valid = data["valid"] if case.endswith("pad") else np.ones(data["f"].shape[:2], bool)
    y, weights = run(spec, case.startswith("causal"), jax.tree.map(jnp.asarray, layer), data["f"], jnp.asarray(valid))
    np.testing.assert_allclose(np.asarray(y)[valid], data[f"{name}.y"][valid], rtol=0, atol=TOLERANCE, err_msg=name)
    if f"{name}.attn" in data.files:
        np.testing.assert_allclose(weights, data[f"{name}.attn"], rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("part", POSITION_PARTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_dissection(shared, kernel, part):
    data = np.load(shared / "goldens" / f"dissection_{kernel}.npz")
    names = [name.removesuffix(".y") for name in data.files if name.endswith(".y") and name.split(".")[1] == part]
    assert len(names) >= 4
    for name in names:
        check(data, learned(spec_of(kernel, name)), name)


def test_the_goldens_sinusoids_are_ours(shared):
    """So that sinusoidal positions, in their factored form, are checked by the same values."""
    data = np.load(shared / "goldens" / "dissection_exponential.npz")
    np.testing.assert_allclose(data["t"], sinusoids(jnp.arange(LENGTH), 8), atol=1e-6)
    np.testing.assert_allclose(data["w.r"], sinusoids(jnp.arange(2 * LENGTH - 1) - LENGTH + 1, 8), atol=1e-6)
    for part in ("direct_sum", "product_asym", "product_asym_bias", "product_sym"):
        for value in ("v_nopos", "v_pos"):
            name = f"asym.{part}.{value}.all"
            if f"{name}.y" in data.files:
                check(data, spec_of("exponential", name), name)


def test_linear_kernel_with_negative_scores(shared):
    data = np.load(shared / "goldens" / "dissection_linear_signed.npz")
    assert np.asarray(run_logits(data)).min() < 0
    check(data, sj.Kernel("linear"), "asym.none.v_nopos.all")


def run_logits(data):
    params = {"query": data["w.W_q"], "key": data["w.W_k"]}
    f = jnp.asarray(data["f"])
    return sj.Kernel("linear")(jax.tree.map(jnp.asarray, params), f, f).factor


@pytest.mark.parametrize("case", ["no_mem", "mem"])
def test_transformer_xl(shared, case):
    """The Transformer-XL layer: product_asymmetric with biases, causal with memory."""
    data = np.load(shared / "goldens" / "transfo_xl_attention.npz")
    heads, head_dim = data["w.r_w_bias"].shape
    features = data["x"].shape[-1]

    def split(weight):
        return jnp.asarray(weight.T.reshape(features, heads, head_dim))

    query, key, value = map(split, np.split(data["w.qkv_net.weight"], 3))
    params = {
        "scores": {
            "query": query,
            "key": key,
            "position_key": split(data["w.r_net.weight"]),
            "content_bias": jnp.asarray(data["w.r_w_bias"]),
            "position_bias": jnp.asarray(data["w.r_r_bias"]),
        },
        "value": value,
        "out": jnp.asarray(data["w.o_net.weight"].T.reshape(heads, head_dim, features)),
    }

    def norm(x):
        x = x.astype(np.float64)
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(
            x.var(-1, keepdims=True) + 1e-5
        )  # not 1e-6, as its README says
        return jnp.asarray(scaled * data["w.layer_norm.weight"] + data["w.layer_norm.bias"], jnp.float32)

    memory = norm(data["mems"]) if case == "mem" else None
    mixer = MultiHead(sj.Kernel("exponential", integration="product_asymmetric", biases=True))
    around = Surroundings(causal=True, memory=memory)
    y = data["x"] + np.asarray(mixer(params, norm(data["x"]), None, around))
    np.testing.assert_allclose(y, data[f"{case}.y"], rtol=0, atol=TOLERANCE)
    weights = mixer.weights(params, norm(data["x"]), None, around)
    np.testing.assert_allclose(weights, data[f"{case}.attn"], rtol=0, atol=TOLERANCE)
