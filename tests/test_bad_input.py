"""Every kind of bad input is one named error before the first step: the message says what, where and what instead.

Each row runs the command line on a good command with something changed, and must end with exit code 2 and the text.
"""

import jax
import jax.numpy as jnp
import pytest
import seqio
import tensorflow as tf
from flax import nnx
from t5.evaluation import metrics

import synthesizer_jax as sj
from synthesizer_jax.__main__ import main
from synthesizer_jax.models import parameters
from synthesizer_jax.training.checkpoint import CheckpointWriter

GOOD = {
    "MODEL_DIR": '"{tmp}/run"',
    "MIXTURE_OR_TASK_NAME": '"quickstart_span_corruption"',
    "MIXTURE_OR_TASK_MODULE": '"synthesizer_jax.tasks.quickstart"',
    "TASK_FEATURE_LENGTHS": '{"inputs": 64, "targets": 32}',
    "BATCH_SIZE": "8",
    "TRAIN_STEPS": "1",
    "ATTENTION": '"R+V"',
    "model.vocab_size": "2176",
}
EVALUATE = {name: GOOD[name] for name in ("MIXTURE_OR_TASK_MODULE", "TASK_FEATURE_LENGTHS", "BATCH_SIZE")} | {
    "CHECKPOINT_PATH": '"{tmp}/trained"',
    "MIXTURE_OR_TASK_NAME": '"quickstart_negation"',
}
MODEL, TRAIN = "--gin_file=models/t5_tiny.gin", "--gin_file=runs/pretrain.gin"

