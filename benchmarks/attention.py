"""What attention costs: every variant's time on a CPU, and what the compiler for TPU makes of it.

    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python benchmarks/attention.py [--measures cpu tpu packed] [--variants V R FR ...]
        [--passes forward both] [--lengths 128 512 2048] [--tokens 4096] [--repeats 5] [--topology v5e:2x2]
        [--hbm_bytes FILE] [--json FILE] [--markdown FILE]

tpu: bytes through main memory, operations of matrix products and temporaries of a causal layer, projections included, in
bfloat16 with float32 parameters. Needs libtpu (pip install 'jax[tpu]'), not a TPU. --hbm_bytes names a Python file with a
function hbm_bytes(compiled), whose count stands beside the library's own (analysis/traffic.py).
cpu: seconds of attention alone, scores included, in float32: a round runs every variant once, its naive form and
dot-product attention in between, and ratios are medians of each round's ratios. JAX's CPU devices use all cores.
packed: R in rows of 1, 3 and 17 segments, by the library and by the general path that looks up [b, h, q, k].

The naive form of a variant has all logits [b, h, q, k] in an array, masked, in a softmax, times the values, with JAX's own
gradients. vanilla is that of dot-product attention with positions as T5 has none. A run may be split: --json adds to what its
file has, and the tables are made of all of it.
"""

import argparse
import functools
import importlib.util
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import synthesizer_jax as sj
from synthesizer_jax.analysis import topologies, traffic
from synthesizer_jax.analysis.hlo import Module
from synthesizer_jax.axes import Param
from synthesizer_jax.mixers import MultiHead, Surroundings

HEADS, HEAD_DIM = 12, 64
FEATURES = HEADS * HEAD_DIM
DIMS = sj.Dims(FEATURES, HEADS, HEAD_DIM)
MASKED = -1e30
GiB = 2**30
MOST_CPU = 12 * GiB  # of a naive form; measured, it holds about 5 arrays [b, h, q, k] in float32 at once

VARIANTS = (
    "V", "R", "fixedR", "FR", "D", "FD", "R+V", "FR+V", "D+V", "R+D", "relative", "Toeplitz",
)  # fmt: skip
READ_NOTHING = ("R", "fixedR", "FR", "relative", "Toeplitz")  # no product of the layer but values and output


def spec_of(name, length):
    match name:
        case "relative":
            return sj.RelativePositionBias()
        case "Toeplitz":
            return sj.Toeplitz(length)
    return sj.synthesizer(name, max_length=length)


class Naive(MultiHead):
    """The same layer with all logits in an array."""

    def __call__(self, params, x, x_kv=None, around=None):
        scores = self.scores(params["scores"], x, x)
        values = self._values(params, x, None)
        return jnp.einsum("bqhd,hde->bqe", naive(scores, values), params["out"].astype(x.dtype))


def naive(scores, values):
    """Causal attention over logits [b, h, q, k]."""
    b, k, h, _ = values.shape
    logits = jnp.broadcast_to(scores.logits(), (b, h, k, k))
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((k, k), bool)), logits, MASKED), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(values.dtype), values)


def lower_bound(name, batch, length, passes):
    """Bytes of a layer whose scores read no token, each of its three steps (values, attention, output) reading what it needs
    once and writing what it makes once; x, v, out and y are arrays [b, n, e] in bfloat16, parameters are float32.

    Forward: x; v, v; out, out; y. Backward: d_y, out; d_out, d_out, out, v; d_v, x, d_v; d_x. Parameters are read in both
    passes, and their gradients are written. Arrays that stay on the chip move nothing: small batches may go below it. None
    where scores read tokens.
    """
    if name not in READ_NOTHING:
        return None
    declared = MultiHead(spec_of(name, length)).params(DIMS)
    parameters = 4 * sum(np.prod(p.shape) for p in leaves(declared))
    arrays = {"forward": 6, "both": 16}[passes]
    return int(arrays * batch * length * FEATURES * 2 + parameters * {"forward": 1, "both": 3}[passes])


