"""Training on two hosts, each a real process with its own streams of the data; going on in one process."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from synthesizer_jax.training import checkpoint, hosts

SCRIPT = """
import os, sys
host, count, address, folder, steps = sys.argv[1:]
host, count = int(host), int(count)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={2 // count}"  # two devices in all
import jax
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, host)
from synthesizer_jax.models import t5_tiny
from synthesizer_jax.training import hosts
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.optimizer import Adafactor, Constant

assert hosts.gather(b"host" * (host + 1)) == [b"host" * (h + 1) for h in range(count)]
sizes = {"features": 16, "mlp_features": 32, "heads": 2, "head_dim": 8, "vocab_size": 2048}
train(
    model=t5_tiny("R", max_length=32, dropout_rate=0.0, **sizes),
    optimizer=Adafactor(Constant(1e-2), min_size_to_factor=8),
    mixture_or_task_name="quickstart_negation",
    task_feature_lengths={"inputs": 32, "targets": 16},
    batch_size=8,
    train_steps=int(steps),
    model_dir=folder,
    log_period=1,
    checkpoint_period=3,
    eval_period=None,
    data_shards=2,
)
"""


def run(count, folder, steps):
    """Trains in `count` processes and waits for them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *map(str, (host, count, address, folder, steps))],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(count)
    ]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]


def losses(folder):
    lines = pathlib.Path(folder, "train", "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_a_run_on_two_hosts_goes_on_in_one_process(tmp_path):
    """The losses are those of one process that never stopped: of the same sums, in float32, of two parts each."""
    run(1, tmp_path / "whole", 8)
    run(2, tmp_path / "moved", 5)
    assert checkpoint.latest(tmp_path / "moved").name == "checkpoint_5"
    run(1, tmp_path / "moved", 8)
    whole = losses(tmp_path / "whole")
    assert len(set(whole)) == 8
    assert losses(tmp_path / "moved") == pytest.approx(whole, rel=1e-6)


def test_one_host_gathers_its_own():
    assert hosts.gather(b"alone") == [b"alone"]
