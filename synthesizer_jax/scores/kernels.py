"""The kernel family: attention as a kernel smoother whose choices are independent (Transformer Dissection).

Tsai et al. 2019, equation 2: Attention(x_q; M) = sum_{k in M} K(x_q, x_k) / sum_{k' in M} K(x_q, x_k') * v(x_k). Here are the
kernel K, its symmetry, how positions enter it, and whether they enter the value v. The set M is that of the masks: all,
causal, causal with `memory`, and `Sparse` keys of `MultiHead`.
"""

import dataclasses
from typing import ClassVar, Literal, get_args

import jax.numpy as jnp

from synthesizer_jax.axes import BUCKETS, EMBED, HEADS, KV, SYNTH_KEY, Param, contract, fan_in, normal, zeros
from synthesizer_jax.scores.base import (
    Dims,
    Scores,
    Spec,
    check_flag,
    check_positive,
    check_reach,
    project,
    take_positions,
)
from synthesizer_jax.scores.position import RelativePositionBias, distances_of, shifted, sinusoid_features, sinusoids

Function = Literal["exponential", "rbf", "polynomial", "linear"]
Integration = Literal["none", "direct_sum", "lookup", "product_asymmetric", "product_symmetric"]
Positions = Literal["sinusoidal", "learned", "t5"]

_RELATIVE = ("lookup", "product_asymmetric")


