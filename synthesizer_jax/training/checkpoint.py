"""Checkpoints: model_dir/checkpoint_<step>/, written by Orbax in the background, restored strictly.

One checkpoint holds all that a run needs to go on, and appears by a single rename, so that a run killed while it saves
leaves nothing that could be taken for a checkpoint:

    state/        parameters, optimizer state and step, as nested dicts of arrays
    model/        the model's configuration, as JSON
    run/          what the trainer wants back (position in the data, settings), as JSON
    checks.json   what tells whether all of it is as it was written (integrity.py)

A checkpoint is restored on any mesh and any number of hosts, in the layout and the dtypes that are wanted (restoring.py).
Of a model_dir the last checkpoint that is whole is taken, and what is wrong with later ones is said.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from synthesizer_jax import sharding
from synthesizer_jax.models import parameters
from synthesizer_jax.models.config import (
    EncoderDecoderConfig,
    EncoderOnlyConfig,
    ModelConfig,
    config_from_json,
    to_json,
)
from synthesizer_jax.training import finding, hosts, integrity, restoring
from synthesizer_jax.training.finding import PREFIX
from synthesizer_jax.training.integrity import MODEL, RUN, STATE, Damaged
from synthesizer_jax.training.logging import say

TRASH = "deleted_checkpoints"

# Where checkpoints are found.
step_of, exists, latest, damaged = finding.step_of, finding.exists, finding.latest, finding.damaged
find, use = finding.find, finding.use

# Fields of a configuration that may change between the run that wrote a checkpoint and the one that reads it; in another
# layout (scan_layers) the arrays must fit, which they do where layers are alike.
FREE_FIELDS = ("dropout_rate", "dtype", "param_dtype", "remat", "scan_layers")

# Where an encoder-decoder and a classifier have the same parameters.
ENCODER_PATHS = ("params/embedding", "params/position_embedding", "params/encoder", "fixed/encoder")


def check_folder(model_dir: epath.PathLike) -> None:
    """ValueError where a path has what means something in patterns of file names: Orbax could not find its own files."""
    wrong = sorted(set(str(epath.Path(model_dir).absolute())) & set("[]*?"))
    if wrong:
        raise ValueError(
            f"model_dir: expected a path without {' '.join(wrong)}, which are patterns of file names to Orbax, got {model_dir}"
        )


class _Manager(ocp.CheckpointManager):
    """Orbax's, which does not ask JAX whether to stop: `Notice` counts the times that it is asked, see preemption.py."""

    def reached_preemption(self, step: int) -> bool:
        return False


class CheckpointWriter:
    """Writes checkpoints of one model_dir in the background, and keeps the last `keep` of them (None: all).

    keep_period: checkpoints at multiples of so many steps stay besides, of all writers that are given it.

    Unfinished directories of a killed run are removed. Use as a context manager: leaving waits for the last write. All
    hosts call its methods at the same points. Where a write fails, in the background or not, the next call raises an
    OSError with the folder, the step and the cause; earlier checkpoints stay.
    """

    def __init__(self, model_dir: str, keep: int | None = 3, keep_period: int | None = None):
        check_kept(keep, keep_period)
        check_folder(model_dir)
        self._folder = epath.Path(model_dir).absolute()
        kept = [LatestN(keep)] + ([EveryNSteps(keep_period)] if keep_period is not None else [])
        options = ocp.CheckpointManagerOptions(
            step_prefix=PREFIX,
            cleanup_tmp_directories=True,
            preservation_policy=AnyPreservationPolicy(kept),
            todelete_subdir=TRASH,  # a rename, as a run killed while it deletes would leave half a checkpoint behind
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._write_checks,
                # Else threads wait minutes for a folder that could not be made, and the process for them.
                create_directories_asynchronously=False,
            ),
        )
        self._manager = _Manager(self._folder, options=options)
        self._trash = self._folder / TRASH
        self._step: int | None = None  # of the last write that was begun
        self._arrays: dict[str, Any] = {}  # in it
        absl.logging.get_absl_logger().addFilter(_is_no_trace_of_orbax)
        self._empty_trash()

    def save(self, step: int, state: Any, config: ModelConfig, run: Mapping[str, Any]) -> None:
        """Copies `state` and returns; files are written while training goes on. Raises an earlier write's error."""
        named = dict(sharding.named_leaves(state))
        items = {
            STATE: ocp.args.PyTreeSave(restoring.nested(named)),
            MODEL: ocp.args.JsonSave(json.loads(to_json(config))),
            RUN: ocp.args.JsonSave(dict(run)),
        }
        self.wait()  # Orbax would wait as well; until then it may still fill the trash
        self._empty_trash()
        self._step, self._arrays = step, integrity.describe_arrays(named)
        with self._telling():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def check(self) -> None:
        """Raises the error of a write in the background, such as a full disk, as soon as it has ended."""
        if (
            not self._manager.is_saving_in_progress()
        ):  # Orbax's check_for_errors sees none: a thread of its own takes them
            self.wait()

    def wait(self) -> None:
        """Until all is on disk."""
        with self._telling():
            self._manager.wait_until_finished()

    def set_aside_after(self, step: int) -> None:
        """Renames the checkpoints after `step` to checkpoint_<step>.damaged: new ones will take their place."""
        if jax.process_index() == 0:
            for path in reversed(finding.checkpoints(self._folder)):
                if step_of(path) > step:
                    moved = _free_name(path)
                    path.rename(moved)
                    say(f"moved {path} to {moved.name}; remove it when you do not need it")
        hosts.gather(b"")  # the others wait
        self._manager.reload()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            with self._telling():
                self._manager.close()
        finally:
            absl.logging.get_absl_logger().removeFilter(_is_no_trace_of_orbax)
        self._empty_trash()

    def _write_checks(self):
        """Orbax calls it on one host, when all items are complete and have yet to appear under the checkpoint's name."""
        name = f"{PREFIX}_{self._step}"
        unfinished = [path for path in self._folder.iterdir() if path.name.startswith(f"{name}.orbax-checkpoint-tmp")]
        integrity.write(unfinished[0] if unfinished else self._folder / name, self._arrays)

    @contextlib.contextmanager
    def _telling(self):
        try:
            yield
        except Exception as error:
            whole = latest(self._folder)
            stays = (
                f"the last whole checkpoint is {whole.name}" if whole is not None else "there is no whole checkpoint"
            )
            raise OSError(
                f"model_dir: {PREFIX}_{self._step} could not be written to {self._folder}: {_cause(error)}; {stays}; make "
                "room, or give a folder that can be written, and run the same command again"
            ) from error

    def _empty_trash(self):
        if jax.process_index() == 0 and self._trash.exists():
            self._trash.rmtree(missing_ok=True)


