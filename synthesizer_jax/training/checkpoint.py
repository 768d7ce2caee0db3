"""Checkpoints: model_dir/checkpoint_<step>/, written by Orbax in the background, restored strictly.

One checkpoint holds all that a run needs to go on, and appears by a single rename, so that a run killed while it saves
leaves nothing that could be taken for a checkpoint:

    state/   parameters, optimizer state and step, as nested dicts of arrays
    model/   the model's configuration, as JSON
    run/     what the trainer wants back (position in the data, settings), as JSON

Restoring compares every path and shape before it reads an array: Orbax itself ignores a requested shape.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh
from orbax.checkpoint.checkpoint_managers import LatestN

from synthesizer_jax import sharding
from synthesizer_jax.models import parameters
from synthesizer_jax.models.config import (
    EncoderDecoderConfig,
    EncoderOnlyConfig,
    ModelConfig,
    config_from_json,
    to_json,
)

PREFIX = "checkpoint"
STATE, MODEL, RUN = "state", "model", "run"
TRASH = "deleted_checkpoints"

# Fields of a configuration that may change between the run that wrote a checkpoint and the one that reads it.
FREE_FIELDS = ("dropout_rate", "dtype", "remat")

# Where an encoder-decoder and a classifier have the same parameters.
ENCODER_PATHS = ("params/embedding", "params/position_embedding", "params/encoder", "fixed/encoder")


def check_folder(model_dir: epath.PathLike) -> None:
    """ValueError where a path has what means something in patterns of file names: Orbax could not find its own files."""
    wrong = sorted(set(str(epath.Path(model_dir).absolute())) & set("[]*?"))
    if wrong:
        raise ValueError(
            f"model_dir: expected a path without {' '.join(wrong)}, which are patterns of file names to Orbax, got {model_dir}"
        )


class CheckpointWriter:
    """Writes checkpoints of one model_dir in the background and keeps the last `keep` of them (None: all).

    Unfinished directories of a killed run are removed. Use as a context manager: leaving waits for the last write.
    """

    def __init__(self, model_dir: str, keep: int | None = 3):
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep: expected a number of checkpoints >= 1, or None for all, got {keep!r}")
        check_folder(model_dir)
        folder = epath.Path(model_dir).absolute()
        options = ocp.CheckpointManagerOptions(
            step_prefix=PREFIX,
            cleanup_tmp_directories=True,
            preservation_policy=LatestN(keep),
            todelete_subdir=TRASH,  # a rename, as a run killed while it deletes would leave half a checkpoint behind
        )
        self._manager = ocp.CheckpointManager(folder, options=options)
        self._trash = folder / TRASH
        self._empty_trash()

    def save(self, step: int, state: Any, config: ModelConfig, run: Mapping[str, Any]) -> None:
        """Copies `state` and returns; files are written while training goes on. Raises an earlier write's error."""
        items = {
            STATE: ocp.args.PyTreeSave(_nested(dict(sharding.named_leaves(state)))),
            MODEL: ocp.args.JsonSave(json.loads(to_json(config))),
            RUN: ocp.args.JsonSave(dict(run)),
        }
        self._manager.wait_until_finished()  # Orbax would wait as well; until then it may still fill the trash
        self._empty_trash()
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def check(self) -> None:
        """Raises the error of a write in the background, such as a full disk."""
        self._manager.check_for_errors()

    def wait(self) -> None:
        """Until all is on disk."""
        self._manager.wait_until_finished()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._manager.close()
        self._empty_trash()

    def _empty_trash(self):
        if jax.process_index() == 0 and self._trash.exists():
            self._trash.rmtree(missing_ok=True)


def latest(model_dir: str) -> epath.Path | None:
    """The checkpoint with the highest step, None where there is none."""
    folder = epath.Path(model_dir)
    steps = {step_of(path): path for path in folder.iterdir()} if folder.is_dir() else {}
    steps.pop(None, None)
    return steps[max(steps)] if steps else None


def step_of(path: epath.PathLike) -> int | None:
    """1000 for .../checkpoint_1000, None for any other name (also for one that is being written)."""
    match = re.fullmatch(rf"{PREFIX}_(\d+)", epath.Path(path).name)
    return int(match.group(1)) if match else None