# kind: (what is changed in the good training command; None leaves a macro out), text
TRAINING = {
    # macros and flags
    "missing macros, all at once": ({"MODEL_DIR": None, "BATCH_SIZE": None}, "missing: MODEL_DIR    give it as"),
    "missing macro, with an example": (
        {"TRAIN_STEPS": None},
        "missing: TRAIN_STEPS   give it as   --gin.TRAIN_STEPS='10000'",
    ),
    "misspelt macro": (
        {"BATCH_SIZES": "8"},
        "nothing in `train` refers to the macro BATCH_SIZES; did you mean BATCH_SIZE or MICROBATCHES?",
    ),
    "unquoted string": (
        {"ATTENTION": "R+V"},
        """R+V is not a gin value; a string is written in quotes: --gin.ATTENTION='"R+V"'""",
    ),
    "unquoted path": ({"MODEL_DIR": "runs/x"}, """a string is written in quotes: --gin.MODEL_DIR='"runs/x"'"""),
    "lost quotes in a dictionary": (
        {"TASK_FEATURE_LENGTHS": "{inputs: 64}"},
        """as in --gin.TASK_FEATURE_LENGTHS='{"inputs": 512, "targets": 114}'""",
    ),
    "flag without a value": ({"BATCH_SIZE": ""}, "--gin.BATCH_SIZE: expected --gin.NAME=VALUE"),
    "string for a number": (
        {"BATCH_SIZE": '"8"'},
        "BATCH_SIZE (train.batch_size): expected int, got '8'; write it without",
    ),
    "float for an integer": ({"TRAIN_STEPS": "1.5"}, "TRAIN_STEPS (train.train_steps): expected int, got 1.5"),
    "string for a boolean": ({"PACK": '"true"'}, "expected bool, got 'true'; write it without quotes: PACK = True"),
    "number for a string": ({"MODEL_DIR": "3"}, """expected str, got 3; write it in quotes: MODEL_DIR = "3\""""),
    "boolean for a number": ({"DROPOUT_RATE": "True"}, "DROPOUT_RATE (model.dropout_rate): expected float, got True"),
    "number for a schedule": (
        {"Adafactor.learning_rate": "0.1"},
        "Adafactor.learning_rate: expected a function (in gin: @",
    ),
    "unknown configurable": ({"trian.pack": "True"}, "no configurable 'trian'; did you mean train?"),
    "unknown parameter": ({"train.bach_size": "8"}, "train has no parameter 'bach_size'; did you mean batch_size?"),
    "unknown field of the model": ({"model.head": "4"}, "model has no parameter 'head'; did you mean heads"),
    "unknown optimizer": ({"train.optimizer": "@AdamX()"}, "no configurable 'AdamX'; did you mean AdamW?"),
    "what is no optimizer": (
        {"train.optimizer": "@t5_small()"},
        "train.optimizer: expected Adafactor | AdamW, got @t5_small()",
    ),
    # data
    "unknown task": ({"MIXTURE_OR_TASK_NAME": '"quickstart_negatoin"'}, "did you mean quickstart_negation"),
    "task module that is not there": (
        {"MIXTURE_OR_TASK_MODULE": '"no_such_tasks"'},
        "there is no module 'no_such_tasks'",
    ),
    "lengths without targets": (
        {"TASK_FEATURE_LENGTHS": '{"inputs": 64}'},
        'expected {"inputs": TOKENS, "targets": TOKENS}',
    ),
    "length of zero": (
        {"TASK_FEATURE_LENGTHS": '{"inputs": 0, "targets": 8}'},
        "expected an integer of at least 1, got 0",
    ),
    "inputs longer than max_length": ({"MAX_LENGTH": "63"}, "length 64 is more than max_length=63"),
    "cache that is not there": ({"USE_CACHED_TASKS": "True"}, "use_cached_tasks: no cache of"),
    "vocabulary larger than the embedding": (
        {"model.vocab_size": "2000"},
        "has ids up to 2047, the model has 2000 rows",
    ),
    # sizes
    "batch of zero": ({"BATCH_SIZE": "0"}, "batch_size: expected a whole number >= 1, got 0"),
    "batch that does not divide": (
        {"BATCH_SIZE": "9"},
        "batch_size=9 does not divide over data x fsdp = 8 x 1 = 8 devices",
    ),
    "mesh that does not divide": ({"train.mesh": "@MeshShape()", "MeshShape.model": "3"}, "devices, but there are 8"),
    "heads that do not divide": (
        {"train.mesh": "@MeshShape()", "MeshShape.model": "8"},
        "of size 4 does not divide over model=8",
    ),
    "negative steps": ({"TRAIN_STEPS": "-5"}, "train_steps: expected at least 1, got -5"),
    "label smoothing of one": ({"LABEL_SMOOTHING": "1.0"}, "label_smoothing: expected a number in [0, 1)"),
    "negative z-loss": ({"Z_LOSS": "-1.0"}, "z_loss: expected a number >= 0"),
    "negative learning rate": ({"LEARNING_RATE": "-1.0"}, "InverseSqrt.scale: expected a number > 0, got -1.0"),
    "model_dir that cannot be made": ({"MODEL_DIR": '"/dev/null/run"'}, "model_dir: cannot write to /dev/null/run"),
    "checkpoint that is not there": ({"INITIAL_CHECKPOINT_PATH": '"/nowhere"'}, "'/nowhere' does not exist"),
    "checkpoint that is none": ({"INITIAL_CHECKPOINT_PATH": '"{tmp}"'}, "is neither a checkpoint"),
    "checkpoint of another model": ({"INITIAL_CHECKPOINT_PATH": '"{tmp}/trained"'}, "holds another model:"),
    # model
    "unknown letters": (
        {"ATTENTION": '"R+Q"'},
        "notation: 'Q' in 'R+Q' is not understood; expected a sum of V, R, fixedR, FR",
    ),
    "unknown option of a letter": ({"ATTENTION": '"FR[rnk=8]"'}, "has an option that FactorizedRandom does not know"),
    "rank of zero": ({"ATTENTION": '"FR[rank=0]"'}, "rank: expected a positive whole number, got 0"),
    "factors that do not give the length": (
        {"ATTENTION": '"FD[a=3, b=5]"'},
        "expected a * b = max_length = 512, got a=3 * b=5 = 15",
    ),
    "sigmoid of three parts": (
        {
            "ATTENTION": "@synthesizer()",
            "synthesizer.notation": '"R+V+D"',
            "synthesizer.max_length": "64",
            "synthesizer.weights": '"sigmoid"',
        },
        "weights: 'sigmoid' weighs two parts, got 3",
    ),
    "max_length of zero": ({"MAX_LENGTH": "0"}, "max_length: expected a positive whole number, got 0"),
    "heads of zero": ({"model.heads": "0"}, "heads: expected a positive whole number, got 0"),
    "dropout of one": ({"DROPOUT_RATE": "1.0"}, "dropout_rate: expected a rate from 0 to below 1, got 1.0"),
    "unknown activation": (
        {"model.mlp_activation": '"swish"'},
        "model.mlp_activation: expected 'relu' or 'gated-gelu', got 'swish'",
    ),
    "float16": ({"DTYPE": '"float16"'}, "DTYPE (model.dtype): expected 'float32' or 'bfloat16', got 'float16'"),
    "unknown remat": ({"REMAT": '"some"'}, "REMAT (model.remat): expected 'none' or 'full' or 'dots' or 'attention', got 'some'"),
    "cross-attention has no letters": ({"model.cross_attention": '"R"'}, "model has no parameter 'cross_attention'"),
}

