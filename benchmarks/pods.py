"""What the TPU compiler says of our configurations on slices of TPUs: docs/pods.md. No TPU is needed.

    python benchmarks/pods.py run [SECTION ...] [--only TEXT]   # what is not in docs/pods.jsonl yet, a line each; hours in all
    python benchmarks/pods.py write                             # docs/pods.md from it

Every configuration is one call of `python -m synthesizer_jax compile`. A run that is stopped goes on where it was; a line that
is deleted from docs/pods.jsonl is made again.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from synthesizer_jax import launch
from synthesizer_jax.analysis.topologies import GENERATIONS

DOCS = pathlib.Path(__file__).parents[1] / "docs"
LINES, PAGE = DOCS / "pods.jsonl", DOCS / "pods.md"
GiB, MiB = 2**30, 2**20
LENGTHS = {"inputs": 512, "targets": 114}


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of a table."""

    section: str
    name: str  # unique in the section
    topology: str
    steps: str
    files: tuple[str, ...]
    flags: tuple[str, ...]  # NAME=VALUE, of gin

    def command(self) -> list[str]:
        """The arguments of python -m synthesizer_jax."""
        return [
            "compile",
            f"--topology={self.topology}",
            *(f"--gin_file={name}" for name in self.files),
            *(f"--gin.{flag}" for flag in self.flags),
            f"--steps={self.steps}",
        ]


def mesh(**axes: int) -> tuple[str, ...]:
    """Flags for a mesh."""
    return tuple(f"MESH_{name.upper()}={size}" for name, size in axes.items())


BF16 = 'DTYPE="bfloat16"'
FULL = 'REMAT="full"'


def paper() -> Iterator[Case]:
    """The paper's C4 base on its own hardware and on a newer slice, batch 128."""
    for topology, flags in (("v5e:4x4", (BF16,)), ("v3:2x2", (BF16, FULL))):
        for row in ("V", "R", "R+V", "D+V"):
            steps = "train,eval,decode" if topology == "v5e:4x4" else "train"
            yield Case("paper", f"{row} {topology}", topology, steps, (f"experiments/c4/{row}.gin",), flags)


PODS = ("v4:4x4x8", "v4:2x2x4", "v4:2x2x2", "v4:2x2x1")


def largest() -> Iterator[Case]:
    """T5 11B on pods that get smaller: parameters in float32, split over all chips; batch 128."""
    files = ("models/t5_11b.gin", "attention/R+V.gin", "runs/compile.gin")
    for topology in PODS:
        chips = count(topology)
        flags = (
            BF16,
            FULL,
            *lengths(LENGTHS),
            *mesh(data=1, fsdp=chips),
            "PACK=False",
            f"MICROBATCHES={128 // chips}",
        )
        yield Case("11b", topology, topology, "train", files, ("BATCH_SIZE=128", *flags))


def scaling() -> Iterator[Case]:
    """Base R+V, 8 sequences a chip."""
    for topology in ("v4:2x2x1", "v4:2x2x4", "v4:4x4x4", "v4:4x8x8", "v4:8x8x16"):
        flags = (BF16, "PACK=False", f"BATCH_SIZE={8 * count(topology)}")
        yield Case("scaling", topology, topology, "train", ("experiments/c4/R+V.gin",), flags)


def memory() -> Iterator[Case]:
    """One thing at a time, base R+V on 4 chips of 32 sequences in all."""
    variants = {
        "as it is": (),
        "4 microbatches": ("MICROBATCHES=4",),
        "remat": (FULL,),
        "8 loss chunks": ("LOSS_CHUNKS=8",),
        "remat, 8 loss chunks": (FULL, "LOSS_CHUNKS=8"),
        "fsdp": mesh(data=1, fsdp=4),
        "all of these": (FULL, "MICROBATCHES=4", "LOSS_CHUNKS=8", *mesh(data=1, fsdp=4)),
    }
    for name, flags in variants.items():
        given = (BF16, "PACK=False", "BATCH_SIZE=32", *flags)
        yield Case("memory", name, "v5e:2x2", "train", ("experiments/c4/R+V.gin",), given)
    files = ("models/paper_lm1b_base.gin", "attention/R+V.gin", "runs/compile.gin")
    for chunks in (1, 8):
        name = "language model, remat" + f", {chunks} loss chunks" * (chunks > 1)
        given = (BF16, FULL, "PACK=False", "BATCH_SIZE=128", *lengths({"targets": 256}), f"LOSS_CHUNKS={chunks}")
        yield Case("memory", name, "v5e:2x2", "train", files, given)


