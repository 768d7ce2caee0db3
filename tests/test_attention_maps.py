"""Attention weights of whole models, and the pictures of them: what is drawn are the weights."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matplotlib import figure
from PIL import Image

import synthesizer_jax as sj
from synthesizer_jax.analysis import attention_maps
from synthesizer_jax.analysis.attention_maps import Maps, draw_maps, encoder_maps
from synthesizer_jax.models import parameters

SIZES = {"features": 16, "mlp_features": 32, "heads": 2, "head_dim": 8, "dropout_rate": 0.1}
TOKENS = jnp.array([[5, 6, 7, 8, 1, 0, 0], [9, 8, 7, 6, 5, 4, 1]])
TARGETS = jnp.array([[0, 3, 4, 0], [0, 5, 6, 1]])
BATCH = {"encoder_input_tokens": TOKENS, "decoder_input_tokens": TARGETS}

PRESETS = {
    "encoder-decoder": functools.partial(sj.t5_tiny, max_length=8, vocab_size=32, **SIZES),
    "language model": functools.partial(sj.lm_tiny, max_length=8, vocab_size=32, **SIZES),
    "classifier": functools.partial(sj.classifier_tiny, 3, max_length=8, vocab_size=32, **SIZES),
}


@functools.cache
def model_of(config):
    """A model with drawn parameters: quicker than its own initial values."""
    rng = np.random.default_rng(0)
    declared = parameters.abstract(config)
    drawn = [jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype) / 3, tree) for tree in declared]
    return parameters.bind(config, *drawn)


@functools.cache
def maps_of(kind, attention="R+V", **options):
    return attention_maps.weights(model_of(PRESETS[kind](attention, **options)), BATCH)


# Weights


@pytest.mark.parametrize(
    ("kind", "stacks"),
    [
        ("encoder-decoder", {"encoder": (7, 7), "decoder": (4, 4), "cross": (4, 7)}),
        ("language model", {"decoder": (4, 4)}),
        ("classifier", {"encoder": (7, 7)}),
    ],
)
def test_weights_of_every_kind_of_model(kind, stacks):
    maps = maps_of(kind)
    assert {name: one.layers[0].shape[2:] for name, one in maps.items()} == stacks
    for name, one in maps.items():
        assert len(one.layers) == 2 and {layer.shape for layer in one.layers} == {(2, 2, *stacks[name])}
        for layer in one.layers:
            np.testing.assert_allclose(layer.sum(-1), 1, atol=1e-6)
        assert one.causal == (name == "decoder")
    if "encoder" in maps:
        assert not maps["encoder"].layers[0][0, :, :, 5:].any(), "padding"
        np.testing.assert_array_equal(maps["encoder"].keys, TOKENS > 0)
    if "cross" in maps:
        assert not maps["cross"].layers[1][0, :, :, 5:].any(), "padding"
        np.testing.assert_array_equal(maps["cross"].keys, TOKENS > 0)
    if "decoder" in maps:
        assert not np.triu(maps["decoder"].layers[0], k=1).any(), "the future"
        np.testing.assert_array_equal(maps["decoder"].queries, [[True, True, True, False], [True] * 4])


@pytest.mark.parametrize("scan", [True, False])
def test_weights_of_random_scores_are_the_softmax_of_their_table(scan):
    config = PRESETS["classifier"]("R", scan_layers=scan, remat="full")
    model = model_of(config)
    layers = parameters.split(model)[0]["encoder"]["layers"]
    table = layers["attention"]["scores"]["R"][0] if scan else layers["0"]["attention"]["scores"]["R"]
    expected = jax.nn.softmax(table[:, :7, :7] + model.encoder.bias(7, 7)[0], axis=-1)
    found = attention_maps.weights(model, BATCH)["encoder"]
    np.testing.assert_allclose(found.layers[0][1], expected, atol=1e-6)  # no padding here


@pytest.mark.parametrize("attention", ["R", "V", "FR+D", sj.LightweightConv(3, heads=2)])
def test_weights_are_those_that_training_applies_without_making_them(attention):
    """Each layer's attention is its weights times its values: also of R, whose [b, h, q, k] never exists."""
    model = model_of(PRESETS["classifier"](attention, scan_layers=False))
    maps = attention_maps.weights(model, BATCH)
    x, context = model.embedding(TOKENS, jnp.float32), model.encoder.context(TOKENS)
    for layer, weights in zip(model.encoder.layers, maps["encoder"].layers, strict=True):
        normed = layer.attention_norm(x)
        applied = layer.attention(normed, **context.of_self_attention())
        if isinstance(attention, str):
            values = jnp.einsum("bke,ehd->bkhd", normed, layer.attention.value[...])
            expected = jnp.einsum("bhqk,bkhd,hde->bqe", weights, values, layer.attention.out[...])
            np.testing.assert_allclose(applied, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(weights, layer.attention.weights(normed, **context.of_self_attention()), atol=1e-6)
        x = layer(x, context, None)


def test_weights_of_cross_attention_are_those_that_the_decoder_applies():
    model = model_of(PRESETS["encoder-decoder"]("R+V", scan_layers=False))
    found = attention_maps.weights(model, BATCH)["cross"]
    layer, encoded = model.decoder.layers[0], model.encode(TOKENS)
    x, context = model.embedding(TARGETS, jnp.float32), model.decoder.context(TARGETS)
    x = layer.cross_attention_norm(x + layer.attention(layer.attention_norm(x), **context.of_self_attention()))
    applied = layer.cross_attention(x, encoded, key_mask=TOKENS > 0)
    values = jnp.einsum("bke,ehd->bkhd", encoded, layer.cross_attention.value[...])
    expected = jnp.einsum("bhqk,bkhd,hde->bqe", found.layers[0], values, layer.cross_attention.out[...])
    np.testing.assert_allclose(applied, expected, rtol=0, atol=1e-5)


def test_the_second_look_does_not_compile_again():
    attention_maps.weights(model_of(PRESETS["classifier"]("V")), BATCH)
    before = attention_maps._weights._cache_size()
    other = nnx.clone(model_of(PRESETS["classifier"]("V")))
    attention_maps.weights(other, {"encoder_input_tokens": np.asarray(TOKENS) + 1})
    assert attention_maps._weights._cache_size() == before


# What Maps gives


def drawn_maps(stack="encoder", causal=False, depth=3, heads=2, seed=0):
    """Maps of two sequences of 4 tokens, the first with padding in the middle and at the end, and of random weights."""
    rng = np.random.default_rng(seed)
    real = np.array([[True, False, True, False], [True] * 4])
    layers = tuple(rng.random((2, heads, 4, 4)).astype(np.float32) for _ in range(depth))
    return Maps(stack, layers, real, real, causal)


def test_padding_is_left_out_on_both_sides():
    maps = drawn_maps()
    np.testing.assert_array_equal(maps.of(1, 0), maps.layers[1][0][:, ::2, ::2])
    np.testing.assert_array_equal(maps.of(-1, 1), maps.layers[2][1])
    expected = [*maps.layers[0][0][:, ::2, ::2].ravel(), *maps.layers[0][1].ravel()]
    assert sorted(maps.values(0)) == sorted(expected)


def test_the_future_is_left_out_where_it_is_none_of_the_models_choices():
    maps = drawn_maps(causal=True)
    expected = [maps.layers[0][1, h, q, k] for h in range(2) for q in range(4) for k in range(q + 1)]
    expected += [maps.layers[0][0, h, q, k] for h in range(2) for q in (0, 2) for k in (0, 2) if k <= q]
    assert sorted(maps.values(0)) == sorted(expected)


# Pictures


def images(picture):
    """(title, drawn numbers, limits of the colours) of each map."""
    return [
        (axis.get_title(), np.asarray(axis.images[0].get_array()), axis.images[0].get_clim())
        for axis in picture.axes
        if axis.images
    ]


def words(labels):
    return [label.get_text() for label in labels]


def test_heat_maps_draw_the_weights_of_each_head():
    maps = drawn_maps(heads=6)
    picture = attention_maps.heat_maps(maps, layer=-1, example=0, tokens=["a", "b"])
    drawn = images(picture)
    assert [title for title, _, _ in drawn] == [f"head {head}" for head in range(1, 7)]
    for (_, weights, limits), expected in zip(drawn, maps.of(2), strict=True):
        np.testing.assert_array_equal(weights, expected)
        assert limits == (0, maps.of(2).max())
    assert picture.get_suptitle() == "Attention weights: encoder, layer 3 of 3"
    assert (picture.get_supxlabel(), picture.get_supylabel()) == ("key (attended to)", "query")
    assert [axis.get_ylabel() for axis in picture.axes if axis.get_ylabel()] == ["attention weight"], "the colour bar"
    lines = [axis for axis in picture.axes if words(axis.get_yticklabels()) == ["a", "b"] and axis.images]
    columns = [axis for axis in picture.axes if words(axis.get_xticklabels()) == ["a", "b"]]
    assert (len(lines), len(columns)) == (2, 4), "6 heads in 2 lines of 4"


def test_heat_maps_of_cross_attention_have_two_texts():
    maps = dataclasses.replace(drawn_maps("cross-attention"), keys=np.ones((2, 4), bool))
    picture = attention_maps.heat_maps(maps, tokens=["a", "b"], key_tokens=list("wxyz"))
    first = picture.axes[0]
    assert words(first.get_yticklabels()) == ["a", "b"] and words(first.get_xticklabels()) == list("wxyz")
    np.testing.assert_array_equal(images(picture)[1][1], maps.layers[0][0, 1][::2])


def test_histograms_count_the_weights_of_each_layer():
    variants = {name: drawn_maps(seed=seed, causal=True) for seed, name in enumerate(("V", "D", "R"))}
    picture = attention_maps.histograms(variants, bins=10)
    assert [axis.get_title() for axis in picture.axes] == ["layer 1", "layer 2", "layer 3"]
    largest = max(maps.values(layer).max() for maps in variants.values() for layer in range(3))
    for layer, axis in enumerate(picture.axes):
        lines = axis.patches
        assert [line.get_label() for line in lines] == ["V", "D", "R"]
        for line, maps in zip(lines, variants.values(), strict=True):
            data = line.get_data()
            bars = np.minimum(np.floor(maps.values(layer) / largest * 10), 9)
            np.testing.assert_array_equal(data.values, [np.sum(bars == bar) for bar in range(10)])
            np.testing.assert_allclose(data.edges, np.linspace(0, largest, 11), rtol=1e-6)
        assert axis.get_yscale() == "log"
    assert len({(line.get_edgecolor(), line.get_linestyle()) for line in picture.axes[0].patches}) == 3
    assert words(picture.axes[0].get_legend().get_texts()) == ["V", "D", "R"]
    assert (picture.get_supxlabel(), picture.get_supylabel()) == ("attention weight", "pairs of tokens")


def test_bins_reach_weights_outside_0_and_1():
    maps = drawn_maps(depth=5)
    maps.layers[4][1, 0, 0, 0] = -0.5
    maps.layers[3][1, 0, 0, 0] = 2.0
    picture = attention_maps.histograms({"W": maps}, bins=5)
    total = [sum(axis.patches[0].get_data().values) for axis in picture.axes if axis.patches]
    assert total == [2 * (4 + 16)] * 5
    np.testing.assert_allclose(picture.axes[0].patches[0].get_data().edges, np.linspace(-0.5, 2, 6))


def test_a_comparison_has_a_row_for_each_variant():
    variants = {
        "R": {"before": drawn_maps(heads=3), "after": drawn_maps(heads=3, seed=1)},
        "token mixing": {"before": drawn_maps(heads=1, seed=2), "after": drawn_maps(heads=1, seed=3)},
    }
    variants["token mixing"]["after"].layers[1][1, 0, 2, 3] = -0.25
    picture = attention_maps.compare(variants, layer=1, heads=2, example=1, tokens=list("abcd"))
    before, after = (variants["R"][stage].layers[1][1] for stage in ("before", "after"))
    single = [variants["token mixing"][stage].layers[1][1, 0] for stage in ("before", "after")]
    drawn = images(picture)
    for (_, weights, limits), expected in zip(drawn, [*before[:2], *after[:2], *single], strict=True):
        np.testing.assert_array_equal(weights, expected)
        assert limits == (min(0, expected.min()), expected.max())
    assert drawn[0][0] == f"before, head 1\nmax {before[0].max():.2f}"
    assert drawn[5][0] == f"after, head 1\n-0.25 to {single[1].max():.2f}"
    assert [axis.get_ylabel() for axis in picture.axes if axis.get_ylabel()] == ["R", "token mixing"]
    assert sum(words(axis.get_xticklabels()) == list("abcd") for axis in picture.axes) == 4, "below each column"
    assert picture.get_suptitle() == "Attention weights: encoder, layer 2"


def test_a_comparison_by_layers_shows_the_mean_of_the_heads():
    maps = drawn_maps()
    picture = attention_maps.compare({"R": {"": maps}}, by="layers", example=1)
    drawn = images(picture)
    assert [title.splitlines()[0] for title, _, _ in drawn] == ["layer 1", "layer 2", "layer 3"]
    for (_, weights, _), layer in zip(drawn, maps.layers, strict=True):
        np.testing.assert_array_equal(weights, layer[1].mean(0))


def test_a_picture_shows_itself_in_a_notebook_and_is_saved(tmp_path):
    """Notebooks ask an object for _repr_png_ and take the bytes as they are."""
    for picture in (
        attention_maps.heat_maps(drawn_maps(), tokens=["one", "two"]),
        attention_maps.histograms({"R": drawn_maps()}),
        attention_maps.compare({"R": {"": drawn_maps()}}),
    ):
        assert isinstance(picture, figure.Figure)
        shown = Image.open(io.BytesIO(picture._repr_png_()))
        assert shown.format == "PNG" and min(shown.size) > 150
        picture.savefig(tmp_path / "picture.png")
        saved = Image.open(tmp_path / "picture.png")
        np.testing.assert_array_equal(np.asarray(saved), np.asarray(shown))
        assert picture._repr_png_() == picture._repr_png_(), "the same bytes each time"
        assert len(np.unique(np.asarray(shown).reshape(-1, 4), axis=0)) > 20, "something is drawn"


def test_brighter_is_more_also_in_grey():
    colours = attention_maps.colours(np.linspace(0, 1, 256))
    grey = colours[:, :3] @ [0.299, 0.587, 0.114]
    assert np.all(np.diff(grey) > 0)


# For the comparison of variants


def test_maps_are_drawn_for_each_row_and_head():
    config = PRESETS["encoder-decoder"]("R+V")
    trained, fixed = parameters.split(model_of(config))
    first, last = (encoder_maps(config, trained, fixed, TOKENS[1:], layer) for layer in (0, -1))
    assert first.shape == last.shape == (2, 7, 7) and not np.array_equal(first, last)
    picture = draw_maps({"R+V": [first, last]}, ("first", "last"), list("abcdefg"), "two layers")
    drawn = images(picture)
    titles = [title.splitlines()[0] for title, _, _ in drawn]
    assert titles == ["first, head 1", "first, head 2", "last, head 1", "last, head 2"]
    for (_, weights, _), expected in zip(drawn, [*first, *last], strict=True):
        np.testing.assert_array_equal(weights, expected)


# What is refused


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (lambda: attention_maps.heat_maps(drawn_maps(), layer=3), "layer: the encoder has 3 layers, got 3"),
        (lambda: attention_maps.heat_maps(drawn_maps(), layer=-4), "layer: the encoder has 3 layers, got -4"),
        (lambda: attention_maps.heat_maps(drawn_maps(), example=2), "example: the batch has 2 examples, got 2"),
        (
            lambda: attention_maps.heat_maps(drawn_maps(), tokens=list("abcd")),
            "tokens: expected a text for each of the 2 tokens that are no padding, got 4",
        ),
        (lambda: attention_maps.histograms({}), "variants: expected at least one label"),
        (
            lambda: attention_maps.histograms({"V": drawn_maps(), "R": drawn_maps(depth=2)}),
            r"variants: expected stacks of as many layers, got \[2, 3\]",
        ),
        (
            lambda: attention_maps.histograms({str(i): drawn_maps() for i in range(7)}),
            "variants: expected at most 6, which lines can tell apart, got 7",
        ),
        (lambda: attention_maps.compare({"V": {"": drawn_maps()}}, by="head"), r"by: expected one of .* got 'head'"),
        (lambda: attention_maps.compare({}), "variants: expected at least one label"),
        (
            lambda: attention_maps.compare(
                {"V": {"": drawn_maps("encoder"), "other": maps_of("classifier")["encoder"]}}
            ),
            r"variants: expected maps of one example, of the same lengths, got .*\(2, 2\), \(5, 5\)",
        ),
        (
            lambda: attention_maps.weights(model_of(PRESETS["classifier"]("V")), {"decoder_input_tokens": TOKENS}),
            "batch: expected encoder_input_tokens, got no encoder_input_tokens",
        ),
        (
            lambda: attention_maps.weights(model_of(PRESETS["classifier"]("V")), {"encoder_input_tokens": TOKENS[0]}),
            r"batch: expected encoder_input_tokens of shape \[b, length\], got shape \(7,\)",
        ),
        (
            lambda: attention_maps.weights(
                model_of(PRESETS["language model"]("V")), BATCH | {"decoder_segment_ids": TARGETS}
            ),
            "batch: expected one example in each row, got decoder_segment_ids",
        ),
        (
            lambda: encoder_maps(PRESETS["encoder-decoder"]("R"), {}, {}, TOKENS[1:], 2),
            "layer: the encoder has 2 layers, got 2",
        ),
        (
            lambda: attention_maps.weights(model_of(PRESETS["classifier"](sj.TokenMixing(8, hidden=16))), BATCH),
            "model: layer 1 of the encoder, TokenMixing, has no weights to look at. hidden: token mixing through 16",
        ),
    ],
)
def test_wrong_arguments_are_refused(attempt, text):
    with pytest.raises(ValueError, match=text):
        attempt()