LM, CLASSIFIER = "--gin_file=models/lm_tiny.gin", "--gin_file=models/classifier_tiny.gin"
TEXT = {"MIXTURE_OR_TASK_NAME": '"quickstart_lm"', "TASK_FEATURE_LENGTHS": '{"targets": 64}'}
LABELS = {
    "MIXTURE_OR_TASK_NAME": '"quickstart_negation_class"',
    "TASK_FEATURE_LENGTHS": '{"inputs": 64}',
    "NUM_CLASSES": "2",
    "PACK": "False",
}

# kind: (files, what is changed in the good training command, text)
KINDS = {
    "field of another kind of model": (
        [MODEL, TRAIN],
        {"model.num_classes": "3"},
        "num_classes (of EncoderOnlyConfig) is no field of the configuration; expected some of vocab_size",
    ),
    "cross-attention of a language model": (
        [LM, TRAIN],
        TEXT | {"model.cross_heads": "3"},
        "cross_heads (of EncoderDecoderConfig) is no field of the configuration",
    ),
    "classifier without classes": (
        [CLASSIFIER, TRAIN],
        LABELS | {"NUM_CLASSES": None},
        "missing: NUM_CLASSES   give it",
    ),
    "one class": ([CLASSIFIER, TRAIN], LABELS | {"NUM_CLASSES": "1"}, "num_classes: expected at least 2, got 1"),
    "classes that are not the task's": (
        [CLASSIFIER, TRAIN],
        LABELS | {"NUM_CLASSES": "4"},
        "num_classes: 'targets' of 'quickstart_negation_class' is one of 2 ids, the model has 4 classes",
    ),
    "classes of another kind of model": ([LM, TRAIN], TEXT | {"NUM_CLASSES": "2"}, "refers to the macro NUM_CLASSES"),
    "packed classifier": (
        [CLASSIFIER, TRAIN],
        LABELS | {"PACK": None},
        "pack: EncoderOnly gives one answer for a row, so that a row holds one example; set pack=False (PACK = False)",
    ),
    "unknown pooling": (
        [CLASSIFIER, TRAIN],
        LABELS | {"model.pooling": '"max"'},
        "model.pooling: expected 'mean' or 'first', got 'max'",
    ),
    "labels that are text": (
        [CLASSIFIER, TRAIN],
        LABELS | {"MIXTURE_OR_TASK_NAME": '"quickstart_negation"'},
        "num_classes: 'targets' of 'quickstart_negation' is one of 2048 ids",
    ),
    "task with inputs for a language model": (
        [LM, TRAIN],
        TEXT | {"MIXTURE_OR_TASK_NAME": '"quickstart_negation"'},
        "'quickstart_negation' has the features inputs and targets, but DecoderOnly reads targets",
    ),
    "text without inputs for an encoder-decoder": (
        [MODEL, TRAIN],
        {"MIXTURE_OR_TASK_NAME": '"quickstart_lm"'},
        "'quickstart_lm' has the features targets, but EncoderDecoder reads inputs and targets",
    ),
    "lengths of another kind of model": (
        [LM, TRAIN],
        TEXT | {"TASK_FEATURE_LENGTHS": GOOD["TASK_FEATURE_LENGTHS"]},
        'task_feature_lengths: expected {"targets": TOKENS} for DecoderOnly, got',
    ),
    "text longer than max_length": ([LM, TRAIN], TEXT | {"MAX_LENGTH": "63"}, "length 64 is more than max_length=63"),
    "checkpoint of another kind of model": (
        [LM, TRAIN],
        TEXT | {"INITIAL_CHECKPOINT_PATH": '"{tmp}/trained"'},
        "holds another kind of model: EncoderDecoder, where DecoderOnly is wanted",
    ),
    "encoder of another size": (
        [CLASSIFIER, TRAIN],
        LABELS | {"INITIAL_CHECKPOINT_PATH": '"{tmp}/trained"'},
        "params/embedding/embedding: (2176, 8) in the checkpoint, (2176, 128) wanted",
    ),
}

