"""How long a training step takes to trace and to compile at several depths, for this machine's CPU and for a TPU, and import.

python benchmarks/compile_time.py [--depths 2 6 12] [--attention V R] [--rounds 3] [--unscanned] [--topology v5e:2x2]
    [--import_pairs 5] [--json FILE]

The step is the Trainer's, of T5 of the mini size of train_step.py with as many layers in each stack. Depths take turns, in a
random order in each round. For the TPU it needs libtpu (pip install 'jax[tpu]'), not a TPU; --topology none leaves it out.
--unscanned measures scan_layers=False, too. Prints Markdown: medians with the least and the most, and their ratio to the
first depth's.
"""

import argparse
import dataclasses
import json
import os
import random
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import import_time
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from train_step import RATE, SIZES

import synthesizer_jax as sj
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.optimizer import AdamW, Constant
from synthesizer_jax.training.step import Trainer


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile."""

    platform: str
    attention: str
    depth: int  # layers of encoder and of decoder
    scanned: bool

    @property
    def family(self):
        """What differs in depth alone."""
        return f"{self.platform} {self.attention}{'' if self.scanned else ', scan_layers=False'}"


def compile_once(case, devices):
    """Seconds to trace and lower, and to compile."""
    size = SIZES["mini"]
    config = sj.t5_tiny(
        case.attention,
        max_length=size.inputs,
        features=size.features,
        mlp_features=size.mlp_features,
        heads=size.heads,
        head_dim=size.head_dim,
        vocab_size=size.vocab_size,
        encoder_layers=case.depth,
        decoder_layers=case.depth,
        scan_layers=case.scanned,
    )
    trainer = Trainer(config, AdamW(Constant(RATE)), MeshShape().build(devices))
    lengths = {"inputs": size.inputs, "targets": size.targets}
    shapes = config.batch.shapes(size.batch, lengths, packed=False)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    state = trainer.abstract_state()
    start = time.perf_counter()
    lowered = trainer.train_step().lower(state, batch)
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def devices_of(options):
    """platform -> one device."""
    found = {"cpu": jax.devices("cpu")[:1]}
    if options.topology != "none":
        found["tpu"] = topologies.get_topology_desc(platform="tpu", topology_name=options.topology).devices[:1]
    return found


def measure(options):
    """case -> (seconds to trace, seconds to compile) of each round, after one that warms up."""
    devices = devices_of(options)
    scans = (True, False) if options.unscanned else (True,)
    cases = [
        Case(platform, attention, depth, scanned)
        for platform in devices
        for attention in options.attention
        for scanned in scans
        for depth in options.depths
    ]
    seconds, rng = {case: [] for case in cases}, random.Random(0)
    for platform, chosen in devices.items():
        compile_once(Case(platform, options.attention[0], 1, True), chosen)
    for _ in range(options.rounds):
        for case in rng.sample(cases, len(cases)):
            seconds[case].append(compile_once(case, devices[case.platform]))
    return seconds


def figures(seconds):
    first = {}
    for case, rounds in seconds.items():
        trace, build = (list(times) for times in zip(*rounds, strict=True))
        both = [sum(pair) for pair in rounds]
        first.setdefault(case.family, statistics.median(both))
        yield {
            **dataclasses.asdict(case),
            "trace": trace,
            "compile": build,
            "median": statistics.median(both),
            "ratio": statistics.median(both) / first[case.family],
            "name": case.family,
        }


def show(rows):
    print("\n| | layers | s to trace | s to compile | both | to the first |\n|---|---|---|---|---|---|")
    for row in rows:
        spans = (
            f"{statistics.median(row[k]):.2f} ({min(row[k]):.2f} to {max(row[k]):.2f})" for k in ("trace", "compile")
        )
        depth = f"{row['depth']}+{row['depth']}"
        print(f"| {row['name']} | {depth} | {' | '.join(spans)} | {row['median']:.2f} | {row['ratio']:.2f} |")


def imports(pairs):
    """Seconds that `import flax` and ours take in new processes, in turn."""
    measured = [[import_time.seconds(module) for module in ("flax", "synthesizer_jax")] for _ in range(pairs + 1)][1:]
    flax, ours = (statistics.median(times) for times in zip(*measured, strict=True))
    return {"flax": flax, "synthesizer_jax": ours, "ratio": statistics.median(o / f for f, o in measured)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 6, 12])
    parser.add_argument("--attention", nargs="+", default=["V", "R"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unscanned", action="store_true")
    parser.add_argument("--topology", default="v5e:2x2", help="of a TPU, or none")
    parser.add_argument("--import_pairs", type=int, default=5)
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    rows = list(figures(measure(options)))
    show(rows)
    imported = imports(options.import_pairs)
    print("\nimport: flax {flax:.2f} s, synthesizer_jax {synthesizer_jax:.2f} s, ratio {ratio:.2f}".format(**imported))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"steps": rows, "import": imported, "jax": jax.__version__}, file, indent=2)


if __name__ == "__main__":
    main()
