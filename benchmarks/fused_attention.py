"""The fused kernel for TPU beside XLA's unfused attention, as the compiler says: attention with a bias that the batch shares.

    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python benchmarks/fused_attention.py [--measures bare layer plans step]
        [--shapes 128x512 16x1024 16x2048 8x4096] [--topology v5e:2x2] [--hbm_bytes FILE] [--json FILE] [--markdown FILE]

Needs libtpu (pip install 'jax[tpu]'), not a TPU. All of it forward and backward, causal, in bfloat16, 12 heads of 64:
bare: attention alone, its arrays given. layer: R+V with its projections. plans: the blocks that are chosen on each
generation, and the VMEM that they need. step: a training step of the paper's C4 base, 128 x 512/114, data parallel (minutes).

Bytes through main memory (HBM) are the library's count (analysis/traffic.py) and, with --hbm_bytes, that of a Python file's
hbm_bytes(compiled). Both take a kernel's operands to be read once; "with fetches again" adds what the kernel's blocks read
more than once, by its own formula.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import synthesizer_jax as sj
from synthesizer_jax.analysis import topologies, traffic
from synthesizer_jax.analysis.hlo import Module
from synthesizer_jax.nn.attention import as_mixer
from synthesizer_jax.ops import flash_plan
from synthesizer_jax.scores.base import Scores
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.optimizer import Adafactor, Constant
from synthesizer_jax.training.step import Trainer

HEADS, HEAD_DIM = 12, 64
FEATURES = HEADS * HEAD_DIM
PATHS = ("flash", "xla")
GENERATIONS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")
MEASURES = ("bare", "layer", "plans", "step")
GB, GiB, MiB = 1e9, 2**30, 2**20


def kernel_vmem(topology):
    return flash_plan.VMEM[topologies.topology(topology).devices[0].device_kind]


def compiled(function, shapes, topology):
    """function compiled for one device, with seconds of compilation."""
    mesh = Mesh(np.array(topologies.topology(topology).devices[:1]), ("x",))
    one = NamedSharding(mesh, PartitionSpec())
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        program = jax.jit(function, in_shardings=one, out_shardings=one).lower(*shapes).compile()
    return program, time.perf_counter() - start


def figures(program, seconds, count):
    module = Module.parse(program.as_text())
    executed = traffic.executed(module)
    found = {
        "bytes": traffic.memory_bytes(module, executed),
        "flops": traffic.matrix_flops(module, executed),
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "kernels": program.as_text().count("tpu_custom_call"),
        "seconds": seconds,
    }
    return found if count is None else found | {"counted": count(program)}


def plans_of(batch, length, topology):
    """The kernel's blocks of both passes."""
    rows = (batch, length, HEADS, HEAD_DIM)
    return flash_plan.plan(flash_plan.sizes_of(rows, rows, rows, 2, True), flash_plan.budget(kernel_vmem(topology)))


