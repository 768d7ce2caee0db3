"""docs/performance.md: what is measured of speed, each table by one command, and where.

    python benchmarks/performance.py run [NAME ...]   # runs benchmarks; their tables and figures go to docs/performance/
    python benchmarks/performance.py write            # docs/performance.md from the tables

Each benchmark can be run by itself, and says what it needs.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
FOLDER, PAGE = ROOT / "docs" / "performance", ROOT / "docs" / "performance.md"


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of the page."""

    name: str  # of the files in docs/performance
    title: str
    says: str
    command: str  # after `python benchmarks/`
    apart: bool = False  # too long for the page, which then has a link
    environment: tuple[tuple[str, str], ...] = (("JAX_PLATFORMS", "cpu"), ("TPU_SKIP_MDS_QUERY", "1"))


SECTIONS = (
    Section(
        "attention_tpu",
        "Attention, for TPU",
        "Causal layers with their projections in bfloat16, parameters in float32, 12 heads of 64. HBM is what moves to and from "
        "main memory. The bound is every array read and written once.",
        "attention.py --measures tpu --lengths 512 --batch 128 --passes both --variants V R FR R+V D+V",
    ),
    Section(
        "attention_tpu_long",
        "Longer attention, for TPU",
        "The same at 8 x 2048. What fits the chip's own memory costs nothing, so that less than the bound may move.",
        "attention.py --measures tpu --lengths 2048 --batch 8 --passes both --variants V R FR R+V D+V",
    ),
    Section(
        "attention_cpu",
        "Attention, on a CPU",
        "Attention alone, scores included, float32; vanilla is given its queries and keys, V makes its own. Every variant once a "
        "round; ratios are medians of the rounds' ratios.",
        "attention.py --measures cpu --lengths 512 --passes both --variants V R FR R+V --repeats 7",
    ),
    Section(
        "attention_tpu_all",
        "Attention for TPU, all variants",
        "16,384 tokens in batches: rows of 128 tokens, forward and both passes, and rows of 2,048, both passes. Other lengths were "
        "not run (each takes a quarter of an hour).",
        "attention.py --measures tpu --lengths 128 2048",
        apart=True,
    ),
    Section(
        "attention_cpu_all",
        "Attention on a CPU, all variants and lengths",
        "4,096 tokens in batches: rows of 128 to 4,096, forward and both passes.",
        "attention.py --measures cpu --repeats 3",
        apart=True,
    ),
    Section(
        "fused_attention",
        "The fused kernel, for TPU",
        "Scores with a low-rank part and a bias that the batch shares: R+V, D+V, FR+V, and V with T5's relative bias. XLA's columns are "
        "of the library's own general path; with JAX's gradients in place of its softmax's it moves two fifths more.",
        "fused_attention.py --measures bare layer plans",
    ),
    Section(
        "packed",
        "What packing costs R",
        "Rows of several segments, whose positions count from 0 in each. On a CPU rows of many segments are slower than the "
        "general path.",
        "attention.py --measures packed --lengths 128 512 --repeats 3",
    ),
    Section(
        "train_step",
        "Training steps on a CPU, beside Hugging Face transformers",
        "float32, d 256, 4 + 4 layers, MLP 512, vocabulary 8,192, batches of 8 x 256/64. In the paper R makes 1.61 times the steps "
        "of dynamic convolutions and 1.05 times those of lightweight ones (on TPU). The process keeps the memory that a step "
        "frees, which our Trainer asks of glibc and both sides profit from (synthesizer_jax/training/cpu.py).",
        "train_step.py --steps 25",
    ),
    Section(
        "train_step_fresh",
        "The same in memory that is given back after each step",
        "With the defaults of glibc and JAX, as where a program has used JAX before it imports the Trainer.",
        "train_step.py --steps 25 --fresh_memory --attention V R FR R+V",
    ),
    Section(
        "train_step_tiny",
        "Smaller steps",
        "d 128, 2 + 2 layers, batches of 8 x 128/32.",
        "train_step.py --steps 40 --size tiny",
    ),
    Section(
        "train_step_small",
        "Larger steps",
        "T5 small: d 512, 6 + 6 layers, vocabulary 32,128, batches of 8 x 512/114.",
        "train_step.py --steps 10 --size small --warmup 2 --attention V R FR R+V",
    ),
    Section(
        "decoding",
        "Greedy decoding on a CPU, beside Hugging Face transformers",
        "The same sizes, batch 8, 64 tokens.",
        "decoding.py --rounds 10 --lengths --attention V R FR R+V",
    ),
    Section(
        "compile_time",
        "Compilation and start",
        "The layers of a stack are compiled once, whatever their number; on a CPU up to four are unrolled.",
        "compile_time.py --depths 2 12 --attention V R --rounds 1 --topology none --import_pairs 1",
    ),
    Section(
        "long_sequences",
        "Long sequences",
        "The longest that fit 24 GiB, by the compiler's analysis for CPU, and a check of it by a process's real peak.",
        "long_sequences.py",
    ),
)
ELSEWHERE = """## Elsewhere

- The input pipeline: [tasks.md](tasks.md), "How fast" (`python benchmarks/input_pipeline.py`).
- Whole steps of every shipped configuration on slices of TPUs: [pods.md](pods.md).
- Light and dynamic convolution for TPU: `python benchmarks/convolution.py`.
- The cost of an import: `python benchmarks/import_time.py`.
"""


def run(section):
    """The benchmark's tables to NAME.md, its figures to NAME.json."""
    figures, tables = FOLDER / f"{section.name}.json", FOLDER / f"{section.name}.md"
    script, *options = section.command.split()
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options, "--json", str(figures)]
    print(f"{section.name}: python benchmarks/{section.command}", flush=True)
    found = subprocess.run(command, env={**os.environ, **dict(section.environment)}, stdout=subprocess.PIPE, text=True)
    if found.returncode:
        sys.exit(f"{section.name}: exit code {found.returncode}")
    lines = found.stdout.splitlines()
    tables.write_text("\n".join(line for line in lines if not line.startswith("{")).strip() + "\n")


def _within_page(text):
    """Tables without a title of their own, their headings one level lower."""
    for line in text.strip().splitlines():
        if not line.startswith(("# ", "Made by ", "`python ")):
            yield f"#{line}" if line.startswith("## ") else line


def page():
    """docs/performance.md."""
    yield "# Performance\n"
    yield (
        "Made by `python benchmarks/performance.py write` from the tables of the benchmarks that it names. **No TPU and no GPU "
        "was there**: figures for TPU are those of its compiler (bytes, operations, memory of a compiled program), and the CPU's "
        "are times of two shared cores, of which only the ratios mean something.\n"
    )
    for section in SECTIONS:
        tables = FOLDER / f"{section.name}.md"
        yield f"## {section.title}\n"
        yield f"{section.says} `python benchmarks/{section.command}`\n"
        if not tables.exists():
            yield "Not measured yet.\n"
        elif section.apart:
            yield f"[The tables]({FOLDER.name}/{tables.name}).\n"
        else:
            yield "\n".join(_within_page(tables.read_text())) + "\n"
    yield ELSEWHERE


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "write"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="sections; all without any")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in SECTIONS)}")
    if arguments.what == "run":
        FOLDER.mkdir(exist_ok=True)
        for section in SECTIONS:
            if not arguments.names or section.name in arguments.names:
                run(section)
    PAGE.write_text(re.sub(r"\n{3,}", "\n\n", "\n".join(page())))


if __name__ == "__main__":
    main()