def meshes() -> Iterator[Case]:
    """Base R+V, batch 128 on 16 chips arranged in other ways."""
    for axes in ({"data": 4, "model": 4}, {"data": 1, "fsdp": 16}, {"data": 2, "fsdp": 4, "model": 2}):
        name = " x ".join(f"{axis}={size}" for axis, size in axes.items())
        flags = (BF16, "PACK=False", *mesh(**axes))
        yield Case("meshes", name, "v5e:4x4", "train", ("experiments/c4/R+V.gin",), flags)


def random_scores() -> Iterator[Case]:
    """R [h, n, n] of T5 small split over the model axis in every possible way; it is stored by query over fsdp as well."""
    files = ("models/t5_small.gin", "attention/R.gin", "runs/compile.gin")
    for name, split in {
        "heads": {},
        "queries": {"heads": None, "synth_query": "model"},
        "keys": {"heads": None, "synth_key": "model"},
        "not split": {"heads": None},
    }.items():
        rules = {".*/scores/.*R": split} if split else {}
        flags = (BF16, "PACK=False", "BATCH_SIZE=32", *lengths(LENGTHS), *mesh(data=1, model=4))
        given = ("compile.rules=@Rules()", f"Rules.parameters={rules!r}")
        yield Case("R", name, "v5e:2x2", "train", files, (*flags, *given))


LARGE = {"3b": ("v5e:4x4", 16), "11b": ("v4:4x4x4", 64)}  # what more than 4 chips are needed for


def models() -> Iterator[Case]:
    """Every model with three kinds of attention."""
    for file in shipped("models", but="options"):
        size = file.removesuffix(".gin").rpartition("_")[2]
        topology, chips = LARGE.get(size, ("v5e:2x2", 4))
        for attention in ("V", "R", "R+V"):
            yield _product(file, attention, topology, chips)


def attentions() -> Iterator[Case]:
    """Every kind of attention in the smallest models that take it, and in a base model."""
    for attention in (name.removeprefix("attention/").removesuffix(".gin") for name in shipped("attention")):
        for file in ("models/t5_tiny.gin",):
            yield dataclasses.replace(_product(file, attention, "v5e:2x2", 4), section="attentions")


def _product(file: str, attention: str, topology: str, chips: int) -> Case:
    features = LENGTHS
    flags = [BF16, "PACK=False", f"BATCH_SIZE={2 * chips}"]
    if "classifier" in file:
        flags, features = [*flags, "NUM_CLASSES=4"], {"inputs": 512}
    elif "lm" in file:
        features = {"targets": 256}
    elif "mt" in file:
        features = {"inputs": 256, "targets": 256}  # its longest
    if chips > 4:
        flags += [FULL, *mesh(data=1, fsdp=chips)]
    files = (file, f"attention/{attention}.gin", "runs/compile.gin")
    return Case("models", f"{name_of(file)} {attention}", topology, "train", files, (*flags, *lengths(features)))


SECTIONS = {
    "paper": paper,
    "memory": memory,
    "meshes": meshes,
    "R": random_scores,
    "scaling": scaling,
    "11b": largest,
    "attentions": attentions,
    "models": models,
}


def shipped(folder: str, but: str = "") -> list[str]:
    return [f for f in launch.shipped_files() if f.startswith(f"{folder}/") and f != f"{folder}/{but}.gin"]


def name_of(file: str) -> str:
    return file.rpartition("/")[2].removesuffix(".gin")


def lengths(features: dict[str, int]) -> tuple[str, ...]:
    return (f"TASK_FEATURE_LENGTHS={json.dumps(features)}",)


def count(topology: str) -> int:
    """The chips of a slice."""
    return math.prod(int(size) for size in topology.partition(":")[2].split("x"))


