"""Greedy decoding on a CPU: tokens per second beside Hugging Face's T5, bytes of the caches, and what a step costs.

python benchmarks/decoding.py [--attention V R D FR R+V] [--batch 8] [--inputs 64] [--targets 64] [--rounds 11] [--threads 1 2]
    [--lengths 64 256 1024 4096] [--json FILE]

Hugging Face's part needs pip install torch transformers; without them ours alone is measured. Encoder-decoders of the same
sizes, by default d 256, 4 + 4 layers, 8 heads of 32, MLP 512, vocabulary 8192, float32, with random weights. Every contestant
answers the same inputs with the same number of tokens: no id ends a row, as `generate` has no EOS at all, and ours one that
is checked not to come out. `generate` runs with the setting that is fastest here, of a dynamic or static cache and of these
numbers of threads. Encoding is part of the time on both sides. In each round everyone decodes once; ratios are of a round's
times, and medians of the rounds, with their quartiles. Prints Markdown.

The second table: one step at token 100 of models for 64 ... 4096 tokens, with the cache of its stage (128 tokens, see
decoding.py) and, for comparison, with a cache for all tokens. MB and MFLOP are read off the compiled program.
"""

import argparse
import functools
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import synthesizer_jax as sj
from synthesizer_jax.analysis import traffic
from synthesizer_jax.analysis.hlo import Module
from synthesizer_jax.decoding import greedy
from synthesizer_jax.models import parameters

FEATURES, HEADS, HEAD_DIM, MLP, LAYERS, VOCAB = 256, 8, 32, 512, 4, 8192
NEVER = VOCAB - 1  # the EOS that our models must not say
AT, STAGE = 100, 128  # the token at which a step is measured, and the tokens that its cache has room for
STEPS = 8  # measured at once


def configure(attention, max_length):
    sizes = {"features": FEATURES, "heads": HEADS, "head_dim": HEAD_DIM, "mlp_features": MLP, "vocab_size": VOCAB}
    return sj.t5_tiny(attention, max_length, encoder_layers=LAYERS, decoder_layers=LAYERS, **sizes)


def initial(config):
    return jax.jit(parameters.init, static_argnums=0)(config, jax.random.key(0))


# Tokens per second


def ours(attention, inputs, targets):
    """(a function that decodes, the bytes of its self-attention's cache)."""
    config = configure(attention, targets)
    trained, fixed = initial(config)

    @jax.jit
    def decode(trained, fixed, inputs):
        model = parameters.bind(config, trained, fixed).for_decoding()
        options = {"batch": inputs.shape[0], "max_length": targets, "eos_id": NEVER}
        return greedy(model.decode_step, model.init_cache(inputs, 1), grow=model.grow_cache, **options)

    said = np.asarray(decode(trained, fixed, inputs))
    if NEVER in said:
        raise SystemExit(f"{attention}: a row ended; take another NEVER")
    shapes = jax.eval_shape(lambda *p: parameters.bind(config, *p).init_cache(inputs, targets), trained, fixed)
    arrays = [leaf for layer in shapes["layers"] for leaf in jax.tree.leaves(layer["self"]) if leaf.ndim]
    run = functools.partial(decode, trained, fixed, inputs)
    return lambda: run().block_until_ready(), sum(array.size * array.dtype.itemsize for array in arrays)


def hugging_face(inputs, targets, threads):
    """(functions that decode, by their settings); empty without torch and transformers."""
    try:
        import torch
        from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration
    except ImportError:
        print("Without Hugging Face's T5, which needs: pip install torch transformers\n")
        return {}
    torch.manual_seed(0)
    ids = {"eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 0}
    sizes = {"d_model": FEATURES, "num_heads": HEADS, "d_kv": HEAD_DIM, "d_ff": MLP, "vocab_size": VOCAB}
    model = T5ForConditionalGeneration(T5Config(num_layers=LAYERS, num_decoder_layers=LAYERS, **sizes, **ids)).eval()
    tokens = torch.tensor(np.asarray(inputs), dtype=torch.long)
    mask = torch.ones_like(tokens)

    def decode(cache, count):
        torch.set_num_threads(count)
        with torch.inference_mode():
            said = model.generate(tokens, attention_mask=mask, generation_config=cache)
        assert said.shape == (tokens.shape[0], targets + 1), said.shape
        return said

    how = {"max_new_tokens": targets, "do_sample": False, "num_beams": 1, "use_cache": True}
    kinds = {
        "dynamic cache": GenerationConfig(**how, **ids),
        "static cache": GenerationConfig(cache_implementation="static", **how, **ids),
    }
    return {
        f"{name}, {count} thread{'s' * (count > 1)}": functools.partial(decode, config, count)
        for name, config in kinds.items()
        for count in threads
    }


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def fastest(settings):
    """The setting with the best of 3 runs after a first one."""
    best = {name: min([seconds(function) for _ in range(4)][1:]) for name, function in settings.items()}
    for name, value in best.items():
        print(f"generate, {name}: {value:.3f} s")
    return min(best, key=best.get)


def quartiles(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high]}


