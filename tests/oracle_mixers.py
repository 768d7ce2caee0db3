"""The slow reference of mixers and kernels: the style and the rules of oracle.py, from the papers' equations."""

import numpy as np
import oracle
import oracle_convolution
from oracle import build, kind, project, total


def mix(mixer, params, x, shared=None, *, key_mask=None, causal=False, segments=None, positions=None, bias=None):
    """[b, q, e] of a mixer, or of scores, which stand for multi-head attention over them. segments: packed rows."""
    rule = {
        "multi_head": _multi_head,
        "linformer": _linformer,
        "token_mixing": _token_mixing,
        "lightweight_conv": oracle_convolution.mix,
        "dynamic_conv": oracle_convolution.mix,
    }.get(kind(mixer), _attention)
    around = {"key_mask": key_mask, "causal": causal, "segments": segments, "positions": positions, "bias": bias}
    return rule(mixer, {**params, **(shared or {})}, x, around)


def _multi_head(mixer, params, x, around):
    return _attention(mixer.scores, params, x, around, mixer.keys)


def _attention(spec, params, x, around, keys=None):
    """sum_j K_ij v_j / sum_j K_ij over the keys of each query. [b, h, q, k] kernels, not logits."""
    b, q = x.shape[:2]
    scores, positions = params["scores"], around["positions"]
    kernel = kernels(spec, scores, x, oracle.positions_of(positions, b, q))
    values = project(value_inputs(spec, scores, x, oracle.positions_of(positions, b, q)), params["value"])
    h, d = values.shape[2:4]
    bias = around["bias"]
    heads = np.empty((b, q, h, d), dtype=object)
    for n, i, g in np.ndindex(b, q, h):
        seen = [j for j in range(q) if _sees(around, n, i, j) and _near(keys, i, j)]
        for t in range(d):
            heads[n, i, g, t] = 0.0
        if seen:
            row = {
                j: (kernel[n, g, i, j] if bias is None else kernel[n, g, i, j] * np.exp(bias[0, g, i, j])) for j in seen
            }
            norm = total(row.values())
            for t in range(d):
                heads[n, i, g, t] = total(row[j] * values[n, j, g, t] for j in seen) / norm
    return oracle.join(heads, params["out"])


def _near(keys, i, j):
    if keys is None:
        return True
    return abs(i - j) < keys.window or (keys.stride is not None and (i - j) % keys.stride == 0)


def _sees(around, n, i, j):
    if around["causal"] and j > i:
        return False
    if around["key_mask"] is not None and not around["key_mask"][n, j]:
        return False
    segments = around["segments"]
    return segments is None or (segments[n, j] > 0 and segments[n, i] == segments[n, j])


# Kernels


def kernels(spec, params, x, positions):
    """K [b, h, i, j] > 0 (a linear kernel's may be negative): what is summed over keys."""
    if kind(spec) == "kernel":
        return _kernel(spec, params, x, positions)
    if kind(spec) == "mixture" and spec.weights == "sum":
        parts = [
            kernels(part, params.get(name, {}), x, positions)
            for name, part in zip(oracle.names_of_parts(spec), spec.parts, strict=True)
        ]
        return build(parts[0].shape, lambda *at: np.prod([part[at] for part in parts], axis=0))
    if kind(spec) == "mixture" and any(kind(part) == "kernel" for part in spec.parts):
        parts = [
            kernels(part, params.get(name, {}), x, positions)
            for name, part in zip(oracle.names_of_parts(spec), spec.parts, strict=True)
        ]
        alpha = oracle.mixture_weights(spec, params, parts[0].shape[1])
        return build(
            parts[0].shape,
            lambda n, g, i, j: np.exp(total(alpha[m, g] * np.log(part[n, g, i, j]) for m, part in enumerate(parts))),
        )
    s = oracle.logits(spec, params, x, q_positions=positions)
    return build(s.shape, lambda *at: np.exp(s[at]))


def value_inputs(spec, params, x, positions):
    """f_j, or f_j + t_j."""
    if kind(spec) == "mixture":
        for name, part in zip(oracle.names_of_parts(spec), spec.parts, strict=True):
            x = value_inputs(part, params.get(name, {}), x, positions)
        return x
    return _plus_positions(spec, params, x, positions) if kind(spec) == "kernel" and spec.value_positions else x


