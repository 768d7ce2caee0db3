"""A checkpoint of one process is restored by two, and the other way round: real processes, which agree what is damaged."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from synthesizer_jax.models import t5_tiny
from synthesizer_jax.sharding import MeshShape, named_leaves
from synthesizer_jax.training import checkpoint
from synthesizer_jax.training.checkpoint import CheckpointWriter
from synthesizer_jax.training.optimizer import Adafactor, Constant
from synthesizer_jax.training.step import Trainer

SHAPE = MeshShape(data=2, fsdp=2, model=2)
SIZES = {"features": 16, "mlp_features": 32, "heads": 4, "head_dim": 8, "vocab_size": 32}


def make(mesh, **changes):
    config = t5_tiny("fixedR+V", max_length=12, **SIZES | changes)
    return Trainer(config, Adafactor(Constant(1e-2), min_size_to_factor=8), mesh)


def filled(trainer, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.integers(-99, 99, leaf.shape).astype(leaf.dtype), trainer.abstract_state())


def place(trainer, state):
    """On whatever devices and hosts."""

    def put(array, leaf):
        return jax.make_array_from_callback(array.shape, leaf.sharding, lambda index: array[index])

    return jax.tree.map(put, state, trainer.abstract_state())


def assert_holds(restored, state, target):
    """The parts on this process's devices are those of `state`, with the shardings of `target`."""
    leaves = zip(named_leaves(restored), named_leaves(state), named_leaves(target), strict=True)
    for (name, array), (_, numbers), (_, leaf) in leaves:
        assert array.sharding.is_equivalent_to(leaf.sharding, array.ndim) and array.dtype == leaf.dtype, name
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, numbers[shard.index].astype(leaf.dtype), err_msg=name)


CHILD = """
import os, sys
tests, address, host, folder = sys.argv[1:]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path.insert(0, tests)
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, int(host))
import numpy as np
from test_checkpoint_hosts import SHAPE, assert_holds, filled, make, place
from synthesizer_jax.training import checkpoint, restoring

mesh = SHAPE.build()
trainer = make(mesh)
read = restoring.ocp.PyTreeCheckpointHandler.restore

def fails_on_one_host(self, path, **how):
    if path.parent.name == "checkpoint_8" and host == "1":
        raise ValueError("DATA_LOSS: on this host alone")
    return read(self, path, **how)

restoring.ocp.PyTreeCheckpointHandler.restore = fails_on_one_host
assert len(mesh.devices.flat) == 8 and jax.process_count() == 2
target = trainer.abstract_state()
found, state = checkpoint.use(folder, lambda found: checkpoint.restore(found, target))
assert found.name == "checkpoint_7", found
assert_holds(state, filled(trainer, 7), target)

other = make(mesh, scan_layers=False, param_dtype="bfloat16")
restored = checkpoint.restore(found, other.abstract_state())
wi = filled(trainer, 7).params["encoder"]["layers"]["mlp"]["wi"]
layers = restored.params["encoder"]["layers"]
for layer in "01":
    assert_holds(layers[layer]["mlp"]["wi"], wi[int(layer)], other.abstract_state().params["encoder"]["layers"][layer]["mlp"]["wi"])

with checkpoint.CheckpointWriter(folder) as writer:
    writer.set_aside_after(7)
    writer.save(8, place(trainer, filled(trainer, 80)), trainer.config, {"by": "two"})
print(jax.process_index(), found.name)
"""


@pytest.mark.slow
def test_two_processes_restore_what_one_wrote_and_one_what_two_wrote(tmp_path):
    one = make(SHAPE.build(jax.devices()[:8]))
    with CheckpointWriter(str(tmp_path)) as writer:
        for step in (7, 8, 9):
            writer.save(step, place(one, filled(one, step)), one.config, {})
    (tmp_path / "checkpoint_9/state/_METADATA").unlink()

    said = run_two(tmp_path)
    assert "checkpoint_9 is damaged: state/_METADATA is missing; checkpoint_7 is taken instead" in said[0]
    assert "checkpoint_8 is damaged: DATA_LOSS: on this host alone; checkpoint_7 is taken instead" in said[0]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint_7", "checkpoint_8", "checkpoint_8.damaged", "checkpoint_9.damaged"]

    for mesh in (jax.devices()[:1], jax.devices()[:8]):
        trainer = make(MeshShape(model=len(mesh) // 4 or 1).build(mesh))
        found, state = checkpoint.use(
            tmp_path, lambda found, to=trainer: checkpoint.restore(found, to.abstract_state())
        )
        assert found.name == "checkpoint_8" and checkpoint.read_run(found) == {"by": "two"}
        assert_holds(state, filled(trainer, 80), trainer.abstract_state())


def run_two(folder):
    """What the two processes said."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    words = [sys.executable, "-c", CHILD, str(pathlib.Path(__file__).parent), address]
    started = [
        subprocess.Popen([*words, host, str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for host in "01"
    ]
    said = []
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        said.append(errors)
    return said
