"""The token-mixing layer for Flax Linen: the same specs, parameters and numbers as nn/attention.py, in T5X's manner."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx, traverse_util
from jaxtyping import Array, Bool, Float, Int, Num

from synthesizer_jax.axes import Param
from synthesizer_jax.mixers import Mixer
from synthesizer_jax.mixers.mixer import Surroundings
from synthesizer_jax.nn.attention import as_mixer, check_rate
from synthesizer_jax.nn.layers import Fixed
from synthesizer_jax.ops.attend import Dropout, Path
from synthesizer_jax.scores.base import Dims, Parameters, Spec

# The collections of trained parameters, and of those that are drawn once and saved, but never updated.
PARAMS = "params"
FIXED = "fixed"
_TYPES = {PARAMS: nnx.Param, FIXED: Fixed}

# nnx.bridge makes Fixed of the collection "fixed", and the reverse.
nnx.register_variable_name(FIXED, Fixed, overwrite=True)


class LogicalAxes(nn.LogicallyPartitioned, eq=False):
    """A parameter with its logical axes, as `nn.with_logical_partitioning` boxes it.

    nn.get_partition_spec and nn.logical_to_mesh_sharding read it, nn.unbox leaves the array. In NNX, through nnx.bridge,
    the names become the variable's `axes`, as in synthesizer_jax.Attention: as Flax's own metadata they would ask for a
    mesh as soon as the variable is made.
    """

    def to_nnx_metadata(self):
        return {"value": self.value, "axes": self.names}

    @classmethod
    def from_nnx_metadata(cls, metadata):
        return cls(metadata["value"], metadata["axes"])


class Attention(nn.Module):
    """Mixes the tokens of a sequence, [b, q, e] -> [b, q, e]; e is that of the inputs.

    scores: what is exchangeable, as in `synthesizer_jax.Attention`: scores such as Random(512) or
    synthesizer("R+V", max_length=512) for multi-head attention over them, or another mixer in its place. dropout_rate is
    that of the attention weights; its keys come from the "dropout" stream. dtype: of the computation (None: of the
    inputs); scores and softmax are float32. path: the algorithm of attention, see ops/attend.py.

    Parameters are named and shaped as in the NNX layer: `value` [e, h, d], `out` [h, d, e], `scores/R` [h, n, n], ... in
    "params", boxed with their logical axes; Fixed Random in the collection "fixed", which no optimizer sees and which
    has to be kept with the parameters. nn.scan over layers: variable_axes={"params": 0, "fixed": 0},
    metadata_params={nn.PARTITION_NAME: "layers"}.
    """

    scores: Spec | Mixer
    heads: int
    head_dim: int
    dropout_rate: float = 0.0
    deterministic: bool | None = None  # no dropout; said here or in the call where there is a rate
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    path: Path = "auto"

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "b q e"],
        inputs_kv: Float[Array, "b k e"] | None = None,
        mask: Num[Array, "_b _h _q _k"] | Bool[Array, "_b _h _q _k"] | None = None,
        bias: Float[Array, "_b _h _q _k"] | None = None,
        *,
        deterministic: bool | None = None,
        decode: bool = False,
        key_mask: Bool[Array, "b _k"] | None = None,
        causal: bool = False,
        q_segments: Int[Array, "b q"] | None = None,
        k_segments: Int[Array, "b _k"] | None = None,
        q_positions: Int[Array, "*_b q"] | None = None,
        k_positions: Int[Array, "*_b _k"] | None = None,
        memory: Float[Array, "b m e"] | None = None,
        shared: Parameters | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "b q e"]:
        """Self-attention of inputs_q, or attention to inputs_kv where the scores allow it.

        inputs_kv: None, or inputs_q itself, for self-attention. mask [b|1, h|1, q|1, k]: booleans, or numbers of which
        those above 0 may attend, as make_attention_mask, make_causal_mask and combine_masks build them; a query that may
        attend to nothing gets 0. bias [b|1, h|1, q|1, k] is added to the scores.

        The other arguments are those of `synthesizer_jax.Attention`. Say by key_mask, causal and segments what they can
        say: with mask, [b, h, q, k] is built even for scores that the batch shares, and mixers other than attention
        refuse it. A mask that separates packed examples doesn't say where in its example a token stands: give
        q_positions to scores that are indexed by it.

        decode: causal, token by token, with the collection "cache". The first call, under init or with "cache" mutable,
        has inputs of the full length and makes an empty cache for that many tokens; every later one takes the next
        token or tokens, with key_mask over the cache's length, mask and bias as wide, and their rows all, or those of
        these tokens. No dropout.

        sow_weights: weights [b, h, q, k] as "attention_weights" into the collection "intermediates".
        """
        x, x_kv = self._inputs(inputs_q, inputs_kv)
        params = _variables(self, self.mixer.params(self._dims(x)), self.param_dtype)
        around = Surroundings(
            key_mask=key_mask,
            causal=causal or decode,
            q_segments=q_segments,
            k_segments=k_segments,
            q_positions=q_positions,
            k_positions=k_positions,
            mask=_as_booleans(mask),
            bias=bias,
            memory=memory,
            shared=shared or {},
            dropout=None if decode else self._dropout(deterministic),
        )
        if sow_weights:
            self._check_no_decoding(decode)
            self.sow("intermediates", "attention_weights", self.mixer.weights(params, x, x_kv, around))
        if decode:
            return self._decode(params, x, x_kv, around)
        return self.mixer(params, x, x_kv, around)

    def weights(
        self,
        inputs_q: Float[Array, "b q e"],
        inputs_kv: Float[Array, "b k e"] | None = None,
        mask: Num[Array, "_b _h _q _k"] | Bool[Array, "_b _h _q _k"] | None = None,
        bias: Float[Array, "_b _h _q _k"] | None = None,
        *,
        key_mask: Bool[Array, "b _k"] | None = None,
        causal: bool = False,
        q_segments: Int[Array, "b q"] | None = None,
        k_segments: Int[Array, "b _k"] | None = None,
        q_positions: Int[Array, "*_b q"] | None = None,
        k_positions: Int[Array, "*_b _k"] | None = None,
        memory: Float[Array, "b m e"] | None = None,
        shared: Parameters | None = None,
    ) -> Float[Array, "b _h q _k"]:
        """What weight each token gives to each other, [b, h, q, k] in float32: for looking at; apply(method="weights")."""
        x, x_kv = self._inputs(inputs_q, inputs_kv)
        around = Surroundings(
            key_mask=key_mask,
            causal=causal,
            q_segments=q_segments,
            k_segments=k_segments,
            q_positions=q_positions,
            k_positions=k_positions,
            mask=_as_booleans(mask),
            bias=bias,
            memory=memory,
            shared=shared or {},
        )
        return self.mixer.weights(_merged(self.variables), x, x_kv, around)

    @property
    def mixer(self) -> Mixer:
        """What mixes: the scores as attention over them, or the mixer that was given."""
        return as_mixer(self.scores, self.path)

    def _dims(self, x):
        return Dims(x.shape[-1], self.heads, self.head_dim)

    def _inputs(self, inputs_q, inputs_kv):
        """The inputs in the computation's dtype; None for those of self-attention, as inputs_q says it all."""
        dtype = inputs_q.dtype if self.dtype is None else self.dtype
        if inputs_kv is None or inputs_kv is inputs_q:
            return inputs_q.astype(dtype), None
        if self.mixer.cross_attention_error():
            raise ValueError(
                f"inputs_kv: {self.mixer.cross_attention_error()}; in self-attention leave it out, or give the very "
                "array that inputs_q is"
            )
        return inputs_q.astype(dtype), inputs_kv.astype(dtype)

    def _dropout(self, deterministic):
        check_rate("dropout_rate", self.dropout_rate)
        if self.dropout_rate == 0 or nn.merge_param("deterministic", self.deterministic, deterministic):
            return None
        return Dropout(self.dropout_rate, self.make_rng("dropout"))

    def _decode(self, params, x, x_kv, around):
        self._check_decoding(x_kv, around)
        ready = self.has_variable("cache", "cache_index")
        empty = self.mixer.init_cache(params, x.shape[-1], x.shape[0], x.shape[1], x.dtype)
        held = {
            name: self.variable("cache", "cache_index" if name == "index" else f"cached_{name}", lambda leaf=leaf: leaf)
            for name, leaf in empty.items()
            if leaf is not None
        }
        if not ready:
            return self.mixer(params, x, None, around)
        index = held["index"].value
        around = Surroundings(
            key_mask=around.key_mask,
            mask=_rows(around.mask, index, x.shape[1]),
            bias=_rows(around.bias, index, x.shape[1]),
            shared=around.shared,
        )
        out, cache = self.mixer.step(params, x, empty | {name: v.value for name, v in held.items()}, around)
        for name, variable in held.items():
            variable.value = cache[name]
        return out

    def _check_decoding(self, x_kv, around):
        if x_kv is not None:
            raise ValueError(
                "decode: expected self-attention, got inputs_kv; attention to another sequence has no cache"
            )
        names = ("q_segments", "k_segments", "q_positions", "k_positions", "memory")
        given = [name for name in names if getattr(around, name) is not None]
        if given:
            raise ValueError(f"decode: it continues one sequence from its start and goes without {', '.join(given)}")
        if self.mixer.decoder_error():
            raise ValueError(f"decode: {self.mixer.decoder_error()}")
        if around.mask is not None and self.mixer.mask_error():
            raise ValueError(f"mask: {self.mixer.mask_error()}")
        if around.bias is not None and self.mixer.bias_error():
            raise ValueError(f"bias: {self.mixer.bias_error()}")

    def _check_no_decoding(self, decode):
        if decode:
            raise ValueError("sow_weights: single steps have no weights to look at; use decode=False")


