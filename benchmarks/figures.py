"""The pictures of attention weights under docs/: of the variants at initialisation, and of a run of the quickstart.

    python benchmarks/figures.py [MODEL_DIR [FOLDER]]

Without a run, of models that are drawn with a fixed seed: a minute on any machine, the same pixels each time. With the
MODEL_DIR of a quickstart run (experiments/quickstart.gin), of its variants before and after training. FOLDER: docs.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import synthesizer_jax.tasks.quickstart
from PIL import Image

import synthesizer_jax as sj
from synthesizer_jax import data
from synthesizer_jax.analysis import attention_maps
from synthesizer_jax.analysis.comparison import folder_name
from synthesizer_jax.models import parameters
from synthesizer_jax.training import checkpoint

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SENTENCE = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "lay", "on", "the", "rug"]
ZOO = {
    "V": "V",
    "R": "R",
    "FR": "FR[rank=2]",
    "D": "D",
    "FD": "FD",
    "R+V": "R+V",
    "RBF": sj.Kernel("rbf"),
    "LightConv": "LightConv[width=5,heads=4]",
    "Linformer": "Linformer[rank=4]",
}


def drawn(attention: str, tokens: np.ndarray) -> attention_maps.Maps:
    """The maps of an encoder at initialisation, without a relative position bias."""
    sizes = {"max_length": tokens.shape[1], "vocab_size": int(tokens.max()) + 1, "relative_bias": False}
    config = sj.classifier_tiny(2, attention, **sizes)
    model = parameters.bind(config, *jax.jit(parameters.init, static_argnums=0)(config, jax.random.key(0)))
    return attention_maps.weights(model, {"encoder_input_tokens": jnp.asarray(tokens)})["encoder"]


def save(picture: attention_maps.Picture, path: pathlib.Path) -> None:
    """As PNG of at most 256 colours, a third of the size."""
    picture.savefig(path)
    Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=256).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def at_initialisation(folder: pathlib.Path) -> None:
    """Of a sentence, the heads of all variants; of random tokens, the histograms of V, D and R."""
    words = sorted(set(SENTENCE))
    sentence = np.array([[1 + words.index(word) for word in SENTENCE]])
    zoo = {name: {"": drawn(attention, sentence)} for name, attention in ZOO.items()}
    title = "Attention weights of the first layer at initialisation"
    save(attention_maps.compare(zoo, tokens=SENTENCE, title=title), folder / "attention_zoo.png")
    tokens = np.random.default_rng(0).integers(1, 500, (8, 64))
    variants = {name: drawn(name, tokens) for name in ("V", "D", "R")}
    title = "Attention weights of an encoder at initialisation"
    save(attention_maps.histograms(variants, title=title), folder / "attention_histograms.png")


def of_run(model_dir: pathlib.Path, folder: pathlib.Path) -> None:
    """Of validation examples, each variant's heads and layers before and after training, and the histograms after it."""
    comparison = json.loads((model_dir / "comparison.json").read_text())
    finetuning, seed = comparison["settings"]["finetuning"], comparison["settings"]["random_seed"]
    task, lengths = finetuning["mixture_or_task_name"], finetuning["task_feature_lengths"]
    batch, _ = next(iter(data.eval_batches(task, lengths, 8, split="validation")))
    words = data.output_vocabulary(task, "inputs").tokenizer
    example = batch["encoder_input_tokens"][0]
    tokens = [words.id_to_piece(int(token)) for token in example[example > 0]]
    stages = {}
    for attention in (row["attention"] for row in comparison["rows"]):
        config, *after = checkpoint.restore_params(str(model_dir / folder_name(attention) / "finetuning"))
        before = jax.jit(parameters.init, static_argnums=0)(config, jax.random.key(seed))
        stages[attention] = {
            stage: attention_maps.weights(parameters.bind(config, *arrays), batch)["encoder"]
            for stage, arrays in (("before", before), ("after", after))
        }
    title = "Attention weights of the first encoder layer, before pretraining and after fine-tuning"
    save(attention_maps.compare(stages, tokens=tokens, title=title), folder / "quickstart_attention.png")
    title = "Attention weights of the encoder before and after training, mean of the heads"
    save(attention_maps.compare(stages, by="layers", tokens=tokens, title=title), folder / "quickstart_layers.png")
    after = {attention: of["after"] for attention, of in stages.items()}
    title = "Attention weights of the encoder after training"
    save(attention_maps.histograms(after, title=title), folder / "quickstart_histograms.png")


if __name__ == "__main__":
    run, folder, *_ = [*map(pathlib.Path, sys.argv[1:]), None, None]
    if run is None:
        at_initialisation(DOCS)
    else:
        of_run(run, folder or DOCS)
