"""A packed mixture of real tasks, interrupted in mid-epoch: a new process goes on with the very same batches."""

import collections
import hashlib
import inspect
import json
import subprocess
import sys

import numpy as np
import pytest
import seqio

from synthesizer_jax import data
from synthesizer_jax.data.streams import stream_dataset

LENGTHS = {"inputs": 128, "targets": 16}
TASKS = ("glue_rte", "glue_cola", "glue_stsb")
MIXTURE = "data_resume_mixture"
ROWS = {"glue_rte": 2490, "glue_cola": 8551, "glue_stsb": 5749}  # of the official training splits

REGISTER = """
for task in TASKS:
    data.get_mixture_or_task(task)
seqio.MixtureRegistry.add(MIXTURE, [(task, seqio.mixing_rate_num_examples) for task in TASKS])
"""


@pytest.fixture(scope="module", autouse=True)
def mixture(shared):
    before = seqio.utils._TFDS_DATA_DIR_OVERRIDE
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYNTHESIZER_JAX_VOCAB", str(shared / "data/vocab/t5/spiece.model"))
        seqio.set_tfds_data_dir_override(str(shared / "tfds"))
        exec(REGISTER, {"data": data, "seqio": seqio, "TASKS": TASKS, "MIXTURE": MIXTURE})
        yield
        seqio.set_tfds_data_dir_override(before)


def digest(batch):
    hashed = hashlib.sha256()
    for name in sorted(batch):
        hashed.update(name.encode() + batch[name].tobytes())
    return hashed.hexdigest()


RESUME = f"""
import hashlib, json, pathlib, sys
import numpy as np
import seqio
from synthesizer_jax import data
TASKS, MIXTURE = {TASKS!r}, {MIXTURE!r}
{inspect.getsource(digest)}
tfds, path, arguments = json.load(sys.stdin)
seqio.set_tfds_data_dir_override(tfds)
{REGISTER}
hosts = arguments.pop("hosts")
batches = [data.TrainBatches(**arguments, shard=(host, hosts)) for host in range(hosts)]
for host in batches:
    host.restore(pathlib.Path(path).read_bytes())
for _ in range(100):
    parts = [next(host) for host in batches]
    print("digest", digest({{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}}))
"""


@pytest.mark.parametrize("shards, hosts", [(1, 1), (4, 1), (4, 2)])
def test_a_new_process_goes_on_in_mid_epoch(shards, hosts, tmp_path, shared):
    """100 batches, to the bit; also on two hosts where there was one."""
    arguments = {"mixture_or_task_name": MIXTURE, "task_feature_lengths": LENGTHS, "batch_size": 8, "shards": shards}
    with data.TrainBatches(**arguments) as batches:
        for _ in range(50):
            next(batches)
        state = batches.state()
        expected = [digest(next(batches)) for _ in range(100)]
    assert len(set(expected)) == 100
    (tmp_path / "state").write_bytes(state)
    given = json.dumps([str(shared / "tfds"), str(tmp_path / "state"), arguments | {"hosts": hosts}])
    new = subprocess.run([sys.executable, "-c", RESUME], input=given, capture_output=True, text=True)
    assert [line.split()[1] for line in new.stdout.splitlines() if line.startswith("digest")] == expected, new.stderr
    # The buffers of three tasks, 1,000 examples each, with their text, for each stream.
    assert len(state) < 4e6 * shards


def test_hosts_share_the_examples_of_an_epoch():
    """With 4 shards on 1, 2 or 4 hosts: all rows of the splits, each once, and each host its own."""
    for task in TASKS:
        provider = data.get_mixture_or_task(task)
        options = {"split": "train", "use_cached": False, "seed": 0, "num_epochs": 1}
        whole = examples(stream_dataset(provider, LENGTHS, 0, 1, shuffle=False, **options))
        assert whole.total() == ROWS[task]
        streams = [examples(stream_dataset(provider, LENGTHS, s, 4, shuffle=True, **options)) for s in range(4)]
        for hosts in (1, 2, 4):
            own = [sum(streams[h * 4 // hosts : (h + 1) * 4 // hosts], collections.Counter()) for h in range(hosts)]
            assert sum(own, collections.Counter()) == whole
            assert max(part.total() for part in own) - min(part.total() for part in own) <= 4 // hosts


def examples(dataset):
    return collections.Counter(
        (x["inputs"].tobytes(), np.asarray(x["targets"]).tobytes()) for x in dataset.as_numpy_iterator()
    )
