"""What defines a model: parameter counts and paths, presets, configurations and their JSON form."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from variants import MAX_LENGTH, MIXERS, VARIANTS, parametrized

import synthesizer_jax as sj
from synthesizer_jax.models import parameters


def configure(scores, activation="relu", tied=True, **overrides):
    fields = {"vocab_size": 17, "features": 8, "mlp_features": 12, "heads": 2, "head_dim": 4}
    fields |= {"encoder_layers": 2, "decoder_layers": 2, "mlp_activation": activation, "tied_embedding": tied}
    fields |= {"encoder_attention": scores, "decoder_attention": scores}
    return sj.EncoderDecoderConfig(**fields | overrides)


R_PLUS_V = dict(VARIANTS)["R+V"]


# Parameters

DENSE = "D[bias=False,share_w2=True]"


def mixed(notation, max_length=512):
    return sj.synthesizer(notation, max_length, weights="sigmoid", per_head=False, share_query=notation.startswith("D"))


@pytest.mark.parametrize(
    ("attention", "millions"),
    [("V", 222.9), ("R", 254.3), ("R+V", 292.1), (DENSE, 224.4), (mixed(f"{DENSE}+V"), 243.3), ("FR[rank=16]", 207.1)],
    ids=["V", "R", "R+V", "D", "D+V", "FR"],
)
def test_paper_c4_base_counts(attention, millions):
    """The paper's numbers to 0.1 million (223 is printed without a decimal)."""
    assert abs(sj.count_parameters(sj.paper_c4_base(attention)) / 1e6 - millions) < 0.1


def test_paper_mt_base_counts():
    """The paper prints whole millions: V and R 67, R+V 73."""
    count = {name: sj.count_parameters(sj.paper_mt_base(name)) for name in ("V", "R", "R+V", "fixedR")}
    assert [round(count[name] / 1e6) for name in ("V", "R", "R+V")] == [67, 67, 73]
    alpha = 12 * 2 * 8
    assert count["R+V"] - count["V"] == 12 * 8 * 256**2 + alpha
    assert count["R"] - count["fixedR"] == 12 * 8 * 256**2


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        # As the published checkpoints have; one relative bias table of [32, heads] in each stack.
        (sj.t5_small, 60_506_624),
        (sj.t5_base, 222_903_552),
        (sj.t5_large, 737_668_096),
        (sj.t5_3b, 2_851_598_336),
        (sj.t5_11b, 11_307_321_344),
        (sj.t5_1_1_small, 76_961_152),
        (sj.t5_1_1_base, 247_577_856),
        (sj.t5_1_1_large, 783_150_080),
        (sj.t5_1_1_3b, 2_849_757_184),
        (sj.t5_1_1_11b, 11_135_332_352),
    ],
)
def test_t5_counts(preset, count):
    assert sj.count_parameters(preset()) == count


@pytest.mark.parametrize(
    ("config", "count"),
    [
        # Embedding, layers of 4 e^2 + 2 e m + 2 e, the final norm, a table of [32, heads]; a head of (e + 1) classes.
        (sj.paper_lm1b_base(), 32_128 * 512 + 6 * (4 * 512**2 + 2 * 512 * 2048 + 2 * 512) + 512 + 32 * 8),
        (sj.paper_lm1b_base("R"), 35_330_816),  # at N = 256 and e = 512, R [8, 256, 256] is as large as W_q and W_k
        (sj.paper_classifier(4), 32_128 * 256 + 4 * (4 * 256**2 + 2 * 256 * 1024 + 2 * 256) + 256 + 32 * 4 + 257 * 4),
        (sj.paper_classifier(4, "FR[rank=32]"), 11_373_956),  # at N = 512 and e = 256, so are R1 and R2 with rank 32
        (sj.lm_tiny(tied_embedding=False), 4_506_368 + 128 * 32_128),
        (sj.classifier_tiny(2), 4_506_626),
    ],
    ids=["lm", "lm R", "classifier", "classifier FR", "lm untied", "tiny classifier"],
)
def test_counts_of_one_stack(config, count):
    assert sj.count_parameters(config) == count


