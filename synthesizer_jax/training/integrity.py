"""Whether a checkpoint is what was written: checks.json, beside its items, says how it must be.

TensorStore finds a file that is gone or cut short, but not a changed byte in the data of an array: that restores other
numbers (its zarr chunks are compressed by zstd without a checksum). So each array has a fingerprint, taken on the devices
when it is saved and taken again when it is read, on whatever mesh; and each file its size, small ones their CRC, which are
looked at before anything is read.
"""

import concurrent.futures
import functools
import json
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from synthesizer_jax.training import hosts

STATE, MODEL, RUN = ITEMS = ("state", "model", "run")  # the folders of a checkpoint
CHECKS = "checks.json"
SMALL = 2**20  # bytes; larger files are data of arrays
JSON_FILES = tuple(f"{item}/metadata" for item in (MODEL, RUN))  # as Orbax names them


class Damaged(ValueError):
    """A checkpoint that is not what was written, with the reason."""

    def __init__(self, checkpoint: epath.PathLike, reason: str):
        folder = epath.Path(checkpoint).parent
        super().__init__(
            f"{checkpoint} is damaged: {reason}; give another one, or {folder} for the last one that is whole"
        )
        self.checkpoint, self.reason = checkpoint, reason


def describe_arrays(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Shape, dtype and fingerprint of each array by its name. All hosts must call it at the same point."""
    taken = fingerprints(arrays)
    return {
        name: {"shape": list(array.shape), "dtype": str(array.dtype), "fingerprint": taken[name]}
        for name, array in arrays.items()
    }


def write(folder: epath.Path, arrays: Mapping[str, Any]) -> None:
    """checks.json in a folder whose items are complete; `arrays` from describe_arrays."""
    files = {}
    for item in ITEMS:
        for path in _files(folder / item):
            size = path.stat().length
            crc = zlib.crc32(path.read_bytes()) if size <= SMALL else None
            files[str(path.relative_to(folder))] = {"size": size, "crc32": crc}
    write_checks(folder, arrays, files)


def write_checks(folder: epath.Path, arrays: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """The file itself, which has a CRC of its own content."""
    content = {"arrays": dict(arrays), "files": dict(files)}
    (folder / CHECKS).write_text(json.dumps(content | {"crc32": _crc(content)}))


def read_checks(folder: epath.PathLike) -> dict[str, Any]:
    """{"arrays": ..., "files": ...} of checks.json; ValueError where it is not what was written."""
    content = json.loads((epath.Path(folder) / CHECKS).read_text())
    if not isinstance(content, dict) or content.pop("crc32", None) != _crc(content):
        raise ValueError(f"{folder}/{CHECKS} is not what was written")
    return content


def fault(checkpoint: epath.PathLike) -> str | None:
    """What is wrong with a checkpoint, as far as it shows without reading arrays; None: nothing.

    A checkpoint without checks.json, of an earlier version, must have its folders, and JSON where JSON belongs.
    """
    folder = epath.Path(checkpoint)
    lacking = [f"{item}/" for item in ITEMS if not (folder / item).is_dir()]
    if lacking:
        return f"it has no {', '.join(lacking)}"
    if not (folder / CHECKS).exists():
        return next(filter(None, (_json_fault(folder, name) for name in (*JSON_FILES, f"{STATE}/_METADATA"))), None)
    try:
        files = read_checks(folder)["files"].items()
    except ValueError:
        return f"{CHECKS} is not what was written"
    expected = [(name, entry["size"], entry["crc32"]) for name, entry in files]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:  # a pod leaves thousands of files, perhaps far away
        return next(filter(None, pool.map(lambda entry: _file_fault(folder, *entry), expected)), None)


def recorded(checkpoint: epath.PathLike) -> dict[str, dict[str, Any]] | None:
    """What describe_arrays said of the arrays when they were saved; None for an earlier version's checkpoint."""
    folder = epath.Path(checkpoint)
    return read_checks(folder)["arrays"] if (folder / CHECKS).exists() else None


def check_declared(checkpoint: epath.PathLike, found: Mapping[str, Any]) -> None:
    """Damaged unless the arrays that a checkpoint says it has are those that were saved."""
    written = recorded(checkpoint)
    if written is None:
        return
    then = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in written.items()}
    now = {name: (tuple(leaf.shape), str(jnp.dtype(leaf.dtype))) for name, leaf in found.items()}
    different = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if different:
        raise Damaged(checkpoint, f"it does not declare the arrays that were saved: {_some(different)}")


def check_values(checkpoint: epath.PathLike, arrays: Mapping[str, jax.Array]) -> None:
    """Damaged unless arrays, read as they were saved, have the values that were saved. All hosts must call it."""
    written = recorded(checkpoint)
    if written is None:
        return
    taken = fingerprints(arrays)
    different = [name for name in arrays if taken[name] != written[name]["fingerprint"]]
    if different:
        raise Damaged(checkpoint, f"other values than were saved in {_some(different)}")


