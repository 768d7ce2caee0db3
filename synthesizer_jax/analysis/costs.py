"""What a configuration costs, before anything runs: parameters, floating-point operations and cache bytes, by part.

Operations are model FLOPs, see models/flops.py.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.axes import Param
from synthesizer_jax.mixers import DynamicConv, LightweightConv, synthesizer
from synthesizer_jax.models import parameters
from synthesizer_jax.models.config import (
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    EncoderOnlyConfig,
    ModelConfig,
    paper_c4_base,
)
from synthesizer_jax.models.flops import CROSS, MLP, REST, SELF, count_flops, training_flops
from synthesizer_jax.scores import Dense, DotProduct, Mixture
from synthesizer_jax.scores.base import Dims, Spec, check_positive

_PATHS = {"attention": SELF, "shared": SELF, "relative_bias": SELF, "cross_attention": CROSS, "mlp": MLP}


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a model: its trained parameters, and its operations in a forward pass over one example."""

    name: str
    parameters: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one example; see the module's docstring for what is counted."""

    parts: tuple[Part, ...]
    tokens: int  # of the example, input and target
    training_flops: int  # of the loss and its gradient
    cache_bytes_per_target: float  # that decoding keeps for each target token of a sequence, from the second on
    cache_bytes_per_input: float  # and for each input token
    cache_bytes_fixed: int  # and independently of the length

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def flops(self) -> int:
        return sum(part.flops for part in self.parts)

    def as_markdown(self) -> str:
        """A table of the parts, and what decoding keeps."""
        lines = ["| part | parameters | forward FLOPs per token |", "| --- | ---: | ---: |"]
        rows = [*self.parts, Part("all", self.parameters, self.flops)]
        lines += [f"| {row.name} | {row.parameters:,} | {row.flops / self.tokens:,.0f} |" for row in rows]
        return "\n".join(
            [
                *lines,
                "",
                f"A training step has {self.training_flops / self.flops:.2f} times the forward FLOPs. Decoding keeps "
                f"{self.cache_bytes_per_target:,.0f} bytes per target token, {self.cache_bytes_per_input:,.0f} per input "
                f"token and {self.cache_bytes_fixed:,} more, per sequence.",
            ]
        )


def costs(config: ModelConfig, input_length: int, target_length: int = 0) -> Costs:
    """The costs of one example with input_length tokens in the encoder and target_length in the decoder.

    A model without an encoder or decoder has no tokens there, whatever is given. Nothing is computed or allocated.
    """
    program = _PROGRAMS[type(config)](config, input_length, target_length)
    shapes = _shapes(config)
    forward = count_flops(program.forward, *shapes, *program.inputs)
    counts = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters.abstract(config)[0], is_leaf=_is_declared):
        counts[_part_of(path)] += math.prod(leaf.shape)
    names = [name for name in (SELF, CROSS, MLP, REST) if counts[name] or forward[name]]
    return Costs(
        tuple(Part(name, counts[name], forward[name]) for name in names),
        program.tokens,
        training_flops(config, {"inputs": input_length, "targets": target_length}),
        *_cache_bytes(program, shapes),
    )


@dataclasses.dataclass(frozen=True)
class _Program:
    """A kind of model as functions of its parameters and of shapes."""

    forward: Callable  # (trained, fixed, *inputs) -> outputs
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    tokens: int
    cache: Callable | None = None  # (trained, fixed, input length, target length) -> shapes of the cache
    lengths: tuple[int, int] = (0, 0)


def _encoder_decoder(config, input_length, target_length):
    check_positive("input_length", input_length)
    check_positive("target_length", target_length)

    def cache(shapes, k, n):
        def make(trained, fixed, tokens):
            return parameters.bind(config, trained, fixed).init_cache(tokens, n)

        return jax.eval_shape(make, *shapes, _tokens(k))

    def forward(trained, fixed, inputs, targets):
        return parameters.bind(config, trained, fixed)(inputs, targets)

    lengths = input_length, target_length
    return _Program(forward, tuple(map(_tokens, lengths)), sum(lengths), cache, lengths)


def _decoder_only(config, input_length, target_length):
    check_positive("target_length", target_length)

    def cache(shapes, _, n):
        return jax.eval_shape(lambda *trees: parameters.bind(config, *trees).init_cache(1, n), *shapes)

    def forward(trained, fixed, targets):
        return parameters.bind(config, trained, fixed)(targets)

    return _Program(forward, (_tokens(target_length),), target_length, cache, (0, target_length))


def _encoder_only(config, input_length, target_length):
    check_positive("input_length", input_length)

    def forward(trained, fixed, inputs):
        return parameters.bind(config, trained, fixed)(inputs)

    return _Program(forward, (_tokens(input_length),), input_length)


_PROGRAMS = {
    EncoderDecoderConfig: _encoder_decoder,
    DecoderOnlyConfig: _decoder_only,
    EncoderOnlyConfig: _encoder_only,
}


def _tokens(length):
    return jax.ShapeDtypeStruct((1, length), jnp.int32)


def _shapes(config):
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), parameters.abstract(config), is_leaf=_is_declared
    )


def _is_declared(leaf):
    return isinstance(leaf, parameters.Declared)


