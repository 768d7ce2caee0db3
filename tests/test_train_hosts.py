"""Two hosts, real processes with four devices each, against one with eight: training, going on, evaluation, stopping."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from synthesizer_jax.evaluation import evaluate, infer
from synthesizer_jax.models import t5_tiny
from synthesizer_jax.sharding import MeshShape, named_leaves
from synthesizer_jax.training import checkpoint, hosts
from synthesizer_jax.training.logging import read_lines
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.optimizer import Adafactor, Constant, InverseSqrt

SIZES = {"features": 16, "mlp_features": 32, "heads": 8, "head_dim": 4, "vocab_size": 2048}
TASK, LENGTHS = "quickstart_negation", {"inputs": 32, "targets": 16}
TRAIN_STEPS = 8
ARGUMENTS = {
    "model": t5_tiny("R+V", max_length=32, dropout_rate=0.1, **SIZES, encoder_layers=1, decoder_layers=1),
    "optimizer": Adafactor(Constant(1e-2), min_size_to_factor=8),
    "mixture_or_task_name": TASK,
    "mixture_or_task_module": "synthesizer_jax.tasks.quickstart",
    "task_feature_lengths": LENGTHS,
    "batch_size": 16,
    "train_steps": TRAIN_STEPS,
    "log_period": 3,
    "checkpoint_period": 4,
    "eval_period": 6,
    "eval_steps": 2,
    "data_shards": 2,
    "mesh": MeshShape(data=2, fsdp=2, model=2),
}
OVER_HOSTS = MeshShape(data=1, fsdp=1, model=8)  # both hosts read the same rows
OF_DATA = {"mixture_or_task_name": TASK, "task_feature_lengths": LENGTHS, "batch_size": 24}  # 29 = 24 + 5 examples
EVALUATE = {
    "metrics": OF_DATA | {"num_examples": 29},
    "perplexity": OF_DATA | {"num_examples": 29, "mixture_or_task_name": "quickstart_span_corruption"},
}
LINES = "".join(f"negation the value of the {word} is not returned\n" for word in ("object", "name", "list"))


def infer_options(folder):
    return OF_DATA | {"input_file": f"{folder}/lines.txt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "lines.txt").write_text(LINES)
    return folder


@pytest.fixture(scope="module")
def two(folder):
    """What each of two hosts says that it has done, see hosts_child.py, and what it says besides."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    child = pathlib.Path(__file__).with_name("hosts_child.py")
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    environment = os.environ | {  # four runs of one program; compiled as here, so that its numbers are the same to the bit
        "XLA_FLAGS": " ".join(flags),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    words = [[sys.executable, str(child), str(host), "2", address, str(folder)] for host in range(2)]
    started = [subprocess.Popen(each, **pipes) for each in words]
    told = [process.communicate(timeout=600) for process in started]
    for process, (_, errors) in zip(started, told, strict=True):
        assert process.returncode == 0, errors[-5000:]
    return told


@pytest.fixture(scope="module")
def one(folder, two):
    """The same by one process."""
    whole = train(**ARGUMENTS, model_dir=str(folder / "one"))
    moved = train(**ARGUMENTS, model_dir=str(folder / "moved"))
    options = {"checkpoint_path": str(folder / "whole"), "output_dir": str(folder / "alone")}
    done = {name: evaluate(**given, **options) for name, given in EVALUATE.items()}
    infer(**infer_options(folder), **options)
    return whole, moved, done


def done(two):
    """What both hosts say."""
    first, second = (re.fullmatch(r"process (\d): (.*)", out.splitlines()[-1]) for out, _ in two)
    assert (first[1], second[1]) == ("0", "1") and first[2] == second[2]
    return json.loads(first[2])


def entries(folder, *names):
    lines = read_lines(pathlib.Path(folder, *names) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if "timing" not in name} for line in lines]


def states(*folders):
    mesh = MeshShape().build()
    found = [checkpoint.restore_params(str(folder), mesh) for folder in folders]
    for (name, a), (_, b) in zip(*(named_leaves(trained) for _, trained, _ in found), strict=True):
        yield name, np.asarray(a), np.asarray(b)


@pytest.mark.slow
def test_two_hosts_train_as_one_process_does(folder, two, one):
    """Sums over devices are made in another order, of numbers in float32: 8 steps move loss and parameters by 1e-6."""
    for name in (("train",), ("training_eval", TASK)):
        mine, theirs = entries(folder / "one", *name), entries(folder / "whole", *name)
        assert [entry["step"] for entry in mine] == [entry["step"] for entry in theirs]
        assert mine == [pytest.approx(entry, rel=1e-5) for entry in theirs]
    assert len({entry["loss"] for entry in entries(folder / "one", "train")}) == 4
    for name, a, b in states(folder / "one", folder / "whole"):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=name)
    assert done(two)["whole"][TASK] == pytest.approx(one[0].evaluations[TASK], rel=1e-5)


