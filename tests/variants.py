"""The tuples of all variants that drive the properties: adding a variant is one row here.

VARIANTS are scores, which have logits; KERNELS are scores, some without a logarithm and some up to a constant of the row.
MIXERS are all that a layer can be made of: these scores, and what takes attention's place.
"""

import pytest

import synthesizer_jax as sj

# The longest length that the tests' scores cover; longer than the sequences, so that tables are sliced.
MAX_LENGTH = 12

VARIANTS = (
    ("V", sj.DotProduct()),
    ("V scaled", sj.DotProduct(scale=0.5)),
    ("R", sj.Random(MAX_LENGTH)),
    ("fixedR", sj.Random(MAX_LENGTH, trained=False)),
    ("FR", sj.FactorizedRandom(MAX_LENGTH, rank=3)),
    ("D", sj.Dense(MAX_LENGTH)),
    ("D authors'", sj.Dense(MAX_LENGTH, bias=False, share_w2=True)),
    ("FD", sj.FactorizedDense(MAX_LENGTH)),
    ("FD separate", sj.FactorizedDense(MAX_LENGTH, a=2, shared_hidden=False)),
    ("relative", sj.RelativePositionBias(buckets=8, max_distance=16)),
    ("Toeplitz", sj.Toeplitz(MAX_LENGTH)),
    ("R+V", sj.synthesizer("R+V", MAX_LENGTH)),
    ("D+V", sj.synthesizer("D+V", MAX_LENGTH)),
    ("R+D", sj.synthesizer("R+D", MAX_LENGTH)),
    ("FR+V", sj.synthesizer("FR[rank=3]+V", MAX_LENGTH)),
    ("FD+V", sj.synthesizer("FD+V", MAX_LENGTH)),
    ("R+FR", sj.synthesizer("R+FR", MAX_LENGTH)),
    ("R+V sum", sj.synthesizer("R+V", MAX_LENGTH, weights="sum")),
    ("R+V authors'", sj.synthesizer("R+V", MAX_LENGTH, weights="sigmoid", per_head=False)),
    (
        "D+V authors'",
        sj.synthesizer(
            "D[bias=False,share_w2=True]+V", MAX_LENGTH, weights="sigmoid", per_head=False, share_query=True
        ),
    ),
    ("nested", sj.Mixture((sj.synthesizer("R+D", MAX_LENGTH), sj.DotProduct(), sj.Random(MAX_LENGTH)))),
)

LEARNED = {"positions": "learned", "max_length": MAX_LENGTH}
T5 = {"positions": "t5", "buckets": 8, "max_distance": 16}

KERNELS = (
    ("exponential", sj.Kernel()),
    ("rbf", sj.Kernel("rbf")),
    ("rbf symmetric", sj.Kernel("rbf", symmetric=True)),
    ("polynomial", sj.Kernel("polynomial")),
    ("direct sum", sj.Kernel("rbf", integration="direct_sum", **LEARNED)),
    ("lookup", sj.Kernel(integration="lookup", scaled_lookup=True)),
    ("lookup learned", sj.Kernel(integration="lookup", **LEARNED)),
    ("lookup t5", sj.Kernel("polynomial", integration="lookup", **T5)),
    ("Transformer-XL", sj.Kernel(integration="product_asymmetric", biases=True)),
    ("asymmetric product learned", sj.Kernel("rbf", integration="product_asymmetric", **LEARNED)),
    ("asymmetric product t5", sj.Kernel(symmetric=True, integration="product_asymmetric", **T5)),
    ("symmetric product", sj.Kernel("rbf", symmetric=True, integration="product_symmetric")),
    ("symmetric product learned", sj.Kernel("polynomial", integration="product_symmetric", **LEARNED)),
    ("values with positions", sj.Kernel(integration="direct_sum", value_positions=True)),
    ("values with learned positions", sj.Kernel("rbf", value_positions=True, **LEARNED)),
    ("linear", sj.Kernel("linear")),
    ("linear symmetric product", sj.Kernel("linear", integration="product_symmetric", symmetric=True, **LEARNED)),
    ("R+rbf", sj.Mixture((sj.Random(MAX_LENGTH), sj.Kernel("rbf", symmetric=True)))),
    ("D+polynomial", sj.Mixture((sj.Dense(MAX_LENGTH), sj.Kernel("polynomial")))),
    ("FR+linear", sj.Mixture((sj.FactorizedRandom(MAX_LENGTH), sj.Kernel("linear", value_positions=True)), "sum")),
)

MIXERS = (
    *VARIANTS,
    *KERNELS,
    ("V local", sj.MultiHead(sj.DotProduct(), keys=sj.Sparse(3))),
    ("R+V strided", sj.MultiHead(sj.synthesizer("R+V", MAX_LENGTH), keys=sj.Sparse(2, stride=4))),
    ("light", sj.LightweightConv(3)),
    ("light wide", sj.LightweightConv(9, heads="features", separable=True, bias=True)),
    ("light without glu", sj.LightweightConv(4, glu=False)),
    ("light without softmax", sj.LightweightConv(3, softmax=False)),
    ("light renormalize", sj.LightweightConv(9, renormalize=True)),
    ("dynamic", sj.DynamicConv(3)),
    ("dynamic wide", sj.DynamicConv(9, heads="features", separable=True, bias=True)),
    ("dynamic with own heads", sj.DynamicConv(4, heads="features", glu=False)),
    ("dynamic renormalize", sj.DynamicConv(5, renormalize=True)),
    ("Linformer", sj.Linformer(MAX_LENGTH, rank=3)),
    ("Linformer per head", sj.Linformer(MAX_LENGTH, rank=3, sharing="none")),
    ("Linformer key-value", sj.Linformer(MAX_LENGTH, rank=5, sharing="key-value")),
    ("Linformer layerwise", sj.Linformer(MAX_LENGTH, rank=3, sharing="layerwise")),
    ("token mixing", sj.TokenMixing(MAX_LENGTH)),
    ("token mixing without bias", sj.TokenMixing(MAX_LENGTH, bias=False)),
    ("token mixing MLP", sj.TokenMixing(MAX_LENGTH, hidden=2 * MAX_LENGTH)),
    ("token mixing encoder MLP", sj.TokenMixing(MAX_LENGTH, hidden=10, bias=False, approximate_gelu=False)),
)

# One of each kind, and the paper's mixtures: what every run of the tests goes through. The other rows differ from these by an
# option, and are slow tests: a change of scores or mixers is to be tested with `pytest -m ""`.
CORE = {
    "V",
    "R",
    "fixedR",
    "FR",
    "D",
    "FD",
    "relative",
    "R+V",
    "D+V",
    "FR+V",
    "R+V authors'",
    "rbf symmetric",
    "Transformer-XL",
    "symmetric product learned",
    "values with learned positions",
    "FR+linear",
    "R+V strided",
    "light wide",
    "dynamic renormalize",
    "Linformer layerwise",
    "token mixing MLP",
}


def parametrized(rows):
    """A test for each row of (name, spec), of those that are not in CORE a slow one."""
    slow = pytest.mark.slow
    named = [pytest.param(spec, id=name, marks=() if name in CORE else slow) for name, spec in rows]
    return pytest.mark.parametrize("spec", named)
