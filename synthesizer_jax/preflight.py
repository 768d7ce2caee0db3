"""What a command would do, checked and told before anything runs or is allocated.

Each function takes a command's arguments, raises the first fault as a ValueError, and returns lines for the user.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import seqio
from etils import epath

from synthesizer_jax import data, evaluation, sharding
from synthesizer_jax.models import EncoderDecoderConfig, count_parameters, parameters
from synthesizer_jax.training import checkpoint
from synthesizer_jax.training.step import PACKED, REQUIRED, Trainer


def before_training(arguments: Mapping[str, Any]) -> list[str]:
    """For `train`."""
    a = arguments
    _check_at_least("train_steps", a["train_steps"], 1)
    _check_writable("model_dir", a["model_dir"])
    mesh = (a["mesh"] or sharding.MeshShape()).build()
    sharding.check_batch_size(mesh, a["batch_size"])
    lines = _describe_split(a, "train")
    _check_data(a, a["model"])
    trainer = Trainer(a["model"], a["optimizer"], mesh, a["random_seed"], a["z_loss"], a["label_smoothing"])
    trainer.abstract_state()
    names = (*REQUIRED, *PACKED) if a["pack"] else REQUIRED
    lines += _describe_batch(names, a["task_feature_lengths"], a["batch_size"], a["model"])
    lines.append("devices: " + " x ".join(f"{name}={size}" for name, size in mesh.shape.items()))
    return lines + [_describe_start(a)]


def _describe_start(a: Mapping[str, Any]) -> str:
    found = checkpoint.latest(a["model_dir"])
    if found is not None:
        checkpoint.check_same_model(found, a["model"])
        if checkpoint.step_of(found) > a["train_steps"]:
            raise ValueError(f"train_steps: {found} is past step {a['train_steps']} already; expected at least as many")
        return f"continues from {found}"
    if a["initial_checkpoint_path"] is not None:
        found = checkpoint.find(a["initial_checkpoint_path"])
        checkpoint.check_same_model(found, a["model"])
        return f"starts from the parameters of {found}"
    return f"starts from new parameters, seed {a['random_seed']}"


def before_evaluation(arguments: Mapping[str, Any]) -> list[str]:
    """For `evaluate`."""
    tasks = evaluation.tasks_with_metrics(arguments["mixture_or_task_name"], arguments["split"])
    return [*before_inference(arguments), f"metrics of: {', '.join(task.name for task in tasks)}"]


def before_inference(arguments: Mapping[str, Any]) -> list[str]:
    """For `infer`."""
    a = arguments
    found = checkpoint.find(a["checkpoint_path"])
    config = checkpoint.read_config(found)
    _check_at_least("batch_size", a["batch_size"], 1)
    if a["output_dir"] is not None:
        _check_writable("output_dir", a["output_dir"])
    if a.get("input_file") is not None and not epath.Path(a["input_file"]).is_file():
        raise ValueError(f"input_file: no such file: {a['input_file']}")
    source = [f"inputs: {a['input_file']}"] if a.get("input_file") is not None else _describe_split(a, a["split"])
    _check_data(a, config)
    batch = _describe_batch(REQUIRED, a["task_feature_lengths"], a["batch_size"], config)
    return [f"checkpoint: {found}", *source, *batch]


def _check_data(a: Mapping[str, Any], config: EncoderDecoderConfig) -> None:
    provider = data.get_mixture_or_task(a["mixture_or_task_name"])
    data.check_lengths(a["task_feature_lengths"])
    data.check_vocabulary(provider, config.vocab_size)


def _describe_split(a: Mapping[str, Any], split: str) -> list[str]:
    provider = data.get_mixture_or_task(a["mixture_or_task_name"])
    data.check_split(provider, split)
    cached = "cached" if data.use_cache(provider, a["use_cached_tasks"]) else "not cached"
    tasks = ", ".join(task.name for task in seqio.get_subtasks(provider) if split in task.splits)
    return [f"data: split {split!r} of {tasks} ({cached})"]


def _describe_batch(names, lengths, batch_size: int, config: EncoderDecoderConfig) -> list[str]:
    """Traces the model on a batch, which finds lengths that it cannot take; allocates nothing."""
    length = {"encoder": lengths["inputs"], "decoder": lengths["targets"]}
    batch = {name: jax.ShapeDtypeStruct((batch_size, length[name.split("_")[0]]), jnp.int32) for name in names}
    inputs = {
        name: array for name, array in batch.items() if name not in ("decoder_target_tokens", "decoder_loss_weights")
    }
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