def test_every_preset_has_a_count():
    presets = {name for name in dir(sj) if name.startswith(("t5_", "paper_"))}
    tested = {f"t5_{size}" for size in ("small", "base", "large", "3b", "11b")}
    tested |= {f"t5_1_1_{size}" for size in ("small", "base", "large", "3b", "11b")}
    assert presets == tested | {
        *("t5_tiny", "t5_1_1_tiny", "paper_c4_base", "paper_mt_base", "paper_lm1b_base", "paper_classifier")
    }


LAYER_PATHS = {
    "attention/out": (2, 2, 4, 8),
    "attention/scores/alpha": (2, 2, 2),
    "attention/scores/dot_product/key": (2, 8, 2, 4),
    "attention/scores/dot_product/query": (2, 8, 2, 4),
    "attention/scores/random/R": (2, 2, MAX_LENGTH, MAX_LENGTH),
    "attention/value": (2, 8, 2, 4),
    "attention_norm/scale": (2, 8),
    "mlp/wi": (2, 8, 12),
    "mlp/wo": (2, 12, 8),
    "mlp_norm/scale": (2, 8),
}
CROSS_PATHS = {
    "cross_attention/out": (2, 2, 4, 8),
    "cross_attention/scores/key": (2, 8, 2, 4),
    "cross_attention/scores/query": (2, 8, 2, 4),
    "cross_attention/value": (2, 8, 2, 4),
    "cross_attention_norm/scale": (2, 8),
}


def test_parameter_paths_are_an_interface():
    """Checkpoints hold these paths: a change breaks everyone's."""
    trained, fixed = parameters.abstract(configure(R_PLUS_V))
    found = {"/".join(key.key for key in path): leaf for path, leaf in jax.tree.leaves_with_path(trained)}
    expected = {"embedding/embedding": (17, 8)}
    for stack, paths in (("encoder", LAYER_PATHS), ("decoder", LAYER_PATHS | CROSS_PATHS)):
        expected |= {f"{stack}/layers/{path}": shape for path, shape in paths.items()}
        expected |= {f"{stack}/final_norm/scale": (8,), f"{stack}/relative_bias/rel_embedding": (2, 32)}
    assert {path: leaf.shape for path, leaf in found.items()} == expected
    assert fixed == {}
    for path, leaf in found.items():
        assert len(leaf.axes) == len(leaf.shape), path
        assert (leaf.axes[0] == "layers") == ("/layers/" in path), path
    untied = parameters.abstract(configure(R_PLUS_V, tied=False))[0]
    assert untied["lm_head"].shape == (8, 17) and untied["lm_head"].axes == ("embed", "vocab")


# Configurations


@parametrized(MIXERS)
def test_json_round_trip(spec):
    options = {"dropout_rate": 0.25, "remat": "dots", "dtype": "bfloat16", "scan_layers": False}
    config = sj.t5_1_1_tiny("V", encoder_attention=spec, **options)
    assert sj.config_from_json(sj.to_json(config)) == config


@dataclasses.dataclass(frozen=True)
class Nearness(sj.Spec):
    """A user's own scores: -|i - j|."""

    strength: float = 1.0

    name = "nearness"

    def params(self, dims):
        return {}

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        distances = jnp.arange(x_q.shape[1])[:, None] - jnp.arange(k_length)
        return sj.Scores(bias=-self.strength * jnp.abs(distances).astype(jnp.float32)[None, None])


def test_scores_of_the_users_own_are_read_back():
    config = sj.t5_tiny(sj.Mixture((Nearness(2.0), sj.DotProduct())))
    text = sj.to_json(config)
    assert sj.config_from_json(text) == config
    with pytest.raises(ValueError, match="unknown kind of scores 'Farness'; import the module that defines it first"):
        sj.config_from_json(text.replace("Nearness", "Farness"))


