"""Optimizers and learning rates as frozen dataclasses of plain values, built through optax.

A parameter that is scanned over depth holds one array per layer behind a leading axis "layers". Adafactor looks at
whole arrays (the clipping of an update, the scale of a parameter, the factored second moments), so here it looks at
each layer's array by itself: a scanned and an unscanned model train alike. Adjacent axes of heads and size per head
count as one, as in T5's joined kernels: optax alone would leave [e, h, 64] unfactored, because 64 < 128.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from synthesizer_jax import axes as ax
from synthesizer_jax.models.parameters import Declared
from synthesizer_jax.sharding import path_name

Schedule = Callable[[jax.typing.ArrayLike], Float[Array, ""]]


def _in_float32(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """With gradients, parameters and statistics in float32, whatever the dtype of the parameters."""

    def as_float32(tree):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def update(gradients, state, params):
        # optax's Adam raises a float to an integer power, which JAX refuses under strict dtype promotion.
        with jax.numpy_dtype_promotion("standard"):
            return transformation.update(as_float32(gradients), state, as_float32(params))

    return optax.GradientTransformation(lambda params: transformation.init(as_float32(params)), update)


def _ramp(step, steps: int):
    return jnp.minimum(1.0, (_float(step) + 1.0) / steps) if steps else jnp.float32(1.0)


def _float(step):
    return jnp.asarray(step, jnp.float32)


def _check(name: str, value: Any, good: bool, expected: str) -> None:
    if not good or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name}: expected a number {expected}, got {value!r}")


def _check_schedule(owner: str, value: Any) -> None:
    if not callable(value):
        raise ValueError(
            f"{owner}.learning_rate: expected a schedule such as Constant({value!r}) or InverseSqrt() "
            f"(in gin: @Constant()), got {value!r}"
        )


@dataclasses.dataclass(frozen=True)
class InverseSqrt:
    """scale / sqrt(max(step, warmup)): constant for `warmup` steps, then falling. T5's pretraining rate."""

    warmup: int = 10_000  # steps
    scale: float = 1.0
    linear_warmup: int = 0  # steps over which the rate rises from 0; = warmup gives the Transformer's "Noam" rate

    def __post_init__(self):
        _check("InverseSqrt.warmup", self.warmup, self.warmup >= 1, ">= 1 steps")
        _check("InverseSqrt.scale", self.scale, self.scale > 0, "> 0")
        _check("InverseSqrt.linear_warmup", self.linear_warmup, self.linear_warmup >= 0, ">= 0 steps")

    def __call__(self, step: jax.typing.ArrayLike) -> Float[Array, ""]:
        rate = self.scale * jax.lax.rsqrt(jnp.maximum(_float(step), float(self.warmup)))
        return rate * _ramp(step, self.linear_warmup)


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same rate at every step. T5's fine-tuning rate."""

    value: float = 1e-3
    linear_warmup: int = 0  # steps over which the rate rises from 0

    def __post_init__(self):
        _check("Constant.value", self.value, self.value > 0, "> 0")
        _check("Constant.linear_warmup", self.linear_warmup, self.linear_warmup >= 0, ">= 0 steps")

    def __call__(self, step: jax.typing.ArrayLike) -> Float[Array, ""]:
        return self.value * _ramp(step, self.linear_warmup)


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer and Stern 2018) without momentum, with T5's settings."""

    learning_rate: Schedule = InverseSqrt()
    decay_exponent: float = 0.8  # second moments decay by 1 - t ** -decay_exponent
    clipping: float = 1.0  # largest root mean square of an update before scaling
    epsilon: float = 1e-30  # added to squared gradients
    minimum_scale: float = 1e-3  # of a parameter, so that zeros can move
    scale_by_parameter: bool = True  # steps are relative to a parameter's root mean square
    min_size_to_factor: int = 128  # second moments are factored when the two largest axes have this size

    def __post_init__(self):
        _check_schedule("Adafactor", self.learning_rate)
        _check("Adafactor.decay_exponent", self.decay_exponent, 0 < self.decay_exponent <= 1, "in (0, 1]")
        _check("Adafactor.clipping", self.clipping, self.clipping > 0, "> 0")
        _check("Adafactor.epsilon", self.epsilon, self.epsilon > 0, "> 0")
        _check("Adafactor.minimum_scale", self.minimum_scale, self.minimum_scale > 0, "> 0")
        _check("Adafactor.min_size_to_factor", self.min_size_to_factor, self.min_size_to_factor >= 2, ">= 2")

    def build(self, declared: Any) -> optax.GradientTransformation:
        """For parameters declared by a tree of Declared(shape, dtype, axes)."""
        layouts = jax.tree.map(_layout, declared)
        return optax.chain(_adafactor(self, layouts), optax.scale_by_learning_rate(self.learning_rate))


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    learning_rate: Schedule
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0  # of matrices; vectors (scales, biases) are left alone
    max_gradient_norm: float | None = 1.0  # gradients are scaled down to this norm over all parameters; None: never
    # Of the first moment. The second stays float32: at b2 = 0.999 its changes are below bfloat16's spacing, 2^-8. Adafactor
    # keeps too little to save on.
    moment_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        _check_schedule("AdamW", self.learning_rate)
        _check("AdamW.b1", self.b1, 0 <= self.b1 < 1, "in [0, 1)")
        _check("AdamW.b2", self.b2, 0 <= self.b2 < 1, "in [0, 1)")
        _check("AdamW.epsilon", self.epsilon, self.epsilon > 0, "> 0")
        _check("AdamW.weight_decay", self.weight_decay, self.weight_decay >= 0, ">= 0")
        limit = self.max_gradient_norm
        _check("AdamW.max_gradient_norm", limit, limit is None or limit > 0, "> 0 or None")
        if self.moment_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"AdamW.moment_dtype: expected 'float32' or 'bfloat16', got {self.moment_dtype!r}")

    def build(self, declared: Any) -> optax.GradientTransformation:
        """For parameters declared by a tree of Declared(shape, dtype, axes)."""
        matrices = jax.tree.map(lambda leaf: len(_layout(leaf).shape) > 1, declared)
        clip = optax.identity() if self.max_gradient_norm is None else optax.clip_by_global_norm(self.max_gradient_norm)
        adam = optax.adamw(
            self.learning_rate,
            self.b1,
            self.b2,
            self.epsilon,
            mu_dtype=jnp.dtype(self.moment_dtype),
            weight_decay=self.weight_decay,
            mask=matrices,
        )
        return _in_float32(optax.chain(clip, adam))


