"""Training steps on CPU: ours with every kind of attention, and T5 of Hugging Face transformers in torch, in one process.

python benchmarks/train_step.py [--size mini] [--attention V R R+V ...] [--optimizer adamw | adafactor] [--steps 15]
    [--dropout 0.0] [--fresh_memory | --huge_pages] [--json FILE]

Needs `pip install 'synthesizer_jax[benchmarks]'` for torch and transformers; without them it measures ours alone. Both
sides have the same sizes, numbers of parameters (checked), batches, float32, dropout, class of optimizer and number of
threads. In each round every contestant makes one step, in a random order, with a pause before it in which the other's
threads go to sleep. Prints Markdown: medians with quartiles, and ratios of medians beside those within rounds.

torch: T5ForConditionalGeneration in train mode, called with attention_mask, decoder_input_ids and labels, once with eager
attention and once with torch's fused attention ("sdpa"); the faster is the opponent. Its AdamW is the fused one. Dropout is 0
unless given, as torch's masks cost more than ours, which all positions share.

Both sides profit from memory that the process keeps from step to step, as our Trainer asks of glibc (training/cpu.py).
--fresh_memory: neither does, as the program starts again with glibc's and JAX's defaults. --huge_pages: the same, with
malloc asking for huge pages.
"""

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import os
import random
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import numpy as np

import synthesizer_jax as sj
from synthesizer_jax.sharding import MeshShape, place_batch
from synthesizer_jax.training.optimizer import Adafactor, AdamW, Constant
from synthesizer_jax.training.step import Trainer

try:
    import torch
    import transformers
except ModuleNotFoundError:
    torch = None

ATTENTION = ("V", "R", "D", "FR", "R+V", "LightConv", "DynConv", "Linformer")
OPTIONS = {
    "LightConv": "width=9",
    "DynConv": "width=9",
    "Linformer": "rank=64",
}  # where the name alone does not say all
HUGE_PAGES = "glibc.malloc.hugetlb=1"
FRESH = "glibc.malloc.hugetlb=0"  # glibc's default; that it is said keeps the Trainer from asking
RATE = 1e-4
PAUSE = 0.05  # seconds; OpenMP's threads spin for a while after their work


@dataclasses.dataclass(frozen=True)
class Size:
    """A model's and its batch's sizes."""

    features: int
    mlp_features: int
    heads: int
    head_dim: int
    layers: int  # of encoder and of decoder
    vocab_size: int
    batch: int
    inputs: int  # tokens of a row
    targets: int


SIZES = {
    "tiny": Size(128, 512, 4, 32, 2, 8192, 8, 128, 32),
    "mini": Size(256, 512, 4, 64, 4, 8192, 8, 256, 64),
    "small": Size(512, 2048, 8, 64, 6, 32_128, 8, 512, 114),
}


def make_batch(size, seed=0):
    """Random tokens; the last tenth of every other row is padding."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(2, size.vocab_size, (size.batch, size.inputs), dtype=np.int32)
    targets = rng.integers(2, size.vocab_size, (size.batch, size.targets), dtype=np.int32)
    for tokens in (inputs, targets):
        tokens[::2, -(tokens.shape[1] // 10) :] = 0
    return {
        "encoder_input_tokens": inputs,
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }


# Contestants: their number of parameters, and a function that makes one step and returns the mean loss.


def ours(notation, size, options):
    chosen = f"{notation}[{OPTIONS[notation]}]" if notation in OPTIONS else notation
    encoder = sj.synthesizer(chosen, size.inputs)
    overrides = dataclasses.asdict(size)
    layers, _, inputs, _ = (overrides.pop(name) for name in ("layers", "batch", "inputs", "targets"))
    overrides |= {"encoder_layers": layers, "decoder_layers": layers, "dropout_rate": options.dropout}
    if notation == "Linformer":  # of a fixed number of keys, and so of no decoder
        overrides["decoder_attention"] = sj.synthesizer("V", inputs)
    config = sj.t5_tiny(encoder, max_length=inputs, **overrides)
    if options.optimizer == "adamw":
        optimizer = AdamW(Constant(RATE), max_gradient_norm=None)
    else:
        optimizer = Adafactor(Constant(RATE))
    trainer = Trainer(config, optimizer, MeshShape().build(jax.devices()[:1]))
    state, step = trainer.init(), trainer.train_step()
    batch = place_batch(trainer.mesh, make_batch(size))

    def one():
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready(state)
        return float(metrics["loss"] / metrics["weight"])

    return sj.count_parameters(config), one


def of_torch(attention, size, options):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=size.vocab_size,
        d_model=size.features,
        d_kv=size.head_dim,
        d_ff=size.mlp_features,
        num_layers=size.layers,
        num_decoder_layers=size.layers,
        num_heads=size.heads,
        dropout_rate=options.dropout,
        feed_forward_proj="relu",
        tie_word_embeddings=True,
        use_cache=False,
    )
    config._attn_implementation = attention
    model = transformers.T5ForConditionalGeneration(config).float().train()
    if options.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    else:
        optimizer = transformers.optimization.Adafactor(
            model.parameters(), lr=RATE, scale_parameter=True, relative_step=False, warmup_init=False
        )
    batch = {name: torch.from_numpy(rows).long() for name, rows in make_batch(size).items()}
    targets = batch["decoder_target_tokens"]
    labels = torch.where(targets > 0, targets, -100)
    mask = (batch["encoder_input_tokens"] > 0).long()

    def one():
        optimizer.zero_grad(set_to_none=True)
        loss = model(
            input_ids=batch["encoder_input_tokens"],
            attention_mask=mask,
            decoder_input_ids=batch["decoder_input_tokens"],
            labels=labels,
        ).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    used = model.config._attn_implementation
    if used != attention:
        raise ValueError(f"transformers took {used!r} attention in place of {attention!r}")
    return sum(p.numel() for p in model.parameters()), one


def contestants(options):
    """name -> (number of parameters, step)."""
    size, found = SIZES[options.size], {}
    for notation in options.attention:
        found[notation] = ours(notation, size, options)
    if torch is None:
        print("torch and transformers are missing: pip install 'synthesizer_jax[benchmarks]'; ours alone", flush=True)
        return found
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for attention in ("eager", "sdpa"):
        try:
            found[f"torch {attention}"] = of_torch(attention, size, options)
        except (ValueError, ImportError) as error:
            print(f"torch without {attention} attention: {error}", flush=True)
    if "V" in found:
        for name, (parameters, _) in found.items():
            if name.startswith("torch") and parameters != found["V"][0]:
                raise SystemExit(f"{name} has {parameters} parameters, V {found['V'][0]}: other models")
    return found


def measure(found, options):
    """name -> seconds of each round; everybody's first steps are not measured."""
    rng, seconds, losses = random.Random(0), {name: [] for name in found}, {name: [] for name in found}
    for name, (_, step) in found.items():
        for _ in range(options.warmup):
            losses[name].append(step())
    gc.collect()
    gc.disable()
    for _ in range(options.steps):
        order = list(found)
        rng.shuffle(order)
        for name in order:
            time.sleep(PAUSE)
            start = time.perf_counter()
            losses[name].append(found[name][1]())
            seconds[name].append(time.perf_counter() - start)
    return seconds, losses


