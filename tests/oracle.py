"""The slow reference: numpy, float64, explicit loops, written from the papers' equations and not from the library.

It reads the fields of a spec and the names of its parameters, and calls none of the library's functions.

Arrays are indexed element by element, so an element may be a number or a vector of numbers: `gradients` uses this.
It gives each input element its own entry of a long complex vector, adds i * 1e-20 there, and runs the very same loops
once. The imaginary part of the result divided by 1e-20 is the exact derivative (complex-step differentiation: no
difference is taken, so nothing cancels). What the equations do not differentiate (the row maximum of the clamp) takes
the real part.

Letters: b batch, i query, j key, h heads, d size per head, e embedding, n maximum length, r rank.
"""

import itertools
import re

import numpy as np

STEP = 1e-20

# Options of jax.jit for programs that run once: half of the compilation time, the same operations.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


# Numbers and arrays of them


def real(x):
    return np.real(x)


def total(terms):
    result = 0.0
    for term in terms:
        result = result + term
    return result


def relu(x):
    return np.where(real(x) > 0, x, 0.0 * x)


def at_least(x, floor):
    return np.where(real(x) >= floor, x, floor + 0.0 * x)


def build(shape, element):
    """An object array whose element [index] is element(*index)."""
    out = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        out[index] = element(*index)
    return out


def tree_map(function, tree):
    if isinstance(tree, dict):
        return {name: tree_map(function, child) for name, child in tree.items()}
    return function(tree)


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree) for leaf in leaves(tree[name])]
    return [tree]


def numbers(tree):
    """Float64 object arrays, so that loops index plain Python numbers."""
    return tree_map(lambda a: np.asarray(a, np.float64), tree)


def value(array):
    """Object array -> float64 array of the real parts."""
    return np.vectorize(lambda x: float(np.ravel(real(x))[0]), otypes=[np.float64])(array)


def gradients(function, tree, cotangent):
    """(value, gradients) of sum(function(tree) * cotangent): float64 array, and a tree like `tree`.

    function: nested dict of arrays -> object array, as the functions below make.
    """
    tree = numbers(tree)
    size = sum(leaf.size for leaf in leaves(tree))
    counter = itertools.count()

    def seed(leaf):
        out = np.empty(leaf.shape, dtype=object)
        for index in np.ndindex(*leaf.shape):
            number = np.full(size, leaf[index], np.complex128)
            number[next(counter)] += 1j * STEP
            out[index] = number
        return out

    def visit(node):  # in the order of `leaves`
        return {name: visit(node[name]) for name in sorted(node)} if isinstance(node, dict) else seed(node)

    out = function(visit(tree))
    cotangent = np.asarray(cotangent, np.float64)
    loss = total(out[index] * cotangent[index] for index in np.ndindex(*out.shape))
    slope = np.imag(loss + np.zeros(size)) / STEP
    offset = itertools.accumulate([0] + [leaf.size for leaf in leaves(tree)])

    def cut(node):
        if isinstance(node, dict):
            return {name: cut(node[name]) for name in sorted(node)}
        start = next(offset)
        return slope[start : start + node.size].reshape(node.shape)

    return value(out), cut(tree)


def relative_error(actual, expected, floor=0.0):
    """The largest difference over the largest expected number, or over `floor` where that is more.

    floor: the size of a summand of numbers that may cancel. Where nothing but 0 is expected: 0 when equal, else inf.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    scale = np.max(np.abs(expected), initial=0.0)
    difference = np.max(np.abs(actual - expected), initial=0.0)
    if np.isnan(difference):
        return np.inf
    return difference / max(scale, floor) if scale else (0.0 if difference == 0 else np.inf)


def worst(actual, expected, floor=0.0):
    """(largest relative error, its path) over two nested dicts."""
    if not isinstance(expected, dict):
        return relative_error(actual, expected, floor), ""
    assert sorted(actual) == sorted(expected), (sorted(actual), sorted(expected))
    found = [(worst(actual[name], expected[name], floor), name) for name in expected]
    return max(((error, f"{name}/{path}") for (error, path), name in found), default=(0.0, ""))


# Scores: each returns an object array [b, h, q, k]


def kind(spec):
    """DotProduct -> dot_product."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(spec).__name__).lower()


def names_of_parts(spec):
    """random, dense, random_1, ...: from the second of a kind on with its number."""
    kinds = ["relative_position" if kind(part) == "relative_position_bias" else kind(part) for part in spec.parts]
    return [name + (f"_{kinds[:at].count(name)}" if name in kinds[:at] else "") for at, name in enumerate(kinds)]