def read_config(checkpoint: epath.PathLike) -> ModelConfig:
    """The configuration of the model in a checkpoint."""
    return config_from_json(json.dumps(_read_json(checkpoint, MODEL)))


def read_run(checkpoint: epath.PathLike) -> dict[str, Any]:
    """What the trainer gave to `save` as `run`."""
    return _read_json(checkpoint, RUN)


def check_same_model(checkpoint: epath.PathLike, config: ModelConfig) -> None:
    """ValueError that lists the fields in which a checkpoint's model differs from `config`, but for those that may.

    Where it does, or has another layout, the arrays that do not fit are listed too: missing, unexpected, of different shape.
    """
    saved = read_config(checkpoint)
    if type(saved) is not type(config):
        raise ValueError(
            f"{checkpoint} holds another kind of model: {saved.batch.kind}, where {config.batch.kind} is wanted"
        )
    trained, fixed = parameters.abstract(config)
    wanted = dict(sharding.named_leaves({"params": trained, "fixed": fixed}))
    _check_fit(checkpoint, _different_fields(saved, config), ("params", "fixed"), wanted, "another model")


def _different_fields(saved, config) -> list[str]:
    """Those that both configurations have."""
    saved, wanted = json.loads(to_json(saved)), json.loads(to_json(config))
    names = [name for name in wanted if name in saved and name not in ("kind", *FREE_FIELDS)]
    return [f"  {n}: {saved[n]} in the checkpoint, {wanted[n]} now" for n in names if saved[n] != wanted[n]]


def _check_fit(checkpoint, fields, top, wanted, what) -> None:
    lists = restoring.mismatches(restoring.saved_arrays(checkpoint, top), wanted)
    if fields or lists:
        text = "\n".join(filter(None, [*fields, lists]))
        raise ValueError(
            f"{checkpoint} holds {what}:\n{text}\nuse its configuration, or another model_dir or checkpoint"
        )


def restore(checkpoint: epath.PathLike, target: Any) -> Any:
    """The saved state in the structure of `target`, a tree of jax.ShapeDtypeStruct with shardings of today's mesh.

    Layers that were stacked are taken apart, or the other way round, and floats get the dtype of `target`. All hosts must
    call it.

    Raises: ValueError with three lists, of paths that are missing in the checkpoint, unexpected, or of different shape;
      Damaged where it is not what was written.
    """
    return restoring.restore(checkpoint, target, top=None)