def leaves(declared):
    return jax.tree.leaves(declared, is_leaf=lambda leaf: isinstance(leaf, Param))


def with_gradients(function, passes):
    """(params, x, cotangent) -> outputs, or outputs and all gradients."""
    if passes == "forward":
        return lambda params, x, cotangent: function(params, x)

    def both(params, x, cotangent):
        y, transposed = jax.vjp(function, params, x)
        return y, transposed(cotangent)

    return both


# What the compiler for TPU says


def one_device(topology):
    mesh = jax.sharding.Mesh(topologies.topology(topology).devices[:1], ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def figures(program, counter):
    module = Module.parse(program.as_text())
    run = list(cheapest(module, module.entry))
    found = {
        "gb": traffic.memory_bytes(module, run) / 1e9,
        "gb_other_counter": None if counter is None else counter(program) / 1e9,
        "gflop": traffic.matrix_flops(module, run) / 1e9,
        "gib_temporaries": program.memory_analysis().temp_size_in_bytes / GiB,
        "largest_array": max(array.size for _, one, _ in run for array in one.results),
    }
    return found | {"gb_of_a_further_pass": sum(loop_bytes(module, module.entry)) / 1e9}


def cheapest(module, computation, times=1):
    """What runs, of a conditional the branch that moves least: of packed rows, the one for those that packing makes."""
    for instruction in computation.values():
        if instruction.opcode == "conditional":
            branches = [list(cheapest(module, branch, times)) for branch in module.branches(instruction)]
            yield from min(branches, key=lambda branch: traffic.memory_bytes(module, branch))
        elif instruction.opcode == "while":
            body = module.computations[instruction.called("body")]
            yield from cheapest(module, body, times * module.trips(instruction))
        elif instruction.opcode == "call":
            yield from cheapest(module, module.computations[instruction.called("to_apply")], times)
        else:
            yield computation, instruction, times


def loop_bytes(module, computation):
    """Of each loop that runs a number of times that is not known before, the bytes of one run."""
    for instruction in computation.values():
        if instruction.opcode == "conditional":
            branches = [list(cheapest(module, branch)) for branch in module.branches(instruction)]
            sizes = [traffic.memory_bytes(module, branch) for branch in branches]
            yield from loop_bytes(module, module.branches(instruction)[int(np.argmin(sizes))])
        elif instruction.opcode == "while" and "known_trip_count" not in instruction.attributes:
            body = module.computations[instruction.called("body")]
            yield traffic.memory_bytes(module, list(cheapest(module, body)))


def compiled(mixer, batch, length, passes, sharding, packed=False, key_mask=False):
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32),
        mixer.params(DIMS),
        is_leaf=lambda leaf: isinstance(leaf, Param),
    )
    x = jax.ShapeDtypeStruct((batch, length, FEATURES), jnp.bfloat16)
    row = {"key_mask": jax.ShapeDtypeStruct((batch, length), jnp.bool_)} if key_mask else {}
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    row |= {"q_segments": ids, "q_positions": ids} if packed else {}

    def run(params, x, cotangent, row):
        around = Surroundings(causal=True, **row)
        return with_gradients(lambda params, x: mixer(params, x, None, around), passes)(params, x, cotangent)

    jitted = jax.jit(run, in_shardings=sharding, out_shardings=sharding)
    with jax.set_mesh(sharding.mesh):  # what is traced for
        return jitted.lower(params, x, x, row).compile()


