"""Which checkpoint is meant by a path: the one that it names, or the last one of a model_dir that is whole."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from etils import epath

from synthesizer_jax.training import hosts, integrity
from synthesizer_jax.training.integrity import MODEL, STATE, Damaged
from synthesizer_jax.training.logging import say

T = TypeVar("T")

PREFIX = "checkpoint"


def step_of(path: epath.PathLike) -> int | None:
    """1000 for .../checkpoint_1000, None for any other name (also for one that is being written)."""
    match = re.fullmatch(rf"{PREFIX}_(\d+)", epath.Path(path).name)
    return int(match.group(1)) if match else None


def latest(model_dir: epath.PathLike) -> epath.Path | None:
    """The last checkpoint that is whole as far as it shows without reading arrays; None where there is none."""
    return next((path for path in checkpoints(model_dir) if integrity.fault(path) is None), None)


def exists(model_dir: epath.PathLike) -> bool:
    """Whether a model_dir holds anything by a checkpoint's name, whole or not."""
    return bool(checkpoints(model_dir))


def damaged(path: epath.PathLike) -> list[str]:
    """A line for each checkpoint of a model_dir that `latest` passes over."""
    lines = []
    for checkpoint in checkpoints(path):
        reason = integrity.fault(checkpoint)
        if reason is None:
            break
        lines.append(f"{checkpoint} is damaged: {reason}")
    return lines


def find(path: epath.PathLike) -> epath.Path:
    """The checkpoint at `path`, which is a checkpoint or a model_dir with checkpoints, of which `latest` is taken.

    Raises: ValueError when nothing is there, or no checkpoint; Damaged when the checkpoint, or all, are damaged.
    """
    found = _candidates(path)
    whole = next((checkpoint for checkpoint in found if integrity.fault(checkpoint) is None), None)
    if whole is not None:
        return whole
    if _is_one(path):
        raise Damaged(found[0], integrity.fault(found[0]))
    raise _all_damaged(path, {checkpoint: integrity.fault(checkpoint) for checkpoint in found})


def use(path: epath.PathLike, read: Callable[[epath.Path], T]) -> tuple[epath.Path, T]:
    """(checkpoint, read(checkpoint)), of the checkpoint at `path`, or of the last one of a model_dir that can be read.

    A checkpoint of a model_dir whose damage shows only when `read` reads it is passed over, too. All hosts call this and
    take the same checkpoint.

    Raises: as `find`, and what `read` raises but for Damaged.
    """
    reasons: dict[epath.Path, str] = {}
    for checkpoint in _agreed_candidates(path):
        try:
            reason = _first_host(lambda checkpoint=checkpoint: integrity.fault(checkpoint))
            if reason is not None:
                raise Damaged(checkpoint, reason)
            result = read(checkpoint)
        except Damaged as error:
            if _is_one(path):
                raise
            reasons[checkpoint] = error.reason
            continue
        for passed, reason in reasons.items():
            say(f"{passed} is damaged: {reason}; {checkpoint.name} is taken instead")
        return checkpoint, result
    raise _all_damaged(path, reasons)


def checkpoints(model_dir: epath.PathLike) -> list[epath.Path]:
    """Whatever has a checkpoint's name, the last first."""
    folder = epath.Path(model_dir)
    found = [path for path in folder.iterdir() if step_of(path) is not None] if folder.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def _candidates(path: epath.PathLike) -> list[epath.Path]:
    """The checkpoint at `path` itself, or those of a model_dir, the last first; at least one."""
    folder = epath.Path(path)
    if not folder.exists():
        raise ValueError(f"checkpoint path {str(path)!r} does not exist")
    if _is_one(path):
        return [folder]
    found = checkpoints(folder)
    if found:
        return found
    unfinished = [child.name for child in folder.iterdir() if child.name.startswith(PREFIX)] if folder.is_dir() else []
    what = f"only unfinished or damaged ones: {', '.join(unfinished)}" if unfinished else f"no {PREFIX}_<step> folder"
    raise ValueError(
        f"checkpoint path {str(path)!r} is neither a checkpoint (a folder with {STATE}/ and {MODEL}/) nor a model_dir that "
        f"holds one: {what}"
    )


def _is_one(path: epath.PathLike) -> bool:
    """Whether a path names one checkpoint, maybe a damaged one."""
    folder = epath.Path(path)
    return step_of(folder) is not None or ((folder / STATE).is_dir() and (folder / MODEL).is_dir())


def _agreed_candidates(path: epath.PathLike) -> list[epath.Path]:
    names = _first_host(lambda: [str(found) for found in _candidates(path)])
    return [epath.Path(name) for name in names]


def _first_host(look: Callable[[], Any]) -> Any:
    """What the first host finds, on all of them; a ValueError that it raises, too."""
    if jax.process_count() == 1:
        return look()
    found, error = None, None
    if jax.process_index() == 0:
        try:
            found = look()
        except ValueError as raised:
            error = str(raised)
    found, error = json.loads(hosts.gather(json.dumps([found, error]).encode())[0])
    if error is not None:
        raise ValueError(error)
    return found


def _all_damaged(path: epath.PathLike, reasons: Mapping[epath.Path, str]) -> ValueError:
    lines = [f"  {checkpoint.name}: {reason}" for checkpoint, reason in reasons.items()]
    return ValueError(
        f"every checkpoint in {path} is damaged; give another folder, or move them away to begin anew:\n"
        + "\n".join(lines)
    )
