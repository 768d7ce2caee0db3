"""Toeplitz scores: trained, and the same along each diagonal."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from synthesizer_jax.axes import HEADS, SYNTH_KEY, Param, normal
from synthesizer_jax.scores.base import Dims, Scores, Synthetic, check_positive, check_std
from synthesizer_jax.scores.position import distances_of


@dataclasses.dataclass(frozen=True)
class Toeplitz(Synthetic):
    """logits_ij = t_{i-j}, one number per distance, head and layer, the same for every input.

    A Random Synthesizer that is invariant to shifts, and T5's relative position bias with a bucket for each distance and
    a table for each layer. Parameters per head: 2 n - 1. Reads nothing; self-attention up to n = max_length.
    """

    max_length: int
    init_std: float = 1.0  # of the entries, as in Random

    name: ClassVar[str] = "toeplitz"

    def __post_init__(self):
        check_positive("max_length", self.max_length)
        check_std("init_std", self.init_std)

    def params(self, dims: Dims):
        return {"t": Param((dims.heads, 2 * self.max_length - 1), (HEADS, SYNTH_KEY), normal(self.init_std))}

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        self.check_lengths(x_q.shape[1], k_length, q_positions, k_positions)
        distances = distances_of(x_q.shape[1], k_length, q_positions, k_positions, self.max_length)
        index = distances + self.max_length - 1
        table = params["t"].astype(jnp.float32)
        return Scores(bias=jnp.moveaxis(jnp.take(table, index, axis=1, mode="fill", fill_value=jnp.nan), 0, 1))
