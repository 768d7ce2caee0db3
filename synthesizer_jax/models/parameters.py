"""The pure view of a model: nested dicts of arrays that a functional training step can hold, shard and save.

A parameter's path is the way to it through the modules, such as encoder/layers/attention/scores/R. Trained and fixed
parameters are two trees, so that gradients and optimizers see the trained ones alone.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from flax import nnx

from synthesizer_jax.models.config import DecoderOnlyConfig, EncoderDecoderConfig, EncoderOnlyConfig, ModelConfig
from synthesizer_jax.models.decoder_only import DecoderOnly
from synthesizer_jax.models.encoder_decoder import EncoderDecoder
from synthesizer_jax.models.encoder_only import EncoderOnly
from synthesizer_jax.models.transformer import in_use
from synthesizer_jax.nn.layers import Fixed

Tree = dict[str, Any]  # nested: names -> arrays
Model = EncoderDecoder | DecoderOnly | EncoderOnly

_MODELS = {EncoderDecoderConfig: EncoderDecoder, DecoderOnlyConfig: DecoderOnly, EncoderOnlyConfig: EncoderOnly}


@dataclasses.dataclass(frozen=True)
class Declared:
    """A parameter before it exists: its shape, dtype and logical axes."""

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    axes: tuple[str | None, ...]


def init(config: ModelConfig, key: jax.Array) -> tuple[Tree, Tree]:
    """Initial (trained, fixed) parameters; pure, to be called under jit with the shardings of today's mesh."""
    _, trained, fixed = nnx.split(_MODELS[type(config)](config, rngs=nnx.Rngs(key)), nnx.Param, Fixed)
    return _tree(trained, lambda v: v[...]), _tree(fixed, lambda v: v[...])


def abstract(config: ModelConfig) -> tuple[Tree, Tree]:
    """(trained, fixed) trees of `Declared`; takes no memory."""
    _, trained, fixed = _abstract(config)

    def declare(v):
        return Declared(tuple(v.shape), v.dtype, v.axes)

    return _tree(trained, declare), _tree(fixed, declare)


def bind(config: ModelConfig, trained: Tree, fixed: Tree) -> Model:
    """The model with these parameters; cheap, for use under jit. Layers gather theirs when their turn comes."""
    graph, abstract_trained, abstract_fixed = _abstract(config)
    return nnx.merge(graph, _state(abstract_trained, trained), _state(abstract_fixed, fixed))


def split(model: Model) -> tuple[Tree, Tree]:
    """The (trained, fixed) parameters of a model that exists."""
    _, trained, fixed = nnx.split(model, nnx.Param, Fixed)
    return _tree(trained, lambda v: v[...]), _tree(fixed, lambda v: v[...])


def count_parameters(config: ModelConfig) -> int:
    """The number of trained parameters; takes no memory."""
    _, trained, _ = _abstract(config)
    return sum(math.prod(variable.shape) for _, variable in nnx.to_flat_state(trained))


@functools.lru_cache(maxsize=32)
def _abstract(config):
    model = nnx.eval_shape(lambda: _MODELS[type(config)](config, rngs=nnx.Rngs(0)))
    return nnx.split(model, nnx.Param, Fixed)


def _tree(state, read) -> Tree:
    tree: Tree = {}
    for path, variable in nnx.to_flat_state(state):
        *parents, name = map(str, path)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = read(variable)
    return tree


def _state(abstract_state, tree):
    flat = []
    for path, variable in nnx.to_flat_state(abstract_state):
        leaf, names = tree, [str(name) for name in path]
        for name in names:
            leaf = leaf[name]
        held = type(variable)(leaf, axes=variable.axes, path="/".join(names))
        flat.append((path, held if "layers" in names else in_use(held)))
    return nnx.from_flat_state(flat)