def sinusoid(position, size):
    angles = [position / 10000.0 ** (2 * f / size) for f in range(size // 2)]
    return [np.sin(a) for a in angles] + [np.cos(a) for a in angles]


def _position(spec, params, p, size):
    return params["positions"][p] if spec.positions == "learned" else sinusoid(p, size)


def _plus_positions(spec, params, x, positions):
    b, q, e = x.shape[:3]
    return build((b, q, e), lambda n, i, c: x[n, i, c] + _position(spec, params, int(positions[n, i]), e)[c])


def _relative(spec, params, distance, size):
    """a or r at the distance i - j."""
    if spec.positions == "sinusoidal":
        return sinusoid(distance, size)
    if spec.positions == "learned":
        return params["relative"][distance + spec.max_length - 1]
    return params["relative"][oracle.bucket(-distance, spec.buckets, spec.max_distance, True)]


def _function(spec, u, w, d):
    """K(u, w) of two vectors of length d."""
    product = total(u[t] * w[t] for t in range(d))
    if spec.kernel == "exponential":
        return np.exp(product / np.sqrt(d))
    if spec.kernel == "rbf":
        return np.exp(-total((u[t] - w[t]) ** 2 for t in range(d)) / np.sqrt(d))
    return product if spec.kernel == "linear" else product**2


def _kernel(spec, params, x, positions):
    b, q, e = x.shape[:3]
    f = _plus_positions(spec, params, x, positions) if spec.integration == "direct_sum" else x
    u = project(f, params["query"])
    w = u if spec.symmetric else project(f, params["key"])
    h, d = u.shape[2:4]
    biases = (params["content_bias"], params["position_bias"]) if spec.biases else (np.zeros((h, d)),) * 2
    if spec.integration == "product_symmetric":
        t = build((b, q, e), lambda n, i, c: _position(spec, params, int(positions[n, i]), e)[c])
        tw = project(t, params["position_key"])

    def element(n, g, i, j):
        content = [u[n, i, g, c] + biases[0][g, c] for c in range(d)]
        value = _function(spec, content, w[n, j, g], d)
        distance = int(positions[n, i]) - int(positions[n, j])
        if spec.integration == "lookup":
            a = _relative(spec, params, distance, d)
            product = total(u[n, i, g, c] * a[c] for c in range(d))
            value = value * np.exp(product / np.sqrt(d) if spec.scaled_lookup else product)
        elif spec.integration == "product_asymmetric":
            r = _relative(spec, params, distance, e)
            r = [total(r[a] * params["position_key"][a, g, c] for a in range(e)) for c in range(d)]
            value = value * np.exp(total((u[n, i, g, c] + biases[1][g, c]) * r[c] for c in range(d)) / np.sqrt(d))
        elif spec.integration == "product_symmetric":
            value = value * _function(spec, tw[n, i, g], tw[n, j, g], d)
        return value

    return build((b, h, q, q), element)


# Linformer and token mixing


def _segments(around, b, q):
    """For each row, the lists of its tokens that belong together, with their positions."""
    positions = oracle.positions_of(around["positions"], b, q)
    for n in range(b):
        ids = [1] * q if around["segments"] is None else [int(s) for s in around["segments"][n]]
        for segment in sorted(set(ids) - {0}):
            yield n, [i for i in range(q) if ids[i] == segment], positions[n]


def _linformer(mixer, params, x, around):
    """softmax(x W_q (E x W_k)^T / sqrt d) (F x W_v): the projections of a segment's real tokens."""
    b, q = x.shape[:2]
    query, key, value = (project(x, params[name]) for name in ("query", "key", "value"))
    h, d = query.shape[2:4]
    first, second = params["E"], params.get("F", params["E"])
    heads = build((b, q, h, d), lambda *at: 0.0)
    for n, own, p in _segments(around, b, q):
        keys = [j for j in own if around["key_mask"] is None or around["key_mask"][n, j]]
        for g in range(h):
            e_g, f_g = (a[g] if a.ndim == 3 else a for a in (first, second))
            slots = range(mixer.rank)
            k = [[total(e_g[p[j], s] * key[n, j, g, t] for j in keys) for t in range(d)] for s in slots]
            v = [[total(f_g[p[j], s] * value[n, j, g, t] for j in keys) for t in range(d)] for s in slots]
            for i in own:
                row = [np.exp(total(query[n, i, g, t] * k[s][t] for t in range(d)) / np.sqrt(d)) for s in slots]
                for t in range(d):
                    heads[n, i, g, t] = total(row[s] * v[s][t] for s in slots) / total(row)
    return oracle.join(heads, params["out"])


def _gelu(mixer, z):
    if mixer.approximate_gelu:
        return oracle.gelu(z)
    return 0.5 * z * (1.0 + _erf(z / np.sqrt(2.0)))


def _erf(z):
    """The power series, which holds for complex numbers, too: 2 / sqrt(pi) sum (-1)^k z^(2k+1) / (k! (2k+1))."""
    term, result = z, z
    for k in range(1, 60):
        term = term * (-(z**2)) / k
        result = result + term / (2 * k + 1)
    return result * 2.0 / np.sqrt(np.pi)


def _token_mixing(mixer, params, x, around):
    b, q, e = x.shape[:3]
    m, causal = mixer.hidden, around["causal"]
    bias = (lambda name, c: params[name][c]) if mixer.bias else (lambda name, c: 0.0)
    y = build((b, q, e), lambda *at: 0.0)
    for n, own, p in _segments(around, b, q):
        keys = [j for j in own if around["key_mask"] is None or around["key_mask"][n, j]]
        for c in range(e):
            if m is None:
                for i in own:
                    seen = [j for j in keys if not causal or j <= i]
                    y[n, i, c] = total(params["W"][p[i], p[j]] * x[n, j, c] for j in seen) + bias("b", p[i])
                continue
            owner = [unit * mixer.max_length // m for unit in range(m)]
            hidden = []
            for unit in range(m):
                seen = [j for j in keys if not causal or p[j] <= owner[unit]]
                z = total(params["W1"][p[j], unit] * x[n, j, c] for j in seen) + bias("b1", unit)
                hidden.append(_gelu(mixer, z))
            for i in own:
                units = [unit for unit in range(m) if not causal or owner[unit] <= p[i]]
                y[n, i, c] = total(params["W2"][unit, p[i]] * hidden[unit] for unit in units) + bias("b2", p[i])
    return y