def find(path: str) -> epath.Path:
    """The checkpoint at `path`, which is a checkpoint or a model_dir with checkpoints, of which the last one is taken.

    Raises: ValueError when nothing is there, or no checkpoint.
    """
    folder = epath.Path(path)
    if not folder.exists():
        raise ValueError(f"checkpoint path {path!r} does not exist")
    if _is_checkpoint(folder):
        return folder
    last = latest(path)
    if last is not None:
        return last
    unfinished = [child.name for child in folder.iterdir() if child.name.startswith(PREFIX)] if folder.is_dir() else []
    found = f"only unfinished ones: {', '.join(unfinished)}" if unfinished else f"no {PREFIX}_<step> folder"
    raise ValueError(
        f"checkpoint path {path!r} is neither a checkpoint (a folder with {STATE}/ and {MODEL}/) nor a model_dir that "
        f"holds one: {found}"
    )


def read_config(checkpoint: epath.PathLike) -> ModelConfig:
    """The configuration of the model in a checkpoint."""
    return config_from_json(json.dumps(_read_json(checkpoint, MODEL)))


def read_run(checkpoint: epath.PathLike) -> dict[str, Any]:
    """What the trainer gave to `save` as `run`."""
    return _read_json(checkpoint, RUN)


def check_same_model(checkpoint: epath.PathLike, config: ModelConfig) -> None:
    """ValueError that lists the fields in which a checkpoint's model differs from `config`, but for those that may."""
    saved = read_config(checkpoint)
    if type(saved) is not type(config):
        raise ValueError(
            f"{checkpoint} holds another kind of model: {saved.batch.kind}, where {config.batch.kind} is wanted"
        )
    _check_fields(checkpoint, saved, config, "another model")


def _check_fields(checkpoint, saved, config, what):
    """The fields that both configurations have."""
    saved, wanted = json.loads(to_json(saved)), json.loads(to_json(config))
    names = [name for name in wanted if name in saved and name not in ("kind", *FREE_FIELDS)]
    different = [name for name in names if saved[name] != wanted[name]]
    if different:
        lines = [f"  {name}: {saved[name]} in the checkpoint, {wanted[name]} now" for name in different]
        raise ValueError(
            f"{checkpoint} holds {what}:\n" + "\n".join(lines) + "\nuse its configuration, or another model_dir "
            "or checkpoint"
        )


def restore(checkpoint: epath.PathLike, target: Any) -> Any:
    """The saved state in the structure of `target`, a tree of jax.ShapeDtypeStruct with shardings of today's mesh.

    Raises: ValueError with three lists, of paths that are missing in the checkpoint, unexpected, or of different shape.
    """
    return _restore(checkpoint, target, top=None)


def restore_params(
    path: str, mesh: Mesh | None = None, config: ModelConfig | None = None
) -> tuple[ModelConfig, dict, dict]:
    """(config, trained, fixed): the model alone from a checkpoint or the last one of a model_dir, laid out on `mesh`.

    mesh: default all devices, parameters whole on each. config: how to use the model, where it differs from the saved
    one in the few fields that may (dropout_rate, dtype, remat); checked.
    """
    checkpoint = find(path)
    if config is None:
        config = read_config(checkpoint)
    else:
        check_same_model(checkpoint, config)
    mesh = sharding.MeshShape().build() if mesh is None else mesh
    trained, fixed = map(lambda declared: sharding.shaped(mesh, declared), parameters.abstract(config))
    state = _restore(checkpoint, {"params": trained, "fixed": fixed}, top=("params", "fixed"))
    return config, state["params"], state["fixed"]


def check_initial(checkpoint: epath.PathLike, config: ModelConfig) -> str:
    """ValueError unless `initial_params` can take the parameters, of which it reads none. Returns what it takes."""
    if not _is_encoder_for(checkpoint, config):
        check_same_model(checkpoint, config)
        return f"the parameters of {checkpoint}"
    _check_same_arrays(checkpoint, _saved(checkpoint, ENCODER_PATHS), _encoder_of(config))
    _check_fields(checkpoint, read_config(checkpoint), config, "another encoder")
    return f"embedding and encoder of {checkpoint}, with a new head"