def bare(batch, length, path, topology):
    rows = jax.ShapeDtypeStruct((batch, length, HEADS, HEAD_DIM), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((HEADS, length, length), jnp.float32)

    def run(query, key, values, bias, cotangent):
        def attention(query, key, values, bias):
            scores = Scores(query=query, key=key, bias=bias[None])
            return sj.attend(scores, values, causal=True, path=path)

        out, pull_back = jax.vjp(attention, query, key, values, bias)
        return out, pull_back(cotangent)

    return compiled(run, (rows, rows, rows, bias, rows), topology)


def layer(batch, length, path, topology):
    mixer = dataclasses.replace(as_mixer(sj.synthesizer("R+V", max_length=length)), path=path)
    module = nnx.eval_shape(lambda: sj.Attention(mixer, FEATURES, HEADS, HEAD_DIM, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    x = jax.ShapeDtypeStruct((batch, length, FEATURES), jnp.bfloat16)

    def run(state, x, cotangent):
        y, pull_back = jax.vjp(lambda state, x: nnx.merge(graph, state)(x, causal=True), state, x)
        return y, pull_back(cotangent)

    return compiled(run, (state, x, x), topology)


def step(attention, path, topology):
    config = sj.paper_c4_base(attention=attention, dtype="bfloat16", remat="full")
    if path != "auto":
        own = {
            name: dataclasses.replace(as_mixer(getattr(config, name)), path=path)
            for name in ("encoder_attention", "decoder_attention")
        }
        config = dataclasses.replace(config, **own)
    devices = topologies.topology(topology).devices
    trainer = Trainer(config, Adafactor(Constant(1e-3)), MeshShape(data=len(devices)).build(devices))
    shapes = config.batch.shapes(128, {"inputs": 512, "targets": 114}, packed=False)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    start = time.perf_counter()
    return trainer.train_step().lower(trainer.abstract_state(), batch).compile(), time.perf_counter() - start


def gathered(arguments, known, count):
    """known with the figures that it lacks, keyed by measure and what is measured."""
    for batch, length in (map(int, shape.split("x")) for shape in arguments.shapes):
        for measure, make in (("bare", bare), ("layer", layer)):
            for path in PATHS if measure in arguments.measures else ():
                key = f"{measure} {arguments.topology} {batch}x{length} {path}"
                if key not in known:
                    known[key] = figures(*make(batch, length, path, arguments.topology), count)
                    yield
        for topology in GENERATIONS if "plans" in arguments.measures else ():
            found = plans_of(batch, length, topology)
            known[f"plan {topology} {batch}x{length}"] = found and [dataclasses.asdict(blocks) for blocks in found]
    for attention, path in (("R+V", "auto"), ("R+V", "xla"), ("V", "auto"), ("V", "xla"), ("R", "auto")):
        key = f"step {arguments.topology} {attention} {path}"
        if "step" in arguments.measures and key not in known:
            known[key] = figures(*step(attention, path, arguments.topology), count)
            yield


def table(head, rows):
    yield f"| {' | '.join(head)} |"
    yield "| --- |" + " ---: |" * (len(head) - 1)
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def ratio(known, key, other, field):
    return f"{known[key][field] / known[other][field]:.3f}"


def compared(known, measure):
    """Rows of the kernel beside the unfused form."""
    for key in known:
        if key.startswith(f"{measure} ") and key.endswith(" flash"):
            other = key.replace(" flash", " xla")
            if other not in known:
                continue
            one, two = known[key], known[other]
            topology, shape = key.split()[1:3]
            again = plans_of(*map(int, shape.split("x")), topology)
            least = [blocks.moved for blocks in again]
            fetched = one["bytes"] + sum(least) - once(shape)
            counted = ratio(known, key, other, "counted") if "counted" in one and "counted" in two else ""
            yield [
                shape,
                f"{one['bytes'] / GB:.2f}",
                f"{two['bytes'] / GB:.2f}",
                ratio(known, key, other, "bytes"),
                counted,
                f"{fetched / two['bytes']:.3f}",
                ratio(known, key, other, "flops"),
                f"{one['temporaries'] / GiB:.2f}",
                f"{two['temporaries'] / GiB:.2f}",
            ]


def once(shape):
    """The bytes of the kernels' operands and results of both passes."""
    batch, length = map(int, shape.split("x"))
    rows, bias = 2 * batch * length * FEATURES, 4 * HEADS * length**2
    return rows * (4 + 7) + 3 * bias


def markdown(known):
    head = ["batch x length", "kernel, GB", "XLA, GB", "ratio", "ratio, other count", "ratio with fetches again"]
    head += ["FLOPs, ratio", "temporaries, GiB", "XLA's"]
    for measure, title in (("bare", "Attention alone"), ("layer", "R+V with its projections")):
        rows = list(compared(known, measure))
        if rows:
            yield from (f"**{title}**, forward and backward:", "")
            yield from table(head, rows)
    plans = {key: found for key, found in known.items() if key.startswith("plan ")}
    if plans:
        yield from ("**Blocks** (queries; sequences in a tile of the backward pass) and their VMEM:", "")
        head = ["device", "batch x length", "forward", "MiB", "backward", "tile", "MiB"]
        yield from table(head, (plan_row(key, found) for key, found in plans.items()))
    steps = {key: found for key, found in known.items() if key.startswith("step ")}
    if steps:
        yield from (
            "**A training step** of the paper's C4 base, 128 x 512/114, four chips, data parallel, full remat:",
            "",
        )
        head = ["scores", "path", "GB moved on a chip", "temporaries, GiB", "kernels"]
        yield from table(head, (step_row(key, found) for key, found in steps.items()))


def plan_row(key, found):
    _, topology, shape = key.split()
    if found is None:
        return [topology, shape, "does not fit: XLA", "", "", "", ""]
    forward, backward = found
    vmem = [f"{blocks['vmem'] / MiB:.1f}" for blocks in found]
    return [topology, shape, str(forward["queries"]), vmem[0], str(backward["queries"]), str(backward["tile"]), vmem[1]]


def step_row(key, found):
    _, _, attention, path = key.split()
    moved, kept = f"{found['bytes'] / GB:.1f}", f"{found['temporaries'] / GiB:.2f}"
    return [attention, path, moved, kept, str(found["kernels"])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES[:3]))
    parser.add_argument(
        "--shapes", nargs="+", default=["128x512", "16x1024", "16x2048", "8x4096"], metavar="BATCHxLENGTH"
    )
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--hbm_bytes", help="a Python file with hbm_bytes(compiled)")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the figures, which is added to")
    parser.add_argument("--markdown", type=pathlib.Path, help="a file for the tables; otherwise they are printed")
    arguments = parser.parse_args()
    count = None
    if arguments.hbm_bytes:
        spec = importlib.util.spec_from_file_location("hbm_bytes", arguments.hbm_bytes)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        count = module.hbm_bytes
    known = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    save(arguments, known)
    for _ in gathered(arguments, known, count):
        save(arguments, known)
    save(arguments, known)
    text = "\n".join(markdown(known))
    arguments.markdown.write_text(text) if arguments.markdown else print(text)


def save(arguments, known):
    if arguments.json:
        arguments.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