def positions_of(positions, batch, length):
    """None, [length] or [b, length] -> [b, length]."""
    positions = np.arange(length) if positions is None else np.asarray(positions)
    return np.broadcast_to(positions, (batch, length))


def project(x, kernel):
    """[b, l, e], [e, h, r] -> [b, l, h, r]."""
    b, length, e = x.shape[:3]
    h, r = kernel.shape[1:3]
    return build((b, length, h, r), lambda n, i, g, t: total(x[n, i, c] * kernel[c, g, t] for c in range(e)))


def logits(spec, params, x_q, x_kv=None, q_positions=None, k_positions=None, query=None):
    """The unnormalised log-scores [b, h, q, k]. query: a mixture's shared projection of x_q, [b, q, h, r]."""
    if x_kv is None:
        x_kv = x_q
        k_positions = q_positions if k_positions is None else k_positions
    b, q, k = x_q.shape[0], x_q.shape[1], x_kv.shape[1]
    p_q, p_k = positions_of(q_positions, b, q), positions_of(k_positions, b, k)
    rule = {
        "dot_product": _dot_product,
        "random": _random,
        "factorized_random": _factorized_random,
        "dense": _dense,
        "factorized_dense": _factorized_dense,
        "relative_position_bias": _relative_position_bias,
        "toeplitz": _toeplitz,
        "mixture": _mixture,
    }[kind(spec)]
    return rule(spec, params, x_q, x_kv, p_q, p_k, query)


def _dot_product(spec, params, x_q, x_kv, p_q, p_k, query):
    """(x_i W_q) . (x_j W_k), times scale where one is given."""
    query = project(x_q, params["query"]) if query is None else query
    key = project(x_kv, params["key"])
    b, q, h, d = query.shape[:4]
    scale = 1.0 if spec.scale is None else spec.scale
    return build(
        (b, h, q, key.shape[1]),
        lambda n, g, i, j: scale * total(query[n, i, g, t] * key[n, j, g, t] for t in range(d)),
    )


def _random(spec, params, x_q, x_kv, p_q, p_k, query):
    """R[h, P(i), P(j)]; a constant to the gradient when it is fixed."""
    b, q, k, h = x_q.shape[0], x_q.shape[1], x_kv.shape[1], params["R"].shape[0]
    entry = (lambda x: x) if spec.trained else real
    return build((b, h, q, k), lambda n, g, i, j: entry(params["R"][g, p_q[n, i], p_k[n, j]]))


def _factorized_random(spec, params, x_q, x_kv, p_q, p_k, query):
    """(R1 R2^T)[h, P(i), P(j)]."""
    left, right = params["R1"], params["R2"]
    b, q, k, h, r = x_q.shape[0], x_q.shape[1], x_kv.shape[1], left.shape[0], left.shape[2]
    return build(
        (b, h, q, k), lambda n, g, i, j: total(left[g, p_q[n, i], t] * right[g, p_k[n, j], t] for t in range(r))
    )


def _hidden(z, bias):
    """relu(z + b), [b, q, h, r]."""
    return build(z.shape[:4], lambda n, i, g, t: relu(z[n, i, g, t] + (0.0 if bias is None else bias[g, t])))


def _column(hidden, n, i, g, kernel, bias, c):
    """(hidden W + b)[c] of one position and head."""
    out = total(hidden[n, i, g, t] * kernel[g, t, c] for t in range(kernel.shape[1]))
    return out if bias is None else out + bias[g, c]


def _dense(spec, params, x_q, x_kv, p_q, p_k, query):
    """relu(x_i W1 + b1) W2 + b2, column P(j). The authors' form shares W2 among the heads, has no biases, and reads
    the dot product's query (before any scale) in place of x_i W1."""
    hidden = _hidden(project(x_q, params["w1"]) if query is None else query, params.get("b1"))
    b, q, h = hidden.shape[:3]
    w2 = params["w2"]
    if w2.ndim == 2:
        w2 = build((h, *w2.shape), lambda g, t, c: params["w2"][t, c])
    return build((b, h, q, x_kv.shape[1]), lambda n, g, i, j: _column(hidden, n, i, g, w2, params.get("b2"), p_k[n, j]))


