"""Where the iterators of streams stand, as bytes: a zip archive with TensorFlow's checkpoint of each of them."""

import io
import json
import pathlib
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

IDENTITY, ITERATOR = "identity.json", "iterator"


def pack(identity: Mapping[str, Any], iterators: Mapping[int, Iterator]) -> bytes:
    """identity: of what the iterators iterate over; iterators: by the number of their stream."""
    archive = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(IDENTITY, json.dumps(identity))
        for stream, iterator in iterators.items():
            part = pathlib.Path(folder, str(stream))
            part.mkdir()
            tf.train.Checkpoint(iterator=iterator).write(str(part / ITERATOR))
            for path in sorted(part.iterdir()):
                packed.write(path, f"{stream}/{path.name}")
    return archive.getvalue()


def identity(state: bytes) -> dict[str, Any]:
    """What `pack` was given. Raises ValueError where these bytes are no state."""
    try:
        with zipfile.ZipFile(io.BytesIO(state)) as packed:
            return json.loads(packed.read(IDENTITY))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"state: these {len(state)} bytes are not a state of TrainBatches: {error}") from error


def unpack(state: bytes, iterators: Mapping[int, Iterator]) -> None:
    """Puts iterators where those of the same streams were. Raises ValueError where the state lacks one of the streams."""
    with zipfile.ZipFile(io.BytesIO(state)) as packed, tempfile.TemporaryDirectory() as folder:
        held = {int(name.partition("/")[0]) for name in packed.namelist() if name != IDENTITY}
        missing = sorted(set(iterators) - held)
        if missing:
            raise ValueError(
                f"state: it is that of the streams {sorted(held)} alone, {missing} are missing; a host saves its own "
                "streams: unite the states of all hosts with merge_states"
            )
        packed.extractall(folder)
        for stream, iterator in iterators.items():
            path = pathlib.Path(folder, str(stream), ITERATOR)
            try:
                tf.train.Checkpoint(iterator=iterator).read(str(path)).assert_consumed()
            except (tf.errors.OpError, AssertionError) as error:
                raise ValueError(
                    "state: the data is read in other steps than when it was taken, as by another version of "
                    "synthesizer_jax or of the task. Go on with the version that took it, or start the data anew from the "
                    f"saved parameters (INITIAL_CHECKPOINT_PATH): {str(error).splitlines()[0][:200]}"
                ) from error


def merge_states(states: Sequence[bytes]) -> bytes:
    """One state with the streams of all, which must be of the same batches at the same place: one from each host."""
    identities = [identity(state) for state in states]
    if any(other != identities[0] for other in identities):
        raise ValueError(f"states: expected those of the same batches on all hosts, got {identities}")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as merged:
        for state in states:
            with zipfile.ZipFile(io.BytesIO(state)) as packed:
                for name in sorted(set(packed.namelist()) - set(merged.namelist())):
                    merged.writestr(name, packed.read(name))
    return archive.getvalue()
