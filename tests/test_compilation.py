"""The command `compile`: what it finds of small models on CPUs, and, where libtpu is, on TPU slices."""

import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import synthesizer_jax as sj
from synthesizer_jax import launch
from synthesizer_jax.__main__ import main
from synthesizer_jax.analysis import compilation, topologies
from synthesizer_jax.analysis.costs import costs
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.optimizer import AdamW, Constant

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no libtpu: pip install 'synthesizer_jax[tpu]'"
)
SIZES = {"vocab_size": 256, "features": 16, "mlp_features": 32, "heads": 2, "head_dim": 8, "dropout_rate": 0.0}
LENGTHS = {"inputs": 16, "targets": 8}
MODELS = {
    "EncoderDecoder": sj.t5_tiny("R+V", max_length=16, encoder_layers=2, decoder_layers=1, **SIZES),
    "DecoderOnly": sj.lm_tiny("D", max_length=16, decoder_layers=1, **SIZES),
    "EncoderOnly": sj.classifier_tiny(3, "FR", max_length=16, encoder_layers=1, **SIZES),
}


SPLIT = MeshShape(data=1, fsdp=2, model=2)


@functools.cache
def report(kind="EncoderDecoder", topology="cpu:4", steps=("train",), mesh=None, **options):
    config = MODELS[kind]
    lengths = {feature: LENGTHS[feature] for feature in config.batch.task_features}
    options = {"optimizer": AdamW(Constant()), "batch_size": 8, "pack": False} | options
    return compilation.report(
        model=config, task_feature_lengths=lengths, topology=topology, steps=steps, mesh=mesh, **options
    )


# What is found


@pytest.mark.parametrize(
    "kind, step",
    [("EncoderOnly", "train"), ("EncoderDecoder", "eval"), ("EncoderDecoder", "decode"), ("DecoderOnly", "decode")],
)
def test_a_program_does_the_models_operations(kind, step):
    """Matrix products alone: XLA leaves out a few, and adds next to none; a loop counts as often as it runs."""
    # In parts of parts, over fsdp as well, 11 % of the products of a step this small are not found: presumably made into sums.
    found = report(kind, "cpu:4", (step,), MeshShape(model=2) if step == "train" else SPLIT)
    (done,) = found.steps
    expected = costs(MODELS[kind], *(found.lengths.get(feature, 0) for feature in ("inputs", "targets")))
    assert found.parameters == sj.count_parameters(MODELS[kind])
    if step == "decode":  # the encoder runs once, the decoder for each token over a cache of the whole length
        assert done.model_flops is None and 0.8 < done.flops / (8 * expected.flops) < 1.5
    else:
        assert done.model_flops == 8 * (expected.training_flops if step == "train" else expected.flops)
        assert 0.9 < done.flops / done.model_flops < 1.1


def test_memory_by_kind_and_by_mesh():
    """Parameters, optimizer and batch of a device, by their shardings; the whole as the compiler lays it out."""
    (alone,), (split,) = (report("EncoderOnly", *where).steps for where in (("cpu:1",), ("cpu:4", ("train",), SPLIT)))
    assert alone.memory.parameters == 4 * sj.count_parameters(MODELS["EncoderOnly"])
    assert 2 * alone.memory.parameters <= alone.memory.optimizer <= 2 * alone.memory.parameters + 16, "and two counts"
    assert alone.memory.batch == 4 * 8 * (16 + 2), "rows of tokens, a label and its weight"
    assert split.memory.batch == alone.memory.batch // 2
    assert alone.memory.parameters / 4 <= split.memory.parameters < alone.memory.parameters / 2
    for memory in (alone.memory, split.memory):
        parts = memory.parameters + memory.optimizer + memory.batch
        assert 0 <= memory.arguments - parts < 64, "a CPU pads nothing; and the step"
        assert memory.total == memory.arguments + memory.results + memory.temporaries + memory.program
    assert not alone.collectives and "model" in {one.axes for one in split.collectives}


