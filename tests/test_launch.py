"""How files and flags become the arguments of a command, and how the command line answers."""

import collections.abc
import itertools
import json
import subprocess
import sys
from typing import Any, Literal

import pytest

import synthesizer_jax as sj
from synthesizer_jax import annotations, launch
from synthesizer_jax.__main__ import main
from synthesizer_jax.training import checkpoint
from synthesizer_jax.training.optimizer import Adafactor, Constant, InverseSqrt

PRETRAIN = ("models/t5_tiny.gin", "attention/R+V.gin", "runs/pretrain.gin")
GIVEN = (
    'MODEL_DIR="runs/run"',
    'MIXTURE_OR_TASK_NAME="quickstart_span_corruption"',
    'MIXTURE_OR_TASK_MODULE="synthesizer_jax.tasks.quickstart"',
    'TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 32}',
    "BATCH_SIZE=8",
    "TRAIN_STEPS=10",
)


def plan(*flags, files=PRETRAIN, search_paths=()):
    return launch.make_plan("train", files, [*GIVEN, *flags], search_paths)


def argv(model_dir, *more, files=PRETRAIN):
    flags = [f"--gin.{binding}" for binding in GIVEN[1:]]
    return ["train", *(f"--gin_file={file}" for file in files), *flags, f'--gin.MODEL_DIR="{model_dir}"', *more]


# Files and flags


def test_the_arguments_of_a_command():
    arguments = plan().arguments
    assert arguments["model"] == sj.t5_tiny("R+V")
    assert arguments["optimizer"] == Adafactor(learning_rate=InverseSqrt())
    assert arguments["task_feature_lengths"] == {"inputs": 64, "targets": 32}
    assert (arguments["batch_size"], arguments["train_steps"], arguments["model_dir"]) == (8, 10, "runs/run")
    assert plan().task_modules == ("synthesizer_jax.tasks.quickstart",)


def test_files_compose_in_any_order():
    expected = plan()
    for files in itertools.permutations(PRETRAIN):
        assert plan(files=files) == expected


def test_flags_win_over_files_and_later_ones_over_earlier_ones(tmp_path):
    own = tmp_path / "own.gin"
    own.write_text('DROPOUT_RATE = 0.3\nATTENTION = "D"\nBATCH_SIZE = 5\n')
    arguments = plan("DROPOUT_RATE=0.1", "DROPOUT_RATE=0.2", files=(*PRETRAIN, str(own))).arguments
    assert arguments["model"] == sj.t5_tiny("D", dropout_rate=0.2)
    assert arguments["batch_size"] == 8


def test_a_macro_that_nobody_gives_leaves_the_default():
    assert "random_seed" not in plan().arguments
    assert plan("RANDOM_SEED=3").arguments["random_seed"] == 3


def test_required_asks_for_a_macro_whatever_the_order(tmp_path):
    own = tmp_path / "own.gin"
    own.write_text("RANDOM_SEED = %gin.REQUIRED\n")
    with pytest.raises(ValueError, match="missing: RANDOM_SEED"):
        plan(files=(str(own), *PRETRAIN))
    for files in ((str(own), *PRETRAIN), (*PRETRAIN, str(own))):
        assert plan("RANDOM_SEED=3", files=files).arguments["random_seed"] == 3


def test_finetuning_asks_for_a_checkpoint():
    files = ("models/t5_1_1_tiny.gin", "runs/finetune.gin")
    with pytest.raises(ValueError, match="missing: INITIAL_CHECKPOINT_PATH"):
        plan(files=files)
    arguments = plan('INITIAL_CHECKPOINT_PATH="runs/x"', "LEARNING_RATE=0.01", files=files).arguments
    assert arguments["initial_checkpoint_path"] == "runs/x"
    assert arguments["optimizer"] == Adafactor(learning_rate=Constant(0.01))


def test_any_field_of_the_model_scopes_and_nested_values(tmp_path):
    own = tmp_path / "own.gin"
    own.write_text("""
model.encoder_attention = @encoder/Mixture()
encoder/Mixture.parts = (@Random(), @FactorizedRandom())
Random.max_length = %LONGEST
FactorizedRandom.max_length = %LONGEST
FactorizedRandom.rank = 4
TASK_FEATURE_LENGTHS = {"inputs": %LONGEST, "targets": 8}
LONGEST = 64
model.features = 32
""")
    flags = [flag for flag in GIVEN if not flag.startswith("TASK_FEATURE")]
    arguments = launch.make_plan("train", (*PRETRAIN, str(own)), flags).arguments
    mixture = sj.Mixture((sj.Random(64), sj.FactorizedRandom(64, rank=4)))
    assert arguments["model"] == sj.t5_tiny("R+V", encoder_attention=mixture, features=32)
    assert arguments["task_feature_lengths"] == {"inputs": 64, "targets": 8}


