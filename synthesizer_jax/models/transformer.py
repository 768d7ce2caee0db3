"""T5's layers and stacks, top to bottom: a layer without and one with cross-attention, a stack of either, and its head."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax import activations
from synthesizer_jax.axes import BATCH, EMBED, LAYERS, LENGTH, VOCAB, Param, contract, fan_in, normal
from synthesizer_jax.mixers import Mixer
from synthesizer_jax.mixers.mixer import Cache
from synthesizer_jax.models.config import ModelConfig
from synthesizer_jax.nn.attention import Attention, as_mixer
from synthesizer_jax.nn.layers import MLP, Embedding, RMSNorm, dropout, values, variable, variables
from synthesizer_jax.scores import Dims, DotProduct, RelativePositionBias, Spec
from synthesizer_jax.scores.base import Parameters, take_positions

Caches = tuple[dict[str, Cache], ...]  # of each layer

_FEW_LAYERS = 4
_ATTENDED = "attended"  # what comes out of attention
_REMAT = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(_ATTENDED),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What all layers of a stack share. None where there is nothing to say."""

    key_mask: Bool[Array, "b q"] | None = None
    segments: Int[Array, "b q"] | None = None
    positions: Int[Array, "b q"] | None = None
    bias: Float[Array, "_b h _q _k"] | None = None
    shared: Parameters | None = None
    encoded: Float[Array, "b k e"] | None = None
    encoder_mask: Bool[Array, "b k"] | None = None
    encoder_bias: Float[Array, "b 1 1 k"] | None = None  # the encoder's mask, where keys and values are cached
    encoder_segments: Int[Array, "b k"] | None = None
    kept: Int[Array, ""] | None = None  # of the tokens of a step, those that the caches are to hold; None: all
    causal: bool = dataclasses.field(default=False, metadata={"static": True})

    def of_self_attention(self) -> dict[str, Any]:
        """What self-attention is told."""
        return {
            "key_mask": self.key_mask,
            "causal": self.causal,
            "q_segments": self.segments,
            "q_positions": self.positions,
            "bias": self.bias,
            "shared": self.shared,
        }

    def of_step(self) -> dict[str, Any]:
        """What a step of self-attention is told."""
        return {"bias": self.bias, "shared": self.shared, "kept": self.kept}

    def of_cross_attention(self) -> dict[str, Any]:
        """What attention to the encoded sequence is told."""
        return {"key_mask": self.encoder_mask, "q_segments": self.segments, "k_segments": self.encoder_segments}


class Layer(nnx.Module):
    """x + self-attention(norm(x)), then x + MLP(norm(x)): an encoder's layer, and a language model's where causal."""

    def __init__(self, config: ModelConfig, mixer: Mixer, *, rngs: nnx.Rngs):
        self.rate = config.dropout_rate
        self.attention_norm = _norm(config, rngs)
        self.attention = _attention(config, mixer, config.heads, config.head_dim, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = _mlp(config, rngs)

    def __call__(self, x: Float[Array, "b q e"], context: Context, key: Array | None) -> Float[Array, "b q e"]:
        keys = _split(key, 4)
        attended = self.attention(self.attention_norm(x), **context.of_self_attention(), dropout_key=keys[0])
        attended = checkpoint_name(attended, _ATTENDED)
        x = _placed(x + dropout(attended, self.rate, keys[1]))
        return _placed(x + dropout(self.mlp(self.mlp_norm(x), keys[2]), self.rate, keys[3]))

    def weights(self, x: Float[Array, "b q e"], context: Context) -> Float[Array, "b h q q"]:
        """The normalised weights of self-attention, [b, h, q, k]."""
        return self.attention.weights(self.attention_norm(x), **context.of_self_attention())

    def init_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike) -> dict[str, Cache]:
        """An empty cache for `length` tokens."""
        return {"self": self.attention.init_cache(batch, length, dtype)}

    def grow_cache(self, cache: dict[str, Cache], length: int) -> dict[str, Cache]:
        """The cache with room for `length` tokens."""
        return {"self": self.attention.grow_cache(cache["self"], length)}

    def step(self, x: Float[Array, "b s e"], cache: dict[str, Cache], context: Context):
        """The next s tokens: (outputs [b, s, e], the cache with them)."""
        attended, own = self.attention.step(self.attention_norm(x), cache["self"], **context.of_step())
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), {"self": own}


