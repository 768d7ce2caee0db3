"""Lightweight and dynamic convolution: weights over the neighbours of a token (Wu et al. 2019)."""

import abc
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from synthesizer_jax.axes import EMBED, HEADS, Param, fan_in, normal, zeros
from synthesizer_jax.mixers.mixer import Mixer, Surroundings, check_plain, check_step, checked, next_index
from synthesizer_jax.ops.convolution import band, convolve, convolve_normalised, drop_taps, exclude, inside
from synthesizer_jax.scores.base import Dims, check_positive


@dataclasses.dataclass(frozen=True)
class Convolution(Mixer):
    """What the two have in common: linear_out(convolution(glu(linear_in(x)))), section 3 of the paper.

    Linear maps as in T5, without biases unless asked for. Channels are split contiguously among the heads: that of channel
    c is c // (e / h). Causal: a token sees itself and the width - 1 before; else width // 2 before and the rest after.
    Padding is zeroed before the convolution and counts as zeros do outside the row; so does, in a packed row, whatever
    belongs to another segment. DropConnect (the layer's dropout rate) acts on the normalised kernels.
    """

    # w, the number of tokens that a kernel spans; a tuple has one for each layer. The paper: 3, 7, 15, 31, 31, 31, 31 in
    # the encoder, 3, 7, 15, 31, 31, 31 in the decoder. The T5-scale comparison: 9.
    width: int | tuple[int, ...]
    heads: int | Literal["features"] | None = (
        None  # h, the different kernels; "features": one a channel; None: the layer's
    )
    glu: bool = True  # linear_in(x) * sigmoid(gate(x)); False: linear_in(x) alone
    bias: bool = False  # of linear_in, gate and linear_out, as in the authors' fairseq code
    # A bias after the depth-wise convolution and a linear [e, e] with bias behind it, a bias of the kernel generator: the
    # separable convolution of Mesh TensorFlow, which the T5-scale comparison ran. Adds parameters, not expressiveness.
    separable: bool = False
    softmax: bool = True  # over the taps of a kernel; False: kernels as they are
    # At the ends of a row (and segment), softmax over the taps inside it alone. Padding (key_mask) is inside the row, as in
    # fairseq: pack, or cut the rows, where an example is to give the same beside padding as alone.
    renormalize: bool = False

    def __post_init__(self):
        widths = self.width if isinstance(self.width, tuple) else (self.width,)
        for width in widths:
            check_positive("width", width)
        if not widths:
            raise ValueError("width: expected a width, or one for each layer, got an empty tuple")
        if self.heads not in (None, "features"):
            check_positive("heads", self.heads)
        for name in ("glu", "bias", "separable", "softmax", "renormalize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.renormalize and not self.softmax:
            raise ValueError("renormalize: the softmax over the taps inside a row needs softmax=True")

    def of_layer(self, layer: int, depth: int):
        if not isinstance(self.width, tuple):
            return self
        if len(self.width) != depth:
            raise ValueError(
                f"width: expected one width per layer, got {len(self.width)} widths {self.width} for {depth} layers"
            )
        return dataclasses.replace(self, width=self.width[layer])

    def params(self, dims: Dims):
        e = dims.features
        self._check_heads(dims)
        inward = {
            name: (Param((e, e), (EMBED, HEADS), fan_in(e)), HEADS) for name in ("linear_in", "gate")[: 1 + self.glu]
        }
        outward = {"linear_out": (Param((e, e), (HEADS, EMBED), fan_in(e)), EMBED)}
        linear = inward | outward
        declared = {name: param for name, (param, _) in linear.items()} | self._kernel_params(dims)
        if self.bias:
            declared |= {f"{name}_bias": Param((e,), (axis,), zeros) for name, (_, axis) in linear.items()}
        if self.separable:
            declared["depthwise_bias"] = Param((e,), (HEADS,), zeros)
            declared["pointwise"] = Param((e, e), (HEADS, EMBED), fan_in(e))
            declared["pointwise_bias"] = Param((e,), (EMBED,), zeros)
        return declared

    @abc.abstractmethod
    def _kernel_params(self, dims: Dims):
        """The parameters that the kernels are made of."""

    @abc.abstractmethod
    def _logits(self, params, u, before=0):
        """The kernels before softmax, [w, b|1, q|1, h], of the convolution's inputs u [b, q, e].

        before: tokens that come before them, whose outputs, and so kernels, nobody reads.
        """

    @abc.abstractmethod
    def _convolve(self, u, logits, causal, within, dropout):
        """Convolution of u with the softmax of these logits, over the taps `within` (None: all), with DropConnect."""

    def __call__(self, params, x, x_kv=None, around=Surroundings()):
        around = self._checked(x, x_kv, around)
        u = self._inputs(params, x, around)
        within = self._within(x.shape[1], around)
        logits = self._renormalized(self._logits(params, u), within)
        return self._outputs(params, self._convolve(u, logits, around.causal, within, around.dropout))

    def weights(self, params, x, x_kv=None, around=Surroundings()):
        """The kernels as bands of a matrix, [b, h, q, k] in float32. Where taps leave the row, rows don't sum to 1."""
        around = self._checked(x, x_kv, around)
        within = self._within(x.shape[1], around)
        logits = self._renormalized(self._logits(params, self._inputs(params, x, around)), within).astype(jnp.float32)
        kernels = jax.nn.softmax(logits, axis=0) if self.softmax else logits
        if within is not None:
            kernels = jnp.where(within[..., None], kernels, 0)
        matrix = band(kernels, x.shape[1], around.causal)
        if around.key_mask is not None:
            matrix = jnp.where(around.key_mask[:, None, None, :], matrix, 0)
        return jnp.broadcast_to(matrix, (x.shape[0], *matrix.shape[1:]))

    def init_cache(self, params, features, batch, length, dtype):
        """The last w - 1 inputs of the convolution, whatever the length, and the number of tokens so far."""
        inputs = jnp.zeros((batch, self._width() - 1, features), dtype)
        return {"inputs": inputs, "index": jnp.zeros((), jnp.int32)}

    def step(self, params, x, cache, around=Surroundings()):
        check_plain(self, x, None, around)
        check_step(x, cache["inputs"])
        index, before, steps = cache["index"], self._width() - 1, x.shape[1]
        mask = around.key_mask
        if mask is not None:
            # Of tokens behind its end a mask says that they are padding.
            mask = jnp.take(mask, index + jnp.arange(steps), axis=1, mode="fill", fill_value=False)
        new = self._inputs(params, x, Surroundings(key_mask=mask))
        u = jnp.concatenate([cache["inputs"], new], axis=1)
        within = inside(u.shape[1], self._width(), True, before=index - before) if self.renormalize else None
        logits = self._renormalized(self._logits(params, new, before), within)
        y = self._convolve(u, logits, True, within, None)[:, before:]
        kept = steps if around.kept is None else around.kept
        return self._outputs(params, y), {
            "inputs": jax.lax.dynamic_slice_in_dim(u, kept, before, axis=1),
            "index": next_index(index, x, around),
        }

    def cross_attention_error(self):
        return f"{type(self).__name__} mixes neighbours within one sequence: use DotProduct() for cross-attention"

    def bias_error(self):
        return f"{type(self).__name__} makes no scores that a bias could be added to; use relative_bias=False"

    def _width(self):
        if isinstance(self.width, tuple):
            raise ValueError(
                f"width: expected one number, got {self.width}, a width for each layer of a stack; a layer takes "
                "of_layer(layer, depth)"
            )
        return self.width

    def _heads(self, dims):
        return dims.features if self.heads == "features" else self.heads or dims.heads

    def _check_heads(self, dims):
        if dims.features % self._heads(dims):
            raise ValueError(
                f"heads: {dims.features} features don't divide among {self._heads(dims)} heads of equally many channels; "
                f"use heads that divide them, such as heads={_divisor(dims.features, self._heads(dims))}"
            )

    def _checked(self, x, x_kv, around):
        check_plain(self, x, x_kv, around)
        if around.k_segments is not None:
            raise ValueError(
                f"k_segments: {type(self).__name__} mixes one sequence with itself; give its segments as q_segments"
            )
        return checked(x, x_kv, around)

    def _within(self, length, around):
        """Taps that count: all where zeros outside the row are the same."""
        if around.q_segments is None and not self.renormalize:
            return None
        return inside(length, self._width(), around.causal, around.q_segments)

    def _renormalized(self, logits, within):
        return exclude(logits, within) if self.renormalize else logits

    def _inputs(self, params, x, around):
        u = _linear(params, "linear_in", x)
        if self.glu:
            u = u * jax.nn.sigmoid(_linear(params, "gate", x))
        real = around.key_mask
        if around.q_segments is not None:
            packed = around.q_segments > 0
            real = packed if real is None else real & packed
        return u if real is None else jnp.where(real[..., None], u, 0)

    def _outputs(self, params, y):
        if self.separable:
            y = _linear(params, "pointwise", y + params["depthwise_bias"].astype(y.dtype))
        return _linear(params, "linear_out", y)


@dataclasses.dataclass(frozen=True)
class LightweightConv(Convolution):
    """y[i, c] = sum_t softmax_t(kernel[head of c]) u[i + t - left, c], u = glu(x), then linear_out (section 3.1).

    The kernels [h, w] are the same for all tokens and sequences. Parameters: `linear_in`, `gate`, `linear_out` [e, e] and
    `kernel` [h, w], 3 e^2 + h w (2 e^2 + h w without glu). Reads no token to make its weights; sees width tokens.

    LightweightConv(9, heads="features", bias=True, separable=True) is the layer of the T5-scale comparison (Synthesizer
    section 4.2; Narang et al. 2021): 4 e^2 + (w + 5) e parameters, a kernel for each channel. The released configuration
    asks for two unique filters, but the released layer does not pass that on.
    """

    def _kernel_params(self, dims):
        width = self._width()
        return {"kernel": Param((self._heads(dims), width), (HEADS, None), normal(width**-0.5))}

    def _logits(self, params, u, before=0):
        return params["kernel"].astype(jnp.float32).T[:, None, None]

    def _convolve(self, u, logits, causal, within, dropout):
        kernels = jax.nn.softmax(logits, axis=0) if self.softmax else logits
        if dropout is not None and dropout.rate > 0:
            width, _, _, heads = kernels.shape
            kernels = kernels * drop_taps((width, u.shape[0], 1, heads), dropout)  # one draw for all of a sequence
        return convolve(u, kernels, causal, within)


@dataclasses.dataclass(frozen=True)
class DynamicConv(Convolution):
    """As `LightweightConv`, the kernel of token i being softmax_t(u_i kernel_generator) (section 3.2, equation 4).

    Each token makes its kernels from its own convolution input u_i alone: it reads one token, no pairs. Parameters:
    `linear_in`, `gate`, `linear_out` [e, e] and `kernel_generator` [e, h, w], (3 + h w / e) e^2.

    DynamicConv(9, heads="features", bias=True, separable=True) is the layer of the T5-scale comparison: (4 + w) e^2 +
    (w + 5) e parameters, a kernel for each channel and token, for which the comparison cut the MLP to 512.
    """

    def _kernel_params(self, dims):
        e, width, heads = dims.features, self._width(), self._heads(dims)
        # Logits of variance 1 / w, as the lightweight kernels start.
        declared = {"kernel_generator": Param((e, heads, width), (EMBED, HEADS, None), fan_in(e * width))}
        if self.separable:
            declared["kernel_generator_bias"] = Param((heads, width), (HEADS, None), zeros)
        return declared

    def _logits(self, params, u, before=0):
        # Rounded to u's dtype as every projection is: with a kernel for each channel they are the layer's largest array.
        logits = jnp.einsum("bqe,ehw->wbqh", u, params["kernel_generator"].astype(u.dtype))
        if self.separable:
            logits = logits + params["kernel_generator_bias"].astype(u.dtype).T[:, None, None]
        return jnp.pad(logits, ((0, 0), (0, 0), (before, 0), (0, 0))) if before else logits

    def _convolve(self, u, logits, causal, within, dropout):
        factors = None if within is None else within[..., None].astype(jnp.float32)
        if dropout is not None and dropout.rate > 0:
            kept = drop_taps(logits.shape, dropout)
            factors = kept if factors is None else kept * factors
        if self.softmax:
            return convolve_normalised(u, logits, causal, factors)
        kernels = logits.astype(jnp.float32)
        return convolve(u, kernels if factors is None else kernels * factors, causal)


def _linear(params, name, x):
    y = x @ params[name].astype(x.dtype)
    return y + params[f"{name}_bias"].astype(y.dtype) if f"{name}_bias" in params else y


def _divisor(features, heads):
    """The largest number of heads, up to this one, that divides the features."""
    return max(number for number in range(1, heads + 1) if features % number == 0)