def test_own_folders_come_before_the_shipped_files(tmp_path, monkeypatch):
    for folder, rate in (("searched", 0.4), ("here", 0.6)):
        path = tmp_path / folder / "models" / "t5_tiny.gin"
        path.parent.mkdir(parents=True)
        path.write_text(f'include "models/t5_small.gin"\ninclude "beside.gin"\nDROPOUT_RATE = {rate}\n')
        (path.parent / "beside.gin").write_text("model.mlp_features = 64\n")
    expected = sj.t5_small("R+V", dropout_rate=0.4, mlp_features=64)
    assert plan(search_paths=[str(tmp_path / "searched")]).arguments["model"] == expected
    monkeypatch.chdir(tmp_path / "here")
    assert plan(search_paths=[str(tmp_path / "searched")]).arguments["model"].dropout_rate == 0.6


def test_a_users_own_configurable(tmp_path, monkeypatch):
    (tmp_path / "own_rates.py").write_text("""
import gin
from synthesizer_jax.training.optimizer import Constant

@gin.configurable
def halved(rate: float) -> Constant:
    return Constant(rate / 2)
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = tmp_path / "own.gin"
    own.write_text("import own_rates\nAdafactor.learning_rate = @halved()\nhalved.rate = 0.5\n")
    made = plan(files=(*PRETRAIN, str(own)))
    assert made.arguments["optimizer"].learning_rate == Constant(0.25)
    assert "import own_rates" in made.config
    with pytest.raises(ValueError, match="halved.rate: expected float, got 'fast'"):
        plan('halved.rate="fast"', files=(*PRETRAIN, str(own)))


def test_the_operative_configuration_parses_again(tmp_path):
    for number, attention in enumerate(("attention/FR+V.gin", "attention/D+V_mesh.gin")):
        files = ("models/paper_c4_base.gin", attention, "runs/pretrain.gin")
        first = plan("Z_LOSS=1e-3", "USE_CACHED_TASKS=False", files=files)
        path = tmp_path / f"{number}.gin"
        path.write_text(first.config)
        again = launch.make_plan("train", [str(path)], [])
        assert again.config == first.config
        assert first.arguments.items() <= again.arguments.items()
        assert again.task_modules == first.task_modules
        changed = launch.make_plan("train", [str(path)], ["BATCH_SIZE=16"])
        assert changed.arguments["batch_size"] == 16


def test_all_missing_macros_at_once_with_an_example_of_each():
    with pytest.raises(ValueError) as caught:
        launch.make_plan("train", PRETRAIN, ["BATCH_SIZE=8"])
    text = str(caught.value)
    for example in (
        "--gin.MODEL_DIR='\"runs/my_run\"'",
        "--gin.MIXTURE_OR_TASK_NAME='\"quickstart_span_corruption\"'",
        '--gin.TASK_FEATURE_LENGTHS=\'{"inputs": 512, "targets": 114}\'',
        "--gin.TRAIN_STEPS='10000'",
    ):
        assert example in text
    assert "BATCH_SIZE" not in text


def test_several_faults_are_told_together():
    with pytest.raises(ValueError) as caught:
        plan("TRAIN_STEP=10", "model.head=4", 'BATCH_SIZE="64"')
    text = str(caught.value)
    assert "did you mean TRAIN_STEPS" in text
    assert "model has no parameter 'head'; did you mean heads" in text
    assert "expected int, got '64'; write it without quotes: BATCH_SIZE = 64" in text


def test_a_well_known_macro_in_a_file_may_be_for_another_command(tmp_path):
    own = tmp_path / "own.gin"
    own.write_text('SPLIT = "test"\nTRAIN_STEPS = 5\n')
    plan(files=(*PRETRAIN, str(own)))
    with pytest.raises(ValueError, match="nothing in `train` refers to the macro SPLIT"):
        plan('SPLIT="test"')


# Types


class _A:
    pass


class _B(_A):
    pass


@pytest.mark.parametrize("value, annotation, expected", [
    (1, int, True), (True, int, False), (1.0, int, False), ("1", int, False),
    (1, float, True), (1.5, float, True), (False, float, False), (None, float, False),
    ("a", str, True), (1, str, False), (True, bool, True), (1, bool, False), ("true", bool, False),
    (None, int | None, True), (3, int | None, True), ("3", int | None, False),
    ("a", Literal["a", "b"], True), ("c", Literal["a", "b"], False), (True, Literal[1], False),
    ([1, 2], list[int], True), ([1, "2"], list[int], False), ((1, 2), list[int], False),
    ((1, 2), tuple[int, ...], True), ((1, "2"), tuple[int, str], True), ((1,), tuple[int, str], False),
    ("ab", collections.abc.Sequence[str], False), (("a",), collections.abc.Sequence[str], True),
    ({"a": 1}, collections.abc.Mapping[str, int], True), ({"a": "1"}, collections.abc.Mapping[str, int], False),
    ({"a": 1}, dict, True), (1, dict, False), (1, Any, True), (print, collections.abc.Callable, True),
    (3, collections.abc.Callable[[int], int], False), (_B(), _A, True), (_A(), _B, False),
    (annotations.Instance(_B), _A, True), (annotations.Instance(_A), _B, False), (annotations.Instance(Any), int, True),
    (annotations.Instance(_A), _A | None, True), (annotations.Instance(_A), int | None, False),
])  # fmt: skip
def test_whether_a_value_fits_an_annotation(value, annotation, expected):
    assert annotations.fits(value, annotation) is expected


def test_annotations_as_users_write_them():
    assert annotations.spell(int | None) == "int | None"
    assert annotations.spell(collections.abc.Mapping[str, int]) == "Mapping[str, int]"
    assert annotations.spell(Literal["a", "b"]) == "'a' or 'b'"


# The command line


def test_dry_run_tells_what_would_run_and_touches_nothing(tmp_path, capsys):
    assert main(argv(tmp_path / "run", "--gin.model.vocab_size=2176", "--dry_run")) == 0
    told = capsys.readouterr().out
    for line in (
        "model.attention = %ATTENTION",
        f"model: {sj.count_parameters(sj.t5_tiny('R+V', vocab_size=2176)):,} trained parameters",
        "encoder_input_tokens [8, 64] int32",
        "-> logits [8, 32, 2176] float32",
        "data: split 'train' of quickstart_span_corruption",
        "starts from new parameters, seed 0",
        "devices: 8 x cpu: data=8 x fsdp=1 x model=1",
    ):
        assert line in told
    assert not (tmp_path / "run").exists()


def test_train_writes_a_configuration_that_runs_again(tmp_path, capsys):
    run = tmp_path / "run"
    sizes = {"vocab_size": 2176, "features": 16, "mlp_features": 16, "encoder_layers": 1, "decoder_layers": 1}
    small = [
        "--gin.TRAIN_STEPS=2",
        "--gin.EVAL_PERIOD=None",
        *(f"--gin.model.{name}={size}" for name, size in sizes.items()),
    ]
    assert main(argv(run, *small)) == 0
    assert (run / "checkpoint_2").is_dir()
    capsys.readouterr()
    assert main(["train", f"--gin_file={run / 'config.gin'}", "--dry_run"]) == 0
    assert f"continues from {run / 'checkpoint_2'}" in capsys.readouterr().out
    written = {name: (run / name).read_bytes() for name in ("config.gin", "model-info.txt")}
    for dry in (["--dry_run"], []):  # what can't go on is refused by both, and changes nothing
        assert main(argv(run, *small, "--gin.BATCH_SIZE=16", "--gin.TRAIN_STEPS=4", *dry)) == 2
        assert "data: the checkpoint was saved with other batches: batch_size 8 then, 16 now" in capsys.readouterr().err
    assert main(argv(run, *small, "--gin.KEEP=0", "--dry_run")) == 2
    assert "keep: expected a number of checkpoints >= 1" in capsys.readouterr().err
    assert written == {name: (run / name).read_bytes() for name in written}
    evaluate = [
        "evaluate",
        "--gin_file=runs/evaluate.gin",
        f'--gin.CHECKPOINT_PATH="{run}"',
        "--gin.BATCH_SIZE=8",
        '--gin.MIXTURE_OR_TASK_NAME="quickstart_negation"',
        '--gin.MIXTURE_OR_TASK_MODULE="synthesizer_jax.tasks.quickstart"',
        '--gin.TASK_FEATURE_LENGTHS={"inputs": 32, "targets": 4}',
    ]
    assert main([*evaluate, "--gin.MESH_MODEL=8", "--dry_run"]) == 2
    assert "does not divide over model=8" in capsys.readouterr().err
    assert main([*evaluate, "--gin.MESH_MODEL=3", "--dry_run"]) == 2
    assert "needs a multiple of 3 devices, but there are 8" in capsys.readouterr().err
    assert main([*evaluate, "--gin.evaluate.num_examples=10"]) == 0
    assert "quickstart_negation  accuracy  " in capsys.readouterr().out
    file = tmp_path / "inputs.txt"
    file.write_text("order: the value of the object\n")
    infer = ["infer" if a == "evaluate" else a.replace("evaluate.gin", "infer.gin") for a in evaluate]
    assert main([*infer, f'--gin.INPUT_FILE="{file}"']) == 0
    written = run / "inference" / "inputs-2.jsonl"
    assert f"wrote {written}" in capsys.readouterr().out
    assert json.loads(written.read_text())["input"] == "order: the value of the object"


@pytest.mark.parametrize(
    "kind, files, task, lengths, more",
    [
        ("lm", ("models/lm_tiny.gin", "runs/pretrain.gin"), "quickstart_lm", '{"targets": 16}', ()),
        (
            "classifier",
            ("models/classifier_tiny.gin", "runs/classify.gin"),
            "quickstart_negation_class",
            '{"inputs": 16}',
            ("--gin.NUM_CLASSES=2",),
        ),
    ],
    ids=["lm", "classifier"],
)
def test_train_evaluate_and_infer_other_kinds_of_models(tmp_path, capsys, kind, files, task, lengths, more):
    data = [
        f'--gin.MIXTURE_OR_TASK_NAME="{task}"',
        '--gin.MIXTURE_OR_TASK_MODULE="synthesizer_jax.tasks.quickstart"',
        f"--gin.TASK_FEATURE_LENGTHS={lengths}",
        "--gin.BATCH_SIZE=8",
    ]
    sizes = {"vocab_size": 2048, "features": 16, "mlp_features": 16, "head_dim": 4}
    small = [f"--gin.model.{name}={size}" for name, size in sizes.items()]
    train = ["--gin.TRAIN_STEPS=1", f'--gin.MODEL_DIR="{tmp_path}"', "--gin.EVAL_PERIOD=None", '--gin.ATTENTION="R+V"']
    assert main(["train", *(f"--gin_file={file}" for file in files), *data, *train, *small, *more]) == 0
    assert main(["train", f"--gin_file={tmp_path / 'config.gin'}", "--dry_run"]) == 0
    file = tmp_path / "lines.txt"
    file.write_text("negation the value of\n")
    use = [*data, f'--gin.CHECKPOINT_PATH="{tmp_path}"']
    assert main(["evaluate", "--gin_file=runs/evaluate.gin", *use, "--gin.evaluate.num_examples=9"]) == 0
    assert main(["infer", "--gin_file=runs/infer.gin", *use, f'--gin.INPUT_FILE="{file}"']) == 0
    told = capsys.readouterr().out
    assert f"continues from {tmp_path / 'checkpoint_1'}" in told
    assert f"{task}  {'perplexity' if kind == 'lm' else 'accuracy'}  " in told
    (line,) = (tmp_path / "inference" / "lines-1.jsonl").read_text().splitlines()
    assert json.loads(line)["input"] == "negation the value of"
    assert kind == "lm" or json.loads(line)["prediction"] in ("false", "true")


def test_a_command_for_one_kind_of_model_refuses_another():
    files = ("experiments/quickstart.gin",)
    with pytest.raises(ValueError, match="reproduce.model: expected EncoderDecoderConfig, got DecoderOnlyConfig"):
        launch.make_plan("reproduce", files, ["model.preset=@lm_tiny"])


def test_a_fault_of_the_user_is_one_message_and_a_bug_a_traceback(tmp_path, capsys, monkeypatch):
    assert main(argv(tmp_path, "--gin.DROPOUT_RATE=1.5", "--dry_run")) == 2
    assert capsys.readouterr().err == "error: dropout_rate: expected a rate from 0 to below 1, got 1.5\n"

    def broken(**arguments):
        return int("not a number")

    monkeypatch.setattr(sys.modules["synthesizer_jax.training.loop"], "train", broken)
    monkeypatch.setattr(launch.Plan, "preflight", lambda self: [])
    with pytest.raises(ValueError, match="invalid literal for int"):
        main(argv(tmp_path))


def test_flags_that_are_not_there_or_in_another_spelling(tmp_path, capsys):
    for arguments in (["trian"], [], argv(tmp_path, "--gin_fle=a.gin"), argv(tmp_path, "stray")):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert main(argv(tmp_path, "--tfds_data_dir=/nowhere", "--dry_run")) == 2
    assert "--tfds_data_dir: no such directory: /nowhere" in capsys.readouterr().err
    assert main(argv(tmp_path, "--seqio_additional_cache_dirs=/nowhere", "--dry_run")) == 2
    assert "--seqio_additional_cache_dirs: no such directory: /nowhere" in capsys.readouterr().err
    assert main(argv(tmp_path, "--gin_bindings=BATCH_SIZE=16", "--gin.model.vocab_size=2176", "--dry_run")) == 0
    assert "BATCH_SIZE = 8" in capsys.readouterr().out  # --gin.NAME wins


def test_help_is_fast_and_shows_examples():
    code = "import sys; from synthesizer_jax.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({name.partition('.')[0] for name in sys.modules} & {'tensorflow', 'seqio', 't5'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.rstrip().endswith("[]"), done.stderr  # what takes seconds is not imported
    assert "--gin_file=attention/R+V.gin" in done.stdout and "models/paper_c4_base.gin" in done.stdout


def test_as_a_module_from_another_directory(tmp_path):
    command = [sys.executable, "-m", "synthesizer_jax", "train", "--gin_file=runs/pretrain.gin", "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert "missing: train.model" in done.stderr and "missing: TRAIN_STEPS" in done.stderr
    assert "Traceback" not in done.stderr


OWN_SCORES = """
import dataclasses
import jax.numpy as jnp
import synthesizer_jax as sj

@dataclasses.dataclass(frozen=True)
class OwnScores(sj.Spec):
    strength: float = 1.0

    def params(self, dims):
        return {}

    def score(self, params, x_q, keys, k_length, q_positions=None, k_positions=None):
        return sj.Scores(bias=jnp.full((1, 1, x_q.shape[1], k_length), self.strength))
"""


def test_scores_of_the_users_own_module(tmp_path, monkeypatch):
    """One gin line imports them; then the notation and gin know the class by its name."""
    (tmp_path / "own_scores_module.py").write_text(OWN_SCORES)
    monkeypatch.syspath_prepend(tmp_path)
    given = ['MODEL_DIR="runs/run"', 'MIXTURE_OR_TASK_NAME="a_task"', 'TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 8}',
             "BATCH_SIZE=8", "TRAIN_STEPS=10"]  # fmt: skip

    def attention_of(*lines):
        (tmp_path / "own.gin").write_text("\n".join(["import own_scores_module", *lines, ""]))
        files = ["models/t5_tiny.gin", str(tmp_path / "own.gin"), "runs/pretrain.gin"]
        return launch.make_plan("train", files, given).arguments["model"].encoder_attention

    by_notation = attention_of('ATTENTION = "OwnScores[strength=2.0]+V"')
    assert type(by_notation.parts[0]).__name__ == "OwnScores" and by_notation.parts[0].strength == 2.0
    by_reference = attention_of("ATTENTION = @OwnScores()", "OwnScores.strength = 3.0")
    assert type(by_reference).__name__ == "OwnScores" and by_reference.strength == 3.0
    with pytest.raises(ValueError, match="strength: expected float, got 'a'|OwnScores.strength"):
        attention_of("ATTENTION = @OwnScores()", "OwnScores.strength = 'a'")


@pytest.mark.parametrize("folder", ["runs/LightConv[width=5]", "runs/what?"])
def test_folders_that_orbax_cannot_read_are_refused(folder):
    with pytest.raises(ValueError, match="model_dir: expected a path without"):
        checkpoint.check_folder(folder)