@pytest.mark.slow
def test_a_run_moves_from_two_hosts_with_the_model_over_both_to_one_process(folder, one):
    assert entries(folder / "moved", "train") == [
        pytest.approx(entry, rel=1e-5) for entry in entries(folder / "one", "train")
    ]
    for name, a, b in states(folder / "one", folder / "moved"):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_signal_to_one_host_stops_both_at_one_step_and_they_go_on_exactly(folder, two):
    said = done(two)
    assert said["code"] == 128 + signal.SIGTERM and 3 <= said["stopped"] < TRAIN_STEPS
    assert f"stopped at step {said['stopped']} by SIGTERM, saved as " in two[0][1]
    for name in (("train",), ("training_eval", TASK)):
        assert entries(folder / "stopped", *name) == entries(folder / "whole", *name)
    assert said["again"] == said["whole"]
    for name, a, b in states(folder / "stopped", folder / "whole"):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.slow
def test_two_hosts_evaluate_and_infer_what_one_process_does(folder, two, one):
    """Examples that do not divide: 29 in batches of 24, 3 lines in one. Rows do not meet, so that scores are equal."""
    said = done(two)
    for name in EVALUATE:
        assert said[name] == one[2][name]
    files = {path.name: path.read_text() for path in (folder / "alone").glob("*.jsonl")}
    assert {path.name: path.read_text() for path in (folder / "two").glob("*.jsonl")} == files and len(files) == 5
    assert len(files[f"{TASK}-{TRAIN_STEPS}.jsonl"].splitlines()) == 29
    assert len(files[f"lines-{TRAIN_STEPS}.jsonl"].splitlines()) == 3


@pytest.mark.slow
def test_the_first_host_alone_tells_and_each_has_its_trace(folder, two):
    first, second = (errors for _, errors in two)
    libraries = re.compile(r"WARNING|\[Gloo\]|[IWE]\d{4} |\s|$")
    ours = {line for line in first.splitlines() if not libraries.match(line)}
    assert {"said by the first", "starts from new parameters, seed 0"} < ours
    assert any(line.startswith("step 6/8  loss") for line in ours) and not ours & set(second.splitlines())
    for host in range(2):
        assert len(list((folder / "moved/profile" / f"process_{host}").rglob("*.xplane.pb"))) == 1
    assert {path.name for path in (folder / "whole").iterdir()} == {
        "checkpoint_4",
        "checkpoint_8",
        "model-info.txt",
        "train",
        "training_eval",
    }


def test_one_host_gathers_its_own():
    assert hosts.gather(b"alone") == [b"alone"]


def test_hosts_with_other_arguments_do_not_begin(monkeypatch):
    """Each says which, in the same words; objects without a text of their own are not told apart by their addresses."""
    given = {"batch_size": 8, "optimizer": Adafactor(InverseSqrt(scale=1.0)), "own": object()}
    hosts.check_same(given | {"batch_size": 16})  # alone
    other = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "gather", lambda content: other.append(content) or other[-2:])
    hosts.check_same(given)
    hosts.check_same(given | {"own": object()})
    with pytest.raises(ValueError, match="all processes need the same arguments") as error:
        hosts.check_same(given | {"optimizer": Adafactor(InverseSqrt(scale=1e-5)), "batch_size": 16})
    lines = str(error.value).splitlines()[1:]
    assert lines[0] == "  batch_size: 8 in process 0, 16 in process 1"
    assert len(lines) == 2 and "scale=1.0" in lines[1] and "scale=1e-05" in lines[1]


@pytest.mark.parametrize(
    "held, parts",
    [
        ([{0, 1}, {2, 3}], [(0, 2), (1, 2)]),
        ([{2, 3}, {0, 1}], [(1, 2), (0, 2)]),
        ([{0}, {0}, {1}, {1}], [(0, 2), (0, 2), (1, 2), (1, 2)]),  # the model axis over pairs of hosts
        ([{0, 2}, {1, 3}], [(0, 2), (1, 2)]),  # devices in another order
        ([{0}, {0}], [(0, 1), (0, 1)]),
    ],
)
def test_hosts_read_the_rows_that_their_devices_hold(held, parts):
    held = list(map(frozenset, held))
    assert [hosts._part(held, host) for host in range(len(held))] == parts


@pytest.mark.parametrize("held", [[{0, 1}, {1, 2}], [{0}, {0, 1}], [{0, 1, 2}, {3}]])
def test_rows_shared_in_part_are_refused(held):
    with pytest.raises(ValueError, match="mesh: the devices of a host hold rows .* host 0: "):
        hosts._part(list(map(frozenset, held)), 0)


def test_one_process_reads_whole_batches():
    for mesh in (MeshShape(), MeshShape(data=2, model=4), MeshShape(data=1, fsdp=2, model=4)):
        assert hosts.batch_shard(mesh.build()) == (0, 1)
    assert jax.process_count() == 1