# Compiling


def run(sections: list[str], only: str) -> None:
    """Compiles the cases of these sections, with `only` in their names, that have no line."""
    for section in sections:
        for case in SECTIONS[section]():
            if only in case.name and (section, case.name) not in lines():
                start = time.time()
                found = compiled(case)
                with LINES.open("a") as file:
                    file.write(
                        json.dumps({"section": section, "name": case.name, "command": shown(case)} | found) + "\n"
                    )
                print(
                    f"{section}  {case.name}  {time.time() - start:.0f} s  {found.get('error', 'ok')[:200]}", flush=True
                )


def compiled(case: Case) -> dict:
    """What the command finds, of each collective the sums alone; or its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.json"
        command = [sys.executable, "-m", "synthesizer_jax", *case.command(), f"--json={path}"]
        options = {"capture_output": True, "text": True, "env": os.environ | {"JAX_PLATFORMS": "cpu"}, "check": False}
        done = subprocess.run(command, **options)
        if done.returncode or not path.exists():
            return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
        found = json.loads(path.read_text())
    for step in found["steps"].values():
        step["activations"] = largest_but_gradients(step.pop("collectives", []))
        step["message"] = step.get("message", "")[:2000]
    return found


def largest_but_gradients(collectives: list[dict]) -> dict:
    """Of each kind of collective, its largest array: what would show whether attention or logits are exchanged."""
    largest: dict[str, dict] = {}
    for one in sorted(collectives, key=lambda one: one["bytes"] / one["times"]):
        largest[f"{one['kind']} over {one['axes']}"] = {
            "shape": one["shape"],
            "dtype": one["dtype"],
            "origin": one["origin"],
        }
    return largest


def shown(case: Case) -> str:
    """The command as it is typed."""
    words = [word if not set(word) & set("\"'{} @()") else f"'{word}'" for word in case.command()]
    return " ".join(["python -m synthesizer_jax", *words])


def lines() -> dict[tuple[str, str], dict]:
    found = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []
    return {(line["section"], line["name"]): line for line in found}


# Writing


def write() -> None:
    """docs/pods.md."""
    found = lines()
    PAGE.write_text("\n".join(_page(found)) + "\n")


def _page(found) -> Iterator[str]:
    yield "# Pods, by the TPU compiler"
    yield ""
    yield INTRODUCTION
    yield ""
    yield from _generations()
    for section, title, text, table in (
        ("paper", "The paper's C4 model", PAPER, _paper),
        ("11b", "T5 11B", ELEVEN, _pods),
        ("scaling", "Weak scaling", SCALING, _scaling),
        ("meshes", "Other meshes", MESHES, _meshes),
        ("R", "What R is split over", RANDOM, _meshes),
        ("memory", "What saves memory", MEMORY, _memory_table),
        ("attentions", "Every attention", ATTENTIONS, _grid),
        ("models", "Every model", MODELS, _grid),
    ):
        rows = {name: line for (of, name), line in found.items() if of == section}
        wanted = [case.name for case in SECTIONS[section]()]
        yield from (f"\n## {title}\n", text, "")
        yield from table({name: rows[name] for name in wanted if name in rows})
        missing = [name for name in wanted if name not in rows]
        if missing:
            yield f"\nNot compiled yet: {', '.join(missing)}."
        if rows:
            yield f"\nFor example: `{next(iter(rows.values()))['command']}`"


def _generations() -> Iterator[str]:
    yield "| TPU | devices a chip | GiB of HBM of a device | of which a program may have |"
    yield "| --- | ---: | ---: | ---: |"
    for name, generation in GENERATIONS.items():
        yield f"| {name} | {generation.devices} | {generation.memory} | {generation.usable} |"


def _step(line: dict, name: str = "train") -> dict:
    return line.get("steps", {}).get(name, {})


def _fits(line: dict, step: dict) -> str:
    if "error" in line:
        return line["error"]
    usable = line["memory_bytes_of_a_device"]
    if "memory" not in step:
        return f"no: needs at least {step['needs'] / GiB:.1f} of {usable / GiB:.2f} GiB" if step.get("needs") else "no"
    return f"{step['memory']['total'] / usable:.0%} of {usable / GiB:.2f} GiB"


def _sent(step: dict) -> int:
    return sum(row["sent"] for row in step.get("summary", ()))


def _carried(step: dict) -> int:
    return sum(row["bytes"] for row in step.get("summary", ()))


def _gib(size: float) -> str:
    return f"{size / GiB:,.2f}" if size >= 0.01 * GiB or not size else f"{size / GiB:.4f}"


def _paper(rows) -> Iterator[str]:
    yield (
        "| attention, slice | step | fits a device | temporaries GiB | memory moved GiB | sent GiB | program TFLOPs | model "
        "TFLOPs | program / model FLOPs |"
    )
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, line in rows.items():
        if "error" in line:
            yield f"| {name} | | {line['error']} | | | | | | |"
        for step_name, step in line.get("steps", {}).items():
            if "memory" not in step:
                yield f"| {name} | {step_name} | {_fits(line, step)} | | | | | | |"
                continue
            model = step["model_flops"]
            yield (
                f"| {name} | {step_name} | {_fits(line, step)} | {_gib(step['memory']['temporaries'])} | "
                f"{_gib(step['memory_bytes'])} | {_gib(_sent(step))} | {step['flops'] / 1e12:.2f} | "
                + (f"{model / 1e12:.2f} | {step['flops'] / model:.2f} |" if model else "- | - |")
            )


def _memory_table(rows) -> Iterator[str]:
    yield (
        "| | fits a device | parameters and optimizer GiB | temporaries GiB | all GiB | memory moved GiB | sent GiB | program / "
        "model FLOPs |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, line in rows.items():
        step = _step(line)
        if "memory" not in step:
            yield f"| {name} | {_fits(line, step)} | | | | | | |"
            continue
        memory = step["memory"]
        yield (
            f"| {name} | {_fits(line, step)} | {_gib(memory['parameters'] + memory['optimizer'])} | "
            f"{_gib(memory['temporaries'])} | {_gib(memory['total'])} | {_gib(step['memory_bytes'])} | {_gib(_sent(step))} | "
            f"{step['flops'] / step['model_flops']:.2f} |"
        )


def _pods(rows) -> Iterator[str]:
    yield from _memory_table(rows)
    fit = {name: line["chips"] for name, line in rows.items() if "memory" in _step(line)}
    if fit:
        yield f"\nThe smallest of these that fits is {min(fit, key=fit.get)}."


def _scaling(rows) -> Iterator[str]:
    yield "| chips | slice | collectives | carry MiB a chip | sent by a chip MiB | memory moved GiB | fits a chip |"
    yield "| ---: | --- | --- | ---: | ---: | ---: | --- |"
    for name, line in rows.items():
        step = _step(line)
        kinds = ", ".join(f"{row['count']} {row['kind']} over {row['axes']}" for row in step.get("summary", ()))
        yield (
            f"| {line.get('chips', '')} | {name} | {kinds} | {_carried(step) / MiB:,.1f} | {_sent(step) / MiB:,.1f} | "
            f"{_gib(step.get('memory_bytes', 0))} | {_fits(line, step)} |"
        )
    payloads = [_carried(_step(line)) for line in rows.values() if _step(line)]
    if len(payloads) > 1:
        spread = max(payloads) / min(payloads) - 1
        yield f"\nWhat the collectives of a chip carry differs by {spread:.1%} over all of these."
    if payloads:
        yield from _exchanged(rows)


def _exchanged(rows) -> Iterator[str]:
    """The largest arrays of each kind of collective, over all slices."""
    seen = {}
    for line in rows.values():
        for kind, one in _step(line).get("activations", {}).items():
            seen[f"{kind}: {one['dtype']}{one['shape']}"] = one["origin"].rpartition("closed_call/")[2][-60:]
    yield "The largest array of each kind: " + "; ".join(f"{what} ({where})" for what, where in seen.items()) + "."


def _meshes(rows) -> Iterator[str]:
    yield "| mesh | collective | over | times | sent by a chip MiB | largest array |"
    yield "| --- | --- | --- | ---: | ---: | --- |"
    for name, line in rows.items():
        for row in _step(line).get("summary", ()):
            yield (
                f"| {name} | {row['kind']} | {row['axes']} | {row['count']} | {row['sent'] / MiB:,.1f} | "
                f"{row['largest']} |"
            )
        if not _step(line).get("summary"):
            yield f"| {name} | {_fits(line, _step(line))} | | | | |"


def _grid(rows) -> Iterator[str]:
    yield "| configuration | slice | parameters | fits a device | sent MiB | program / model FLOPs |"
    yield "| --- | --- | ---: | --- | ---: | ---: |"
    for name, line in rows.items():
        step = _step(line)
        if "memory" not in step:
            yield f"| {name} | {line.get('topology', '')} | {line.get('parameters', 0):,} | {_fits(line, step)} | | |"
            continue
        yield (
            f"| {name} | {line['topology']} | {line['parameters']:,} | {_fits(line, step)} | {_sent(step) / MiB:,.1f} | "
            f"{step['flops'] / step['model_flops']:.2f} |"
        )


INTRODUCTION = """Made by `python benchmarks/pods.py`, which calls `python -m synthesizer_jax compile` for every row, on a machine
without a TPU. Numbers are the TPU compiler's, or read off the program that it made (loops count as often as they run), of one
device and one step: a chip, but half a chip of v3. **Nothing here was run on a TPU.** Memory is in GiB. *Memory moved* is what the
program reads from and writes to HBM, without padding; *sent* is what a device sends in the collectives by ring algorithms.
*program / model FLOPs* is above 1 where activations are computed again. Activations are bfloat16, parameters float32.