class DecoderLayer(nnx.Module):
    """x + causal self-attention(norm(x)), x + cross-attention(norm(x), encoded), x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig, mixer: Mixer, *, rngs: nnx.Rngs):
        self.rate = config.dropout_rate
        self.attention_norm = _norm(config, rngs)
        self.attention = _attention(config, mixer, config.heads, config.head_dim, rngs)
        self.cross_attention_norm = _norm(config, rngs)
        self.cross_attention = _attention(config, DotProduct(), *config.cross_dims, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = _mlp(config, rngs)

    def __call__(self, x: Float[Array, "b q e"], context: Context, key: Array | None) -> Float[Array, "b q e"]:
        keys = _split(key, 6)
        attended = self.attention(self.attention_norm(x), **context.of_self_attention(), dropout_key=keys[0])
        attended = checkpoint_name(attended, _ATTENDED)
        x = _placed(x + dropout(attended, self.rate, keys[1]))
        crossed = self.cross_attention(
            self.cross_attention_norm(x), context.encoded, **context.of_cross_attention(), dropout_key=keys[2]
        )
        crossed = checkpoint_name(crossed, _ATTENDED)
        x = _placed(x + dropout(crossed, self.rate, keys[3]))
        return _placed(x + dropout(self.mlp(self.mlp_norm(x), keys[4]), self.rate, keys[5]))

    def weights(self, x: Float[Array, "b q e"], context: Context) -> Float[Array, "b h q q"]:
        """The normalised weights of self-attention, [b, h, q, k]."""
        return self.attention.weights(self.attention_norm(x), **context.of_self_attention())

    def cross_weights(self, x: Float[Array, "b q e"], context: Context) -> Float[Array, "b h q k"]:
        """The normalised weights of cross-attention, [b, h, q, k]."""
        x = x + self.attention(self.attention_norm(x), **context.of_self_attention())
        return self.cross_attention.weights(
            self.cross_attention_norm(x), context.encoded, **context.of_cross_attention()
        )

    def init_cache(self, encoded: Float[Array, "b k e"], mask: Bool[Array, "b k"], length: int) -> dict[str, Cache]:
        """An empty cache for `length` tokens; cross-attention's keys and values are computed once, here."""
        return {
            "self": self.attention.init_cache(encoded.shape[0], length, encoded.dtype),
            "cross": computed_once(self.cross_attention.cross_cache(encoded, key_mask=mask)),
        }

    def grow_cache(self, cache: dict[str, Cache], length: int) -> dict[str, Cache]:
        """The cache with room for `length` tokens."""
        return cache | {"self": self.attention.grow_cache(cache["self"], length)}

    def step(self, x: Float[Array, "b s e"], cache: dict[str, Cache], context: Context):
        """The next s tokens: (outputs [b, s, e], the cache with them)."""
        attended, own = self.attention.step(self.attention_norm(x), cache["self"], **context.of_step())
        x = x + attended
        x = x + self.cross_attention.cross_step(self.cross_attention_norm(x), cache["cross"], bias=context.encoder_bias)
        return x + self.mlp(self.mlp_norm(x)), {"self": own, "cross": cache["cross"]}