def test_the_report_as_text_and_as_json(tmp_path, capsys):
    flags = [f"--gin.model.{name}={value}" for name, value in SIZES.items()]
    flags += ["--gin.model.decoder_layers=1", "--gin.BATCH_SIZE=8", '--gin.TASK_FEATURE_LENGTHS={"targets": 8}']
    files = [f"--gin_file={name}" for name in ("models/lm_tiny.gin", "attention/FD.gin", "runs/compile.gin")]
    path = tmp_path / "found.json"
    assert main(["compile", *files, *flags, "--topology=cpu:2", "--steps=eval", f"--json={path}"]) == 0
    text, found = capsys.readouterr().out, json.loads(path.read_text())
    assert "cpu:2 (2 CPUs), data=2 x fsdp=1 x model=1, batch 8 x 8 targets" in text
    assert "| parameters |" in text and "| eval | all-reduce | data | 1 |" in text
    assert found["mesh"] == {"data": 2, "fsdp": 1, "model": 1} and list(found["steps"]) == ["eval"]
    step = found["steps"]["eval"]
    assert step["memory"]["total"] > step["memory"]["parameters"] > 0 and step["flops"] > 0
    assert step["summary"][0]["kind"] == "all-reduce" and step["collectives"][0]["axes"] == "data"


# What is given


def test_a_training_runs_own_files_and_flags_serve():
    """Its optimizer, batch and model count; where it trains, on what and how long is of no interest."""
    flags = ['MODEL_DIR="runs/x"', "TRAIN_STEPS=5", 'MIXTURE_OR_TASK_NAME="nothing"', "BATCH_SIZE=64", "Z_LOSS=0.0"]
    flags += ["MICROBATCHES=2", "LOSS_CHUNKS=4", "MESH_MODEL=2", 'PARAM_DTYPE="bfloat16"', 'TOPOLOGY="cpu:8"']
    flags += ["compile.topology=%TOPOLOGY", "train.eval_period=7", 'TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 8}']
    plan = launch.make_plan("compile", ["models/t5_tiny.gin", "attention/R.gin", "runs/t2t.gin"], flags)
    assert plan.arguments["model"] == sj.t5_tiny("R", param_dtype="bfloat16")
    assert isinstance(plan.arguments["optimizer"], AdamW)
    settings = {"batch_size": 64, "z_loss": 0.0, "microbatches": 2, "loss_chunks": 4, "mesh": MeshShape(model=2)}
    assert settings.items() <= plan.arguments.items()
    assert plan.task_modules == () and "model_dir" not in plan.arguments
    assert plan.preflight() == ["steps: train, eval, decode", "devices: cpu:8 (8 CPUs), data=4 x fsdp=1 x model=2"]
    with pytest.raises(ValueError, match="--gin.TRAIN_STEP: nothing in `compile` refers to the macro TRAIN_STEP"):
        launch.make_plan("compile", ["models/t5_tiny.gin", "runs/t2t.gin"], [*flags, "TRAIN_STEP=4"])
    with pytest.raises(ValueError, match="--gin.SPLIT: nothing in `compile` refers to the macro SPLIT; leave it out"):
        launch.make_plan("compile", ["models/t5_tiny.gin", "runs/t2t.gin"], [*flags, 'SPLIT="x"'])


def test_an_experiments_file_is_enough():
    plan = launch.make_plan("compile", ["experiments/c4/R+V.gin"], ['compile.topology="v3:2x2"'])
    assert plan.arguments["model"] == sj.paper_c4_base("R+V", dropout_rate=0.0)
    assert plan.arguments["batch_size"] == 128 and plan.arguments["task_feature_lengths"] == {
        "inputs": 512,
        "targets": 114,
    }


