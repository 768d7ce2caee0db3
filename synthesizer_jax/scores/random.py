"""Random scores: matrices that belong to a head and read no token (R, fixed R, FR)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from synthesizer_jax.axes import HEADS, RANK, SYNTH_KEY, SYNTH_QUERY, Param, normal
from synthesizer_jax.scores.base import (
    Dims,
    Lookup,
    Scores,
    Synthetic,
    check_flag,
    check_positive,
    check_std,
    take_positions,
)


@dataclasses.dataclass(frozen=True)
class Random(Synthetic):
    """logits_ij = R_ij, one matrix per head and layer, the same for every input (R; Synthesizer section 3.3).

    trained False leaves R as drawn ("Fixed Random"): saved and restored, without gradient. init_std is the standard
    deviation of the initial entries; None gives the authors' Glorot values over [n, h, n] (about 0.003 at n = 512:
    nearly uniform attention, which Adafactor's relative steps take long to leave).
    Parameters per head: n^2. Reads nothing; self-attention up to n = max_length.
    """

    max_length: int
    trained: bool = True
    init_std: float | None = 1.0

    name: ClassVar[str] = "random"

    def __post_init__(self):
        check_positive("max_length", self.max_length)
        check_flag("trained", self.trained)
        if self.init_std is not None:
            check_std("init_std", self.init_std)

    def params(self, dims: Dims):
        n = self.max_length
        std = (2 / (n * (n + dims.heads))) ** 0.5 if self.init_std is None else self.init_std
        return {"R": Param((dims.heads, n, n), (HEADS, SYNTH_QUERY, SYNTH_KEY), normal(std), self.trained)}

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        self.check_lengths(x_q.shape[1], k_length, q_positions, k_positions)
        table = params["R"] if self.trained else jax.lax.stop_gradient(params["R"])
        if q_positions is not None and q_positions.shape == (1,) and k_positions is None:
            return Scores(bias=_row(table, q_positions[0], k_length).astype(jnp.float32)[None])
        if _of_the_batch(q_positions) and _of_the_batch(k_positions):
            rows = take_positions(table, q_positions, x_q.shape[1], axis=1)
            return Scores(bias=take_positions(rows, k_positions, k_length, axis=2).astype(jnp.float32)[None])
        positions = map(_per_sequence, (q_positions, k_positions), (x_q.shape[1], k_length))
        return Scores(lookup=Lookup(table.astype(jnp.float32), *positions))


def _of_the_batch(positions):
    return positions is None or positions.ndim == 1


def _row(table, position, k_length):
    """[h, 1, k], of a step of decoding: one slice of what is read, as a row of n or a gather cost with n."""
    heads, n, _ = table.shape
    row = jax.lax.dynamic_slice(table, (0, position, 0), (heads, 1, k_length))
    return jnp.where((position >= 0) & (position < n), row, jnp.nan)


def _per_sequence(positions, length):
    return jnp.atleast_2d(jnp.arange(length) if positions is None else positions)


@dataclasses.dataclass(frozen=True)
class FactorizedRandom(Synthetic):
    """logits = R1 R2^T with R1, R2 [n, r] per head (FR; Synthesizer section 3.4, whose k is our rank r).

    init_std is the standard deviation of the initial scores. Parameters per head: 2 n r. Reads nothing;
    self-attention up to n = max_length.
    """

    max_length: int
    rank: int = 8
    init_std: float = 1.0

    name: ClassVar[str] = "factorized_random"

    def __post_init__(self):
        check_positive("max_length", self.max_length)
        check_positive("rank", self.rank)
        check_std("init_std", self.init_std)

    def params(self, dims: Dims):
        shape = (dims.heads, self.max_length, self.rank)
        init = normal((self.init_std * self.rank**-0.5) ** 0.5)  # a sum of r products of two such entries
        return {
            "R1": Param(shape, (HEADS, SYNTH_QUERY, RANK), init),
            "R2": Param(shape, (HEADS, SYNTH_KEY, RANK), init),
        }

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        self.check_lengths(x_q.shape[1], k_length, q_positions, k_positions)
        rows = _factor_rows(params["R1"], q_positions, x_q.shape[1])
        columns = _factor_rows(params["R2"], k_positions, k_length)
        scores = Scores(query=rows, key=columns)
        # Shared by the batch, the product is a small table and the batch needs one softmax; else stay low-rank.
        if rows.shape[0] > 1 or columns.shape[0] > 1:
            return scores
        if x_q.shape[1] == 1:  # a step of decoding
            return Scores(bias=scores.logits())
        # Made before its softmax begins: in one fusion with the product, XLA for TPU writes and reads constants of the softmax
        # as arrays of the table's size. A layer of 8 x 2048 moved 3.16 GB in both passes, and moves 1.30.
        return Scores(bias=jax.lax.optimization_barrier(scores.logits()))


def _factor_rows(table, positions, length):
    """table [h, n, r] at the positions, [b|1, q, h, r] in float32."""
    rows = take_positions(table, positions, length, axis=1).astype(jnp.float32)
    return jnp.moveaxis(rows, 0, -2) if rows.ndim == 4 else jnp.moveaxis(rows, 0, 1)[None]
