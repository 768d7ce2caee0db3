"""Lightweight and dynamic convolution against the authors' fairseq modules (shared/goldens, section 4)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import synthesizer_jax as sj
from synthesizer_jax.mixers import Surroundings
from synthesizer_jax.ops import convolution

TOLERANCE = 1e-5  # stated beside the values: absolute; of gradients after division by max(1, largest)
HEADS, CHANNELS = 2, 8

VARIANTS = {
    "light": (sj.LightweightConv, {}),
    "light_nosoftmax": (sj.LightweightConv, {"softmax": False}),
    "dynamic": (sj.DynamicConv, {}),
    "dynamic_renorm": (sj.DynamicConv, {"renormalize": True}),
}


@pytest.fixture(params=["products", "blocks"])
def algorithm(request, monkeypatch):
    monkeypatch.setattr(convolution, "_WIDE_HEAD", 10**9 if request.param == "products" else 1)


def generator(weight, width):
    """[h * w, e], row h * w + t, as [e, h, w]."""
    return np.moveaxis(weight.reshape(HEADS, width, CHANNELS), 2, 0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [3, 7])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.usefixtures("algorithm")
def test_convolution_alone(shared, name, width, causal):
    """The module without its linear maps, which are the identity here; values and gradients."""
    data = np.load(shared / "goldens" / "fairseq_conv.npz")
    case = f"k{width}.{'causal' if causal else 'centred'}.{name}"
    kind, options = VARIANTS[name]
    spec = kind(width, heads=HEADS, glu=False, **options)
    parameter = "kernel" if kind is sj.LightweightConv else "kernel_generator"
    as_ours = (lambda w: w) if kind is sj.LightweightConv else functools.partial(generator, width=width)
    real, around = data["nonpad"], Surroundings(key_mask=jnp.asarray(data["nonpad"]), causal=causal)

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def run(weight, x):
        y, pull = jax.vjp(lambda w, x: spec(identity() | {parameter: w}, x, None, around), weight, x)
        return y, *pull(jnp.where(real[..., None], data[f"k{width}.cotangent"], 0))

    weight = data[f"k{width}.{'light' if kind is sj.LightweightConv else 'dynamic'}_weight"]
    y, d_weight, d_x = run(jnp.asarray(as_ours(weight)), jnp.asarray(data[f"k{width}.x"]))
    np.testing.assert_allclose(np.asarray(y)[real], data[f"{case}.y"][real], rtol=0, atol=TOLERANCE)
    for found, expected in ((d_x, data[f"{case}.grad_x"]), (d_weight, as_ours(data[f"{case}.grad_w"]))):
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=TOLERANCE)
    if f"{case}_bct_class.y" in data.files:  # the didactic class: head of channel c is c mod h, a known mistake
        assert np.abs(np.asarray(y)[real] - data[f"{case}_bct_class.y"][real]).max() > 0.1


def identity():
    return {"linear_in": jnp.eye(CHANNELS), "linear_out": jnp.eye(CHANNELS)}


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("glu", [True, False])
@pytest.mark.parametrize("width", [3, 7])
@pytest.mark.parametrize("kind", [sj.LightweightConv, sj.DynamicConv])
def test_layer_of_the_authors(shared, kind, width, glu, stack):
    """A whole pre-norm layer: x + mixer(norm(x)), then x + MLP(norm(x)), with biases."""
    data = np.load(
        shared / "goldens" / f"fairseq_block_{'lightweight' if kind is sj.LightweightConv else 'dynamic'}.npz"
    )
    case = f"k{width}.{'glu' if glu else 'noglu'}"
    w = {name.partition(".w.")[2]: data[name] for name in data.files if name.startswith(f"{case}.{stack}.w.")}
    spec = kind(width, heads=HEADS, glu=glu, bias=True)
    params = fairseq_parameters(w, width)
    assert {n: p.shape for n, p in spec.params(sj.Dims(CHANNELS, 1, 1)).items()} == jax.tree.map(np.shape, params)
    first, second = ("layer_norm1", "layer_norm2") if stack == "encoder" else ("conv_layer_norm", "final_layer_norm")
    decoder = stack == "decoder"
    around = Surroundings(key_mask=None if decoder else jnp.asarray(data["nonpad"]), causal=decoder)

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def run(params, x):
        x = x + spec(params, layer_norm(x, w, first), None, around)
        hidden = jax.nn.relu(layer_norm(x, w, second) @ w["fc1.weight"].T + w["fc1.bias"])
        return x + hidden @ w["fc2.weight"].T + w["fc2.bias"]

    y = run(jax.tree.map(jnp.asarray, params), jnp.asarray(data[f"{case}.x"]))
    real = np.ones_like(data["nonpad"]) if decoder else data["nonpad"]
    np.testing.assert_allclose(np.asarray(y)[real], data[f"{case}.{stack}.y"][real], rtol=0, atol=TOLERANCE)


def fairseq_parameters(w, width):
    """[out, in] weights as ours; linear1 holds the values before the gates."""
    parts = np.split(w["linear1.weight"], len(w["linear1.weight"]) // CHANNELS)
    biases = np.split(w["linear1.bias"], len(parts))
    params = {"linear_out": w["linear2.weight"].T, "linear_out_bias": w["linear2.bias"]}
    for name, part, bias in zip(("linear_in", "gate"), parts, biases, strict=False):
        params |= {name: part.T, f"{name}_bias": bias}
    if "conv.weight" in w:
        return params | {"kernel": w["conv.weight"][:, 0]}
    return params | {"kernel_generator": generator(w["conv.weight_linear.weight"], width)}


def layer_norm(x, w, name):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return (
        centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]
        + w[f"{name}.bias"]
    )
