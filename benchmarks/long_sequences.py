"""The longest sequences whose attention fits a memory: V, R, FR and Linformer.

    JAX_PLATFORMS=cpu python benchmarks/long_sequences.py [--gib 24] [--run_gib 8] [--batch 8] [--variants V R FR Linformer]
        [--json FILE] [--markdown FILE]

One layer, forward and backward: 12 heads of 64, 768 features, float32, bidirectional, no padding; the scores cover as many
positions as the sequences have (Linformer: rank 256). Counted are parameters, inputs, outputs, all gradients and temporaries, as
XLA's memory analysis of the program compiled for CPU has them; nothing is allocated. The longest length, in steps of 128, is
found by bisection; memory grows with it.
Then, so that the analysis can be believed, the longest that fits --run_gib runs in a process of its own, and the growth of the
process's peak memory stands beside the analysis.
"""

import argparse
import functools
import json
import pathlib
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp

import synthesizer_jax as sj
from synthesizer_jax.axes import Param
from synthesizer_jax.mixers import MultiHead

DIMS = sj.Dims(features=768, heads=12, head_dim=64)
STEP = 128
LONGEST = 2**21  # tokens; past it nothing is looked for
GiB = 2**30


def mixer_of(name, length):
    if name == "Linformer":
        return sj.Linformer(length, rank=256)
    return MultiHead(sj.synthesizer(name, max_length=length))


def run(mixer, params, x, cotangent):
    """Outputs and gradients of parameters and inputs."""
    y, transposed = jax.vjp(lambda params, x: mixer(params, x), params, x)
    return y, transposed(cotangent)


@functools.cache
def compiled(name, length, batch):
    mixer = mixer_of(name, length)
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32),
        mixer.params(DIMS),
        is_leaf=lambda leaf: isinstance(leaf, Param),
    )
    x = jax.ShapeDtypeStruct((batch, length, DIMS.features), jnp.float32)
    return jax.jit(functools.partial(run, mixer)).lower(params, x, x).compile(), (params, x, x)


def needed(name, length, batch):
    """Bytes of parameters, inputs, outputs and temporaries."""
    memory = compiled(name, length, batch)[0].memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    return sum(sizes) - memory.alias_size_in_bytes


def longest(name, batch, limit):
    """The largest multiple of STEP whose layer needs at most `limit` bytes; 0 where none does."""
    fits = lambda steps: needed(name, steps * STEP, batch) <= limit
    most = 1
    while most * STEP < LONGEST and fits(most):
        most *= 2
    low, high = most // 2, most  # low fits, or is 0; high does not, or is past LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * STEP


def peak_growth(name, length, batch):
    """Bytes by which this process's peak memory grows when the layer runs once."""
    program, shapes = compiled(name, length, batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Ones, written: zeros would be pages that nobody has touched.
    arguments = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), shapes)
    jax.block_until_ready(program(*arguments))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def measured(name, length, batch):
    """The same of a new process, which has peaked at nothing yet."""
    command = [sys.executable, __file__, "--child", name, str(length), str(batch)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def rows_of(options):
    for name in options.variants:
        length = longest(name, options.batch, options.gib * GiB)
        row = {"variant": name, "batch": options.batch, "limit_gib": options.gib, "longest": length}
        row["needed_gib"] = needed(name, length, options.batch) / GiB
        small = longest(name, options.batch, options.run_gib * GiB)
        row |= {"run_limit_gib": options.run_gib, "run_length": small}
        row["run_needed_gib"] = needed(name, small, options.batch) / GiB
        row["run_measured_gib"] = measured(name, small, options.batch) / GiB
        yield row


def markdown(rows):
    first = rows[0]
    columns = (
        "attention",
        f"longest in {first['limit_gib']:g} GiB",
        "needed, GiB",
        f"longest in {first['run_limit_gib']:g} GiB",
        "needed, GiB",
        "measured, GiB",
    )
    lines = [
        "# Long sequences",
        "",
        f"Made by `python benchmarks/long_sequences.py`, which says what is measured: {first['batch']} sequences in a layer.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for r in rows:
        cells = (
            r["variant"],
            f"{r['longest']:,}",
            f"{r['needed_gib']:.2f}",
            f"{r['run_length']:,}",
            f"{r['run_needed_gib']:.2f}",
            f"{r['run_measured_gib']:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    if sys.argv[1:2] == ["--child"]:
        name, length, batch = sys.argv[2:]
        print(peak_growth(name, int(length), int(batch)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=24)
    parser.add_argument("--run_gib", type=float, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--variants", nargs="+", default=["V", "R", "FR", "Linformer"])
    parser.add_argument("--json", type=pathlib.Path, help="a file for the figures")
    parser.add_argument("--markdown", type=pathlib.Path, help="a file for the table; otherwise it is printed")
    options = parser.parse_args()
    rows = []
    for row in rows_of(options):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    options.markdown.write_text(markdown(rows)) if options.markdown else print(markdown(rows))


if __name__ == "__main__":
    main()