class StackParameters(nn.Module):
    """The parameters that all layers of a stack share (`Mixer.stack_params`), for `shared` of each layer's call.

    Such as Linformer's with sharing="layerwise"; an empty dict for most mixers. To be made once, beside the layers.
    """

    scores: Spec | Mixer
    features: int
    heads: int
    head_dim: int
    param_dtype: jax.typing.DTypeLike = jnp.float32

    @nn.compact
    def __call__(self) -> Parameters:
        declared = as_mixer(self.scores).stack_params(Dims(self.features, self.heads, self.head_dim))
        return _variables(self, declared, self.param_dtype)


class _Nested(nn.Module):
    """The parameters below a name."""

    declared: Mapping[str, Any]
    param_dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self):
        return _variables(self, self.declared, self.param_dtype)


def _variables(module: nn.Module, declared: Mapping[str, Any], dtype) -> dict[str, Any]:
    """The arrays of a (nested) dict of declared parameters, as variables of a module in its compact method."""
    return {
        name: _variable(module, name, param, dtype) if isinstance(param, Param) else _Nested(param, dtype, name=name)()
        for name, param in declared.items()
    }


def _variable(module, name, param, dtype):
    def init(key):
        return LogicalAxes(param.init(key, param.shape, jnp.dtype(dtype)), param.axes)

    if param.trained:
        return module.param(name, init)
    value = module.variable(FIXED, name, lambda: init(module.make_rng("params"))).value
    if value.shape != param.shape:
        raise ValueError(f"{FIXED}: expected {name} of shape {param.shape}, got {value.shape}; from another layer?")
    return value


def _merged(variables):
    """Trained and fixed arrays as the one tree that mixers take."""
    return traverse_util.unflatten_dict({path[1:]: leaf for path, leaf in _flat(variables).items()})


def _as_booleans(mask):
    return mask if mask is None or mask.dtype == jnp.bool_ else mask > 0


def _rows(pairs, index, count):
    """Of a mask or bias with a row for every token of the cache, those of the next tokens."""
    if pairs is None or pairs.shape[2] in (1, count):
        return pairs
    return jax.lax.dynamic_slice_in_dim(pairs, index, count, axis=2)


# Parameters from and to NNX


def from_nnx(source: nnx.Module | nnx.State, target: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The parameters of an NNX layer, of a whole NNX model or of its nnx.State as Linen variables.

    {"params": ...} and, where there are fixed parameters, {"fixed": ...}: nested dicts by the NNX names, of the same
    arrays. target: variables as the Linen module's init (also under jax.eval_shape) makes them; the result then stands in
    their boxes and the two must agree.

    Raises ValueError that lists what target has and source lacks, the reverse, and shapes and dtypes that differ.
    """
    state = source if isinstance(source, nnx.State) else nnx.state(source)
    flat = {(name, *map(str, path)): variable.get_value() for name, path, variable in _parameters(state)}
    if target is None:
        return traverse_util.unflatten_dict(flat)
    expected = {name: target[name] for name in _TYPES if name in target}
    _check_agreement("source", flat, _flat(expected))
    return nn.meta.replace_boxed(expected, traverse_util.unflatten_dict(flat))


def to_nnx(variables: Mapping[str, Any], target: nnx.Module) -> nnx.Module:
    """Puts Linen variables into an NNX layer or model of the same names, in place; returns it.

    Of the variables the collections "params" and "fixed" are read, boxed or not.

    Raises ValueError that lists what target has and variables lack, the reverse, and shapes and dtypes that differ.
    """
    given = _flat(variables)
    held = {(name, *map(str, path)): (path, variable) for name, path, variable in _parameters(nnx.state(target))}
    _check_agreement("variables", given, {name: variable for name, (_, variable) in held.items()})
    state = [(path, variable.replace(given[name])) for name, (path, variable) in held.items()]
    nnx.update(target, nnx.from_flat_state(state))
    return target


def _parameters(state):
    """(collection, path, variable) of all parameters; what else there is, such as keys of dropout, is none."""
    for path, variable in nnx.to_flat_state(state):
        for name, kind in _TYPES.items():
            if isinstance(variable, kind):
                yield name, path, variable


def _flat(variables):
    """(collection, *names) -> array."""
    held = {name: nn.unbox(variables[name]) for name in _TYPES if name in variables}
    return traverse_util.flatten_dict(held)


def _check_agreement(what, given, expected):
    def listed(names):
        return ", ".join("/".join(name) for name in sorted(names)) or "none"

    def form(leaf):
        return tuple(leaf.shape), jnp.dtype(leaf.dtype).name

    both = given.keys() & expected.keys()
    different = {name: (form(expected[name]), form(given[name])) for name in both}
    different = {name: forms for name, forms in different.items() if forms[0] != forms[1]}
    if given.keys() != expected.keys() or different:
        told = [f"{'/'.join(name)} {there} in place of {here}" for name, (here, there) in sorted(different.items())]
        raise ValueError(
            f"{what}: expected the parameters of target. Missing: {listed(expected.keys() - given.keys())}. Unexpected: "
            f"{listed(given.keys() - expected.keys())}. Different: {', '.join(told) or 'none'}. Are both made of the "
            "same scores and sizes?"
        )