def tpu_rows(options):
    sharding, counter = one_device(options.topology), load_counter(options.hbm_bytes)
    for length in options.lengths:
        batch = max(options.tokens // length, 1) if options.batch is None else options.batch
        for passes in options.passes:
            for name in options.variants:
                mixer = MultiHead(spec_of(name, length))
                forms = {"library": (mixer, False), "naive": (Naive(mixer.scores), False)}
                if name in READ_NOTHING:
                    forms["library, key mask"] = (mixer, True)
                for form, (layer, key_mask) in forms.items():
                    row = {"measure": "tpu", "length": length, "batch": batch, "passes": passes, "variant": name}
                    row |= {"form": form, "topology": options.topology}
                    bound = lower_bound(name, batch, length, passes)
                    row["gb_lower_bound"] = None if bound is None else bound / 1e9
                    yield row | attempt(layer, batch, length, passes, sharding, counter, key_mask=key_mask)


def attempt(mixer, batch, length, passes, sharding, counter, **settings):
    try:
        return figures(compiled(mixer, batch, length, passes, sharding, **settings), counter)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"left_out": "does not fit the chip: " + str(error).split(": ", 1)[1].splitlines()[0][:160]}


def packed_rows(options):
    sharding, counter = one_device(options.topology), load_counter(options.hbm_bytes)
    for length in options.lengths:
        batch = max(options.tokens // length, 1) if options.batch is None else options.batch
        forms = {
            "not packed": ("auto", False),
            "packed, library": ("auto", True),
            "packed, general path": ("xla", True),
        }
        for form, (path, packed) in forms.items():
            row = {
                "measure": "packed",
                "length": length,
                "batch": batch,
                "passes": "both",
                "variant": "R",
                "form": form,
            }
            mixer = MultiHead(sj.Random(length), path=path)
            row |= attempt(mixer, batch, length, "both", sharding, counter, packed=packed)
            yield row | {"topology": options.topology}
        yield from packed_times(options, batch, length)


def load_counter(path):
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("counter", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hbm_bytes


# Seconds on a CPU


def drawn(spec, batch, length):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (batch, length, FEATURES))
    values, cotangent = (jax.random.normal(key, (batch, length, HEADS, HEAD_DIM)) for key in keys[1:3])
    return spec.init(keys[3], DIMS), x, values, cotangent


def calls(name, batch, length, passes):
    """form -> a compiled call of attention alone: scores of x, and their softmax times given values."""
    spec = spec_of(name, length)
    params, x, values, cotangent = drawn(spec, batch, length)

    def library(given, values):
        params, x = given
        return sj.attend(spec(params, x, x), values, causal=True)

    def unfused(given, values):
        params, x = given
        return naive(spec(params, x, x), values)

    def call(function):
        jitted = jax.jit(with_gradients(function, passes))
        return functools.partial(jitted, (params, x), values, cotangent)

    return {f"{name}, library": call(library), f"{name}, naive": call(unfused)}


def vanilla(batch, length, passes):
    """Dot-product attention of given queries and keys, in its plain form."""
    _, _, values, cotangent = drawn(sj.DotProduct(), batch, length)
    query, key = cotangent * HEAD_DIM**-0.25, values * HEAD_DIM**-0.25

    def function(given, values):
        return naive(sj.Scores(*given), values)

    return functools.partial(jax.jit(with_gradients(function, passes)), (query, key), values, cotangent)


def naive_bytes(batch, length, passes):
    return (5 if passes == "both" else 3) * 4 * batch * HEADS * length**2


def interleaved(functions, repeats):
    """name -> seconds of each round, all functions once a round."""
    for function in functions.values():
        jax.block_until_ready(function())
    seconds = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def paired(seconds, name, other):
    """Median and range of how many times `other` takes as long as `name`, round by round."""
    ratios = [slow / fast for slow, fast in zip(seconds[other], seconds[name], strict=True)]
    return {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def cpu_rows(options):
    for length in options.lengths:
        batch = max(options.cpu_tokens // length, 1) if options.cpu_batch is None else options.cpu_batch
        for passes in options.passes:
            row = {"measure": "cpu", "length": length, "batch": batch, "passes": passes}
            if (needed := naive_bytes(batch, length, passes)) > MOST_CPU:
                yield row | {"left_out": f"the naive form would need {needed / GiB:.0f} GiB"}
                continue
            for name in options.variants:
                functions = calls(name, batch, length, passes) | {"vanilla": vanilla(batch, length, passes)}
                seconds = interleaved(functions, options.repeats)
                own = f"{name}, library"
                yield row | {
                    "variant": name,
                    "seconds": statistics.median(seconds[own]),
                    "spread": [min(seconds[own]), max(seconds[own])],
                    "naive": paired(seconds, own, f"{name}, naive"),
                    "vanilla": paired(seconds, own, "vanilla"),
                }
                del functions
                jax.clear_caches()


def packed_times(options, batch, length):
    """Rows of packed R on the CPU, beside the same without segments."""
    batch = max(options.cpu_tokens // length, 1) if options.cpu_batch is None else options.cpu_batch
    if naive_bytes(batch, length, "both") > MOST_CPU:
        return
    spec = sj.Random(length)
    params, x, values, cotangent = drawn(spec, batch, length)

    def call(path, segments, positions):
        def function(params, values):
            scores = spec(params, x, x, positions, positions)
            return sj.attend(scores, values, causal=True, q_segments=segments, k_segments=segments, path=path)

        return functools.partial(jax.jit(with_gradients(function, "both")), params, values, cotangent)

    for count in (1, 3, 17):
        size = -(-length // count)
        row = jnp.arange(length)
        segments, positions = (jnp.tile(r, (batch, 1)) for r in (row // size + 1, row % size))
        functions = {"not packed": call("auto", None, None), "library": call("auto", segments, positions)}
        functions["general path"] = call("xla", segments, positions)
        seconds = interleaved(functions, options.repeats)
        yield {
            "measure": "packed_cpu",
            "length": length,
            "batch": batch,
            "segments": count,
            "seconds": statistics.median(seconds["library"]),
            "spread": [min(seconds["library"]), max(seconds["library"])],
            "not packed": paired(seconds, "library", "not packed"),
            "general path": paired(seconds, "library", "general path"),
        }


# Tables


def markdown(rows):
    lines = ["# Attention", "", "Made by `python benchmarks/attention.py`, which says what is measured.", ""]
    for key in sorted({(r["length"], r["batch"], r["passes"]) for r in rows if r["measure"] == "tpu"}):
        mine = [r for r in rows if r["measure"] == "tpu" and (r["length"], r["batch"], r["passes"]) == key]
        lines += tpu_table(mine, *key)
    for key in sorted({(r["length"], r["batch"]) for r in rows if r["measure"] == "packed"}):
        mine = [r for r in rows if r["measure"] == "packed" and (r["length"], r["batch"]) == key]
        lines += packed_table(mine, *key)
    cpu = [r for r in rows if r["measure"] == "cpu"]
    for key in sorted({(r["length"], r["batch"], r["passes"]) for r in cpu}):
        lines += cpu_table([r for r in cpu if (r["length"], r["batch"], r["passes"]) == key], *key)
    lines += packed_cpu_table([r for r in rows if r["measure"] == "packed_cpu"])
    return "\n".join(lines) + "\n"


def table(title, columns, rows):
    return [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *rows, ""]


def line(*cells):
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


PASSES = {"forward": "forward", "both": "forward and backward"}


def tpu_table(rows, length, batch, passes):
    vanilla_gb = next((r.get("gb") for r in rows if r["variant"] == "V" and r["form"] == "naive"), None)
    naive_gb = {r["variant"]: r.get("gb") for r in rows if r["form"] == "naive"}
    lines = []
    for r in rows:
        if "left_out" in r:
            lines.append(line(r["variant"], r["form"], r["left_out"], *[""] * 7))
            continue
        lines.append(
            line(
                r["variant"],
                r["form"],
                f"{r['gb']:.3f}",
                number(r["gb_other_counter"], 3),
                ratio(r["gb"], naive_gb.get(r["variant"])),
                ratio(r["gb"], vanilla_gb),
                number(r["gb_lower_bound"], 3),
                ratio(r["gb"], r["gb_lower_bound"]),
                f"{r['gflop']:.0f}",
                f"{r['gib_temporaries']:.2f}",
            )
        )
    columns = ("scores", "form", "GB", "GB, other counter", "/ naive", "/ vanilla", "bound, GB", "/ bound", "GFLOP")
    title = f"TPU {rows[0]['topology'].split(':')[0]}, {batch} x {length}, {PASSES[passes]}"
    return table(title, (*columns, "temporaries, GiB"), lines)


def packed_table(rows, length, batch):
    lines = []
    for r in rows:
        if "left_out" in r:
            lines.append(line(r["form"], r["left_out"], "", "", "", ""))
            continue
        further = r["gb_of_a_further_pass"] if r["form"] == "packed, library" else 0
        # One pass for rows of one segment, two for up to 3, five for up to 31.
        totals = [f"{r['gb'] + (passes - 1) * further:.2f}" for passes in (1, 2, 5)]
        lines.append(line(r["form"], *totals, number(r["gb_other_counter"], 2), f"{r['gib_temporaries']:.2f}"))
    columns = ("R", "GB, 1 segment", "3 segments", "17 segments", "1 segment, other counter", "temporaries, GiB")
    title = f"Packed rows of R, TPU {rows[0]['topology'].split(':')[0]}, {batch} x {length}, forward and backward"
    return table(title, columns, lines)


def cpu_table(rows, length, batch, passes):
    lines = [
        line(r["left_out"], "", "", "")
        if "left_out" in r
        else line(r["variant"], seconds(r), times(r["naive"]), times(r["vanilla"]))
        for r in rows
    ]
    columns = ("scores", "ms (least - most)", "naive form / this", "vanilla / this")
    return table(f"CPU, attention alone, {batch} x {length}, {PASSES[passes]}", columns, lines)


def packed_cpu_table(rows):
    if not rows:
        return []
    lines = [
        line(
            f"{r['batch']} x {r['length']}", r["segments"], seconds(r), times(r["general path"]), times(r["not packed"])
        )
        for r in rows
    ]
    columns = ("shape", "segments", "ms (least - most)", "general path / this", "not packed / this")
    return table("Packed rows of R, CPU, forward and backward", columns, lines)


def number(value, digits):
    return None if value is None else f"{value:.{digits}f}"


def ratio(value, other):
    return None if other is None else f"{value / other:.2f}"


def seconds(row):
    least, most = row["spread"]
    return f"{1e3 * row['seconds']:.0f} ({1e3 * least:.0f} - {1e3 * most:.0f})"


def times(found):
    return f"{found['ratio']:.2f} ({found['least']:.2f} - {found['most']:.2f})"


MEASURES = {"tpu": tpu_rows, "cpu": cpu_rows, "packed": packed_rows}
IDENTITY = ("measure", "length", "batch", "passes", "variant", "form", "segments", "topology")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 1024, 2048, 4096])
    parser.add_argument(
        "--tokens", type=int, default=16384, help="of a batch for TPU; its rows are these by the length"
    )
    parser.add_argument("--batch", type=int, help="rows for TPU, whatever the length")
    parser.add_argument("--cpu_tokens", type=int, default=4096)
    parser.add_argument("--cpu_batch", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--hbm_bytes", help="a Python file with hbm_bytes(compiled)")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the figures, which is added to")
    parser.add_argument("--markdown", type=pathlib.Path, help="a file for the tables; otherwise they are printed")
    options = parser.parse_args()
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    for measure in options.measures:
        for row in MEASURES[measure](options):
            same = [old for old in rows if all(old.get(name) == row.get(name) for name in IDENTITY)]
            rows = [old for old in rows if old not in same] + [row]
            print(json.dumps(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    text = markdown(rows)
    options.markdown.write_text(text) if options.markdown else print(text)


if __name__ == "__main__":
    main()
