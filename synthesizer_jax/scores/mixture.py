"""Mixtures: weighted sums of scores inside the softmax (R+V, D+V, R+D, FR+V, ...)."""

import dataclasses
from collections import Counter
from typing import ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from synthesizer_jax.axes import HEADS, PARTS, Param, zeros
from synthesizer_jax.scores.base import Dims, Parameters, Spec, check_flag
from synthesizer_jax.scores.dense import Dense
from synthesizer_jax.scores.dot_product import DotProduct

Weights = Literal["softmax", "sigmoid", "sum"]


@dataclasses.dataclass(frozen=True)
class Mixture(Spec):
    """logits = sum_n alpha_n logits_n over the parts, alpha learned with sum_n alpha_n = 1 (Synthesizer section 3.5).

    weights: "softmax" over the parts, starting equal (the paper does not say how alpha is normalised); "sigmoid", for
    two parts: s = sigmoid(alpha) for the first and 1 - s for the second (the authors' code); "sum": no weights.
    per_head: a weight for each head, or one for the layer (the authors' code). share_query: the dense parts read the
    dot product's queries in place of their own W1 (the authors' code). Parts may be mixtures.
    Parameters: the parts' and alpha, [parts, h]. Reads what its parts read, and is limited as they are.
    """

    parts: tuple[Spec, ...]
    weights: Weights = "softmax"
    per_head: bool = True
    share_query: bool = False

    name: ClassVar[str] = "mixture"

    def __post_init__(self):
        if not isinstance(self.parts, tuple | list):
            raise ValueError(
                f"parts: expected a tuple of scores such as (Random(512), DotProduct()), got {self.parts!r}"
            )
        object.__setattr__(self, "parts", tuple(self.parts))
        check_flag("per_head", self.per_head)
        check_flag("share_query", self.share_query)
        if len(self.parts) < 2:
            raise ValueError(f"parts: expected at least two scores to mix, got {len(self.parts)}")
        for part in self.parts:
            if not isinstance(part, Spec):
                raise ValueError(f"parts: expected scores such as Random(512) or DotProduct(), got {part!r}")
        if self.weights not in get_args(Weights):
            raise ValueError(f"weights: expected one of {get_args(Weights)}, got {self.weights!r}")
        if self.weights == "sigmoid" and len(self.parts) != 2:
            raise ValueError(
                f"weights: 'sigmoid' weighs two parts, got {len(self.parts)}; use 'softmax', or nest mixtures of two"
            )
        if self.weights != "sum" and self.weighting_error():
            raise ValueError(f"weights: expected 'sum', got {self.weights!r}: {self.weighting_error()}")
        if self.share_query and (self._count(DotProduct) != 1 or not self._count(Dense)):
            raise ValueError(
                "share_query: expected one DotProduct whose queries the Dense parts read, got "
                f"{[type(part).__name__ for part in self.parts]}"
            )

    def _count(self, kind):
        return sum(isinstance(part, kind) for part in self.parts)

    def part_names(self) -> tuple[str, ...]:
        """The name of each part's parameters: its kind, counted from the second of a kind on ("random_1")."""
        seen = Counter()
        names = []
        for part in self.parts:
            names.append(f"{part.name}_{seen[part.name]}" if seen[part.name] else part.name)
            seen[part.name] += 1
        return tuple(names)

    def params(self, dims: Dims):
        declared = {name: part.params(dims) for name, part in zip(self.part_names(), self.parts, strict=True)}
        if self.share_query:
            for name, part in zip(self.part_names(), self.parts, strict=True):
                if isinstance(part, Dense):
                    self._check_rank(part, dims)
                    del declared[name]["w1"]
        declared = {name: part for name, part in declared.items() if part}
        if self.weights != "sum":
            shape = (len(self.parts) if self.weights == "softmax" else 1, dims.heads if self.per_head else 1)
            declared["alpha"] = Param(shape, (PARTS, HEADS if self.per_head else None), zeros)
        return declared

    def _check_rank(self, part, dims):
        if (part.rank or dims.head_dim) != dims.head_dim:
            raise ValueError(
                f"share_query: expected Dense of rank head_dim = {dims.head_dim}, got rank={part.rank}; leave it out"
            )

    def mixture_weights(self, params: Parameters) -> Float[Array, "parts _h"]:
        """alpha as it multiplies the scores, [parts, h] ([parts, 1] for one weight per layer) in float32."""
        if self.weights == "sum":
            return jnp.ones((len(self.parts), 1), jnp.float32)
        raw = params["alpha"].astype(jnp.float32)
        if self.weights == "softmax":
            return jax.nn.softmax(raw, axis=0)
        return jnp.concatenate([jax.nn.sigmoid(raw), jax.nn.sigmoid(-raw)])

    def _part_params(self, params):
        for name, part in zip(self.part_names(), self.parts, strict=True):
            own = params.get(name, {})
            if self.share_query and isinstance(part, Dense):
                own = {**own, "w1": params[DotProduct.name]["query"]}
            yield part, own

    def key_features(self, params, x_kv, k_positions=None):
        features = tuple(part.key_features(own, x_kv, k_positions) for part, own in self._part_params(params))
        return features if jax.tree.leaves(features) else None

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        keys = (None,) * len(self.parts) if keys is None else keys
        scores = []
        for (part, own), part_keys, alpha in zip(
            self._part_params(params), keys, self.mixture_weights(params), strict=True
        ):
            # Where tokens are more than features, it costs less to scale the parameters. A projection of shared queries
            # would be computed for each part then.
            in_parameters = x_q.shape[0] * x_q.shape[1] > x_q.shape[2] and not self.share_query
            scaled = part.scaled_parameters(own, alpha) if in_parameters and self.weights != "sum" else None
            one = part.score(own if scaled is None else scaled, x_q, part_keys, k_length, q_positions, k_positions)
            scores.append(one if scaled is not None or self.weights == "sum" else one.scaled(alpha))
        return sum(scores[1:], scores[0])

    def value_inputs(self, params, x_kv, k_positions=None):
        for part, own in self._part_params(params):
            x_kv = part.value_inputs(own, x_kv, k_positions)
        return x_kv

    def weighting_error(self):
        return next((e for e in (part.weighting_error() for part in self.parts) if e), None)

    def reads_positions(self):
        return any(part.reads_positions() for part in self.parts)

    def cross_attention_error(self):
        return next((e for e in (part.cross_attention_error() for part in self.parts) if e), None)

    def longest(self):
        return min((part.longest() for part in self.parts if part.longest() is not None), default=None)