def fingerprints(arrays: Mapping[str, Any]) -> dict[str, int]:
    """A number of all bits of each array and their places, the same however it is split over devices and hosts.

    The sum, modulo 2^32, of a bijection of each entry's bits, mixed with its index: one changed entry always shows, any
    other change but for once in 2^32. Each device sums its own part, without a collective: programs with collectives that
    are in flight together can wait for one another for ever on CPU devices. Hosts exchange their sums once, so all must
    call it.
    """
    begun = [_begun(array) for array in arrays.values()]
    own = np.array([sum(int(part) for part in parts) % 2**32 for parts in begun], np.uint32)
    told = [np.frombuffer(sums, np.uint32) for sums in hosts.gather(own.tobytes())]
    total = np.sum(told, axis=0, dtype=np.uint32)
    return {name: int(value) for name, value in zip(arrays, total, strict=True)}


def _begun(array) -> list[Any]:
    """Sums of the parts of an array that are this host's, of copies one alone; on accelerators they are still computed."""
    if not isinstance(array, jax.Array):
        array = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))  # as JAX will read it
        return [_by_numpy(array, array.shape, (slice(None),) * array.ndim)] if jax.process_index() == 0 else []
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    if all(shard.device.platform == "cpu" for shard in shards):  # nothing is compiled for them, nor copied
        return [_by_numpy(np.asarray(shard.data), array.shape, shard.index) for shard in shards]
    return _on_devices(array, {shard.device for shard in shards})


def _by_numpy(part: np.ndarray, whole: Sequence[int], index: Sequence[slice]) -> int:
    if not part.ndim:
        part, whole, index = part[None], (1,), (slice(None),)
    first, *starts = [place.start or 0 for place in index]
    rows = max(1, SMALL // max(1, math.prod(part.shape[1:])))  # at once, as there are intermediate results
    pieces = range(0, len(part), rows)
    return sum(int(_sum(np, part[row : row + rows], whole, (first + row, *starts))) for row in pieces)


def _on_devices(array: jax.Array, counted: Collection[jax.Device]) -> list[jax.Array]:
    if not isinstance(array.sharding, NamedSharding):
        return [_of_whole(array)]
    sums = _of_parts(array.sharding.mesh, array.sharding.spec)(array)
    parts = [shard.data for shard in sums.addressable_shards if shard.device in counted]
    for part in parts:
        part.copy_to_host_async()
    return [part.reshape(()) for part in parts]


@jax.jit
def _of_whole(array):
    return _sum(jnp, array, array.shape, (0,) * array.ndim)


@functools.lru_cache(maxsize=512)
def _of_parts(mesh: Mesh, spec: PartitionSpec):
    """Function from an array to one number of each device, an array [*mesh.shape]."""

    def part(array):
        axes = [*spec, *[None] * (array.ndim - len(spec))]
        names = [(axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in axes]
        counts = [math.prod(mesh.shape[name] for name in split) for split in names]
        whole = [size * count for size, count in zip(array.shape, counts, strict=True)]
        places = [jax.lax.axis_index(split).astype(jnp.uint32) if split else 0 for split in names]
        starts = [jnp.uint32(place) * jnp.uint32(size) for place, size in zip(places, array.shape, strict=True)]
        return _sum(jnp, array, whole, starts).reshape((1,) * len(mesh.axis_names))

    out = PartitionSpec(*mesh.axis_names)
    return jax.jit(jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))


def _sum(xp, array, whole: Sequence[int], starts: Sequence[Any]):
    """Of the part of an array of shape `whole` that begins at `starts`; xp: numpy or jax.numpy, with the same result."""
    index = xp.full((1,) * array.ndim, 0x9E3779B9, xp.uint32)
    for axis, start in enumerate(starts):
        place = xp.arange(array.shape[axis], dtype=xp.uint32) + xp.uint32(start)
        stride = xp.uint32(math.prod(whole[axis + 1 :]) % 2**32)
        index = index + (place * stride).reshape([-1 if other == axis else 1 for other in range(array.ndim)])
    return xp.sum(_mix(xp, _bits(xp, array) ^ _mix(xp, index)), dtype=xp.uint32)


def _bits(xp, array):
    unsigned = {1: xp.uint8, 2: xp.uint16, 4: xp.uint32}[array.dtype.itemsize]
    return array.view(unsigned).astype(xp.uint32)


def _mix(xp, x):
    """The last step of MurmurHash3: a bijection of uint32."""
    x = (x ^ (x >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
    x = (x ^ (x >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
    return x ^ (x >> xp.uint32(16))


def _file_fault(folder, name, size, crc):
    path = folder / name
    if not path.exists():
        return f"{name} is missing"
    found = path.stat().length
    if found != size:
        return f"{name} has {found} bytes, where {size} were written"
    if crc is not None and zlib.crc32(path.read_bytes()) != crc:
        return f"{name} has other bytes than were written"
    return None


def _json_fault(folder, name):
    path = folder / name
    if not path.exists():
        return f"{name} is missing"
    try:
        json.loads(path.read_text())
    except ValueError:
        return f"{name} is not JSON"
    return None


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