def compare(options):
    tokens = options.batch * options.targets
    inputs = jnp.asarray(np.random.default_rng(0).integers(2, VOCAB, (options.batch, options.inputs)), jnp.int32)
    settings = hugging_face(inputs, options.targets, options.threads)
    contestants, cache_bytes = {}, {}
    if settings:
        name = fastest(settings)
        contestants["Hugging Face"] = settings[name]
        print(f"\nHugging Face's T5 with {name}; batch {options.batch}, {options.inputs} -> {options.targets} tokens\n")
    for attention in options.attention:
        contestants[attention], cache_bytes[attention] = ours(attention, inputs, options.targets)
    times = {name: [] for name in contestants}
    for number in range(options.rounds + 1):
        for name, decode in contestants.items():
            taken = seconds(decode)
            if number:  # the first warms up
                times[name].append(taken)
    for name, taken in times.items():
        row = {"model": name, "tokens_per_second": quartiles([tokens / second for second in taken])}
        if "Hugging Face" in times:
            base = times["Hugging Face"]
            row["ratio"] = quartiles([theirs / second for theirs, second in zip(base, taken, strict=True)])
            row["ratio_of_medians"] = statistics.median(base) / statistics.median(taken)
        yield row | ({"cache_bytes": cache_bytes[name]} if name in cache_bytes else {})


# A step's cost


def steps(attention, max_length, cache_length):
    """(compiled steps, their arguments), each after AT tokens, or the last ones of a shorter model."""
    config = configure(attention, max_length)
    trained, fixed = initial(config)
    inputs = jnp.full((8, 64), 5, jnp.int32)
    at = min(AT, cache_length - STEPS)

    def cache(trained, fixed, inputs):
        made = parameters.bind(config, trained, fixed).init_cache(inputs, cache_length)
        counted = {"index": jnp.asarray(at, jnp.int32)}
        layers = tuple(layer | {"self": layer["self"] | counted} for layer in made["layers"])
        return made | {"layers": layers} | counted

    def run(trained, fixed, cache):
        model = parameters.bind(config, trained, fixed).for_decoding()

        def step(_, state):
            logits, cache = model.decode_step(*state)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, STEPS, step, (jnp.ones((8, 1), jnp.int32), cache))

    made = jax.jit(cache)(trained, fixed, inputs)
    return jax.jit(run).lower(trained, fixed, made).compile(), (trained, fixed, made)


def of_a_step(program):
    """(MB, MFLOP) of one step: of the loop's body."""
    module = Module.parse(program.as_text())
    found = [(c, i, times) for c, i, times in traffic.executed(module) if times == STEPS]
    counts = traffic.memory_bytes(module, found), traffic.matrix_flops(module, found)
    return [count / STEPS / 1e6 for count in counts]


def cost(options):
    for attention in ("V", "R"):
        compiled = {}
        for length in options.lengths:
            for cache_length in dict.fromkeys((min(STAGE, length), length)):
                compiled[length, cache_length] = steps(attention, length, cache_length)
        taken = {key: [] for key in compiled}
        for number in range(options.rounds + 1):
            for key, (program, arguments) in compiled.items():
                second = seconds(lambda: jax.block_until_ready(program(*arguments)))
                if number:
                    taken[key].append(second / STEPS * 1e3)
        for (length, cache_length), (program, _) in compiled.items():
            megabytes, megaflop = of_a_step(program)
            row = {"model": attention, "max_length": length, "cache": cache_length, "mb": megabytes}
            yield row | {"mflop": megaflop, "ms": quartiles(taken[length, cache_length])}


def table(rows):
    if not rows:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(cell(row.get(name, "-")) for name in columns) + " |")
    print()


def cell(value):
    if isinstance(value, dict):
        return f"{cell(value['median'])} ({' to '.join(map(cell, value['quartiles']))})"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 1000
        else f"{value:,.0f}"
        if value != str(value)
        else value
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="*", default=["V", "R", "D", "FR", "R+V"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--inputs", type=int, default=64)
    parser.add_argument("--targets", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, os.cpu_count()}), help="of torch")
    parser.add_argument("--lengths", nargs="*", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    decoding = list(compare(options)) if options.attention else []
    table(decoding)
    costs = list(cost(options)) if options.lengths else []
    table(costs)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"decoding": decoding, "cost_of_a_step": costs}, file, indent=2)


if __name__ == "__main__":
    main()