@dataclasses.dataclass(frozen=True)
class Kernel(Spec):
    """Scores of a kernel K of u = f_i W_q and w = f_j W_k (Tsai et al. 2019, section 3; f are the tokens, t positions).

    kernel: "exponential" exp(<u, w> / sqrt d), "rbf" exp(-|u - w|^2 / sqrt d), "polynomial" <u, w>^2, "linear" <u, w>. The
    last two have no logarithm: weights are divided by their sum, and a linear kernel, whose sum may be near 0, gives 0
    there (ops/attend.py); the paper found that it does not train. symmetric: W_k = W_q.

    integration of positions:
      "direct_sum": K(f_i + t_i, f_j + t_j);
      "lookup": exp(<u, a_{i-j}>) K, over sqrt d with scaled_lookup (Shaw et al. 2018);
      "product_asymmetric": exp(<u, r_{i-j} W_R> / sqrt d) K; with biases, u + content_bias in K and u + position_bias
        beside r (Transformer-XL, Dai et al. 2019);
      "product_symmetric": K(f_i, f_j) K(t_i W_T, t_j W_T), the same kernel twice.
    positions, of t, a and r: "sinusoidal"; "learned" tables for max_length tokens; "t5", learned for T5's buckets of
    distances, where distances are all that is read. value_positions: v_j = (f_j + t_j) W_v in place of f_j W_v.

    An RBF's |u|^2 is left out, as it cancels: in float32 the weights lose digits where |w|^2 / sqrt d is above 10^3.
    Parameters per head: 2 e d, symmetric e d; W_T and W_R e d each; tables n e (t), (2n - 1) d (a), (2n - 1) e (r) per
    layer. Reads all pairs of tokens. Cross-attention only without positions. Any length, but for learned tables.
    """

    kernel: Function = "exponential"
    symmetric: bool = False
    integration: Integration = "none"
    positions: Positions = "sinusoidal"
    value_positions: bool = False
    max_length: int | None = None  # n of learned positions; others do not read it
    scaled_lookup: bool = False
    biases: bool = False
    buckets: int = 32  # of "t5"
    max_distance: int = 128  # of "t5"

    name: ClassVar[str] = "kernel"

    def __post_init__(self):
        for name, choices in (("kernel", Function), ("integration", Integration), ("positions", Positions)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}: expected one of {get_args(choices)}, got {getattr(self, name)!r}")
        for name in ("symmetric", "value_positions", "scaled_lookup", "biases"):
            check_flag(name, getattr(self, name))
        if self.positions != "sinusoidal" and self.integration == "none" and not self.value_positions:
            raise ValueError(
                f"positions: {self.positions!r} has no effect without an integration of positions or value_positions; give "
                f"integration=, one of {get_args(Integration)[1:]}"
            )
        if self.positions == "t5" and (self.value_positions or self.integration in ("direct_sum", "product_symmetric")):
            raise ValueError(
                "positions: 't5' knows distances alone, and here a token's own position is added or multiplied; use "
                "'sinusoidal' or 'learned', or integration='lookup' or 'product_asymmetric' without value_positions"
            )
        if self.biases and self.integration != "product_asymmetric":
            raise ValueError(f"biases: they belong to integration='product_asymmetric', got {self.integration!r}")
        if self.scaled_lookup and self.integration != "lookup":
            raise ValueError(f"scaled_lookup: it belongs to integration='lookup', got {self.integration!r}")
        if self.max_length is not None:
            check_positive("max_length", self.max_length)
        elif self.positions == "learned":
            raise ValueError("max_length: expected the number of positions that are learned, got None")
        RelativePositionBias(self.buckets, self.max_distance)  # raises where they don't fit

    def params(self, dims: Dims):
        e, h, d = dims.features, dims.heads, dims.head_dim
        inward = Param((e, h, d), (EMBED, HEADS, KV), fan_in(e))
        declared = {"query": inward} if self.symmetric else {"query": inward, "key": inward}
        if self._absolute() and self.positions == "learned":
            declared["positions"] = Param((self.max_length, e), (SYNTH_KEY, EMBED), normal(_STD))
        if self.integration in _RELATIVE and self.positions != "sinusoidal":
            size, axis = (d, KV) if self.integration == "lookup" else (e, EMBED)
            rows, row_axis = (self.buckets, BUCKETS) if self.positions == "t5" else (2 * self.max_length - 1, None)
            declared["relative"] = Param((rows, size), (row_axis, axis), normal(_STD))
        if self.integration in ("product_asymmetric", "product_symmetric"):
            declared["position_key"] = inward
        if self.biases:
            declared |= {name: Param((h, d), (HEADS, KV), zeros) for name in ("content_bias", "position_bias")}
        return declared

    def key_features(self, params, x_kv, k_positions=None):
        if self.integration == "direct_sum":
            x_kv = self._with_positions(params, x_kv, k_positions)
        return self._features(project(x_kv, params["query" if self.symmetric else "key"]))

    def value_inputs(self, params, x_kv, k_positions=None):
        return self._with_positions(params, x_kv, k_positions) if self.value_positions else x_kv

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        if self.longest() is not None:
            check_reach(type(self).__name__, self.longest(), x_q.shape[1], k_length, q_positions, k_positions)
        if self.integration == "direct_sum":
            x_q = self._with_positions(params, x_q, q_positions)
        query = project(x_q, params["query"])
        scores = self._scores(_plus(query, params.get("content_bias")), keys)
        match self.integration:
            case "product_symmetric":
                lengths = x_q.shape[1], k_length
                return scores + self._position_kernel(params, *lengths, q_positions, k_positions, x_q.dtype)
            case "lookup":
                scale = query.shape[-1] ** -0.5 if self.scaled_lookup else 1.0
                return scores + self._lookup(params, query * scale, k_length, q_positions, k_positions)
            case "product_asymmetric":
                query = _plus(query, params.get("position_bias")) * query.shape[-1] ** -0.5
                # <u, r W_R> = <u W_R^T, r>: a look-up with queries of size e.
                query = jnp.einsum("bqhd,ehd->bqhe", query, params["position_key"].astype(query.dtype))
                return scores + self._lookup(params, query, k_length, q_positions, k_positions)
        return scores

    def weighting_error(self):
        if self.kernel != "linear":
            return None
        return (
            "the scores of a linear kernel may be negative and have no weighted logarithm; kernels multiply with 'sum'"
        )

    def cross_attention_error(self):
        if self.integration == "none" and not self.value_positions:
            return None
        return (
            "Kernel scores with positions compare those of one sequence and can't attend to another: use "
            "Kernel(integration='none', value_positions=False) for cross-attention"
        )

    def reads_positions(self):
        return self._absolute()

    def longest(self):
        reads = self.integration != "none" or self.value_positions
        return self.max_length if self.positions == "learned" and reads else None

    def _absolute(self):
        return self.integration in ("direct_sum", "product_symmetric") or self.value_positions

    def _with_positions(self, params, x, positions):
        return x + self._table(params, x.shape[1], positions, x.shape[2]).astype(x.dtype)

    def _table(self, params, length, positions, size):
        """t at the positions, [1|b, length, e] in float32."""
        if self.positions == "sinusoidal":
            t = sinusoids(jnp.arange(length) if positions is None else positions, size)
        else:
            check_reach(type(self).__name__, self.max_length, length, length, positions, positions)
            t = take_positions(params["positions"].astype(jnp.float32), positions, length, axis=0)
        return t if t.ndim == 3 else t[None]

    def _features(self, w):
        """What the kernel reads of w [b, k, h, d]: itself, and for "rbf" -|w|^2 / sqrt d in columns of its dtype."""
        if self.kernel != "rbf":
            return w
        squares = -jnp.sum(jnp.square(w.astype(jnp.float32)), axis=-1, keepdims=True) * w.shape[-1] ** -0.5
        return jnp.concatenate([w, *_in_columns(squares, w.dtype)], axis=-1)

    def _scores(self, u, keys):
        """The kernel of u [b|1, q, h, d] and features of keys as Scores."""
        root = u.shape[-1] ** 0.5
        if self.kernel == "exponential":
            return Scores(u / root, keys)
        if self.kernel == "rbf":  # |u|^2 is the same for all keys of a row, and cancels
            ones = jnp.ones((*u.shape[:-1], keys.shape[-1] - u.shape[-1]), u.dtype)
            return Scores(jnp.concatenate([u * (2 / root), ones], axis=-1), keys)
        products = Scores(u, keys).exponent()
        return Scores(factor=products if self.kernel == "linear" else jnp.square(products))

    def _position_kernel(self, params, q_length, k_length, q_positions, k_positions, dtype):
        weight = params["position_key"]
        query = project(self._table(params, q_length, q_positions, weight.shape[0]).astype(dtype), weight)
        key = project(self._table(params, k_length, k_positions, weight.shape[0]).astype(dtype), weight)
        return self._scores(query, self._features(key))

    def _lookup(self, params, query, k_length, q_positions, k_positions):
        """<query_i, table_{i-j}>, query [b, q, h, c]."""
        if self.positions == "sinusoidal":
            return Scores(*sinusoid_features(query, k_length, q_positions, k_positions))
        table = params["relative"]
        if self.positions == "learned" and q_positions is None and k_positions is None:
            farthest = self.max_length - 1
            rows = table[farthest + 1 - k_length : farthest + query.shape[1]][::-1]  # from the last key's distance on
            return Scores(bias=shifted(contract("bqhc,oc->bhqo", query, rows.astype(query.dtype)), k_length))
        products = contract("bqhc,oc->bhqo", query, table.astype(query.dtype))
        index = self._row(query.shape[1], k_length, q_positions, k_positions)[:, None]
        return Scores(bias=jnp.take_along_axis(products, index, axis=-1, mode="fill", fill_value=jnp.nan))

    def _row(self, q_length, k_length, q_positions, k_positions):
        """The row of the table for query i and key j, [b|1, q, k]; past the end for positions that it does not cover."""
        if self.positions == "t5":
            return RelativePositionBias(self.buckets, self.max_distance).bucket(
                -distances_of(q_length, k_length, q_positions, k_positions)
            )
        return distances_of(q_length, k_length, q_positions, k_positions, self.max_length) + self.max_length - 1


# Learned positions start with the size of sinusoids.
_STD = 0.5**0.5


def _plus(query, bias):
    return query if bias is None else query + bias.astype(query.dtype)


def _in_columns(numbers, dtype):
    """float32 numbers as columns of dtype whose sum they are: one, or three of bfloat16's 8 bits each."""
    if dtype == jnp.float32:
        return [numbers]
    columns = []
    for _ in range(3):
        columns.append(numbers.astype(dtype))
        numbers = numbers - columns[-1].astype(jnp.float32)
    return columns