WRONG = {
    "v9:2x2": "topology: no TPU generation 'v9'; known: v2, v3, v4, v5e, v5p, v6e, tpu7x, and cpu",
    "v5litepod-16": "topology: expected GENERATION:SIZES, such as v5e:4x4, .*, got 'v5litepod-16'; .*v5litepod-16 is v5e:4x4",
    "v5e:4": "topology: v5e has 2 axes, as in v5e:4x4, got 'v5e:4'",
    "v5e:4x4x4": "topology: v5e has 2 axes",
    "v5e:32x32": "topology: v5e:32x32 would have 1,024 chips, but a slice of v5e has at most 256; .*--slices",
    "cpu:2x2": "topology: CPUs are counted, as in cpu:8, and have no slices, got 1 of 'cpu:2x2'",
    "cpu:0": "topology: expected 1 to 1024 CPU devices, got 'cpu:0'",
    "cpu:99999": "topology: expected 1 to 1024 CPU devices, got 'cpu:99999'",
    "cpu:9": "topology: expected at most 8 CPU devices in this process, got cpu:9",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_topology_is_refused(name):
    with pytest.raises(ValueError, match=WRONG[name]):
        report(topology=name)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mesh": MeshShape(data=3)}, "mesh: data=3 x fsdp=1 x model=1 needs 3 devices, but there are 4"),
        ({"batch_size": 6}, "batch_size=6 does not divide over data x fsdp = 4 x 1 = 4 devices"),
        ({"steps": ("train", "test")}, "steps: expected some of train, eval, decode, got test"),
        ({"steps": ()}, "steps: expected some of train, eval, decode, got none"),
        ({"slices": 2}, "topology: CPUs are counted, as in cpu:8, and have no slices, got 2 of 'cpu:4'"),
        ({"slices": 0}, "slices: expected a whole number >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        report(**options)


def test_without_libtpu_the_message_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["compile", "--gin_file=experiments/c4/R+V.gin", "--topology=v5e:2x2"]) == 2
    assert "pip install 'synthesizer_jax[tpu]'" in capsys.readouterr().err


def test_flags_of_compile_are_not_for_other_commands(capsys, tmp_path):
    files = ["--gin_file=models/t5_tiny.gin", "--gin_file=runs/costs.gin", '--gin.TASK_FEATURE_LENGTHS={"inputs": 8}']
    assert main(["costs", *files, "--topology=cpu:8", "--json=x.json"]) == 2
    assert "--topology, --json: of `compile` only, not of `costs`" in capsys.readouterr().err
    assert main(["compile", "--gin_file=experiments/c4/V.gin", "--topology=cpu:8", f"--json={tmp_path}/no/x"]) == 2
    assert f"--json: no such directory: {tmp_path}/no" in capsys.readouterr().err
    assert main(["compile", "--gin_file=experiments/c4/V.gin", "--topology=cpu:8", f"--json={tmp_path}"]) == 2
    assert f"--json: expected a file, got the directory {tmp_path}" in capsys.readouterr().err


def test_every_row_of_docs_pods_is_a_command_that_is_understood():
    path = pathlib.Path(__file__).parents[1] / "benchmarks" / "pods.py"
    spec = importlib.util.spec_from_file_location("pods", path)
    pods = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pods)
    cases = [case for section in pods.SECTIONS.values() for case in section()]
    assert len({(case.section, case.name) for case in cases}) == len(cases)
    for case in cases:
        plan = launch.make_plan("compile", case.files, [*case.flags, f'compile.topology="{case.topology}"'])
        assert plan.arguments["batch_size"] % pods.count(case.topology) == 0
    files = {name for case in cases for name in case.files}
    assert {name for name in launch.shipped_files() if name.startswith(("models/", "attention/"))} - files == {
        "models/options.gin"
    }


# What does not fit

REFUSALS = {
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (576.00G) exceeds "
    "available HBM (7.48G).": 576 * 2**30,
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.34G of 15.75G "
    "hbm. Exceeded hbm capacity by 1.59G.": round(17.34 * 2**30),
    "RESOURCE_EXHAUSTED: something else": None,
}


@pytest.mark.parametrize("message", REFUSALS)
def test_the_compilers_refusal_says_what_is_needed(message):
    assert compilation.needed_bytes(message) == REFUSALS[message]