# kind: (the arguments after `train`), text
FILES = {
    "gin file that is not there": ([MODEL, "--gin_file=runs/pretrian.gin"], "did you mean runs/pretrain.gin"),
    "gin file without its folder": ([MODEL, "--gin_file=pretrain.gin"], "did you mean runs/pretrain.gin"),
    "no gin file": ([], "missing: train.model "),
    "gin file that does not parse": (
        ["--gin_file={tmp}/broken.gin"],
        "line 2: cannot read 'ATTENTION = R+V'; a string is",
    ),
    "gin file that includes itself": (["--gin_file={tmp}/loop.gin"], "includes itself"),
    "import of nothing": (["--gin_file={tmp}/imports.gin"], "there is no module 'no_such_module'"),
    "dynamic registration": (["--gin_file={tmp}/dynamic.gin"], "dynamic registration is not used here"),
    "search path that is not there": (
        [MODEL, TRAIN, "--gin_search_paths=/nowhere"],
        "--gin_search_paths: no such directory",
    ),
    "file without effect": (
        [MODEL, TRAIN, "--gin_file={tmp}/idle.gin"],
        "idle.gin has no effect on `train`; leave it out",
    ),
}
WRITTEN = {
    "broken": "BATCH_SIZE = 8\nATTENTION = R+V\n",
    "loop": "include 'loop.gin'\n",
    "imports": "import no_such_module\n",
    "dynamic": "from __gin__ import dynamic_registration\n",
    "idle": "AdamW.b1 = 0.5\n",
}

