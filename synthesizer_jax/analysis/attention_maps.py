"""Pictures of attention weights: heat maps of heads, histograms, comparisons of variants (Synthesizer section 5).

    from synthesizer_jax.analysis import attention_maps

    maps = attention_maps.weights(model, batch)  # {"encoder": Maps, "decoder": Maps, "cross": Maps}
    attention_maps.heat_maps(maps["encoder"], layer=0)  # shows itself at the end of a notebook's cell
    attention_maps.histograms({"R": maps["encoder"]}).savefig("histograms.png")

The weights are those that the model applies, computed for looking at them: training may never have made them.
"""

import dataclasses
import functools
import io
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from matplotlib import figure

from synthesizer_jax.axes import Param
from synthesizer_jax.mixers.mixer import Surroundings
from synthesizer_jax.models import parameters
from synthesizer_jax.models.config import EncoderDecoderConfig, ModelConfig
from synthesizer_jax.models.parameters import Model, Tree
from synthesizer_jax.nn.attention import as_mixer
from synthesizer_jax.scores import Dims

By = Literal["heads", "layers"]

# Of weights from 0 to 1: perceptually uniform, and as grey from dark to light.
colours = matplotlib.colormaps["viridis"]
# For lines one over the other: apart in lightness, and in dashes.
_LINES = (("#000000", "-"), ("#d55e00", "-"), ("#56b4e9", "-"), ("#009e73", "--"), ("#cc79a7", "--"), ("#e0b000", "--"))


class Picture(figure.Figure):
    """A matplotlib figure that shows itself in a notebook, as PNG; `savefig(path)` writes it to a file."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


@dataclasses.dataclass(frozen=True)
class Maps:
    """The attention weights of one stack of layers over a batch.

    layers: weights of each layer, [b, h, q, k] in float32; h may differ from layer to layer. queries [b, q] and keys
    [b, k]: True at tokens that are no padding. causal: whether a token sees only those up to itself.
    """

    stack: str
    layers: tuple[Float[np.ndarray, "b _h q k"], ...]
    queries: Bool[np.ndarray, "b q"]
    keys: Bool[np.ndarray, "b k"]
    causal: bool

    def of(self, layer: int, example: int = 0) -> Float[np.ndarray, "_h _q _k"]:
        """The weights [h, q, k] of a layer (-1: the last) for one example of the batch, without padding."""
        weights = self.layer(layer)
        if not -len(weights) <= example < len(weights):
            raise ValueError(f"example: the batch has {len(weights)} examples, got {example}")
        return weights[example][:, self.queries[example]][:, :, self.keys[example]]

    def values(self, layer: int) -> Float[np.ndarray, " _n"]:
        """The weights of a layer (-1: the last) in one row: all heads and examples, of the pairs that may attend.

        Padding is left out on both sides, and the future where the stack is causal: their zeros are no choice of the
        model's.
        """
        weights, pairs = self.layer(layer), self.queries[:, :, None] & self.keys[:, None, :]
        if self.causal:
            pairs = pairs & np.tri(*pairs.shape[1:], dtype=bool)
        return weights[np.broadcast_to(pairs[:, None], weights.shape)]

    def layer(self, layer: int) -> Float[np.ndarray, "b _h q k"]:
        """The weights [b, h, q, k] of a layer (-1: the last)."""
        if not -len(self.layers) <= layer < len(self.layers):
            raise ValueError(f"layer: the {self.stack} has {len(self.layers)} layers, got {layer}")
        return self.layers[layer]


def weights(model: Model, batch: Mapping[str, Int[Array, "b _"]]) -> dict[str, Maps]:
    """The attention weights of a model of any kind over a batch: "encoder", "decoder" and "cross", what it has of them.

    model: with its parameters; `parameters.bind(*checkpoint.restore_params(model_dir))` reads one. batch: the model's
    inputs in seqio's names, "encoder_input_tokens" and "decoder_input_tokens", padded by 0; the first decoder token, the
    start of the sequence, counts as real. Other arrays are not read. Every layer's [b, h, q, k] is held: take few
    examples.

    Raises ValueError for a packed batch, and where a layer has no weights, such as a token-mixing MLP.
    """
    names = model.config.batch.inputs
    _check_batch(names, batch, model.config.batch.packing)
    stacks = [name.split("_")[0] for name in names]  # encoder_input_tokens -> encoder
    for stack in stacks:
        _check_weights(model.config, stack)
    graph, state = nnx.split(model)
    tokens = [jnp.asarray(batch[name], jnp.int32) for name in names]
    own, cross = _weights(graph, state, tokens)
    real = {stack: _real(np.asarray(batch[name]), stack) for stack, name in zip(stacks, names, strict=True)}
    maps = {
        stack: Maps(stack, _by_layer(layers), real[stack], real[stack], causal=stack == "decoder")
        for stack, layers in zip(stacks, own, strict=True)
    }
    if cross is not None:
        maps["cross"] = Maps("cross-attention", _by_layer(cross), real["decoder"], real["encoder"], causal=False)
    return maps


@functools.partial(jax.jit, static_argnums=0)
def _weights(graph, state, tokens):
    """(self-attention weights of each stack, cross-attention weights or None)."""
    model = nnx.merge(graph, state)
    own = model.attention_weights(*tokens)
    if not isinstance(model.config, EncoderDecoderConfig):
        return (own,), None
    return own, model.cross_attention_weights(*tokens)


def _by_layer(layers):
    """A stacked array [layers, ...], or a tuple of arrays, as a tuple of numpy arrays."""
    return tuple(np.asarray(layer) for layer in layers)


def _real(tokens, stack):
    """Where tokens are no padding; a decoder's sequence starts with a 0 that is none."""
    real = tokens > 0
    if stack == "decoder":
        real[:, 0] = True
    return real