class Stack(nnx.Module):
    """Layers one after the other, T5's relative position bias shared by all of them, and a final norm.

    layer(config, mixer, rngs=...) makes each; mixer mixes the tokens; causal: each token sees those before it alone.

    With config.scan_layers the layers' parameters are stacked along a leading axis and one compiled layer serves all;
    the initial values are the same either way.
    """

    def __init__(
        self,
        layer: type,
        depth: int,
        mixer: Spec | Mixer,
        causal: bool,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.causal = causal
        mixer = as_mixer(mixer)
        dims = Dims(config.features, config.heads, config.head_dim)
        self.relative_spec = None
        if config.relative_bias and not mixer.bias_error():
            self.relative_spec = RelativePositionBias(
                config.relative_buckets, config.relative_max_distance, bidirectional=not causal
            )
            self.relative_bias = variables(self.relative_spec.params(dims), rngs, config.param_dtype)
        self.shared = variables(mixer.stack_params(dims), rngs, config.param_dtype)
        keys = jax.random.split(rngs.params(), depth)
        if config.scan_layers:
            one = mixer.of_layer(0, depth)
            self.layers = _stacked(lambda key: layer(config, one, rngs=nnx.Rngs(key)), keys)
        else:
            self.layers = nnx.List(
                [layer(config, mixer.of_layer(i, depth), rngs=nnx.Rngs(key)) for i, key in enumerate(keys)]
            )
        self.depth = depth
        self.final_norm = _norm(config, rngs)

    def shared_values(self) -> Parameters:
        """The parameters that all layers share, other than the relative position bias."""
        return values(self.shared)

    def bias(self, q_length: int, k_length: int, q_positions=None) -> Float[Array, "_b h q k"] | None:
        """The relative position bias [b|1, h, q, k] of the stack."""
        if self.relative_spec is None:
            return None
        return self.relative_spec.bias(values(self.relative_bias), q_length, k_length, q_positions).bias

    def context(
        self,
        tokens: Int[Array, "b q"],
        segments: Int[Array, "b q"] | None = None,
        positions: Int[Array, "b q"] | None = None,
    ) -> Context:
        """What the layers are told of a sequence: where padding is, unless segments say it or nobody looks behind."""
        # Within a segment, slots in the row and positions differ by a constant, so that packed rows share one bias.
        bias = self.bias(tokens.shape[1], tokens.shape[1], positions if segments is None else None)
        return Context(
            key_mask=tokens > 0 if segments is None and not self.causal else None,
            segments=segments,
            positions=positions,
            bias=bias,
            shared=self.shared_values(),
            causal=self.causal,
        )

    def step(self, x: Float[Array, "b s e"], caches: Caches, index: Int[Array, ""], context: Context):
        """The next s tokens from slot `index` on: (outputs after the final norm [b, s, e], the layers' caches)."""
        bias = self._cached_bias(x.shape[1], caches, next_positions(index, x))
        context = dataclasses.replace(context, bias=bias, shared=self.shared_values())
        stepped = []
        for layer, cache in zip(self.each_layer(), caches, strict=True):
            x, cache = layer.step(x, cache, context)
            stepped.append(cache)
        return self.final_norm(x), tuple(stepped)

    def grow_caches(self, caches: Caches, length: int) -> Caches:
        """The layers' caches with room for `length` tokens."""
        return tuple(layer.grow_cache(cache, length) for layer, cache in zip(self.each_layer(), caches, strict=True))

    def _cached_bias(self, s_length, caches, positions):
        """The bias [1, h, s, k] of the next tokens for all that the layers' caches have room for."""
        if self.relative_spec is None:
            return None
        return self.bias(s_length, caches[0]["self"]["value"].shape[3], positions)

    def each_layer(self) -> Iterator[nnx.Module]:
        """The layers one by one, for decoding: a loop over stacked ones would copy every cache out and back each step."""
        for graph, state in self._taken_apart():
            yield nnx.merge(graph, _all_in_use(state))

    def unstacked(self) -> "Stack":
        """The same stack with layers of their own, made once before a loop over steps.

        A step that slices them itself copies them each time, on CPUs a third of its cost.
        """
        if not self.config.scan_layers:
            return self
        graph, state = nnx.split(self)
        stack = nnx.merge(graph, state)
        stack.config = dataclasses.replace(self.config, scan_layers=False)
        stack.layers = nnx.List([nnx.merge(graph, computed_once(state)) for graph, state in self._taken_apart()])
        return stack

    def _taken_apart(self):
        """(graph, state) of each layer."""
        if not self.config.scan_layers:
            return [nnx.split(layer) for layer in self.layers]
        graph, state = nnx.split(self.layers)
        return [(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in range(self.depth)]

    def __call__(self, x: Float[Array, "b q e"], context: Context, key: Array | None) -> Float[Array, "b q e"]:
        rate = self.config.dropout_rate
        first, layers, last = _split(key, 3)
        x = _placed(dropout(x, rate, first))
        keys = None if layers is None else jax.random.split(layers, self.depth)
        x, _ = self.over_layers(lambda layer, x, key: (layer(x, context, key), None), x, keys)
        return dropout(self.final_norm(x), rate, last)

    def weights(self, x: Float[Array, "b q e"], context: Context) -> Float[Array, "layers b h q q"]:
        """The normalised self-attention weights of all layers, [layers, b, h, q, k] in float32, without dropout."""
        return self.over_layers(lambda layer, x, _: (layer(x, context, None), layer.weights(x, context)), x, None)[1]

    def over_layers(self, body: Callable, carry: Any, per_layer: Any) -> tuple[Any, Any]:
        """carry, out = body(layer, carry, entry of per_layer) from layer to layer.

        What comes out is stacked, or a tuple where layers differ so that their outputs have different shapes; per_layer
        is given in the same form.
        """
        if not self.config.scan_layers:
            outs = []
            for index, layer in enumerate(self.layers):
                step = self._remat(self._with_layer(body, nnx.graphdef(layer)))
                carry, out = step(carry, (nnx.state(layer), _entry(per_layer, index)))
                outs.append(out)
            return carry, _stack_or_tuple(outs)
        step = self._remat(self._with_layer(body, nnx.graphdef(self.layers)))
        # On a CPU a loop over few layers costs more than it saves: what each keeps for the gradient is copied into one array.
        few = self.config.remat == "none" and self.depth <= _FEW_LAYERS
        unrolled = self.depth if few and activations.on_cpu() else 1
        return jax.lax.scan(step, carry, (nnx.state(self.layers), per_layer), unroll=unrolled)

    def _with_layer(self, body, graph):
        """body as a function of a layer's parameters, which are gathered inside: what is computed again gathers again."""

        def step(carry, xs):
            state, entry = xs
            return body(nnx.merge(graph, _all_in_use(state)), carry, entry)

        return step

    def _remat(self, step):
        if self.config.remat == "none":
            return step
        return jax.checkpoint(step, policy=_REMAT[self.config.remat], prevent_cse=not self.config.scan_layers)


def computed_once(tree: Any) -> Any:
    """Arrays that a loop over steps reads and that are made before it: XLA's CPU backend would make them again each step."""
    return jax.lax.platform_dependent(tree, cpu=jax.lax.optimization_barrier, default=lambda tree: tree)


def in_use(variable: nnx.Variable) -> nnx.Variable:
    """A parameter as it is computed with, see activations.gather."""
    axes = variable.axes[len(variable.axes) - len(variable.shape) :]  # without that of layers, inside a scan over it
    return variable.replace(activations.gather(variable[...], axes, getattr(variable, "path", None)))


def _all_in_use(state: nnx.State) -> nnx.State:
    return jax.tree.map(in_use, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _placed(x):
    return activations.constrain(x, (BATCH, LENGTH, None))


def _stacked(make, keys):
    """The modules make(key), their variables stacked along a leading axis, as one module."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(keys[0])))
    state = jax.vmap(lambda key: nnx.state(make(key)))(keys)
    with_layers = jax.tree.map(
        lambda v: type(v)(v[...], axes=(LAYERS, *v.axes)), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    return nnx.merge(graph, with_layers)


def _entry(per_layer, index):
    return per_layer[index] if isinstance(per_layer, tuple) else jax.tree.map(lambda leaf: leaf[index], per_layer)


def _stack_or_tuple(outs):
    shapes = {(jax.tree.structure(out), *(leaf.shape for leaf in jax.tree.leaves(out))) for out in outs}
    return tuple(outs) if len(shapes) > 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def next_positions(index: Int[Array, ""], x: Array) -> Int[Array, "s"]:
    """Of the tokens x [b, s, ...] that follow `index` earlier ones."""
    return index + jnp.arange(x.shape[1], dtype=jnp.int32)


def position_table(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Variable | None:
    """The trained positions [n, e] that are added to the embeddings; None where there are none."""
    if config.learned_positions is None:
        return None
    table = Param((config.learned_positions, config.features), (LENGTH, EMBED), normal(1.0))
    return variable(table, rngs, config.param_dtype)


def add_positions(
    x: Float[Array, "b q e"], table: nnx.Variable | None, positions: Int[Array, "*_b q"] | None = None
) -> Float[Array, "b q e"]:
    """Embeddings x with the table's rows at these positions, 0, 1, 2, ... for None. Positions beyond it give NaN."""
    if table is None:
        return x
    check_positions_reach(table, x.shape[1])
    return x + take_positions(table[...], positions, x.shape[1], axis=0).astype(x.dtype)


def check_positions_reach(table: nnx.Variable | None, length: int) -> None:
    """Refuse sequences that are longer than the trained positions."""
    if table is not None and length > table.shape[0]:
        raise ValueError(
            f"learned_positions: expected sequences of at most {table.shape[0]} tokens, got {length}; build the model "
            "with more learned_positions, or shorten the sequences"
        )


def lm_head(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Variable | None:
    """The matrix [e, v] of a softmax of its own; None where it is tied to the embedding."""
    if config.tied_embedding:
        return None
    kernel = Param((config.features, config.vocab_size), (EMBED, VOCAB), fan_in(config.features))
    return variable(kernel, rngs, config.param_dtype)


def token_logits(
    x: Float[Array, "b q e"],
    embedding: Embedding,
    head: nnx.Variable | None,
    columns: Float[Array, "e v"] | None = None,
) -> Float[Array, "b q v"]:
    """Logits in float32, from the head or from the embedding scaled by e^-0.5, of which columns is the transpose."""
    if head is None and columns is not None:
        logits = contract("bqe,ev->bqv", x * x.shape[-1] ** -0.5, columns.astype(x.dtype))
    elif head is None:
        logits = embedding.attend(x * x.shape[-1] ** -0.5)
    else:
        logits = contract("bqe,ev->bqv", x, head[...].astype(x.dtype))
    return activations.constrain(logits, (BATCH, LENGTH, VOCAB))


def softmax_factors(
    x: Float[Array, "b q e"], embedding: Embedding, head: nnx.Variable | None
) -> tuple[Float[Array, "b q e"], Float[Array, "v e"]]:
    """(vectors, rows) whose products `token_logits` are."""
    if head is None:
        return x * x.shape[-1] ** -0.5, embedding.embedding[...]
    return x, head[...].T


def check_packing(segments: dict[str, Array | None], positions: dict[str, Array | None]) -> None:
    """Refuse segment ids of some sequences only, or without the positions within them; by the arguments' names."""
    given = [name for name, ids in segments.items() if ids is not None]
    if given and len(given) < len(segments):
        raise ValueError(f"{', '.join(segments)}: expected both or neither; a packed batch has both")
    missing = [name for name, ids in positions.items() if ids is None]
    if given and missing:
        raise ValueError(
            f"{' and '.join(missing)}: expected beside segment ids, the positions within each segment from 0; "
            "seqio's packing gives them"
        )


def _attention(config, scores, heads, head_dim, rngs):
    return Attention(
        scores,
        config.features,
        heads,
        head_dim,
        rngs=rngs,
        dropout_rate=config.dropout_rate,
        param_dtype=config.param_dtype,
    )


def _mlp(config, rngs):
    return MLP(
        config.features,
        config.mlp_features,
        rngs=rngs,
        activation=config.mlp_activation,
        dropout_rate=config.dropout_rate,
        param_dtype=config.param_dtype,
    )


def _norm(config, rngs):
    return RMSNorm(config.features, rngs=rngs, param_dtype=config.param_dtype)


def _split(key, count):
    return [None] * count if key is None else jax.random.split(key, count)
