"""What the hosts of a run tell one another besides arrays, and which part of a batch each of them reads."""

import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import synthesizer_jax
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


def check_same(arguments: Mapping[str, Any]) -> None:
    """ValueError, in every process, where one was given other arguments than the first: a stale gin file, another flag.

    They would train for hours without a fault, each with a state of its own, and no checkpoint of it would be whole.
    """
    if jax.process_count() == 1:
        return
    given = {name: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for name, value in arguments.items()}
    given |= {"synthesizer_jax": synthesizer_jax.__version__, "jax": jax.__version__}
    every = [json.loads(content) for content in gather(json.dumps(given).encode())]
    differ = [
        f"  {name}: {every[0].get(name)} in process 0, {other.get(name)} in process {index}"
        for index, other in enumerate(every)
        for name in dict.fromkeys([*every[0], *other])
        if other.get(name) != every[0].get(name)
    ]
    if differ:
        raise ValueError(
            "all processes need the same arguments, from the same flags and gin files; they differ:\n"
            + "\n".join(differ)
        )


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
