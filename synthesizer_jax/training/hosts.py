"""What the hosts of a run tell one another besides arrays, and which part of a batch each of them reads."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from synthesizer_jax import sharding


def gather(content: bytes) -> list[bytes]:
    """The content of each host, in their order. Waits for all of them: every host must call it at the same point."""
    if jax.process_count() == 1:
        return [content]
    sizes = multihost_utils.process_allgather(np.int32(len(content)))
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def batch_shard(mesh: Mesh) -> tuple[int, int]:
    """(index, number) of the part of a batch that this host reads, of equal parts.

    Each host has a part of its own where its devices hold rows that no other host's do. Hosts whose devices share rows, as
    where the model axis goes over several hosts, read the same part.

    Raises: ValueError where the devices of a host hold some of another's rows, but not the same.
    """
    placed = sharding.batch_sharding(mesh)
    rows = sharding.batch_shards(mesh)
    held: dict[int, set[int]] = {}
    for device, (part,) in placed.devices_indices_map((rows,)).items():
        held.setdefault(device.process_index, set()).update(range(*part.indices(rows)))
    return _part([frozenset(held[host]) for host in sorted(held)], sorted(held).index(jax.process_index()))


def _part(held: list[frozenset[int]], host: int) -> tuple[int, int]:
    """From the rows that each host holds."""
    parts = sorted(set(held), key=min)
    if sum(map(len, parts)) != len(frozenset().union(*parts)) or len({len(part) for part in parts}) != 1:
        shown = "; ".join(f"host {index}: {sorted(rows)}" for index, rows in enumerate(held))
        raise ValueError(
            "mesh: the devices of a host hold rows of the batch that others hold in part: of data x fsdp rows, "
            f"{shown}. Choose axes that divide by the devices of a host"
        )
    return parts.index(held[host]), len(parts)
