"""What a command would do, checked and told before anything runs or is allocated.

Each function takes a command's arguments, raises the first fault as a ValueError, and returns lines for the user.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from synthesizer_jax import data, evaluation, sharding
from synthesizer_jax.models import ModelConfig, count_parameters, parameters
from synthesizer_jax.training import checkpoint, loop, profiling, throughput, watchdog
from synthesizer_jax.training.step import Trainer


def before_training(arguments: Mapping[str, Any]) -> list[str]:
    """For `train`."""
    a = arguments
    _check_at_least("train_steps", a["train_steps"], 1)
    profiling.check_steps(a["profile_steps"], a["train_steps"])
    throughput.check_peak(a["peak_flops_per_device"])
    watchdog.check_seconds(a["watchdog_seconds"])
    checkpoint.check_kept(a["keep"], a["keep_period"])
    checkpoint.check_folder(a["model_dir"])
    _check_writable("model_dir", a["model_dir"])
    mesh = (a["mesh"] or sharding.MeshShape()).build()
    lines = _describe_split(a, "train")
    data.check_packing(a["model"].batch, a["pack"])
    data.check_shards(a["batch_size"], a["data_shards"])
    _check_data(a, a["model"])
    in_parts = {name: a[name] for name in ("z_loss", "label_smoothing", "microbatches", "loss_chunks")}
    rules = a["rules"] or sharding.Rules()
    trainer = Trainer(a["model"], a["optimizer"], mesh, a["random_seed"], rules=rules, **in_parts)
    trainer.check_batch_size(a["batch_size"])
    trainer.abstract_state()
    lines += _describe_cuts(a, "train")
    lines += _describe_batch(a["pack"], a["task_feature_lengths"], a["batch_size"], a["model"])
    lines.append(sharding.described(mesh))
    return lines + _describe_start(a)


def _describe_start(a: Mapping[str, Any]) -> list[str]:
    if checkpoint.exists(a["model_dir"]):
        found = checkpoint.find(a["model_dir"])
        checkpoint.check_same_model(found, a["model"])
        _check_same_batches(a, found)
        if checkpoint.step_of(found) > a["train_steps"]:
            raise ValueError(f"train_steps: {found} is past step {a['train_steps']} already; expected at least as many")
        return [*checkpoint.damaged(a["model_dir"]), f"continues from {found}"]
    if a["initial_checkpoint_path"] is not None:
        found = checkpoint.find(a["initial_checkpoint_path"])
        passed_over = checkpoint.damaged(a["initial_checkpoint_path"])
        return [*passed_over, f"starts from {checkpoint.check_initial(found, a['model'])}"]
    return [f"starts from new parameters, seed {a['random_seed']}"]


def _check_same_batches(a: Mapping[str, Any], found: epath.Path) -> None:
    """What can be told without reading examples."""
    order = {
        "seed": a["random_seed"],
        "pack": a["pack"],
        "shards": a["data_shards"],
        "shuffle": True,
        "num_epochs": None,
    }
    batches = a["mixture_or_task_name"], a["task_feature_lengths"], a["batch_size"], a["model"].batch
    given = data.settings(*batches, split="train", use_cached_tasks=a["use_cached_tasks"], **order)
    data.check_settings(loop.position(found), given)


def before_evaluation(arguments: Mapping[str, Any]) -> list[str]:
    """For `evaluate`."""
    a = arguments
    found = checkpoint.find(a["checkpoint_path"])
    keys = checkpoint.read_config(found).batch
    tasks = evaluation.tasks_with_metrics(a["mixture_or_task_name"], a["split"], keys)
    return [*_describe_use(a, found), f"metrics of: {', '.join(task.name for task in tasks)}"]


def before_inference(arguments: Mapping[str, Any]) -> list[str]:
    """For `infer`."""
    found = checkpoint.find(arguments["checkpoint_path"])
    evaluation.check_source(checkpoint.read_config(found).batch, arguments["input_file"])
    return _describe_use(arguments, found)


def _describe_use(a: Mapping[str, Any], found: epath.Path) -> list[str]:
    config = checkpoint.read_config(found)
    _check_at_least("batch_size", a["batch_size"], 1)
    if a["output_dir"] is not None:
        _check_writable("output_dir", a["output_dir"])
    source = [f"inputs: {a['input_file']}"] if a.get("input_file") is not None else _describe_split(a, a["split"])
    _check_data(a, config)
    source += _describe_cuts(a, a["split"]) if a.get("input_file") is None else []
    batch = _describe_batch(False, a["task_feature_lengths"], a["batch_size"], config)
    mesh, rules = (a["mesh"] or sharding.MeshShape()).build(), a["rules"] or sharding.Rules()
    declared = parameters.abstract(config)
    sharding.check_rules(rules, *declared)
    sharding.shaped(mesh, declared, rules)
    return [
        *checkpoint.damaged(a["checkpoint_path"]),
        f"checkpoint: {found}",
        *source,
        *batch,
        sharding.described(mesh),
    ]


def _check_data(a: Mapping[str, Any], config: ModelConfig) -> None:
    data.check_model(a["mixture_or_task_name"], config)
    data.check_lengths(a["task_feature_lengths"], config.batch)


def _describe_split(a: Mapping[str, Any], split: str) -> list[str]:
    provider = data.get_mixture_or_task(a["mixture_or_task_name"])
    data.check_split(provider, split)
    return [data.describe_split(provider, split, a["use_cached_tasks"])]


def _describe_cuts(a: Mapping[str, Any], split: str) -> list[str]:
    """Reads examples: what is missing or can't be made with these lengths is found."""
    lengths, cached = a["task_feature_lengths"], a["use_cached_tasks"]
    options = {"split": split, "use_cached_tasks": cached, "seed": a["random_seed"]}
    return [str(cut) for cut in data.cut_examples(a["mixture_or_task_name"], lengths, **options)]


def _describe_batch(packed: bool, lengths: Mapping[str, int], batch_size: int, config: ModelConfig) -> list[str]:
    """Traces the model on a batch, which finds lengths that it cannot take; allocates nothing."""
    shapes_of_arrays = config.batch.shapes(batch_size, lengths, packed)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes_of_arrays.items()}
    inputs = {name: batch[name] for name in (*config.batch.inputs, *config.batch.packing) if name in batch}
    trained, fixed = parameters.abstract(config)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), (trained, fixed))
    logits = jax.eval_shape(
        lambda trained, fixed, batch: parameters.bind(config, trained, fixed)(**batch), *shapes, inputs
    )
    frozen = sum(leaf.size for leaf in jax.tree.leaves(shapes[1]))
    count = f"{count_parameters(config):,} trained parameters" + (f", {frozen:,} fixed" if frozen else "")
    shown = [f"  {name} {list(array.shape)} {array.dtype}" for name, array in batch.items()]
    return [f"model: {count}", "batch:", *shown, f"  -> logits {list(logits.shape)} {logits.dtype}"]


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _check_writable(name: str, path: str) -> None:
    """ValueError unless the folder is there and can be written, or can be made. Local paths only."""
    if "://" in path:
        return
    there = epath.Path(path).expanduser().absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{name}: cannot write to {path}: {there} is not a folder that you may write to")