# kind: (what is changed in the good evaluation command), text
EVALUATION = {
    "evaluation of nothing": ({"CHECKPOINT_PATH": '"/nowhere"'}, "checkpoint path '/nowhere' does not exist"),
    "evaluation without a checkpoint": ({"CHECKPOINT_PATH": None}, "missing: CHECKPOINT_PATH"),
    "split that is not there": ({"SPLIT": '"dev"'}, "has no split 'dev'; it has train, validation"),
    "training's macro": ({"TRAIN_STEPS": "3"}, "nothing in `evaluate` refers to the macro TRAIN_STEPS; leave it out"),
    "evaluation batch of zero": ({"BATCH_SIZE": "0"}, "batch_size: expected at least 1, got 0"),
    "decoding longer than max_length": (
        {"TASK_FEATURE_LENGTHS": '{"inputs": 8, "targets": 65}'},
        "more than max_length=64",
    ),
    "task of another vocabulary": ({"MIXTURE_OR_TASK_NAME": '"bad_input_large_vocabulary"'}, "the model has 2176 rows"),
    "results that cannot be written": ({"OUTPUT_DIR": '"/dev/null/x"'}, "output_dir: cannot write to /dev/null/x"),
}


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    """A folder with the gin files above and a trained model of 64 tokens."""
    folder = tmp_path_factory.mktemp("bad_input")
    for name, text in WRITTEN.items():
        (folder / f"{name}.gin").write_text(text)
    config = sj.t5_tiny("R", max_length=64, vocab_size=2176, features=8, head_dim=4, encoder_layers=1, decoder_layers=1)
    trained, fixed = jax.tree.map(lambda p: jnp.zeros(p.shape), parameters.abstract(config))
    with CheckpointWriter(str(folder / "trained")) as writer:
        writer.save(1, {"params": trained, "fixed": fixed}, config, {})
    features = dict.fromkeys(("inputs", "targets"), seqio.Feature(seqio.ByteVocabulary(extra_ids=5000)))
    source = seqio.FunctionDataSource(lambda split, shuffle_files: tf.data.Dataset.from_tensors({}), ["validation"])
    seqio.TaskRegistry.add(
        "bad_input_large_vocabulary", source, preprocessors=[], output_features=features, metric_fns=[metrics.accuracy]
    )
    yield str(folder)
    seqio.TaskRegistry.remove("bad_input_large_vocabulary")


def refused(capsys, tmp, command, files, bindings):
    flags = [f"--gin.{name}={value.replace('{tmp}', tmp)}" for name, value in bindings.items() if value is not None]
    code = main([command, *(file.replace("{tmp}", tmp) for file in files), *flags, "--dry_run"])
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    return error


def test_the_good_commands_are_good(tmp):
    for command, files, bindings in (
        ("train", [MODEL, TRAIN], GOOD),
        ("train", [LM, TRAIN], GOOD | TEXT),
        ("train", [CLASSIFIER, "--gin_file=runs/classify.gin"], GOOD | LABELS),
        ("evaluate", ["--gin_file=runs/evaluate.gin"], EVALUATE),
    ):
        flags = [f"--gin.{name}={value.replace('{tmp}', tmp)}" for name, value in bindings.items()]
        assert main([command, *files, *flags, "--dry_run"]) == 0


@pytest.mark.parametrize("kind", TRAINING)
def test_training(kind, tmp, capsys):
    changed, text = TRAINING[kind]
    assert text in refused(capsys, tmp, "train", [MODEL, TRAIN], GOOD | changed)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(kind, tmp, capsys):
    files, changed, text = KINDS[kind]
    assert text in refused(capsys, tmp, "train", files, GOOD | changed)


@pytest.mark.parametrize("kind", FILES)
def test_files(kind, tmp, capsys):
    files, text = FILES[kind]
    assert text in refused(capsys, tmp, "train", files, GOOD if files else {})


def test_inference_on_a_file_that_is_not_there(tmp, capsys):
    given = EVALUATE | {"INPUT_FILE": '"/nowhere.txt"'}
    text = "input_file: no such file: /nowhere.txt"
    assert text in refused(capsys, tmp, "infer", ["--gin_file=runs/infer.gin"], given)


@pytest.mark.parametrize("kind", EVALUATION)
def test_evaluation(kind, tmp, capsys):
    changed, text = EVALUATION[kind]
    assert text in refused(capsys, tmp, "evaluate", ["--gin_file=runs/evaluate.gin"], EVALUATE | changed)


def test_cross_attention_refuses_scores_by_position():
    """Not on the command line: T5's cross-attention is dot-product."""
    layer = sj.Attention(sj.Random(8), features=8, heads=2, head_dim=4, rngs=nnx.Rngs(0))
    x = jnp.zeros((1, 4, 8))
    with pytest.raises(ValueError, match="Random"):
        layer(x, x + 1)