Optimizer = Adafactor | AdamW


def declare_state(transformation: optax.GradientTransformation, declared: Any) -> Any:
    """The optimizer's state as a tree of Declared: a statistic has its parameter's axes, and is split alike."""
    parameters = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(declared)}
    shapes = jax.eval_shape(
        transformation.init, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), declared)
    )

    def declare(path, leaf):
        owner = _owner([path_name(path[start:]) for start in range(len(path))], parameters)
        if owner is None:
            return Declared(leaf.shape, leaf.dtype, (None,) * len(leaf.shape))
        return Declared(leaf.shape, leaf.dtype, _statistic_axes(path, leaf.shape, parameters[owner]))

    return jax.tree_util.tree_map_with_path(declare, shapes)


def _owner(suffixes: list[str], parameters: dict[str, Declared]) -> str | None:
    return next((suffix for suffix in suffixes if suffix in parameters), None)


def _statistic_axes(path, shape: tuple[int, ...], parameter: Declared) -> tuple[str | None, ...]:
    if shape == tuple(parameter.shape):
        return tuple(parameter.axes)
    layout, fields = _layout(parameter), {getattr(entry, "name", None) for entry in path}
    stack = (ax.LAYERS,) if layout.layers is not None else ()
    if shape[len(stack) :] == (1,):  # optax's placeholder for a statistic that this parameter does not have
        return stack + (None,)
    axes = list(layout.axes)
    for field, rank in (("v_row", -1), ("v_col", -2)):  # means over the largest and over the second largest axis
        if field in fields:
            del axes[np.argsort(layout.shape)[rank]]
    return stack + tuple(axes)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How an optimizer sees a parameter: per layer, with heads and size per head merged."""

    layers: int | None  # size of the leading axis of layers, None without
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    def merge(self, array: jax.Array) -> jax.Array:
        leading = () if self.layers is None else (self.layers,)
        return array.reshape(leading + self.shape)

    def per_layer(self, function: Callable) -> Callable:
        return function if self.layers is None else jax.vmap(function)


def _layout(declared: Declared) -> _Layout:
    layers = declared.shape[0] if declared.axes[:1] == (ax.LAYERS,) else None
    shape, axes = [], []
    for size, axis in list(zip(declared.shape, declared.axes, strict=True))[layers is not None :]:
        if axis in (ax.KV, ax.RANK) and axes and axes[-1] == ax.HEADS:
            shape[-1] *= size  # h is the major axis: a split over heads stays a split of the merged axis
        else:
            shape.append(size)
            axes.append(axis)
    return _Layout(layers, tuple(shape), tuple(axes))


def _adafactor(settings: Adafactor, layouts: Any) -> optax.GradientTransformation:
    """optax's Adafactor on each layer of each parameter, in float32; its FactoredState with one count."""
    moments = optax.scale_by_factored_rms(
        decay_rate=settings.decay_exponent, min_dim_size_to_factor=settings.min_size_to_factor, epsilon=settings.epsilon
    )
    clip = optax.clip_by_block_rms(settings.clipping)
    scale = optax.scale_by_param_block_rms(settings.minimum_scale) if settings.scale_by_parameter else optax.identity()
    rescale = optax.chain(clip, scale)  # neither has a state

    def init(params):
        def statistics(layout, param):
            return layout.per_layer(lambda p: tuple(moments.init(p))[1:])(layout.merge(param.astype(jnp.float32)))

        return _state(jnp.zeros([], jnp.int32), jax.tree.map(statistics, layouts, params))

    def update(gradients, state, params):
        def one_layer(gradient, param, *statistics):
            direction, new = moments.update(gradient, optax.FactoredState(state.count, *statistics), param)
            direction, _ = rescale.update(direction, rescale.init(param), param)
            return direction, *new[1:]

        def one(layout, gradient, param, *statistics):
            gradient, param_f32 = (layout.merge(x.astype(jnp.float32)) for x in (gradient, param))
            direction, *new = layout.per_layer(one_layer)(gradient, param_f32, *statistics)
            return direction.reshape(param.shape), *new

        results = jax.tree.map(one, layouts, gradients, params, state.v_row, state.v_col, state.v)
        updates = jax.tree.map(lambda _, result: result[0], layouts, results)
        return updates, _state(
            optax.safe_increment(state.count), jax.tree.map(lambda _, result: result[1:], layouts, results)
        )

    def _state(count, statistics):  # a tree of (v_row, v_col, v) -> three trees
        return optax.FactoredState(
            count, *(jax.tree.map(lambda _, s, i=i: s[i], layouts, statistics) for i in range(3))
        )

    return optax.GradientTransformation(init, update)
