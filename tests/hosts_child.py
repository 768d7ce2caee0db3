"""One host of tests/test_train_hosts.py: argv is its index, the number of hosts, the coordinator and a folder.

All that two hosts are tested with is done here one after the other, because starting a process takes longest.
"""

import json
import os
import pathlib
import signal
import sys
import time

HOST, COUNT, ADDRESS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={8 // COUNT}"

import jax

from synthesizer_jax.training import distributed

distributed.start(ADDRESS, COUNT, HOST, timeout=120)

from test_train_hosts import ARGUMENTS, EVALUATE, OVER_HOSTS, TRAIN_STEPS, infer_options

from synthesizer_jax import data
from synthesizer_jax.evaluation import evaluate, infer
from synthesizer_jax.training import hosts
from synthesizer_jax.training.logging import say
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.preemption import Stopped

STOP = 4  # batches after which the second host is told to stop


class Told(data.TrainBatches):
    """Tells the second host to stop, and gives the notice, which JAX looks for each second, time to go round."""

    read = 0

    def __next__(self):
        self.read += 1
        if self.read == STOP:
            if HOST == COUNT - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(3)
        return super().__next__()


def main():
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (COUNT, 8, 8 // COUNT)
    assert hosts.gather(b"host" * (HOST + 1)) == [b"host" * (h + 1) for h in range(COUNT)]
    done = {"whole": train(**ARGUMENTS, model_dir=f"{FOLDER}/whole").evaluations}

    real, data.TrainBatches = data.TrainBatches, Told
    try:
        train(**ARGUMENTS, model_dir=f"{FOLDER}/stopped")
    except Stopped as stopped:
        done |= {"stopped": stopped.step, "code": stopped.code}
    data.TrainBatches = real
    done["again"] = train(**ARGUMENTS, model_dir=f"{FOLDER}/stopped").evaluations

    half = {"train_steps": TRAIN_STEPS // 2, "mesh": OVER_HOSTS, "profile_steps": (2, 3), "eval_period": None}
    train(**ARGUMENTS | half, model_dir=f"{FOLDER}/moved")
    places = {"checkpoint_path": f"{FOLDER}/whole", "output_dir": f"{FOLDER}/two"}
    for name, options in EVALUATE.items():
        done[name] = evaluate(**options, **places)
    infer(**infer_options(FOLDER), **places)
    say("said by the first")
    print(distributed.named(json.dumps(done)))


if __name__ == "__main__":
    main()