def test_a_refusal_is_a_row_of_the_table():
    topology = topologies.Topology(
        "v5e:2x2", 1, tuple(jax.devices()[:4]), 4, topologies.GENERATIONS["v5e"].usable_bytes
    )
    refused = compilation.TooLarge("train", 12.3, 20 * 2**30, "RESOURCE_EXHAUSTED: ...")
    found = compilation.Compiled(topology, {"data": 4, "fsdp": 1, "model": 1}, 8, LENGTHS, 1000, (refused,))
    assert "| fits | does not fit: needs at least 20.00 GiB of 15.75 GiB |" in found.as_markdown()
    assert found.as_dict()["steps"]["train"]["needs"] == 20 * 2**30 and not found.fits(refused)


# By the TPU compiler


@needs_libtpu
@pytest.mark.parametrize("name", topologies.GENERATIONS)
def test_the_table_has_what_the_compiler_gives_to_a_program(name):
    """A program that no chip holds is refused with the memory that there is."""
    sizes = "2x2" if topologies.GENERATIONS[name].axes == 2 else "2x2x1"
    found = topologies.topology(f"{name}:{sizes}")
    assert len(found.devices) == 4 * topologies.GENERATIONS[name].devices and found.chips == 4
    huge = jax.ShapeDtypeStruct((2**17, 2**20), jnp.float32, sharding=SingleDeviceSharding(found.devices[0]))
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{topologies.GENERATIONS[name].usable}G\)") as caught:
        jax.jit(lambda x: jnp.sin(x) @ x.T).lower(huge).compile()
    assert compilation.needed_bytes(str(caught.value)) > 2**39


@needs_libtpu
def test_slices_and_single_chips():
    two = topologies.topology("v5e:2x4", 2)
    assert (two.chips, len(two.devices), str(two)) == (16, 16, "2 slices of v5e:2x4 (16 chips)")
    assert str(topologies.topology("v3:2x2")) == "v3:2x2 (4 chips, 8 devices)"
    assert len(topologies.topology("v5e:1x1").devices) == len(topologies.topology("v4:1x1x1").devices) == 1
    with pytest.raises(ValueError, match="topology: libtpu knows no v5e:3x3: .*not divisible"):
        topologies.topology("v5e:3x3")


ON_TPU = {
    "train": ("EncoderDecoder", "v5e:2x2", MeshShape()),
    "decode": ("DecoderOnly", "v4:2x2x1", MeshShape(data=2, model=2)),
    "eval": ("EncoderOnly", "v3:2x2", MeshShape(data=4, fsdp=2)),
}


@needs_libtpu
@pytest.mark.parametrize("name", ON_TPU)
def test_three_small_configurations_compile_for_tpu(name):
    kind, topology, mesh = ON_TPU[name]
    found = report(kind, topology, (name,), mesh)
    (step,) = found.steps
    assert found.fits(step) and 0 < step.memory.total < 2**30
    assert step.memory.program > 0 and step.memory.arguments > step.memory.parameters, "in whole tiles"
    assert step.memory_bytes >= step.memory.parameters / 2, "each parameter is read, but may stay on the chip"
    assert step.model_flops is None or 0.9 < step.flops / step.model_flops < 1.1
    axes = {one.axes for one in step.collectives}
    assert axes and "none" not in axes and not any("part of" in name for name in axes)


@needs_libtpu
def test_data_parallel_training_reduces_the_gradients_and_nothing_else():
    """So there is no collective of what attention computes, nor of logits. The tied embedding's may be reduced twice."""
    (step,) = report("EncoderDecoder", "v5e:2x2", ("train",), MeshShape()).steps
    gradients, embedding = 4 * sj.count_parameters(MODELS["EncoderDecoder"]), 4 * 256 * 16
    assert {(one.kind, one.axes, one.devices) for one in step.collectives} == {("all-reduce", "data", 4)}
    assert gradients <= sum(one.bytes for one in step.collectives) < 1.02 * (gradients + embedding)
