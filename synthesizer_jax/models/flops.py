"""Model FLOPs: the operations of a model's matrix products, counted in its traced program before anything runs.

2 for each multiplication and addition; loops times their trip count, one call of what may be skipped. What acts on one
element at a time (softmax, norms, activations, the shifted products of a depth-wise convolution) is left out, as is usual;
XLA's own count includes it and is a few per cent higher. Recomputation (remat) is no model FLOP.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from synthesizer_jax.models import parameters
from synthesizer_jax.models.config import ModelConfig

SELF, CROSS, MLP, REST = "self-attention", "cross-attention", "MLP", "rest"  # parts of a model
_SCOPES = {"self_attention": SELF, "cross_attention": CROSS, "mlp": MLP}  # jax.named_scope of the layers


def training_flops(config: ModelConfig, task_feature_lengths: Mapping[str, int]) -> int:
    """Of the loss of one row of these lengths and its gradient, every position counted, padding or not."""
    config = dataclasses.replace(config, remat="none")
    shapes = config.batch.shapes(1, task_feature_lengths, packed=False)
    inputs = [jax.ShapeDtypeStruct(shapes[name], jnp.int32) for name in config.batch.inputs]
    declared = parameters.abstract(config)
    trees = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), declared)

    def total(trained, fixed, *inputs):
        return jnp.sum(parameters.bind(config, trained, fixed)(*inputs).astype(jnp.float32))

    return sum(count_flops(jax.grad(total), *trees, *inputs).values())


def count_flops(function: Callable, *shapes: Any) -> Mapping[str, int]:
    """The operations of function(*shapes)'s matrix products by part of the model, from its traced program.

    A loop whose trip count only the data decide counts once.
    """
    counts = collections.Counter()
    _count(jax.make_jaxpr(function)(*shapes).jaxpr, 1, REST, counts)
    return counts


def _count(jaxpr, times, part, counts):
    for equation in jaxpr.eqns:
        own = next((p for scope, p in _SCOPES.items() if scope in str(equation.source_info.name_stack)), part)
        counts[own] += times * _operations(equation)
        repeats = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "cond":
            counts.update(_most(equation.params["branches"], times, own))
        else:
            for inner in _programs_in(equation.params.values()):
                _count(inner, times * repeats, own, counts)


def _most(branches, times, part):
    """The counts of the branch with the most operations."""
    counted = []
    for branch in branches:
        counts = collections.Counter()
        _count(branch.jaxpr, times, part, counts)
        counted.append(counts)
    return max(counted, key=lambda counts: sum(counts.values()))


def _programs_in(values: Iterable[Any]):
    for value in values:
        if hasattr(value, "eqns"):
            yield value
        elif hasattr(value, "jaxpr"):
            yield value.jaxpr
        elif isinstance(value, tuple | list):
            yield from _programs_in(value)


def _operations(equation) -> int:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        first = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(first[axis] for axis in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval.shape, equation.params["dimension_numbers"]
        output_channels = kernel[numbers.rhs_spec[0]]
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // output_channels
    return 0