def _factorized_dense(spec, params, x_q, x_kv, p_q, p_k, query):
    """A[c // b] * B[c % b] at column c = P(j): repeat_interleave(A, b) * tile(B, a)."""
    if "w1" in params:
        hidden_a = hidden_b = _hidden(project(x_q, params["w1"]), params.get("b1"))
    else:
        hidden_a = _hidden(project(x_q, params["wa1"]), params.get("ba1"))
        hidden_b = _hidden(project(x_q, params["wb1"]), params.get("bb1"))
    b, q, h = hidden_a.shape[:3]
    width = params["wb"].shape[2]
    return build(
        (b, h, q, x_kv.shape[1]),
        lambda n, g, i, j: (
            _column(hidden_a, n, i, g, params["wa"], params.get("ba"), p_k[n, j] // width)
            * _column(hidden_b, n, i, g, params["wb"], params.get("bb"), p_k[n, j] % width)
        ),
    )


def bucket(distance, buckets, max_distance, bidirectional):
    """T5's bucket of distance = key - query, in whole numbers.

    Half of the buckets are exact; the others grow so that `max_distance` would be the first of the bucket after the
    last: m steps of the exponential part start at exact * (max_distance / exact)^(m / exponential).
    """
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    steps = buckets - exact
    m = 0
    while m + 1 < steps and distance**steps >= exact ** (steps - m - 1) * max_distance ** (m + 1):
        m += 1
    return offset + exact + m


def _relative_position_bias(spec, params, x_q, x_kv, p_q, p_k, query):
    table = params["rel_embedding"]
    b, q, k, h = x_q.shape[0], x_q.shape[1], x_kv.shape[1], table.shape[0]

    def element(n, g, i, j):
        distance = int(p_k[n, j]) - int(p_q[n, i])
        return table[g, bucket(distance, spec.buckets, spec.max_distance, spec.bidirectional)]

    return build((b, h, q, k), element)


def _toeplitz(spec, params, x_q, x_kv, p_q, p_k, query):
    """t[h, P(i) - P(j)], distances from -(n - 1) on."""
    b, q, k, h = x_q.shape[0], x_q.shape[1], x_kv.shape[1], params["t"].shape[0]
    first = spec.max_length - 1
    return build((b, h, q, k), lambda n, g, i, j: params["t"][g, int(p_q[n, i]) - int(p_k[n, j]) + first])


def _mixture(spec, params, x_q, x_kv, p_q, p_k, query):
    """sum_n alpha_n S_n, inside the softmax."""
    names = names_of_parts(spec)
    if spec.share_query:
        query = project(x_q, params["dot_product"]["query"])
    parts = []
    for name, part in zip(names, spec.parts, strict=True):
        shared = query if kind(part) in ("dot_product", "dense") and spec.share_query else None
        parts.append(logits(part, params.get(name, {}), x_q, x_kv, p_q, p_k, shared))
    h = parts[0].shape[1]
    alpha = mixture_weights(spec, params, h)
    return build(
        parts[0].shape, lambda n, g, i, j: total(alpha[m, g] * parts[m][n, g, i, j] for m in range(len(parts)))
    )


def mixture_weights(spec, params, heads):
    """alpha [parts, h]."""
    parts = len(spec.parts)
    if spec.weights == "sum":
        return np.ones((parts, heads))
    raw = params["alpha"]
    column = (lambda g: g) if raw.shape[1] > 1 else (lambda g: 0)
    if spec.weights == "sigmoid":
        first = build((heads,), lambda g: 1.0 / (1.0 + np.exp(-raw[0, column(g)])))
        return build((2, heads), lambda m, g: 1.0 - first[g] if m else first[g])
    return build(
        (parts, heads),
        lambda m, g: np.exp(raw[m, column(g)]) / total(np.exp(raw[t, column(g)]) for t in range(parts)),
    )


# Attention


def is_shared(spec, *positions, bias=None):
    """True where the scores, and the extra bias [b|1, ...], are the same for the whole batch."""
    if kind(spec) == "mixture":
        return all(is_shared(part, *positions, bias=bias) for part in spec.parts)
    fixed = kind(spec) in ("random", "factorized_random", "relative_position_bias", "toeplitz")
    unbatched = all(p is None or np.ndim(p) == 1 for p in positions)
    return fixed and unbatched and (bias is None or bias.shape[0] == 1)


def attention_weights(
    logits,
    *,
    shared=False,
    key_mask=None,
    causal=False,
    q_offset=0,
    q_segments=None,
    k_segments=None,
    bias=None,
    mask=None,
):
    """The masked softmax, [b, h, q, k]; a row without keys is 0.

    shared: scores shared by the whole batch are by definition max(S, rowmax - 100), the row maximum over the keys that
    the causal rule allows (whatever the key mask says) and a constant to the gradient. mask [b|1, h|1, q, k]: a further
    rule, which stands beside the causal one where the batch shares it; where it differs in the batch, nothing is shared.
    """
    b, h, q, k = logits.shape[:4]
    k_segments = q_segments if k_segments is None else k_segments
    out = np.empty((b, h, q, k), dtype=object)
    for n, g, i in np.ndindex(b, h, q):
        before = [j for j in range(k) if not causal or j <= i + q_offset]
        if mask is not None and mask.shape[0] == 1:
            before = [j for j in before if _at(mask, n, g, i, j)]
        row = {j: logits[n, g, i, j] for j in before}
        if bias is not None:
            row = {j: x + _at(bias, n, g, i, j) for j, x in row.items()}
        if shared and row and (mask is None or mask.shape[0] == 1):
            floor = max(np.max(real(x)) for x in row.values()) - 100.0
            row = {j: at_least(x, floor) for j, x in row.items()}
        keys = before if mask is None else [j for j in before if _at(mask, n, g, i, j)]
        if key_mask is not None:
            keys = [j for j in keys if key_mask[n, j]]
        if q_segments is not None:
            keys = [j for j in keys if k_segments[n, j] != 0 and k_segments[n, j] == q_segments[n, i]]
        for j in range(k):
            out[n, g, i, j] = 0.0
        if keys:
            top = max(np.max(real(row[j])) for j in keys)
            e = {j: np.exp(row[j] - top) for j in keys}
            norm = total(e.values())
            for j in keys:
                out[n, g, i, j] = e[j] / norm
    return out


def _at(array, *index):
    """array[index], an axis of size 1 standing for any index."""
    return array[tuple(0 if size == 1 else at for at, size in zip(index, array.shape, strict=True))]


def attend(logits, values, **masks):
    """[b, h, q, k], [b, k, h, d] -> [b, q, h, d]."""
    w = attention_weights(logits, **masks)
    b, h, q, k = w.shape
    return build(
        (b, q, h, values.shape[3]), lambda n, i, g, t: total(w[n, g, i, j] * values[n, j, g, t] for j in range(k))
    )


def attention_layer(spec, params, x_q, x_kv=None, *, q_positions=None, k_positions=None, bias=None, **masks):
    """sum_h softmax(S) (x W_v,h) W_o,h: [b, q, e]. params: value, out, scores."""
    s = logits(spec, params["scores"], x_q, x_kv, q_positions, k_positions)
    values = project(x_q if x_kv is None else x_kv, params["value"])
    shared = is_shared(spec, q_positions, k_positions, bias=bias)
    return join(attend(s, values, shared=shared, bias=bias, **masks), params["out"])


def join(y, out):
    """[b, q, h, d], [h, d, e] -> [b, q, e]."""
    b, q, h, d = y.shape[:4]
    pairs = list(np.ndindex(h, d))
    return build((b, q, out.shape[2]), lambda n, i, c: total(y[n, i, g, t] * out[g, t, c] for g, t in pairs))


# T5's other blocks


def rms_norm(x, scale, epsilon=1e-6):
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis of [b, l, e]."""
    b, length, e = x.shape[:3]
    norm = build((b, length), lambda n, i: np.sqrt(total(x[n, i, c] ** 2 for c in range(e)) / e + epsilon))
    return build((b, length, e), lambda n, i, c: x[n, i, c] / norm[n, i] * scale[c])


def gelu(x):
    """The tanh form."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def mlp(params, x):
    """wi, wo: relu(x wi) wo; wi_0, wi_1, wo: (gelu(x wi_0) * (x wi_1)) wo. No biases."""

    def matmul(a, kernel):
        b, length, e = a.shape[:3]
        shape = (b, length, kernel.shape[1])
        return build(shape, lambda n, i, c: total(a[n, i, t] * kernel[t, c] for t in range(e)))

    if "wi" in params:
        z = matmul(x, params["wi"])
        hidden = build(z.shape[:3], lambda *index: relu(z[index]))
    else:
        gate, linear = matmul(x, params["wi_0"]), matmul(x, params["wi_1"])
        hidden = build(gate.shape[:3], lambda *index: gelu(gate[index]) * linear[index])
    return matmul(hidden, params["wo"])