def _check_batch(names, batch, packing):
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(f"batch: expected {' and '.join(names)}, got no {' and '.join(missing)}")
    for name in names:
        if np.ndim(batch[name]) != 2:
            raise ValueError(f"batch: expected {name} of shape [b, length], got shape {np.shape(batch[name])}")
    packed = [name for name in packing if name in batch]
    if packed:
        raise ValueError(f"batch: expected one example in each row, got {packed[0]}; make the batch without packing")


def _check_weights(config: ModelConfig, stack: str) -> None:
    """Refuse layers whose mixer has no weights to look at, by number and name."""
    mixer, depth = as_mixer(getattr(config, f"{stack}_attention")), getattr(config, f"{stack}_layers")
    dims = Dims(config.features, config.heads, config.head_dim)
    x = jax.ShapeDtypeStruct((1, 1, config.features), jnp.float32)

    def shapes(declared):
        return jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), declared, is_leaf=lambda p: isinstance(p, Param)
        )

    for layer in range(depth):
        one = mixer.of_layer(layer, depth)
        try:
            jax.eval_shape(
                lambda params, shared, x, one=one: one.weights(params, x, None, Surroundings(shared=shared)),
                shapes(one.params(dims)),
                shapes(one.stack_params(dims)),
                x,
            )
        except ValueError as error:
            raise ValueError(
                f"model: layer {layer + 1} of the {stack}, {type(one).__name__}, has no weights to look at. {error}"
            ) from error


# Pictures


