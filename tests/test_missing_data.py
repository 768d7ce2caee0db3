"""Data that is not there, a shard that would be empty, lengths that cut: said before a model is made, in one message."""

import pathlib

import pytest
import seqio

from synthesizer_jax import tasks
from synthesizer_jax.__main__ import main
from synthesizer_jax.models import t5_tiny
from synthesizer_jax.training import loop
from synthesizer_jax.training.optimizer import Adafactor
from synthesizer_jax.training.step import Trainer

VOCABULARY = str(
    pathlib.Path(tasks.__file__).with_name("quickstart.model")
)  # a SentencePiece model that is always here
FILES = ("models/t5_tiny.gin", "attention/R+V.gin", "runs/pretrain.gin")


@pytest.fixture(autouse=True)
def no_data(tmp_path, monkeypatch):
    monkeypatch.setenv("SYNTHESIZER_JAX_VOCAB", VOCABULARY)
    monkeypatch.setattr(seqio.utils, "_TFDS_DATA_DIR_OVERRIDE", str(tmp_path))


def argv(tmp_path, *more, **macros):
    given = {
        "MODEL_DIR": str(tmp_path / "run"),
        "MIXTURE_OR_TASK_NAME": "glue_rte",
        "TASK_FEATURE_LENGTHS": {"inputs": 64, "targets": 16},
        "BATCH_SIZE": 8,
        "TRAIN_STEPS": 1,
    }
    flags = [f"--gin.{name}={value!r}" for name, value in (given | macros).items()]
    return ["train", *(f"--gin_file={file}" for file in FILES), *flags, f"--tfds_data_dir={tmp_path}", *more]


@pytest.mark.parametrize("more", [(), ("--dry_run",)])
def test_the_command_line_says_what_is_missing(tmp_path, capsys, more):
    assert main(argv(tmp_path, *more)) == 2
    said = capsys.readouterr().err
    assert f"error: no data of glue/rte:2.0.0 in {tmp_path}" in said and "tfds build glue/rte:2.0.0" in said
    assert "Traceback" not in said and not (tmp_path / "run").exists()


def test_train_says_it_before_a_model_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "init", lambda self: pytest.fail("made a model"))
    with pytest.raises(FileNotFoundError, match="^no data of glue/rte:2.0.0 in"):
        loop.train(
            model=t5_tiny("R+V"),
            optimizer=Adafactor(),
            mixture_or_task_name="glue_rte",
            task_feature_lengths={"inputs": 64, "targets": 16},
            batch_size=8,
            train_steps=1,
            model_dir=str(tmp_path / "run"),
        )
    assert not (tmp_path / "run").exists()


def test_a_dry_run_warns_of_lengths_that_cut(tmp_path, capsys):
    lengths = {"inputs": 12, "targets": 4}
    assert (
        main(argv(tmp_path, "--dry_run", MIXTURE_OR_TASK_NAME="quickstart_negation", TASK_FEATURE_LENGTHS=lengths)) == 0
    )
    said = capsys.readouterr().out
    assert "of the first 1,000 examples of quickstart_negation (train) have more than 12 tokens of" in said


def test_training_warns_of_lengths_that_cut(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(loop, "_make_folder", lambda *unused: pytest.fail("far enough"))
    with pytest.raises(pytest.fail.Exception):
        loop.train(
            model=t5_tiny("R+V", vocab_size=2048),
            optimizer=Adafactor(),
            mixture_or_task_name="quickstart_negation",
            task_feature_lengths={"inputs": 12, "targets": 4},
            batch_size=8,
            train_steps=1,
            model_dir=str(tmp_path / "run"),
        )
    assert 'have more than 12 tokens of "inputs" (longest' in capfd.readouterr().err


@pytest.mark.parametrize(
    "macros, text",
    [
        ({"TASK_FEATURE_LENGTHS": {"inputs": 64, "targets": 7}}, "Expected targets length for span corruption (14)"),
        ({"TASK_FEATURE_LENGTHS": {"inputs": 1, "targets": 7}}, 'task_feature_lengths["inputs"]: expected at least 2'),
    ],
)
def test_lengths_that_cannot_be(tmp_path, capsys, macros, text):
    assert main(argv(tmp_path, "--dry_run", MIXTURE_OR_TASK_NAME="quickstart_span_corruption", **macros)) == 2
    assert text in capsys.readouterr().err


def test_shards_that_do_not_divide_the_batch(tmp_path, capsys):
    command = argv(tmp_path, "--dry_run", "--gin.train.data_shards=3", MIXTURE_OR_TASK_NAME="quickstart_negation")
    assert main(command) == 2
    assert "error: shards: 8 rows of a batch cannot be divided among 3 shards" in capsys.readouterr().err
