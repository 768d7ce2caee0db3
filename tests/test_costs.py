"""Costs: operations against closed forms and XLA's own count, parameters of parts, caches, the paper's tables."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from variants import MIXERS, parametrized

import synthesizer_jax as sj
from synthesizer_jax.analysis.costs import CROSS, MLP, REST, SELF, TABLE_1, costs, count_flops, table_1, table_4
from synthesizer_jax.axes import Param
from synthesizer_jax.models import parameters
from synthesizer_jax.nn.attention import as_mixer

E, H, D, N = 32, 4, 8, 16  # features, heads, head size, length
ENCODER = {"vocab_size": 64, "features": E, "mlp_features": 48, "heads": H, "head_dim": D, "mlp_activation": "relu"}


def layer_flops(spec):
    layer = nnx.eval_shape(lambda: sj.Attention(spec, E, H, D, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    counts = count_flops(
        lambda state, x: nnx.merge(graph, state)(x), state, jax.ShapeDtypeStruct((1, N, E), jnp.float32)
    )
    assert set(counts) <= {SELF, REST} and not counts[REST]
    return counts[SELF]


PROJECTION = 2 * N * E * H * D  # of all tokens, for one of queries, keys, values and outputs
WEIGHTED = 2 * N * N * H * D  # the values by their weights, or queries by keys


@pytest.mark.parametrize(
    "spec,flops",
    [
        (sj.DotProduct(), 4 * PROJECTION + 2 * WEIGHTED),
        (sj.Random(N), 2 * PROJECTION + WEIGHTED),
        (sj.FactorizedRandom(N, rank=3), 2 * PROJECTION + WEIGHTED + 2 * N * N * H * 3),
        (sj.synthesizer("R+V", N), 4 * PROJECTION + 2 * WEIGHTED),
        (sj.Kernel("rbf", symmetric=True), 4 * PROJECTION + WEIGHTED + 2 * N * N * H * (D + 1)),
        (sj.TokenMixing(N), 2 * N * N * E),
        (sj.TokenMixing(N, hidden=24), 2 * 2 * N * 24 * E),
        (sj.Linformer(N, rank=5), 2 * PROJECTION + 2 * PROJECTION * 5 // N + 2 * 2 * N * 5 * E + 2 * 2 * N * 5 * H * D),
    ],
    ids=lambda value: type(value).__name__,
)
def test_operations_of_a_layer_are_those_of_its_formula(spec, flops):
    """All at full length, without masks."""
    assert layer_flops(spec) == flops


def config_of(kind, **overrides):
    attention = overrides.pop("attention", sj.synthesizer("R+V", N))
    if kind == "encoder_decoder":
        stacks = {
            "encoder_attention": attention,
            "decoder_attention": attention,
            "encoder_layers": 2,
            "decoder_layers": 3,
        }
        return sj.EncoderDecoderConfig(**ENCODER, **stacks, tied_embedding=False, **overrides)
    if kind == "decoder_only":
        stack = {"decoder_attention": attention, "decoder_layers": 3}
        return sj.DecoderOnlyConfig(**ENCODER, **stack, tied_embedding=True, **overrides)
    return sj.EncoderOnlyConfig(**ENCODER, encoder_attention=attention, encoder_layers=2, num_classes=3, **overrides)


@pytest.mark.parametrize("kind", ["encoder_decoder", "decoder_only", "encoder_only"])
def test_operations_are_close_to_xlas_own_count(kind):
    """XLA counts elementwise work, too; it counts a loop once, so that layers are unrolled for it."""
    wide = {"features": 128, "mlp_features": 512, "head_dim": 32}
    config = config_of(kind, scan_layers=False, dropout_rate=0.0)
    config = type(config)(**{**vars(config), **wide})
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), parameters.abstract(config))
    tokens = [jax.ShapeDtypeStruct((1, N), jnp.int32)] * (2 if kind == "encoder_decoder" else 1)

    def forward(trained, fixed, *tokens):
        return parameters.bind(config, trained, fixed)(*tokens)

    found = costs(config, N, N)
    measured = jax.jit(forward).lower(*shapes, *tokens).compile().cost_analysis()["flops"]
    assert found.flops <= measured < 1.1 * found.flops
    assert costs(type(config)(**{**vars(config), "scan_layers": True}), N, N).flops == found.flops
    assert found.training_flops == pytest.approx(3 * found.flops, rel=0.05), "each product has two in the gradient"


@parametrized(MIXERS)
def test_parts_add_up_for_every_mixer(spec):
    config = config_of("encoder_only", attention=spec, scan_layers=not as_mixer(spec).decoder_error())
    found = costs(config, 6)
    parts = {part.name: part for part in found.parts}
    assert found.parameters == sj.count_parameters(config)
    assert parts[MLP].parameters == 2 * 2 * E * 48 and parts[MLP].flops == 2 * 2 * 2 * 6 * E * 48
    declared = jax.tree.leaves(as_mixer(spec).params(sj.Dims(E, H, D)), is_leaf=lambda leaf: isinstance(leaf, Param))
    own = sum(jnp.zeros(p.shape).size for p in declared if p.trained)
    assert parts[SELF].parameters >= 2 * own and parts[SELF].flops > 0
    assert CROSS not in parts
    assert found.cache_bytes_per_target == 0


def test_what_decoding_keeps():
    """V keeps keys and values, R values alone, token mixing the tokens; cross-attention keys and values of the input."""
    for name, arrays in (("V", 2), ("R", 1)):
        config = config_of("encoder_decoder", attention=sj.synthesizer(name, N))
        found = costs(config, N, N)
        assert found.cache_bytes_per_target == 3 * arrays * H * D * 4
        assert found.cache_bytes_per_input == 3 * 2 * H * D * 4 + 1, "and the input's mask"
        half = costs(type(config)(**{**vars(config), "dtype": "bfloat16"}), N, N)
        assert half.cache_bytes_per_target == 3 * arrays * H * D * 2
    mixing = costs(config_of("decoder_only", attention=sj.TokenMixing(N)), 0, N)
    assert mixing.cache_bytes_per_target == 3 * E * 4 and mixing.cache_bytes_per_input == 0


def test_lengths_are_checked():
    with pytest.raises(ValueError, match="input_length: expected a positive whole number, got 0"):
        costs(config_of("encoder_only"), 0)
    with pytest.raises(ValueError, match="target_length: expected a positive whole number, got 0"):
        costs(config_of("decoder_only"), 4)


def test_table_1_evaluates_the_formulas_that_it_shows():
    e, d, n, r, a, b = 512, 64, 256, 8, 16, 16
    rows = [line.split("|") for line in table_1().splitlines()[2:]]
    for entry, row in zip(TABLE_1, rows, strict=True):
        product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", entry.ours).replace("^", "**").replace("N", "n")
        value = eval(product, {"e": e, "d": d, "n": n, "r": r, "a": a, "b": b})
        assert int(row[4].replace(",", "")) == value, entry.name
    assert [row[5].strip() for row in rows] == [
        "all pairs of tokens", "nothing", "nothing", "nothing", "token i", "token i", "all pairs of tokens",
    ]  # fmt: skip


def test_table_4_has_the_papers_parameters():
    for line in table_4().splitlines()[2:]:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert abs(float(cells[1].rstrip("M")) - float(cells[2].rstrip("M"))) < 1, cells[0]