def heat_maps(
    maps: Maps,
    layer: int = 0,
    example: int = 0,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> Picture:
    """The heads of one layer (-1: the last) for one example, on one colour scale with its bar; padding is cut off.

    tokens: the example's tokens as text, for both axes; key_tokens: those of the keys, in cross-attention.
    """
    heads = maps.of(layer, example)
    number = layer % len(maps.layers)
    blocks = {"": [(f"head {head + 1}", weights) for head, weights in enumerate(heads)]}
    return _grid(
        _folded(blocks[""]),
        title=f"Attention weights: {maps.stack}, layer {number + 1} of {len(maps.layers)}",
        tokens=_labels(tokens, heads.shape[1], "tokens"),
        key_tokens=_labels(tokens if key_tokens is None else key_tokens, heads.shape[2], "key_tokens"),
        limits=(min(0.0, float(heads.min())), float(heads.max())),
    )


def histograms(variants: Mapping[str, Maps], bins: int = 50, title: str | None = None) -> Picture:
    """How often each weight occurs, a panel for each layer, one line for each variant; counts on a logarithmic axis.

    variants: label -> maps, of the same batch, so that counts compare. Of all heads and examples; padding, and the
    future in causal stacks, are left out. All panels have the same bins, from the smallest weight, at most 0, to the
    largest.
    """
    if not variants:
        raise ValueError('variants: expected at least one label with its maps, such as {"R": maps["encoder"]}')
    depths = {len(maps.layers) for maps in variants.values()}
    if len(depths) > 1:
        raise ValueError(f"variants: expected stacks of as many layers, got {sorted(depths)}")
    if len(variants) > len(_LINES):
        raise ValueError(f"variants: expected at most {len(_LINES)}, which lines can tell apart, got {len(variants)}")
    (depth,) = depths
    values = {label: [maps.values(layer) for layer in range(depth)] for label, maps in variants.items()}
    everything = [row for rows in values.values() for row in rows]
    edges = np.linspace(min(0.0, *map(np.min, everything)), max(map(np.max, everything)) or 1.0, bins + 1)
    columns = min(depth, 4)
    lines = -(-depth // columns)
    picture = Picture(figsize=(2.9 * columns + 1.0, 2.2 * lines + 1.1), dpi=100, layout="constrained")
    panels = picture.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for layer, axis in enumerate(panels.flat):
        if layer >= depth:
            axis.set_axis_off()
            continue
        for (label, rows), (colour, dashes) in zip(values.items(), _LINES):
            counts, _ = np.histogram(rows[layer], edges)
            axis.stairs(counts, edges, baseline=0.5, label=label, color=colour, linestyle=dashes, linewidth=1.4)
        axis.set_yscale("log")
        axis.set_title(f"layer {layer + 1}", fontsize=9)
        axis.tick_params(labelsize=8)
    panels[0, 0].set_ylim(bottom=0.5)
    panels[0, 0].legend(fontsize=8)
    (stack, *others) = dict.fromkeys(maps.stack for maps in variants.values())
    picture.suptitle(title or f"Attention weights: {' and '.join([stack, *others])}", fontsize=10)
    picture.supxlabel("attention weight", fontsize=9)
    picture.supylabel("pairs of tokens", fontsize=9)
    return _laid_out(picture)


def compare(
    variants: Mapping[str, Mapping[str, Maps]],
    by: By = "heads",
    layer: int = 0,
    heads: int = 4,
    example: int = 0,
    tokens: Sequence[str] | None = None,
    title: str | None = None,
) -> Picture:
    """Variants below each other, their maps of one example side by side.

    variants: label of the row -> title of the columns, such as "before" and "after" -> maps. by "heads": the first heads
    of one layer (-1: the last), at most `heads` of them; by "layers": the mean over the heads of every layer. Each map
    has its own colours, from 0 (or a negative smallest weight) to its largest weight, which stands above it.
    """
    if not variants:
        raise ValueError('variants: expected at least one label with its maps, such as {"R": {"": maps["encoder"]}}')
    if by not in get_args(By):
        raise ValueError(f"by: expected one of {get_args(By)}, got {by!r}")
    rows = {}
    for label, stages in variants.items():
        rows[label] = [
            (f"{stage}, {name}" if stage else name, weights)
            for stage, maps in stages.items()
            for name, weights in _columns(maps, by, layer, heads, example)
        ]
    shapes = {weights.shape for blocks in rows.values() for _, weights in blocks}
    if len(shapes) != 1:
        raise ValueError(f"variants: expected maps of one example, of the same lengths, got [q, k] of {sorted(shapes)}")
    ((q_length, _),) = shapes
    one = next(iter(next(iter(variants.values())).values()))
    where = f"layer {layer % len(one.layers) + 1}" if by == "heads" else "mean of the heads"
    return _grid(
        rows,
        title=title or f"Attention weights: {one.stack}, {where}",
        tokens=_labels(tokens, q_length, "tokens"),
        key_tokens=_labels(tokens, q_length, "tokens"),
    )


def _columns(maps, by, layer, heads, example):
    if by == "heads":
        return [(f"head {head + 1}", weights) for head, weights in enumerate(maps.of(layer, example)[:heads])]
    return [(f"layer {at + 1}", maps.of(at, example).mean(0)) for at in range(len(maps.layers))]


def _labels(tokens, length, name):
    if tokens is not None and len(tokens) != length:
        raise ValueError(
            f"{name}: expected a text for each of the {length} tokens that are no padding, got {len(tokens)}"
        )
    return tokens


def _folded(maps, columns=4):
    """Maps in lines of as many columns, without labels."""
    return {" " * at: maps[at : at + columns] for at in range(0, len(maps), columns)}


def _grid(rows, title, tokens=None, key_tokens=None, limits=None):
    """Heat maps: rows: label -> [(title, weights [q, k])]. limits: of one scale for all, with a bar; None: each its own."""
    across = max(map(len, rows.values()))
    first = next(iter(rows.values()))[0][1]
    panel = max(1.45, 0.105 * max(first.shape)) if tokens is not None else 1.6
    picture = Picture(figsize=(panel * across + 1.3, (panel + 0.3) * len(rows) + 1.0), dpi=100, layout="constrained")
    axes = picture.subplots(len(rows), across, squeeze=False)
    for line, (label, maps) in zip(axes, rows.items(), strict=True):
        for axis in line[len(maps) :]:
            axis.set_axis_off()
        for axis, (name, weights) in zip(line, maps):
            low, high = limits or (min(0.0, float(weights.min())), float(weights.max()))
            image = axis.imshow(weights, vmin=low, vmax=high, cmap=colours, interpolation="nearest")
            scale = f"max {high:.2f}" if low == 0 else f"{low:.2f} to {high:.2f}"
            axis.set_title(name if limits else f"{name}\n{scale}", fontsize=7.5)
            _ticks(axis, None, None)
        _ticks(line[0], None, tokens)
        if label.strip():
            line[0].set_ylabel(label, fontsize=11, fontweight="bold")
    for column in axes.T:
        drawn = [axis for axis in column if axis.images]
        _ticks(drawn[-1], key_tokens, tokens if drawn[-1] in axes[:, 0] else None)
    if limits:
        picture.colorbar(image, ax=axes, shrink=0.8, label="attention weight").ax.tick_params(labelsize=8)
    picture.suptitle(title, fontsize=10)
    picture.supxlabel("key (attended to)", fontsize=9)
    picture.supylabel("query", fontsize=9)
    return _laid_out(picture)


def _laid_out(picture):
    """With the layout computed and then left alone, which would else move a little each time it is drawn."""
    for _ in range(2):
        picture.draw_without_rendering()
    picture.set_layout_engine("none")
    return picture


def _ticks(axis, across, down):
    across, down = across or (), down or ()
    axis.set_xticks(range(len(across)), across, fontsize=6, rotation=90)
    axis.set_yticks(range(len(down)), down, fontsize=6)
    axis.tick_params(length=2, pad=1)


# For comparison.py


def encoder_maps(
    config: EncoderDecoderConfig, trained: Tree, fixed: Tree, tokens: Int[Array, "1 q"], layer: int = 0
) -> Float[np.ndarray, "h q q"]:
    """The encoder's self-attention weights [h, q, k] in a layer (-1: the last) for one sequence of tokens [1, q]."""
    if not -config.encoder_layers <= layer < config.encoder_layers:
        raise ValueError(f"layer: the encoder has {config.encoder_layers} layers, got {layer}")
    batch = {"encoder_input_tokens": tokens, "decoder_input_tokens": jnp.zeros((1, 1), jnp.int32)}
    return weights(parameters.bind(config, trained, fixed), batch)["encoder"].layer(layer)[0]


def draw_maps(
    rows: Mapping[str, Sequence[Float[np.ndarray, "h q q"]]], columns: Sequence[str], tokens: Sequence[str], title: str
) -> Picture:
    """A grid of heat maps: a row for each label, and for each column title the heads side by side.

    rows: label -> one array [h, q, k] for each column title. tokens: the q tokens as text, along the axes.
    Each map has its own colour scale, from 0 to its largest weight, which stands above it.
    """
    grid = {
        label: [
            (f"{column}, head {head + 1}", weights)
            for column, heads in zip(columns, blocks, strict=True)
            for head, weights in enumerate(heads)
        ]
        for label, blocks in rows.items()
    }
    return _grid(grid, title, tokens, tokens)
