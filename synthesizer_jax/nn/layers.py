"""The layers of a T5 block other than attention, and how declared parameters become NNX variables."""

import functools
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from synthesizer_jax import activations
from synthesizer_jax.axes import EMBED, VOCAB, Param, contract, fan_in, normal, ones
from synthesizer_jax.axes import MLP as MLP_AXIS
from synthesizer_jax.scores.base import check_positive, from_zero

Activation = Literal["relu", "gated-gelu"]


class Fixed(nnx.Variable):
    """A parameter that is drawn once, saved and restored, but never trained: not an nnx.Param, so no optimizer sees it."""


def variable(param: Param, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike) -> nnx.Variable:
    """The NNX variable of a declared parameter; its metadata `axes` holds the logical axes."""
    kind = nnx.Param if param.trained else Fixed
    return kind(param.init(rngs.params(), param.shape, jnp.dtype(dtype)), axes=param.axes)


def variables(declared: Mapping[str, Any], rngs: nnx.Rngs, dtype: jax.typing.DTypeLike) -> nnx.Dict:
    """NNX variables of a (nested) dict of declared parameters."""
    return nnx.Dict(
        {
            name: variable(p, rngs, dtype) if isinstance(p, Param) else variables(p, rngs, dtype)
            for name, p in declared.items()
        }
    )


def values(module: nnx.Dict) -> dict[str, Any]:
    """The arrays of `variables`, as a (nested) dict."""
    return {name: values(v) if isinstance(v, nnx.Dict) else v[...] for name, v in module.items()}


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + 1e-6) * scale over the last axis, statistics in float32 (T5's layer norm: no mean, no bias)."""

    def __init__(self, features: int, *, rngs: nnx.Rngs, epsilon: float = 1e-6, param_dtype=jnp.float32):
        self.epsilon = epsilon
        self.scale = variable(Param((features,), (EMBED,), ones), rngs, param_dtype)

    def __call__(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        return _normalised(x, self.epsilon) * self.scale[...].astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _normalised(x, epsilon):
    return _normalised_and_inverse(x, epsilon)[0].astype(x.dtype)


def _normalised_and_inverse(x, epsilon):
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return x32 * inverse, inverse


@_normalised.defjvp
def _normalised_jvp(epsilon, primals, tangents):
    """By what comes out alone, so that one array is kept for the gradient; JAX would keep three."""
    (x,), (change,) = primals, tangents
    normalised, inverse = _normalised_and_inverse(x, epsilon)
    change = change.astype(jnp.float32)
    along = jnp.mean(normalised * change, axis=-1, keepdims=True)
    return normalised.astype(x.dtype), ((change - normalised * along) * inverse).astype(x.dtype)


class MLP(nnx.Module):
    """wo(relu(wi x)), or wo(gelu(wi_0 x) * wi_1 x) with the tanh form of gelu (T5 v1.0 and v1.1); no biases.

    dropout, shared by the positions of a sequence, acts on the hidden activations.
    """

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        rngs: nnx.Rngs,
        activation: Activation = "relu",
        dropout_rate: float = 0.0,
        param_dtype=jnp.float32,
    ):
        check_positive("features", features)
        check_positive("mlp_features", mlp_features)
        if activation not in get_args(Activation):
            raise ValueError(f"activation: expected one of {get_args(Activation)}, got {activation!r}")
        self.activation = activation
        self.dropout_rate = dropout_rate
        names = ("wi",) if activation == "relu" else ("wi_0", "wi_1")
        for name in names:
            inward = Param((features, mlp_features), (EMBED, MLP_AXIS), fan_in(features))
            setattr(self, name, variable(inward, rngs, param_dtype))
        self.wo = variable(Param((mlp_features, features), (MLP_AXIS, EMBED), fan_in(mlp_features)), rngs, param_dtype)

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "b q e"], dropout_key: Array | None = None) -> Float[Array, "b q e"]:
        if self.activation == "relu":
            hidden = jax.nn.relu(activations.linear(x, self.wi[...]))
        else:
            gate = jax.nn.gelu(activations.linear(x, self.wi_0[...]), approximate=True)
            hidden = gate * activations.linear(x, self.wi_1[...])
        return activations.linear(dropout(hidden, self.dropout_rate, dropout_key), self.wo[...])


class Embedding(nnx.Module):
    """Token embedding [v, e]: ids -> vectors, and vectors -> logits where the softmax is tied to it."""

    def __init__(self, vocab_size: int, features: int, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        table = Param((vocab_size, features), (VOCAB, EMBED), normal(1.0))
        self.embedding = variable(table, rngs, param_dtype)

    def __call__(self, tokens: Int[Array, "b q"], dtype: jax.typing.DTypeLike) -> Float[Array, "b q e"]:
        # An id outside the vocabulary gives NaN, not another token's vector.
        table = self.embedding[...]
        rows = jnp.take(table, from_zero(tokens, table.shape[0]), axis=0, mode="fill", fill_value=jnp.nan)
        return activations.looked_up(rows.astype(dtype))

    def attend(self, x: Float[Array, "b q e"]) -> Float[Array, "b q v"]:
        """Logits in float32."""
        table = self.embedding[...].astype(x.dtype)
        if activations.on_cpu():  # see activations.linear
            return contract("re,ve->rv", activations.as_rows(x), table).reshape(*x.shape[:-1], -1)
        return contract("bqe,ve->bqv", x, table)


def dropout(x: Float[Array, "b q e"], rate: float, key: Array | None) -> Float[Array, "b q e"]:
    """Dropout with one mask for all positions of a sequence, as in T5; none without a key."""
    if key is None or rate == 0:
        return x
    keep = activations.bernoulli(key, 1 - rate, (x.shape[0], 1, x.shape[2]))
    return jnp.where(keep, x / (1 - rate), 0)
