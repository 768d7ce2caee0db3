"""The arrays of a checkpoint, read into today's structure, layout, dtypes and shardings, and checked on the way.

Every path and shape is compared before an array is read: Orbax itself ignores a requested shape. Arrays are read as they
were saved, straight into the shards of today's mesh, compared with their fingerprints, and then converted on the devices.
"""

import contextlib
import gc
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from synthesizer_jax import sharding
from synthesizer_jax.training import hosts, integrity, layouts
from synthesizer_jax.training.integrity import STATE, Damaged
from synthesizer_jax.training.logging import say

AT_ONCE = 2**30  # bytes of arrays that are held beside what they are converted to

# Errors that tell of something else than the checkpoint: of our code, of memory, and of a file system that may recover.
_NOT_DAMAGE = (TypeError, AttributeError, MemoryError, PermissionError, TimeoutError, ConnectionError)
_NOT_DAMAGE += (jax.errors.JaxRuntimeError,)
_MAY_RECOVER = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")


def saved_arrays(checkpoint: epath.PathLike, top: Sequence[str] | None = None) -> dict[str, Any]:
    """path -> what is known (shape, dtype, ...) of each saved array, below the paths `top`; None: of all.

    All hosts must call it.
    """

    def read():
        metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(checkpoint).absolute() / STATE)
        return dict(sharding.named_leaves(metadata.tree))

    found = _attempt(checkpoint, read)
    integrity.check_declared(checkpoint, found)
    return {name: leaf for name, leaf in found.items() if top is None or below(name, top)}


def below(name: str, paths: Sequence[str]) -> bool:
    """Whether a path is one of `paths` or leads through one."""
    return any(f"{name}/".startswith(f"{path}/") for path in paths)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def restore(checkpoint: epath.PathLike, target: Any, top: Sequence[str] | None) -> Any:
    """The saved arrays in the structure of `target`, a tree of jax.ShapeDtypeStruct with shardings.

    top: the paths below which names are compared and read; None: all.
    """
    checkpoint = epath.Path(checkpoint).absolute()
    wanted = dict(sharding.named_leaves(target))
    saved = saved_arrays(checkpoint, top)
    lists = mismatches(saved, wanted)
    if lists:
        raise ValueError(f"{checkpoint} does not fit what is to be restored:\n{lists}")
    parts = layouts.parts(saved, wanted)
    changing = [part for part in parts if layouts.changes(part, saved, wanted)]
    _tell_changes(checkpoint, changing, saved, wanted)
    unchanged = [part for part in parts if not layouts.changes(part, saved, wanted)]
    arrays = {}
    for group in [unchanged, *layouts.groups(changing, saved, AT_ONCE)]:
        read = _read(checkpoint, _to_read(group, saved, wanted)) if group else {}
        for part in group:
            made = layouts.convert(part, [read.pop(name) for name in part.saved], [wanted[n] for n in part.wanted])
            arrays.update(zip(part.wanted, made, strict=True))
    return jax.tree.unflatten(jax.tree.structure(target), [arrays[name] for name in wanted])


def mismatches(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The paths that are missing, unexpected, or of different shape, in lists; "" where all fits.

    What is saved is compared in the layout that is wanted. Floats of any precision fit one another, as do whole numbers.
    """
    offered = {}
    for part in layouts.parts(saved, wanted):
        kind = (part.shape(saved), jnp.dtype(saved[part.saved[0]].dtype))
        offered |= {name: kind for name in part.wanted}
    different = []
    for name in (name for name in wanted if name in offered):
        shape, dtype = tuple(wanted[name].shape), jnp.dtype(wanted[name].dtype)
        if offered[name][0] != shape:
            different.append(f"{name}: {offered[name][0]} in the checkpoint, {shape} wanted")
        elif jnp.issubdtype(offered[name][1], jnp.floating) != jnp.issubdtype(dtype, jnp.floating):
            different.append(f"{name}: {offered[name][1]} in the checkpoint, {dtype} wanted")
    groups = {
        "missing in the checkpoint": [name for name in wanted if name not in offered],
        "unexpected in the checkpoint": [name for name in offered if name not in wanted],
        "of different shape": different,
    }
    return "\n".join("\n    ".join([f"  {title}:", *names]) for title, names in groups.items() if names)


def _to_read(group, saved, wanted) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(
            saved[name].shape,
            saved[name].dtype,
            sharding=layouts.sharding_to_read(part, wanted[part.wanted[0]].sharding),
        )
        for part in group
        for name in part.saved
    }


def _read(checkpoint, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays as they were saved."""
    how = {n: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype, global_shape=x.shape) for n, x in arrays.items()}
    arguments = ocp.args.PyTreeRestore(nested(arrays), restore_args=nested(how), partial_restore=True)

    def read():
        restored = ocp.PyTreeCheckpointHandler().restore(checkpoint / STATE, args=arguments)
        return dict(sharding.named_leaves(restored))

    found = _attempt(checkpoint, read)
    integrity.check_values(checkpoint, found)
    return found


def _attempt(checkpoint, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `read` returns. Where a host cannot read its part, all raise Damaged; so all must call it."""
    found, reason = {}, ""
    with _no_echoes():
        try:
            found = read()
        except Exception as error:  # Orbax raises that, and of many kinds
            reason = _reason(error)
        if reason:
            gc.collect()
    reasons = [told.decode() for told in hosts.gather(reason.encode())]
    if any(reasons):
        raise Damaged(checkpoint, next(filter(None, reasons)))
    return found


def _reason(error: Exception) -> str:
    """What it tells of a checkpoint; raised again where that is nothing."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = " ".join(str(root).split()) or type(root).__name__
    if isinstance(root, _NOT_DAMAGE) or any(code in text for code in _MAY_RECOVER):
        raise error
    return re.split(r" \[(?:tensorstore_spec|source locations)=", text)[0][:500]


@contextlib.contextmanager
def _no_echoes() -> Iterator[None]:
    """Where one array cannot be read, asyncio would tell, with pages of details, of all other reads that are given up."""
    log, hook = logging.getLogger("asyncio"), sys.unraisablehook
    log.addFilter(_never)
    sys.unraisablehook = _never
    try:
        yield
    finally:
        sys.unraisablehook = hook
        log.removeFilter(_never)


def _never(_) -> bool:
    return False


def _tell_changes(checkpoint, changing, saved, wanted):
    for how in ("taken apart", "stacked"):
        count = sum(part.how == how for part in changing)
        if count:
            say(f"the layers of {checkpoint.name} are {how}: {count} arrays (scan_layers differs)")
    casts: dict[tuple[str, str], int] = {}
    for part in changing:
        pair = (str(saved[part.saved[0]].dtype), str(jnp.dtype(wanted[part.wanted[0]].dtype)))
        if pair[0] != pair[1]:
            casts[pair] = casts.get(pair, 0) + len(part.saved)
    for (then, now), count in casts.items():
        say(f"{count} arrays of {checkpoint.name} are {then} and become {now}")