# Figures


def quartiles(values):
    return statistics.quantiles(values, n=4, method="inclusive")


def figures(found, options):
    seconds, losses = measure(found, options)
    size = SIZES[options.size]
    rows = []
    for name, times in seconds.items():
        low, median, high = quartiles(times)
        row = {"name": name, "parameters": found[name][0], "seconds": times, "losses": losses[name]}
        row |= {"median": median, "quartiles": [low, high]}
        row["tokens_per_second"] = size.batch * (size.inputs + size.targets) / median
        rows.append(row)
    ratios = [ratio(a, b, seconds) for a, b in pairs(seconds)]
    return {"setting": setting(options), "contestants": rows, "ratios": ratios}


def pairs(seconds):
    """Whom to compare: ours with the faster torch, and with our V."""
    torches = [name for name in seconds if name.startswith("torch")]
    mine = [name for name in seconds if name not in torches]
    if torches:
        opponent = min(torches, key=lambda name: statistics.median(seconds[name]))
        yield from ((name, opponent) for name in mine)
    yield from ((name, "V") for name in mine if name != "V" and "V" in mine)
    yield from (("R", other) for other in ("DynConv", "LightConv") if {"R", other} <= set(mine))


def ratio(name, other, seconds):
    """How many times faster the first is: of medians, and quartiles of the rounds' own."""
    of_rounds = [b / a for a, b in zip(seconds[name], seconds[other], strict=True)]
    of_medians = statistics.median(seconds[other]) / statistics.median(seconds[name])
    return {"name": name, "beside": other, "speed": of_medians, "quartiles": quartiles(of_rounds)}


def setting(options):
    packages = ("jax", "flax", "torch", "transformers")
    chosen = {name: getattr(options, name) for name in ("size", "optimizer", "dropout", "steps")}
    return {
        "command": "python benchmarks/train_step.py " + " ".join(sys.argv[1:]),
        **chosen,
        "memory": "fresh" if options.fresh_memory else "fresh, huge pages" if options.huge_pages else "kept",
        "sizes": dataclasses.asdict(SIZES[options.size]),
        "threads": len(os.sched_getaffinity(0)),
        "versions": {name: importlib.metadata.version(name) for name in packages[: 4 if torch else 2]},
    }


def show(result):
    chosen = result["setting"]
    sizes = ", ".join(f"{name} {value}" for name, value in chosen["sizes"].items())
    versions = ", ".join(f"{name} {version}" for name, version in chosen["versions"].items())
    print(f"\n`{chosen['command']}`\n\n{sizes}; float32, {chosen['optimizer']}, dropout {chosen['dropout']}, ", end="")
    print(f"{chosen['threads']} threads, {chosen['memory']} memory; {versions}\n")
    print("| | parameters | ms a step, median | quartiles | tokens/s |\n|---|---|---|---|---|")
    for row in result["contestants"]:
        low, high = (f"{1e3 * value:.0f}" for value in row["quartiles"])
        print(f"| {row['name']} | {row['parameters']:,} | {1e3 * row['median']:.0f} | {low} to {high} | ", end="")
        print(f"{row['tokens_per_second']:,.0f} |")
    print("\n| speed | of medians | within rounds: median, quartiles |\n|---|---|---|")
    for row in result["ratios"]:
        low, middle, high = (f"{value:.2f}" for value in row["quartiles"])
        print(f"| {row['name']} / {row['beside']} | {row['speed']:.2f} | {middle}, {low} to {high} |")


def again(**environment):
    """This program once more, in this environment, unless it is there."""
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="mini")
    parser.add_argument("--attention", nargs="+", default=list(ATTENTION), metavar="NOTATION")
    parser.add_argument("--optimizer", choices=("adamw", "adafactor"), default="adamw")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=15, help="rounds that are measured")
    parser.add_argument("--warmup", type=int, default=3, help="steps before")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--fresh_memory", action="store_true")
    memory.add_argument("--huge_pages", action="store_true")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    if options.fresh_memory or options.huge_pages:
        tunable = HUGE_PAGES if options.huge_pages else FRESH
        again(GLIBC_TUNABLES=tunable, JAX_CPU_ENABLE_ASYNC_DISPATCH="1")
    result = figures(contestants(options), options)
    show(result)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