def _part_of(path):
    names = [str(getattr(entry, "key", entry)) for entry in path]
    return next((part for name, part in _PATHS.items() if name in names), REST)


def _cache_bytes(program, shapes):
    """(per target token, per input token, else) from the sizes of caches of two lengths each."""
    if program.cache is None:
        return 0.0, 0.0, 0
    k, n = program.lengths
    shorter = max(1, n // 2)

    def size(k, n):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.cache(shapes, k, n)))

    whole = size(k, n)
    per_target = (whole - size(k, shorter)) / (n - shorter) if n > 1 else float(whole)
    per_input = (whole - size(k - 1, n)) if k > 1 else 0
    return per_target, float(per_input), round(whole - n * per_target - k * per_input)


# The paper's tables


def report(*, model: ModelConfig, task_feature_lengths: Mapping[str, int]) -> Costs:
    """The costs of a configuration for examples of these lengths, {"inputs": ..., "targets": ...}."""
    lengths = [task_feature_lengths.get(feature, 0) for feature in ("inputs", "targets")]
    return costs(model, *lengths)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the paper's Table 1: its formula for the parameters of a head, and ours."""

    name: str
    notation: str
    paper: str  # formula in d (the model's size), N, a, b, k (our r), as the paper writes it
    ours: str  # formula in e, d, N, a, b, r, for one head without value and output projections


TABLE_1 = (
    Entry("Dot product", "V", "2 d^2", "2 e d"),
    Entry("Random", "R", "N^2", "N^2"),
    Entry("Fixed random", "fixedR", "0", "0"),
    Entry("Factorized random", "FR", "2 N k", "2 N r"),
    Entry("Dense", "D", "d^2 + d N", "e d + d N + d + N"),
    Entry("Factorized dense", "FD", "d^2 + d (a + b)", "e d + d + (d + 1) (a + b)"),
    Entry("Mixture R+V", "R+V", "the parts'", "N^2 + 2 e d + 2"),
)


def table_1(features: int = 512, heads: int = 8, head_dim: int = 64, max_length: int = 256) -> str:
    """The paper's Table 1 as Markdown, our counts beside it: parameters of one head, and what scores depend on."""
    dims = Dims(features, heads, head_dim)
    lines = [
        f"| scores | paper: parameters | ours | at e = {features}, d = {head_dim}, N = {max_length} | depends on |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for row in TABLE_1:
        spec = synthesizer(row.notation, max_length)
        declared = jax.tree.leaves(spec.params(dims), is_leaf=lambda leaf: isinstance(leaf, Param))
        count = sum(math.prod(p.shape) for p in declared if p.trained) // heads
        lines.append(f"| {row.name} | {row.paper} | {row.ours} | {count:,} | {reads(synthesizer(row.notation, 8))} |")
    return "\n".join(lines)


# The paper's Table 4, C4 span corruption: name -> (our configuration, its parameters in millions, its TFLOPs).
TABLE_4 = {
    "Transformer": ({"attention": "V"}, 223, 3.70),
    "D (authors' code)": ({"attention": "D[bias=False, share_w2=True]"}, 224, 3.80),
    "LightConv (authors' code)": (
        {"attention": LightweightConv(9, "features", bias=True, separable=True), "learned_positions": 512},
        224,
        3.5,
    ),
    "DynConv (authors' code)": (
        {
            "attention": DynamicConv(9, "features", bias=True, separable=True),
            "learned_positions": 512,
            "mlp_features": 512,
        },
        257,
        3.93,
    ),
    "R": ({"attention": "R"}, 254, 3.36),
    "R+V": ({"attention": "R+V"}, 292, 4.00),
    "D+V (authors' code)": (
        {"attention": Mixture((Dense(512, bias=False, share_w2=True), DotProduct()), weights="sum", share_query=True)},
        243,
        4.20,
    ),
}


def table_4() -> str:
    """The paper's Table 4 columns of costs as Markdown, ours beside them.

    The paper does not say of what its TFLOPs are, so that their ratio to the Transformer's is compared.
    """
    lines = [
        "| model | paper: parameters | ours | paper: TFLOPs | relative | ours: forward FLOPs per token | relative | cache "
        "bytes per target |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    first = None
    for name, (options, millions, tera) in TABLE_4.items():
        found = costs(paper_c4_base(**options), 512, 114)
        per_token = found.flops / found.tokens
        first = first or (tera, per_token)
        lines.append(
            f"| {name} | {millions}M | {found.parameters / 1e6:.1f}M | {tera:.2f} | {tera / first[0]:.2f} | "
            f"{per_token / 1e6:.1f}M | {per_token / first[1]:.2f} | {found.cache_bytes_per_target:,.0f} |"
        )
    return "\n".join(lines)


def reads(spec: Spec) -> str:
    """What the scores of a spec depend on, found by changing the queries' and the keys' tokens."""
    dims = Dims(features=8, heads=1, head_dim=4)
    params = spec.init(jax.random.key(0), dims)
    x, other = (jax.random.normal(jax.random.key(seed), (1, 4, dims.features)) for seed in (1, 2))

    def differs(query, key):
        return bool(np.any(np.asarray(spec(params, query, key).logits() != spec(params, x, x).logits())))

    by_query, by_key = differs(other, x), differs(x, other)
    return "all pairs of tokens" if by_key else "token i" if by_query else "nothing"
