"""The paper's experiment in small: the same model with several attentions, pretrained, fine-tuned and compared."""

import dataclasses
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from etils import epath

from synthesizer_jax import data, evaluation
from synthesizer_jax.analysis.attention_maps import draw_maps, encoder_maps
from synthesizer_jax.models import parameters
from synthesizer_jax.models.config import EncoderDecoderConfig, to_json
from synthesizer_jax.mixers import synthesizer
from synthesizer_jax.training import checkpoint, loop
from synthesizer_jax.training.logging import JSON_LINES, read_lines
from synthesizer_jax.training.optimizer import Adafactor, AdamW


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training run that every variant goes through."""

    mixture_or_task_name: str  # of seqio
    task_feature_lengths: Mapping[str, int]
    steps: int
    optimizer: Adafactor | AdamW
    pack: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """What came out for one attention."""

    attention: str
    parameters: int
    steps_per_second: float  # of pretraining, compilation left out
    pretraining_loss: float  # nats per token, on held-out text
    metrics: Mapping[str, float]  # "<task> <metric>" -> value, on held-out examples


def compare(
    *,
    model: EncoderDecoderConfig,
    attentions: Sequence[str],
    max_length: int,
    pretraining_task: str,
    pretraining_feature_lengths: Mapping[str, int],
    pretraining_steps: int,
    pretraining_optimizer: Adafactor | AdamW,
    finetuning_task: str,
    finetuning_feature_lengths: Mapping[str, int],
    finetuning_steps: int,
    finetuning_optimizer: Adafactor | AdamW,
    batch_size: int,
    model_dir: str,
    random_seed: int = 0,
) -> list[Row]:
    """Pretrains and fine-tunes `model` with each attention, and writes what comes out.

    model: the configuration, whose attention is replaced. attentions: the paper's letters, such as ("V", "R", "R+V").
    max_length: n of the synthetic parts. The tasks are seqio tasks or mixtures; fine-tuning does not pack. Runs that
    are complete in model_dir are not repeated.

    Writes comparison.md, comparison.json and attention.png (the first encoder layer's heads, at initialisation and
    after both stages) into model_dir; returns the rows.
    """
    if not attentions:
        raise ValueError('attentions: expected at least one of the paper\'s letters, such as ("V", "R"), got none')
    pretraining = Stage(
        pretraining_task, pretraining_feature_lengths, pretraining_steps, pretraining_optimizer, pack=True
    )
    finetuning = Stage(finetuning_task, finetuning_feature_lengths, finetuning_steps, finetuning_optimizer, pack=False)
    folder = epath.Path(model_dir)
    start = time.monotonic()
    rows, maps = [], {}
    for attention in attentions:
        spec = synthesizer(attention, max_length)
        config = dataclasses.replace(model, encoder_attention=spec, decoder_attention=spec)
        _tell(f"--- {attention}: {parameters.count_parameters(config):,} parameters")
        run = _Run(config, batch_size, random_seed, folder / folder_name(attention))
        rows.append(run.row(attention, pretraining, finetuning))
        maps[attention] = run.maps(finetuning)
    if jax.process_index() != 0:
        return rows
    text = as_markdown(rows)
    minutes = (time.monotonic() - start) / 60
    settings = {
        "model": json.loads(to_json(model)),
        "pretraining": dataclasses.asdict(pretraining),
        "finetuning": dataclasses.asdict(finetuning),
        "batch_size": batch_size,
        "random_seed": random_seed,
        "minutes": round(minutes, 2),
    }
    (folder / "comparison.md").write_text(text)
    (folder / "comparison.json").write_text(
        json.dumps({"rows": [dataclasses.asdict(row) for row in rows], "settings": settings}, indent=2) + "\n"
    )
    (words,) = {words for _, words in maps.values()}
    picture = draw_maps(
        {attention: blocks for attention, (blocks, _) in maps.items()},
        ("before", "after"),
        words,
        "Attention of the first encoder layer, before pretraining and after fine-tuning",
    )
    with (folder / "attention.png").open("wb") as file:
        picture.savefig(file)
    _tell(f"\n{text}\n{minutes:.1f} minutes. Written to {folder}: comparison.md, comparison.json, attention.png")
    return rows


def _tell(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def folder_name(attention: str) -> str:
    """The notation without what has a meaning in patterns of file names, which Orbax would look for."""
    return re.sub(r"[^\w+.=,-]", "_", attention)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The two stages of one variant, and what is read from them."""

    config: EncoderDecoderConfig
    batch_size: int
    seed: int
    folder: epath.Path

    def row(self, attention: str, pretraining: Stage, finetuning: Stage) -> Row:
        self._train("pretraining", pretraining, None, eval_period=pretraining.steps)
        self._train("finetuning", finetuning, str(self.folder / "pretraining"), eval_period=None)
        results = evaluation.evaluate(
            checkpoint_path=str(self.folder / "finetuning"),
            mixture_or_task_name=finetuning.mixture_or_task_name,
            task_feature_lengths=finetuning.task_feature_lengths,
            batch_size=4 * self.batch_size,
        )
        speeds = [line["timing/steps_per_second"] for line in self._log("train") if "timing/steps_per_second" in line]
        return Row(
            attention,
            parameters.count_parameters(self.config),
            round(statistics.median(speeds), 3),
            round(self._log(f"training_eval/{pretraining.mixture_or_task_name}")[-1]["loss"], 4),
            {f"{task} {name}": value for task, metrics in results.items() for name, value in metrics.items()},
        )

    def _log(self, name):
        return read_lines(self.folder / "pretraining" / name / JSON_LINES)

    def maps(self, finetuning: Stage) -> tuple[list[np.ndarray], tuple[str, ...]]:
        """The first encoder layer's maps before and after, and the tokens of the example that they are of."""
        task = finetuning.mixture_or_task_name
        batch, _ = next(iter(data.eval_batches(task, finetuning.task_feature_lengths, 1, split="validation")))
        tokens = batch["encoder_input_tokens"]
        tokens = tokens[:, : int((tokens > 0).sum())]
        vocabulary = data.output_vocabulary(task, "inputs")
        words = tuple(vocabulary.tokenizer.id_to_piece(int(token)) for token in tokens[0])
        before = parameters.init(self.config, jax.random.key(self.seed))
        _, *after = checkpoint.restore_params(str(self.folder / "finetuning"))
        return [encoder_maps(self.config, *parts, tokens) for parts in (before, after)], words

    def _train(self, name, stage, initial_checkpoint_path, eval_period):
        loop.train(
            model=self.config,
            optimizer=stage.optimizer,
            mixture_or_task_name=stage.mixture_or_task_name,
            task_feature_lengths=stage.task_feature_lengths,
            batch_size=self.batch_size,
            train_steps=stage.steps,
            model_dir=str(self.folder / name),
            initial_checkpoint_path=initial_checkpoint_path,
            random_seed=self.seed,
            pack=stage.pack,
            checkpoint_period=stage.steps,
            keep=1,
            log_period=max(1, stage.steps // 4),
            eval_period=eval_period,
        )


def as_markdown(rows: Sequence[Row]) -> str:
    """The comparison as a Markdown table."""
    metrics = list(rows[0].metrics)
    header = ["attention", "parameters", "steps/s", "pretraining loss", *metrics]
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = [row.attention, f"{row.parameters:,}", f"{row.steps_per_second:.1f}", f"{row.pretraining_loss:.3f}"]
        lines.append("| " + " | ".join(cells + [f"{row.metrics[name]:.1f}" for name in metrics]) + " |")
    return "\n".join(lines) + "\n"