def check_kept(keep: int | None, keep_period: int | None) -> None:
    """ValueError where a writer would not take them."""
    if keep is not None and not _is_count(keep):
        raise ValueError(f"keep: expected a number of checkpoints >= 1, or None for all, got {keep!r}")
    if keep_period is not None and not _is_count(keep_period):
        raise ValueError(f"keep_period: expected a number of steps >= 1, or None, got {keep_period!r}")


def restore_params(
    path: epath.PathLike,
    mesh: Mesh | None = None,
    config: ModelConfig | None = None,
    rules: sharding.Rules = sharding.Rules(),
) -> tuple[ModelConfig, dict, dict]:
    """(config, trained, fixed): the model alone from a checkpoint or the last one of a model_dir, laid out on `mesh`.

    mesh: default all devices, parameters whole on each. config: how to use the model, where it differs from the saved
    one in the few fields that may (FREE_FIELDS); checked. rules: how they are split, where it differs from sharding.RULES.
    """
    mesh = sharding.MeshShape().build() if mesh is None else mesh

    def read(checkpoint):
        if config is not None:
            check_same_model(checkpoint, config)
        used = read_config(checkpoint) if config is None else config
        declared = parameters.abstract(used)
        sharding.check_rules(rules, *declared)
        trained, fixed = (sharding.shaped(mesh, tree, rules) for tree in declared)
        state = restoring.restore(checkpoint, {"params": trained, "fixed": fixed}, top=("params", "fixed"))
        return used, state["params"], state["fixed"]

    return use(path, read)[1]


def check_initial(checkpoint: epath.PathLike, config: ModelConfig) -> str:
    """ValueError unless `initial_params` can take the parameters, of which it reads none. Returns what it takes."""
    if not _is_encoder_for(checkpoint, config):
        check_same_model(checkpoint, config)
        return f"the parameters of {checkpoint}"
    fields = _different_fields(read_config(checkpoint), config)
    _check_fit(checkpoint, fields, ENCODER_PATHS, _encoder_of(config), "another encoder")
    return f"embedding and encoder of {checkpoint}, with a new head"


def initial_params(
    path: epath.PathLike, mesh: Mesh, config: ModelConfig, seed: int, rules: sharding.Rules = sharding.Rules()
) -> tuple[dict, dict]:
    """(trained, fixed) parameters to begin training with, from a checkpoint or the last one of a model_dir.

    All of the same model's; of an encoder-decoder, for a classifier, embedding and encoder, which must be equal but for
    FREE_FIELDS; the classifier's head is then new, drawn with `seed`.

    Raises: ValueError with the fields and the three lists of `restore` in which they differ.
    """

    def read(checkpoint):
        check_initial(checkpoint, config)
        if _is_encoder_for(checkpoint, config):
            return _with_new_head(checkpoint, mesh, config, seed, rules)
        return restore_params(checkpoint, mesh, config, rules)[1:]

    return use(path, read)[1]


def _with_new_head(checkpoint, mesh, config, seed, rules):
    placed = sharding.shaped(mesh, parameters.abstract(config), rules)
    state = restoring.restore(checkpoint, restoring.nested(_encoder_of(config, mesh, rules)), top=ENCODER_PATHS)
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


def _encoder_of(config, mesh=None, rules=sharding.Rules()):
    """path -> declaration, or array to be restored on `mesh`, of what a classifier shares with an encoder-decoder."""
    trained, fixed = parameters.abstract(config)
    tree = {"params": trained, "fixed": fixed}
    tree = tree if mesh is None else sharding.shaped(mesh, tree, rules)
    return {name: leaf for name, leaf in sharding.named_leaves(tree) if restoring.below(name, ENCODER_PATHS)}


def _read_json(checkpoint, item):
    try:
        return ocp.JsonCheckpointHandler().restore(epath.Path(checkpoint).absolute() / item)
    except (FileNotFoundError, ValueError) as error:
        raise Damaged(checkpoint, f"{item}: {error}") from error


def _free_name(path: epath.Path) -> epath.Path:
    names = (f"{path.name}.damaged{again}" for again in ["", *(f".{i}" for i in range(1, 1000))])
    return next(path.parent / name for name in names if not (path.parent / name).exists())


def _cause(error: BaseException) -> str:
    """The operating system's words, where they are among an error's causes, or their number is in TensorStore's."""
    chain = [error]
    while (chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    found = next((e for e in chain if isinstance(e, OSError) and e.strerror), None)
    if found is not None:
        return f"{found.strerror}: {found.filename}" if found.filename else found.strerror
    text = " ".join(str(error).split())
    code = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(code[1])) if code else text[:300]


def _is_no_trace_of_orbax(record: logging.LogRecord) -> bool:
    """Each of its threads tells of a failed write, with its traceback, before we do."""
    return not (record.exc_info and "orbax" in record.pathname.split(os.sep))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
