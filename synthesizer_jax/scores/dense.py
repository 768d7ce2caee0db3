"""Dense scores: each token predicts its own row of the attention matrix (D, FD)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from synthesizer_jax.axes import (
    EMBED,
    HEADS,
    RANK,
    SYNTH_KEY,
    Param,
    contract,
    fan_in,
    zeros,
)
from synthesizer_jax.scores.base import (
    Dims,
    Scores,
    Synthetic,
    check_flag,
    check_positive,
    from_zero,
    project,
    take_positions,
)


@dataclasses.dataclass(frozen=True)
class Dense(Synthetic):
    """logits_i = W2 relu(W1 x_i + b1) + b2 in R^n, read off at the keys' positions (D; Synthesizer section 3.2).

    rank is the hidden size, head_dim by default. The authors' code has no biases and one W2 for all heads: bias=False,
    share_w2=True. Parameters per head: e r + r + r n + n. Reads token i alone; self-attention up to n = max_length.
    """

    max_length: int
    rank: int | None = None
    bias: bool = True
    share_w2: bool = False

    name: ClassVar[str] = "dense"

    def __post_init__(self):
        check_positive("max_length", self.max_length)
        if self.rank is not None:
            check_positive("rank", self.rank)
        check_flag("bias", self.bias)
        check_flag("share_w2", self.share_w2)

    def params(self, dims: Dims):
        h, n, r = dims.heads, self.max_length, self.rank or dims.head_dim
        w2_shape, w2_axes = ((r, n), (RANK, SYNTH_KEY)) if self.share_w2 else ((h, r, n), (HEADS, RANK, SYNTH_KEY))
        weights = {
            "w1": Param((dims.features, h, r), (EMBED, HEADS, RANK), fan_in(dims.features)),
            "w2": Param(w2_shape, w2_axes, fan_in(r)),
        }
        biases = {
            "b1": Param((h, r), (HEADS, RANK), zeros),
            "b2": Param((h, n), (HEADS, SYNTH_KEY), zeros),
        }
        return weights | biases if self.bias else weights

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        self.check_lengths(x_q.shape[1], k_length, q_positions, k_positions)
        hidden = _hidden(x_q, params["w1"], params.get("b1"))
        w2 = take_positions(params["w2"].astype(x_q.dtype), k_positions, k_length, axis=-1)  # [(h,) r, (b,) k]
        if self.share_w2:
            w2 = jnp.broadcast_to(w2, (hidden.shape[2], *w2.shape))
        key = jnp.transpose(w2, (2, 3, 0, 1) if w2.ndim == 4 else (2, 0, 1))
        bias = None
        if self.bias:
            b2 = take_positions(params["b2"].astype(jnp.float32), k_positions, k_length, axis=-1)  # [h, (b,) k]
            bias = jnp.moveaxis(b2, 0, -2)[..., None, :]  # [(b,) h, 1, k]
        return Scores(
            hidden, key if key.ndim == 4 else key[None], bias if bias is None or bias.ndim == 4 else bias[None]
        )


@dataclasses.dataclass(frozen=True)
class FactorizedDense(Synthetic):
    """logits_i[n'] = A_i[n' // b] B_i[n' % b], where A_i in R^a and B_i in R^b are projections of token i and a b = n.

    FD, Synthesizer section 3.4: C_i = H_A(A_i) * H_B(B_i). The only tiling that gives n distinct products is
    repeat_interleave(A, b) * tile(B, a). A = wa^T h + ba and B = wb^T h + bb share h = relu(w1^T x + b1) unless
    shared_hidden is False. a and b default to the most nearly square factors of max_length.
    Parameters per head: e r + r + r (a + b) + a + b. Reads token i alone; self-attention up to n = max_length.
    """

    max_length: int
    a: int | None = None
    b: int | None = None
    rank: int | None = None
    shared_hidden: bool = True

    name: ClassVar[str] = "factorized_dense"

    def __post_init__(self):
        check_positive("max_length", self.max_length)
        for name, value in (("a", self.a), ("b", self.b), ("rank", self.rank)):
            if value is not None:
                check_positive(name, value)
        check_flag("shared_hidden", self.shared_hidden)
        a, b = self.factors()
        if a * b != self.max_length:
            raise ValueError(
                f"FactorizedDense: expected a * b = max_length = {self.max_length}, got a={a} * b={b} = {a * b}; "
                "give one of them, and the other follows"
            )

    def factors(self) -> tuple[int, int]:
        """(a, b), with what was not given filled in."""
        n = self.max_length
        if self.a is None and self.b is None:
            a = max(size for size in range(1, int(n**0.5) + 1) if n % size == 0)
            return a, n // a
        return self.a or n // self.b, self.b or n // self.a

    def params(self, dims: Dims):
        h, r, (a, b) = dims.heads, self.rank or dims.head_dim, self.factors()
        hidden = ("",) if self.shared_hidden else ("a", "b")
        w1 = {f"w{x}1": Param((dims.features, h, r), (EMBED, HEADS, RANK), fan_in(dims.features)) for x in hidden}
        b1 = {f"b{x}1": Param((h, r), (HEADS, RANK), zeros) for x in hidden}
        return (
            w1
            | b1
            | {
                "wa": Param((h, r, a), (HEADS, RANK, None), fan_in(r)),
                "ba": Param((h, a), (HEADS, None), zeros),
                "wb": Param((h, r, b), (HEADS, RANK, None), fan_in(r)),
                "bb": Param((h, b), (HEADS, None), zeros),
            }
        )

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        self.check_lengths(x_q.shape[1], k_length, q_positions, k_positions)
        factor_a = self._factor(params, x_q, "a")
        factor_b = self._factor(params, x_q, "b")
        table = jnp.einsum("bqhi,bqhj->bhqij", factor_a, factor_b)  # n = (i, j): j runs fastest
        table = table.reshape(*table.shape[:3], self.max_length)
        if k_positions is None or k_positions.ndim == 1:
            return Scores(bias=take_positions(table, k_positions, k_length, axis=-1))
        indices = from_zero(k_positions, self.max_length)
        indices = jnp.broadcast_to(indices[:, None, None, :], (*table.shape[:3], k_length))
        return Scores(bias=jnp.take_along_axis(table, indices, axis=-1, mode="fill", fill_value=jnp.nan))

    def _factor(self, params, x, side):
        prefix = "" if self.shared_hidden else side
        hidden = _hidden(x, params[f"w{prefix}1"], params[f"b{prefix}1"])
        out = contract("bqhr,hri->bqhi", hidden, params[f"w{side}"].astype(x.dtype))
        return out + params[f"b{side}"].astype(jnp.float32)


def _hidden(x, w1, b1):
    """relu(x w1 + b1), [b, q, h, r] in x's dtype."""
    out = project(x, w1)
    return jax.nn.relu(out if b1 is None else out + b1.astype(x.dtype))