All rows are older than the fused kernel for V and mixtures, the packed softmax of R and the caches of decoding that
[performance.md](performance.md) describes: today's programs move less, and rows with "decode" compile longer."""
PAPER = """experiments/c4, 512 input and 114 target tokens, packed, batch 128; on v3:2x2, which the paper names, with every layer
recomputed (REMAT = "full"). Decoding is that of a whole batch, up to the last token. In D+V, dense and
dot product share a query: it stands in the traced model twice, and the compiler computes it once."""
ELEVEN = """R+V, batch 128, parameters split over all chips (fsdp), every layer recomputed, one row a chip at a time."""
SCALING = """experiments/c4/R+V.gin, 8 sequences a chip, data parallel. *carry* is the size of the arrays that are reduced, and they
are the gradients: 217 million parameters' in bfloat16 (434 MB), those of R at the lengths that occur (106 MB) and of the tied
embedding (99 MB, twice: of tokens and of logits) in float32 make 737 MB = 703 MiB. So nothing that attention computes is
exchanged, nor are logits. Of n chips, each sends 2 (n - 1) / n times as much by a ring: 1.5 times at 4 chips, twice at many."""
MESHES = """experiments/c4/R+V.gin, batch 128 on v5e:4x4. Attention weights of a layer are [b, 8, 512, 512] and logits
[b, 114, 32128] for b sequences; the largest array of each kind of collective is beside it."""
RANDOM = """T5 small with R at 512 and 114 tokens, batch 32, four chips on the model axis, with R [h, n, n] split over it by
head, by query, by key or not at all. By head, the default, nothing is sent for it."""
MEMORY = """experiments/c4/R+V.gin on v5e:2x2, batch 32, one change at a time. Microbatches add up gradients in float32 and
exchange them once; without them, those of layers are exchanged in bfloat16. Chunks of the loss save what logits need, which
counts where there are many: not with 114 targets a sequence, but in a language model, here of 256 tokens in a batch of 128
(models/paper_lm1b_base.gin)."""
ATTENTIONS = "Every file of gin_configs/attention in T5 tiny, 2 sequences a chip, 512 and 114 tokens, with dropout."
MODELS = """Every file of gin_configs/models with three kinds of attention, 2 sequences a chip, with dropout; from 3 billion
parameters on split over all chips and recomputed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "write"))
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=[])
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this in their name")
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.sections or list(SECTIONS), arguments.only)
    else:
        write()


if __name__ == "__main__":
    main()
