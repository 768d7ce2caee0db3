"""Pictures of attention weights (Synthesizer section 5: patterns before and after training)."""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib import figure

from synthesizer_jax.models import parameters
from synthesizer_jax.models.config import EncoderDecoderConfig
from synthesizer_jax.models.parameters import Tree


def encoder_maps(
    config: EncoderDecoderConfig, trained: Tree, fixed: Tree, tokens: Int[Array, "1 q"], layer: int = 0
) -> Float[np.ndarray, "h q q"]:
    """The encoder's self-attention weights [h, q, k] in a layer (-1: the last) for one sequence of tokens [1, q]."""
    if not -config.encoder_layers <= layer < config.encoder_layers:
        raise ValueError(f"layer: the encoder has {config.encoder_layers} layers, got {layer}")
    weights = _encoder_weights(config, trained, fixed, jnp.asarray(tokens))
    return np.asarray(weights[layer, 0])


@functools.partial(jax.jit, static_argnums=0)
def _encoder_weights(config, trained, fixed, tokens):
    start = jnp.zeros((1, 1), jnp.int32)
    return parameters.bind(config, trained, fixed).attention_weights(tokens, start)[0]


def draw_maps(
    rows: Mapping[str, Sequence[Float[np.ndarray, "h q q"]]], columns: Sequence[str], tokens: Sequence[str], title: str
) -> figure.Figure:
    """A grid of heat maps: a row for each label, and for each column title the heads side by side.

    rows: label -> one array [h, q, k] for each column title. tokens: the q tokens as text, along the axes.
    Each map has its own colour scale, from 0 to its largest weight, which stands above it.
    """
    heads = next(iter(rows.values()))[0].shape[0]
    across = heads * len(columns)
    picture = figure.Figure(figsize=(1.25 * across + 1.2, 1.5 * len(rows) + 1.2), dpi=110)
    axes = picture.subplots(len(rows), across, squeeze=False)
    for line, (label, blocks) in zip(axes, rows.items(), strict=True):
        maps = [
            (column, head, block[head]) for column, block in zip(columns, blocks, strict=True) for head in range(heads)
        ]
        for axis, (column, head, weights) in zip(line, maps, strict=True):
            axis.imshow(weights, vmin=0, vmax=weights.max(), cmap="viridis", interpolation="nearest")
            axis.set_title(f"{column}, head {head + 1}\nmax {weights.max():.2f}", fontsize=7)
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(label, fontsize=11, fontweight="bold")
        line[0].set_yticks(range(len(tokens)), tokens, fontsize=4)
    for axis in axes[-1]:
        axis.set_xticks(range(len(tokens)), tokens, fontsize=4, rotation=90)
    picture.suptitle(title, fontsize=10)
    picture.supxlabel("key (attended to)", fontsize=8)
    picture.supylabel("query", fontsize=8)
    picture.tight_layout()
    return picture
