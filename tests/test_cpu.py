"""What training on CPUs asks of JAX and of malloc. In processes of their own: both are asked once."""

import json
import os
import platform
import subprocess
import sys
import textwrap

import pytest

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

STEPS = """
    import json, resource
    import jax, numpy as np
    import synthesizer_jax as sj
    from synthesizer_jax.sharding import MeshShape, place_batch
    from synthesizer_jax.training import cpu
    from synthesizer_jax.training.optimizer import AdamW, Constant
    from synthesizer_jax.training.step import Trainer

    config = sj.t5_tiny("V", max_length=128, vocab_size=4096, encoder_layers=2, decoder_layers=1)
    trainer = Trainer(config, AdamW(Constant(1e-3)), MeshShape().build(jax.devices()[:1]))
    tokens = np.ones((16, 128), np.int32)
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
    batch = place_batch(trainer.mesh, dict.fromkeys(names, tokens))
    state, step = trainer.init(), trainer.train_step()
    temporaries = step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes
    faults = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    pages = temporaries // resource.getpagesize()
    print(json.dumps({"pages": pages, "faults": faults[3:], "kept": cpu.keep_memory(trainer.mesh)}))
"""


def run(program, **environment):
    """What a program prints last, from JSON, on one CPU device in a fresh process."""
    dropped = ("XLA_FLAGS", "GLIBC_TUNABLES", "JAX_CPU_ENABLE_ASYNC_DISPATCH")
    inherited = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("MALLOC_")}
    environment = inherited | {"JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_glibc
def test_steps_take_no_new_memory_from_the_system():
    found = run(STEPS)
    assert found["kept"]
    assert found["pages"] > 10_000
    assert sorted(found["faults"])[2] < found["pages"] / 20  # of five steps


@needs_glibc
@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_CPU_ENABLE_ASYNC_DISPATCH": "1"},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=9"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_what_the_environment_says_holds(environment):
    found = run(STEPS, **environment)
    assert found["kept"] == ("JAX_CPU_ENABLE_ASYNC_DISPATCH" in environment)
    assert sorted(found["faults"])[2] > found["pages"] / 2


def test_a_c_library_that_is_not_glibc_is_left_alone():
    found = run(
        """
        import json, platform
        platform.libc_ver = lambda: ("", "")
        import jax
        from synthesizer_jax.sharding import MeshShape
        from synthesizer_jax.training import cpu
        print(json.dumps(cpu.keep_memory(MeshShape().build())))
        """
    )
    assert found is False


@needs_glibc
@pytest.mark.parametrize("devices", [1, 2])
def test_memory_is_kept_for_one_device_alone(devices):
    found = run(
        """
        import json
        from synthesizer_jax.sharding import MeshShape
        from synthesizer_jax.training import cpu
        print(json.dumps(cpu.keep_memory(MeshShape().build())))
        """,
        XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}",
    )
    assert found is (devices == 1)


def test_layers_and_models_alone_leave_jax_as_it_is():
    found = run(
        """
        import json, jax
        import synthesizer_jax as sj
        sj.linen, sj.t5_tiny
        alone = jax.config.values["jax_cpu_enable_async_dispatch"]
        from synthesizer_jax.training.step import Trainer
        print(json.dumps([alone, jax.config.values["jax_cpu_enable_async_dispatch"]]))
        """
    )
    assert found == [True, False]