def initial_params(path: str, mesh: Mesh, config: ModelConfig, seed: int) -> tuple[dict, dict]:
    """(trained, fixed) parameters to begin training with, from a checkpoint or the last one of a model_dir.

    All of the same model's; of an encoder-decoder, for a classifier, embedding and encoder, which must be equal but for
    dropout_rate, dtype and remat; the classifier's head is then new, drawn with `seed`.

    Raises: ValueError with the fields, or the three lists of `restore`, in which they differ.
    """
    checkpoint = find(path)
    check_initial(checkpoint, config)
    if not _is_encoder_for(checkpoint, config):
        _, trained, fixed = restore_params(checkpoint, mesh, config)
        return trained, fixed
    placed = sharding.shaped(mesh, parameters.abstract(config))
    state = _restore(checkpoint, _nested(_encoder_of(config, mesh)), top=ENCODER_PATHS)
    names = [name for name in placed[0] if name not in state["params"]]

    def draw(seed):
        trained, _ = parameters.init(config, jax.random.key(seed))
        return {name: trained[name] for name in names}

    shardings = jax.tree.map(lambda leaf: leaf.sharding, {name: placed[0][name] for name in names})
    with jax.set_mesh(mesh):
        new = jax.jit(draw, static_argnums=0, out_shardings=shardings)(seed)
    return state["params"] | new, state.get("fixed", {})


def _is_encoder_for(checkpoint, config):
    return isinstance(config, EncoderOnlyConfig) and isinstance(read_config(checkpoint), EncoderDecoderConfig)


def _encoder_of(config, mesh=None):
    """path -> declaration, or array to be restored on `mesh`, of what a classifier shares with an encoder-decoder."""
    trained, fixed = parameters.abstract(config)
    tree = {"params": trained, "fixed": fixed}
    tree = tree if mesh is None else sharding.shaped(mesh, tree)
    return {name: leaf for name, leaf in sharding.named_leaves(tree) if _below(name, ENCODER_PATHS)}


def _below(name: str, paths: Sequence[str]) -> bool:
    return any(f"{name}/".startswith(f"{path}/") for path in paths)


def _saved(checkpoint, top):
    """path -> what is known of each saved array, below the paths `top`; None: all."""
    try:
        metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(checkpoint).absolute() / STATE)
    except (OSError, ValueError) as error:
        raise ValueError(f"{checkpoint} is damaged; remove it to go on from an earlier one: {error}") from error
    saved = dict(sharding.named_leaves(metadata.tree))
    return {name: leaf for name, leaf in saved.items() if top is None or _below(name, top)}


def _restore(checkpoint, target, top):
    """top: the paths below which names are compared and read; None: all."""
    checkpoint = epath.Path(checkpoint).absolute()
    wanted = dict(sharding.named_leaves(target))
    _check_same_arrays(checkpoint, _saved(checkpoint, top), wanted)
    how = {n: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype, global_shape=x.shape) for n, x in wanted.items()}
    arguments = ocp.args.PyTreeRestore(_nested(wanted), restore_args=_nested(how), partial_restore=top is not None)
    restored = ocp.PyTreeCheckpointHandler().restore(checkpoint / STATE, args=arguments)
    arrays = dict(sharding.named_leaves(restored))
    return jax.tree.unflatten(jax.tree.structure(target), [arrays[name] for name in wanted])


def _check_same_arrays(checkpoint, saved, wanted):
    different = [
        f"{name}: {tuple(saved[name].shape)} in the checkpoint, {tuple(wanted[name].shape)} wanted"
        for name in wanted
        if name in saved and tuple(saved[name].shape) != tuple(wanted[name].shape)
    ]
    groups = {
        "missing in the checkpoint": [name for name in wanted if name not in saved],
        "unexpected in the checkpoint": [name for name in saved if name not in wanted],
        "of different shape": different,
    }
    if any(groups.values()):
        lists = ["\n    ".join([f"  {title}:", *names]) for title, names in groups.items() if names]
        raise ValueError(f"{checkpoint} does not fit what is to be restored:\n" + "\n".join(lists))


def _is_checkpoint(folder: epath.Path) -> bool:
    return (folder / STATE).is_dir() and (folder / MODEL).is_dir()


def _read_json(checkpoint, item):
    return ocp.JsonCheckpointHandler().restore(epath.Path(checkpoint).absolute() / item)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree
