"""Token mixing: weights over positions, the same for every feature, without softmax (MLP-Mixer)."""

import dataclasses

import jax
import jax.numpy as jnp

from synthesizer_jax.axes import SYNTH_KEY, SYNTH_QUERY, Param, contract, fan_in, zeros
from synthesizer_jax.mixers.mixer import (
    Mixer,
    Surroundings,
    check_cache_length,
    check_decoder,
    check_plain,
    check_positions,
    check_step,
    checked,
    next_index,
    within_cache,
)
from synthesizer_jax.ops.attend import drop_keys
from synthesizer_jax.ops.segments import each_segment
from synthesizer_jax.scores.base import Dims, check_flag, check_positive, check_reach, take_positions


@dataclasses.dataclass(frozen=True)
class TokenMixing(Mixer):
    """y_i = sum_j W_ij x_j + b_i, or with hidden units y = W2 gelu(W1 x + b1) + b2 over the tokens, for every feature alike
    (MLP-Mixer, Tolstikhin et al. 2021, equation 1; W1 and W2 are written transposed here).

    Without hidden units and bias it is a Random Synthesizer of one head without softmax, value and output projections
    (Synthesizer section 3.3). Causal: W is lower triangular. Of the hidden units, hidden / n belong to each token, in order;
    a unit reads the tokens up to its own, and is read by its own and those after it. A shorter sequence uses the first rows
    and columns. Padding counts as 0; a padded query's result has no meaning. Packed rows are indexed by the position within
    the segment; with hidden units at the cost of one mixing per segment.

    Parameters: n^2 (+ n), or 2 n m + m + n for m hidden units. Reads no token to make its weights. Self-attention's place
    only, up to n = max_length. Weights to look at exist only without hidden units.
    """

    max_length: int  # n
    hidden: int | None = None  # units; MLP-Mixer: half of the features. None: linear
    bias: bool = True
    approximate_gelu: bool = True  # the tanh form, as in MLP-Mixer's own code; False: by the error function

    def __post_init__(self):
        check_positive("max_length", self.max_length)
        if self.hidden is not None:
            check_positive("hidden", self.hidden)
        check_flag("bias", self.bias)
        check_flag("approximate_gelu", self.approximate_gelu)

    def params(self, dims: Dims):
        n, m = self.max_length, self.hidden
        if m is None:
            weights = {"W": Param((n, n), (SYNTH_QUERY, SYNTH_KEY), fan_in(n))}
            return weights | ({"b": Param((n,), (SYNTH_QUERY,), zeros)} if self.bias else {})
        weights = {
            "W1": Param((n, m), (SYNTH_KEY, None), fan_in(n)),
            "W2": Param((m, n), (None, SYNTH_QUERY), fan_in(m)),
        }
        biases = {"b1": Param((m,), (None,), zeros), "b2": Param((n,), (SYNTH_QUERY,), zeros)}
        return weights | (biases if self.bias else {})

    def __call__(self, params, x, x_kv=None, around=Surroundings()):
        around = self._checked(x, x_kv, around)
        if around.dropout is not None:
            x = drop_keys(x[:, :, None], around.dropout)[:, :, 0]  # whole tokens, as in attention
        positions, segments = around.q_positions, around.q_segments
        if self.hidden is None:
            matrix = self._matrix(params, x.shape[1], around).astype(x.dtype)
            tokens = _real(_real(x, around.key_mask), None if segments is None else segments > 0)
            mixed = contract("bqk,bke->bqe" if matrix.ndim == 3 else "qk,bke->bqe", matrix, tokens)
        elif segments is None:
            mixed = self._two_layers(params, _real(x, around.key_mask), positions, around.causal)
        else:

            def of_segment(own, _):
                tokens = _real(x, own if around.key_mask is None else own & around.key_mask)
                return jnp.where(own[:, :, None], self._two_layers(params, tokens, positions, around.causal), 0)

            mixed = each_segment(of_segment, segments, segments, jax.ShapeDtypeStruct(x.shape, jnp.float32))
        return self._plus_bias(params, mixed, positions).astype(x.dtype)

    def weights(self, params, x, x_kv=None, around=Surroundings()):
        """W, without what is masked, [b, 1, q, k] in float32. Its rows don't sum to 1."""
        if self.hidden is not None:
            raise ValueError(
                f"hidden: token mixing through {self.hidden} hidden units is not linear and has no weights to look at; "
                "TokenMixing(hidden=None) has"
            )
        around = self._checked(x, x_kv, around)
        matrix = self._matrix(params, x.shape[1], around)
        matrix = jnp.broadcast_to(matrix, (x.shape[0], *matrix.shape[-2:]))
        return _real(matrix, around.key_mask, axis=2)[:, None]

    def init_cache(self, params, features, batch, length, dtype):
        if self.decoder_error():
            raise ValueError(self.decoder_error())
        check_cache_length(self, length)
        cache = {"value": jnp.zeros((batch, length, features), dtype), "index": jnp.zeros((), jnp.int32)}
        if self.hidden is not None:
            cache["hidden"] = jnp.zeros((batch, length * self._units(), features), dtype)
        return cache

    def step(self, params, x, cache, around=Surroundings()):
        index, length = cache["index"], cache["value"].shape[1]
        check_plain(self, x, None, around)
        check_step(x, cache["value"], length)
        rows = index + jnp.arange(x.shape[1])
        cache = cache | {"value": jax.lax.dynamic_update_slice_in_dim(cache["value"], x, index, axis=1)}
        tokens = _real(cache["value"], around.key_mask)
        if self.hidden is None:
            matrix = jnp.where(jnp.arange(length) <= rows[:, None], params["W"][rows, :length], 0)
            mixed = contract("qk,bke->bqe", matrix.astype(x.dtype), tokens)
        else:
            units = (rows[:, None] * self._units() + jnp.arange(self._units())).ravel()
            hidden = self._first(params, tokens, params["W1"][:length, units], units, jnp.arange(length))
            start = index * self._units()
            cache["hidden"] = jax.lax.dynamic_update_slice_in_dim(cache["hidden"], hidden, start, axis=1)
            size = cache["hidden"].shape[1]
            mixed = self._second(params["W2"][:size, rows], cache["hidden"], jnp.arange(size), rows)
        y = within_cache(self._plus_bias(params, mixed, rows).astype(x.dtype), index, length)
        return y, cache | {"index": next_index(index, x, around)}

    def cross_attention_error(self):
        return (
            "TokenMixing weighs the positions of one sequence and can't mix in another: use DotProduct() for "
            "cross-attention"
        )

    def bias_error(self):
        return "TokenMixing has no softmax and no place for a bias in it; use relative_bias=False"

    def decoder_error(self):
        if self.hidden is None or self.hidden % self.max_length == 0:
            return None
        return (
            f"hidden={self.hidden} units don't divide among max_length={self.max_length} tokens, so that none could be "
            f"kept from seeing later ones; use a multiple such as hidden={self.max_length} in decoders"
        )

    def reads_positions(self):
        return True

    def longest(self):
        return self.max_length

    def _checked(self, x, x_kv, around):
        check_decoder(self, around)
        check_plain(self, x, x_kv, around)
        for name in ("k_segments", "k_positions"):
            if getattr(around, name) is not None:
                raise ValueError(f"{name}: TokenMixing mixes one sequence with itself; give q{name[1:]} alone")
        around = checked(x, x_kv, around)
        check_positions(self, around, "TokenMixing")
        check_reach(
            type(self).__name__, self.max_length, x.shape[1], x.shape[1], around.q_positions, around.q_positions
        )
        return around

    def _units(self):
        """Hidden units of each token, in decoders."""
        return self.hidden // self.max_length

    def _matrix(self, params, length, around):
        """W at the positions without what is causally or by segment masked, [q, k] or [b, q, k]."""
        positions, segments = around.q_positions, around.q_segments
        rows = take_positions(params["W"], positions, length, axis=0)  # [(b,) q, n]
        if positions is not None and positions.ndim == 2:
            columns = jax.vmap(lambda row, p: take_positions(row, p, length, axis=1))(rows, positions)
        else:
            columns = take_positions(rows, positions, length, axis=1)
        if around.causal:
            columns = jnp.where(jnp.tri(length, dtype=bool), columns, 0)
        if segments is None:
            return columns
        same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
        return jnp.where(same, columns, 0)

    def _two_layers(self, params, x, positions, causal):
        """W2 gelu(W1 x + b1) for tokens at these positions, [b, q, e] in float32."""
        length = x.shape[1]
        first = take_positions(params["W1"], positions, length, axis=0)  # [(b,) k, m]
        second = take_positions(params["W2"], positions, length, axis=1)  # [m, (b,) q]
        at = jnp.arange(length) if positions is None else positions
        units = jnp.arange(self.hidden)
        hidden = self._first(params, x, first, units, at if causal else None)
        return self._second(second, hidden, units, at if causal else None)

    def _first(self, params, x, weight, units, positions):
        """gelu(W1 x + b1) of these units [b, m, e]; positions of the tokens where it is causal."""
        if positions is not None:
            weight = jnp.where(positions[..., None] <= units // self._units(), weight, 0)
        z = contract("bke,bkm->bme" if weight.ndim == 3 else "bke,km->bme", x, weight.astype(x.dtype))
        if self.bias:
            z = z + params["b1"][units].astype(jnp.float32)[:, None]
        return jax.nn.gelu(z, approximate=self.approximate_gelu).astype(x.dtype)

    def _second(self, weight, hidden, units, positions):
        if positions is not None:
            owner = (units // self._units()).reshape(-1, *[1] * positions.ndim)
            weight = jnp.where(owner <= positions, weight, 0)
        return contract("bme,mbq->bqe" if weight.ndim == 3 else "bme,mq->bqe", hidden, weight.astype(hidden.dtype))

    def _plus_bias(self, params, mixed, positions):
        if not self.bias:
            return mixed
        name = "b" if self.hidden is None else "b2"
        bias = take_positions(params[name].astype(jnp.float32), positions, mixed.shape[1], axis=0)
        return mixed + bias[..., None]


def _real(x, mask, axis=1):
    """x with 0 in place of padding along an axis."""
    if mask is None:
        return x
    return jnp.where(jnp.expand_dims(mask, [i for i in range(1, x.ndim) if i != axis]), x, 0)
