"""Dot-product scores (V, "vanilla"): the Transformer's own."""

import dataclasses
import math
from typing import ClassVar

from synthesizer_jax.axes import EMBED, HEADS, KV, Param, fan_in, normal
from synthesizer_jax.scores.base import Dims, Scores, Spec, project


@dataclasses.dataclass(frozen=True)
class DotProduct(Spec):
    """logits_ij = scale <x_i W_q, x_j W_k>, the Transformer's scores (Vaswani et al. 2017; Synthesizer section 3.1).

    scale None is T5's form: no 1/sqrt(d) on the scores; it is folded into W_q's initial values, of standard deviation
    (e d)^-0.5. A number multiplies the queries, e.g. head_dim ** -0.5 for the textbook form with W_q of e^-0.5.
    Parameters per head: 2 e d. Reads all pairs of tokens; any length; self- and cross-attention.
    """

    scale: float | None = None

    name: ClassVar[str] = "dot_product"

    def __post_init__(self):
        number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool) and math.isfinite(self.scale)
        if self.scale is not None and not number:
            raise ValueError(f"scale: expected a finite number or None, got {self.scale!r}")

    def params(self, dims: Dims):
        shape, axes = (dims.features, dims.heads, dims.head_dim), (EMBED, HEADS, KV)
        folded = dims.head_dim**-0.5 if self.scale is None else 1.0
        return {
            "query": Param(shape, axes, normal(dims.features**-0.5 * folded)),
            "key": Param(shape, axes, fan_in(dims.features)),
        }

    def key_features(self, params, x_kv, k_positions=None):
        return project(x_kv, params["key"])

    def scaled_parameters(self, params, alpha):
        return {**params, "query": params["query"] * alpha.astype(params["query"].dtype)[:, None]}

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        query = project(x_q, params["query"])
        return Scores(query=query if self.scale is None else query * self.scale, key=keys)