@pytest.mark.parametrize(
    "config",
    [sj.lm_tiny("R", tied_embedding=False), sj.classifier_tiny(3, "FR", pooling="first"), sj.t5_tiny("D")],
    ids=lambda config: type(config).__name__,
)
def test_json_knows_the_kind_of_model(config):
    assert sj.config_from_json(sj.to_json(config)) == config
    assert json.loads(sj.to_json(config))["kind"] == type(config).__name__


def test_a_file_without_a_kind_is_an_encoder_decoder():
    fields = json.loads(sj.to_json(sj.t5_tiny("R+V")))
    del fields["kind"]
    assert sj.config_from_json(json.dumps(fields)) == sj.t5_tiny("R+V")


def test_json_errors():
    text = sj.to_json(sj.t5_tiny())
    with pytest.raises(ValueError, match=r"unknown fields depth; it was written by another version"):
        sj.config_from_json(text.replace('"encoder_layers"', '"depth"'))
    with pytest.raises(ValueError, match=r"unknown kind of scores 'Magic'"):
        sj.config_from_json(text.replace("DotProduct", "Magic"))
    with pytest.raises(
        ValueError, match=r"unknown kind of model 'MagicConfig'; expected one of EncoderDecoderConfig, D"
    ):
        sj.config_from_json(text.replace("EncoderDecoderConfig", "MagicConfig"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: configure(R_PLUS_V, vocab_size=0), r"vocab_size: expected a positive whole number, got 0"),
        (lambda: configure(R_PLUS_V, heads=2.0), r"heads: expected a positive whole number, got 2.0"),
        (lambda: configure(R_PLUS_V, cross_heads=-1), r"cross_heads: expected a positive whole number, got -1"),
        (lambda: configure(R_PLUS_V, activation="gelu"), r"mlp_activation: expected one of .* got 'gelu'"),
        (
            lambda: configure(R_PLUS_V, dtype="float16"),
            r"dtype: expected one of .* got 'float16'; T5's activations overflow",
        ),
        (lambda: configure(R_PLUS_V, remat="all"), r"remat: expected one of .* got 'all'"),
        (lambda: configure(R_PLUS_V, dropout_rate=1.0), r"dropout_rate: expected a rate from 0 to below 1, got 1.0"),
        (lambda: configure(R_PLUS_V, tied="yes"), r"tied_embedding: expected True or False, got 'yes'"),
        (
            lambda: configure(R_PLUS_V, decoder_attention=None),
            r"decoder_attention: expected scores such as .* got None",
        ),
        (lambda: sj.t5_tiny("Q"), r"notation: 'Q' in 'Q' is not understood"),
        (lambda: sj.t5_tiny("R", 0), r"max_length: expected a positive whole number, got 0"),
        (lambda: sj.t5_tiny("R", layers=3), r"overrides: layers is no field of the configuration; expected some of"),
        (
            lambda: sj.t5_tiny("R", num_classes=3),
            r"num_classes \(of EncoderOnlyConfig\) is no field of the configuration; .* \(EncoderDecoderConfig\)",
        ),
        (
            lambda: sj.lm_tiny(cross_heads=3),
            r"cross_heads \(of EncoderDecoderConfig\) is no field .* \(DecoderOnlyConfig",
        ),
        (lambda: sj.classifier_tiny(2, decoder_layers=3), r"decoder_layers \(of EncoderDecoderConfig and DecoderOnlyC"),
        (lambda: sj.classifier_tiny(1), r"num_classes: expected at least 2, got 1"),
        (lambda: sj.classifier_tiny("2"), r"num_classes: expected a positive whole number, got '2'"),
        (lambda: sj.classifier_tiny(2, pooling="max"), r"pooling: expected one of \('mean', 'first'\), got 'max'"),
        (lambda: sj.lm_tiny(tied_embedding=1), r"tied_embedding: expected True or False, got 1"),
        (lambda: sj.lm_tiny(decoder_layers=0), r"decoder_layers: expected a positive whole number, got 0"),
        (lambda: sj.lm_tiny("Q"), r"notation: 'Q' in 'Q' is not understood"),
        (lambda: sj.t5_tiny(encoder_attention="R"), r"encoder_attention: expected scores such as .* got 'R'"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_configurations_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
