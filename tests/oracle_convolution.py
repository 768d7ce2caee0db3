"""The slow reference of lightweight and dynamic convolution: loops in float64 from Wu et al. 2019, section 3.

It reads the fields of a spec and the names of its parameters. Arrays are indexed element by element, as in oracle.py,
so that `oracle.gradients` can run the same loops.
"""

import numpy as np
import oracle


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def linear(params, name, x):
    """x W + b for each token."""
    weight, bias = params[name], params.get(f"{name}_bias")
    b, q, e = x.shape
    return oracle.build(
        (b, q, weight.shape[1]),
        lambda s, i, f: oracle.total(x[s, i, c] * weight[c, f] for c in range(e)) + (0 if bias is None else bias[f]),
    )


def taps_before(width, causal):
    return width - 1 if causal else width // 2


def counts(s, i, j, length, segments):
    """Whether token i reads token j: one of its row, or of its segment."""
    if not 0 <= j < length:
        return False
    return segments is None or (segments[s, i] == segments[s, j] and segments[s, i] > 0)


def inputs(spec, params, x, key_mask=None, segments=None):
    """What the convolution reads: gated, zero at padding."""
    u = linear(params, "linear_in", x)
    gate = linear(params, "gate", x) if spec.glu else None

    def element(s, i, c):
        if (key_mask is not None and not key_mask[s, i]) or (segments is not None and segments[s, i] == 0):
            return 0.0
        return u[s, i, c] * sigmoid(gate[s, i, c]) if spec.glu else u[s, i, c]

    return oracle.build(u.shape, element)


def kernels(spec, params, u, causal=False, segments=None):
    """[b, q, h, w]; 0 at taps that do not count where they are renormalised."""
    b, q = u.shape[:2]
    dynamic = "kernel_generator" in params
    heads = params["kernel_generator" if dynamic else "kernel"].shape[1 if dynamic else 0]
    out = np.empty((b, q, heads, spec.width), dtype=object)
    for s, i, h in np.ndindex(b, q, heads):
        logits = [_logit(params, u, s, i, h, t) if dynamic else params["kernel"][h, t] for t in range(spec.width)]
        there = [
            not spec.renormalize or counts(s, i, i + t - taps_before(spec.width, causal), q, segments)
            for t in range(spec.width)
        ]
        out[s, i, h] = _softmax(logits, there) if spec.softmax else logits
    return out


def _logit(params, u, s, i, h, t):
    weight, bias = params["kernel_generator"], params.get("kernel_generator_bias")
    made = oracle.total(u[s, i, c] * weight[c, h, t] for c in range(u.shape[2]))
    return made if bias is None else made + bias[h, t]


def _softmax(logits, there):
    if not any(there):
        return [0.0] * len(logits)
    largest = max(float(np.ravel(oracle.real(z))[0]) for z, ok in zip(logits, there) if ok)
    powers = [np.exp(z - largest) if ok else 0.0 for z, ok in zip(logits, there)]
    sum_of_them = oracle.total(powers)
    return [power / sum_of_them for power in powers]


def convolution(u, kernels, causal, segments=None):
    """y[s, i, c] = sum_t kernels[s, i, head of c, t] u[s, i + t - left, c]."""
    q, e = u.shape[1:]
    heads, width = kernels.shape[2:]
    left = taps_before(width, causal)

    def element(s, i, c):
        taps = [t for t in range(width) if counts(s, i, i + t - left, q, segments)]
        head = c // (e // heads)
        return oracle.total([0.0] + [kernels[s, i, head, t] * u[s, i + t - left, c] for t in taps])

    return oracle.build(u.shape, element)


def layer(spec, params, x, *, key_mask=None, causal=False, segments=None, factors=None):
    """The whole mixer. factors [b, q, h, w] multiply the normalised kernels (DropConnect)."""
    u = inputs(spec, params, x, key_mask, segments)
    made = kernels(spec, params, u, causal, segments)
    if factors is not None:
        made = made * factors
    y = convolution(u, made, causal, segments)
    if spec.separable:
        bias = params["depthwise_bias"]
        y = linear(params, "pointwise", oracle.build(y.shape, lambda s, i, c: y[s, i, c] + bias[c]))
    return linear(params, "linear_out", y)


def mix(spec, params, x, around):
    """`layer` as oracle_mixers calls it; distances alone count, so positions don't."""
    return layer(spec, params, x, **{name: around[name] for name in ("key_mask", "causal", "segments")})


def weights(spec, params, x, *, key_mask=None, causal=False, segments=None):
    """The matrix [b, h, q, k] that the convolution applies to the gated tokens."""
    u = inputs(spec, params, x, key_mask, segments)
    made = kernels(spec, params, u, causal, segments)
    b, q, heads, width = made.shape
    out = np.zeros((b, heads, q, q))
    for s, h, i, t in np.ndindex(b, heads, q, width):
        j = i + t - taps_before(width, causal)
        if counts(s, i, j, q, segments) and (key_mask is None or key_mask[s, j]):
            out[s, h, i, j] = made[s, i, h, t]
    return out
