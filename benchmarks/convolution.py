"""What lightweight and dynamic convolution cost on TPU, as its compiler says: forward and backward of one layer in bfloat16.

TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python benchmarks/convolution.py [--shapes 16x512 4x4096] [--heads 12 768]
    [--width 9] [--topology v5e:2x2] [--hbm_bytes FILE] [--json FILE]

Needs libtpu (pip install 'jax[tpu]'), not a TPU. Prints a Markdown table: the forms that the library chooses between, and
those that it does not use. FLOPs, bytes accessed (of all operations, those in fast memory included) and temporaries are
XLA's cost analysis; --hbm_bytes names a Python file with a function hbm_bytes(compiled) that counts the bytes that move to
and from main memory. Fails when the library's own program holds an array of b * h * q * k numbers.
"""

import argparse
import functools
import importlib.util
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

import synthesizer_jax as sj
from synthesizer_jax.mixers import Surroundings
from synthesizer_jax.ops import convolution

FEATURES = 768
CAUSAL = Surroundings(causal=True)


# Forms that the library does not use: u [b, q, e], kernels [w, b|1, q|1, h] -> [b, q, e]


def plain_products(u, kernels):
    """The sum of shifted products with JAX's own gradients."""
    width, heads = kernels.shape[0], kernels.shape[3]
    padded = jnp.pad(u, ((0, 0), (width - 1, 0), (0, 0)))
    taps = [padded[:, t : t + u.shape[1]].astype(jnp.float32) for t in range(width)]
    return sum(tap * jnp.repeat(k, FEATURES // heads, axis=-1) for tap, k in zip(taps, kernels, strict=True)).astype(
        u.dtype
    )


def xla_convolution(u, kernels):
    """XLA's depth-wise convolution; kernels that all tokens share."""
    width, heads = kernels.shape[0], kernels.shape[3]
    repeated = jnp.repeat(kernels[:, 0], FEATURES // heads, axis=-1).astype(u.dtype)  # [w, 1, e]
    return jax.lax.conv_general_dilated(
        u, repeated, (1,), [(width - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=FEATURES
    )


def whole_band(u, kernels):
    """The product with the whole matrix [b, h, q, k]."""
    length, heads = u.shape[1], kernels.shape[3]
    matrix = convolution.band(kernels, length, True).astype(u.dtype)
    split = u.reshape(*u.shape[:2], heads, -1)
    equation = "hqk,bkhd->bqhd" if matrix.shape[0] == 1 else "bhqk,bkhd->bqhd"
    return jnp.einsum(equation, matrix[0] if matrix.shape[0] == 1 else matrix, split).reshape(u.shape)


def blocks(u, kernels):
    return convolution._blocks(u, kernels, kernels.shape[0] - 1)


def products(u, kernels):
    return convolution._products(u, kernels, None, kernels.shape[0] - 1)


FORMS = {
    "light": {
        "sum of products, JAX's gradients": plain_products,
        "XLA's convolution": xla_convolution,
        "band": whole_band,
    },
    "dynamic": {
        "sum of products, JAX's gradients": plain_products,
        "sum of products": products,
        "blocks": blocks,
        "band": whole_band,
    },
}


def layer(kind, spec, form):
    """(params, x) -> y of the whole layer, linear maps included; form None: as the library does it."""
    if form is None:
        return lambda params, x: spec(params, x, None, CAUSAL)

    def call(params, x):
        u = spec._inputs(params, x, CAUSAL)
        return spec._outputs(params, form(u, jax.nn.softmax(spec._logits(params, u).astype(jnp.float32), axis=0)))

    return call


def compiled(function, spec, batch, length, sharding):
    """The program of value and gradients, float32 parameters and bfloat16 activations."""
    declared = spec.params(sj.Dims(FEATURES, 12, 64))
    params = {name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in declared.items()}
    tokens = jax.ShapeDtypeStruct((batch, length, FEATURES), jnp.bfloat16)

    def gradients(params, x, cotangent):
        loss = lambda params, x: jnp.sum((function(params, x) * cotangent).astype(jnp.float32))
        return jax.grad(loss, argnums=(0, 1))(params, x)

    jitted = jax.jit(gradients, in_shardings=sharding, out_shardings=sharding)
    with jax.set_mesh(sharding.mesh):  # what is traced for
        return jitted.lower(params, tokens, tokens).compile()


def largest_array(text):
    """The number of elements of the largest array of a program's text."""
    return max(int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\w+\[([\d,]+)\]", text))


def figures(program, hbm_bytes):
    cost, memory = program.cost_analysis(), program.memory_analysis()
    found = {
        "gflop": cost["flops"] / 1e9,
        "mb_accessed": cost["bytes accessed"] / 1e6,
        "mb_temporaries": memory.temp_size_in_bytes / 1e6,
        "largest_array": largest_array(program.as_text()),
    }
    return found | ({"mb_hbm": hbm_bytes(program) / 1e6} if hbm_bytes else {})


def measure(options):
    sharding = one_device(options.topology)
    counter = None if options.hbm_bytes is None else load(options.hbm_bytes).hbm_bytes
    for shape in options.shapes:
        batch, length = map(int, shape.split("x"))
        for kind, make in (("light", sj.LightweightConv), ("dynamic", sj.DynamicConv)):
            for heads in options.heads:
                spec = make(options.width, heads=heads)
                for name, form in {"synthesizer_jax": None, **FORMS[kind]}.items():
                    if name in ("band", "blocks") and FEATURES // heads < 8:
                        continue  # matrix products of a channel or two
                    start = time.perf_counter()
                    program = compiled(layer(kind, spec, form), spec, batch, length, sharding)
                    row = {"kind": kind, "shape": shape, "heads": heads, "width": options.width, "form": name}
                    row |= figures(program, counter)
                    row["seconds_to_compile"] = time.perf_counter() - start
                    pairs = batch * heads * length**2
                    if form is None and row["largest_array"] >= pairs:
                        raise SystemExit(f"{row}: an array as large as b * h * q * k = {pairs}")
                    yield row


def one_device(topology):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("one",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def load(path):
    spec = importlib.util.spec_from_file_location("counter", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["16x512", "4x4096"], metavar="BATCHxLENGTH")
    parser.add_argument("--heads", nargs="+", type=int, default=[12, FEATURES])
    parser.add_argument("--width", type=int, default=9)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--hbm_bytes", help="a Python file with hbm_bytes(compiled)")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    columns = ("kind", "shape", "heads", "form", "gflop", "mb_accessed", "mb_temporaries", "mb_hbm", "largest_array")
    columns = columns if options.hbm_bytes else tuple(c for c in columns if c != "mb_hbm")
    show = functools.partial(print, flush=True)
    show("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    rows = []
    for row in measure(options):
        rows.append(row)
        cells = (f"{row[c]:.0f}" if isinstance(row[c], float) else str(row[c]) for c in columns)
        show("| " + " | ".join(cells) + " |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
