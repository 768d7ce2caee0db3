"""What a run tells: scalars without contradictions after a restart, progress lines, means over real targets."""

import io
import json
import logging as python_logging

import jax
import numpy as np
import pytest
from clu import metric_writers
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from synthesizer_jax.models import t5_tiny
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.logging import (
    NotFinite,
    Progress,
    ScalarWriter,
    TrainingLog,
    model_info,
    read_lines,
    say_what_is_logged,
    summarize,
)
from synthesizer_jax.training.optimizer import Adafactor
from synthesizer_jax.training.step import Trainer


def curve(folder, name="loss"):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in accumulator.Tensors(name)]


def write(folder, after_step, values):
    writer = ScalarWriter(str(folder), after_step)
    for step, value in values.items():
        writer.write(step, {"loss": value})
    return writer


def test_scalars_reach_tensorboard_and_json(tmp_path):
    write(tmp_path, 0, {1: 3.0, 2: 0.1})  # never closed: what a killed run leaves
    assert curve(tmp_path) == [(1, 3.0), (2, np.float32(0.1))]
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 0.1}]


def test_a_restart_tells_no_step_twice(tmp_path):
    for number in range(11):  # writers elsewhere in the process, so that file names do not sort by chance
        metric_writers.SummaryWriter(str(tmp_path / str(number))).close()
    write(tmp_path, 0, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed in the middle of a line
    write(tmp_path, 2, {3: 30.0, 5: 50.0})
    assert [tuple(entry.values()) for entry in read_lines(tmp_path / "metrics.jsonl")] == curve(tmp_path)
    assert curve(tmp_path) == [(1, 1.0), (2, 2.0), (3, 30.0), (5, 50.0)]


def test_means_are_over_real_targets():
    steps = [
        {"loss": 4.0, "z_loss": 1.0, "accuracy": 1.0, "weight": 2.0, "learning_rate": 0.5, "gradient_norm": 1.0},
        {"loss": 2.0, "z_loss": 0.0, "accuracy": 3.0, "weight": 6.0, "learning_rate": 0.25, "gradient_norm": 2.0},
    ]
    expected = {"loss": 0.75, "z_loss": 0.125, "accuracy": 0.5, "learning_rate": 0.25, "gradient_norm": 1.5}
    assert summarize(steps) == expected
    assert summarize([{"loss": 0.0, "accuracy": 0.0, "weight": 0.0}]) == {"loss": 0.0, "accuracy": 0.0}


def step_metrics(loss=1.0, gradient_norm=1.0):
    values = {"loss": loss, "accuracy": 1.0, "weight": 4.0, "gradient_norm": gradient_norm}
    return jax.tree.map(np.float32, values)


def test_lines_where_there_is_no_terminal(tmp_path):
    stream = io.StringIO()
    with TrainingLog(str(tmp_path), 10, 20, stream) as log:
        for _ in range(3):
            log.add(step_metrics())
        assert log.flush() == {"loss": 0.25, "accuracy": 0.25, "gradient_norm": 1.0}
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("step 13/20  loss 0.25  accuracy 0.25  ") and " steps/s  " in line and line.endswith(" left")
    (entry,) = read_lines(tmp_path / "metrics.jsonl")
    assert entry["step"] == 13 and entry["timing/steps_per_second"] > 0
    np.testing.assert_allclose(entry["timing/target_tokens_per_second"], 4 * entry["timing/steps_per_second"])


def test_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = Progress(5, 10, stream)
    progress.advance()
    progress.show(6, {"loss": 1.5})
    progress.close()
    assert "6/10" in stream.getvalue() and "loss=1.5" in stream.getvalue() and "step 6" not in stream.getvalue()


@pytest.mark.parametrize(
    "bad,text",
    [
        ({"loss": np.nan}, "loss is nan at step 12: training stops"),
        ({"gradient_norm": np.inf}, "gradient_norm is inf at step 12"),
    ],
)
def test_what_is_not_finite_is_named_with_its_step(tmp_path, bad, text):
    with TrainingLog(str(tmp_path), 10, 20, io.StringIO()) as log:
        log.add(step_metrics())
        log.add(step_metrics(**bad))
        with pytest.raises(NotFinite, match=text):
            log.flush()
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_model_info_lists_every_parameter():
    config = t5_tiny("fixedR+V", max_length=8, vocab_size=64)
    made = Trainer(config, Adafactor(), MeshShape(fsdp=2, model=4).build(jax.devices()[:8]))
    lines = model_info(made.mesh, made.declared_state()).splitlines()
    (embedding,) = (line.split("  ") for line in lines if line.startswith("embedding/embedding "))
    assert [word.strip() for word in embedding if word] == [
        "embedding/embedding",
        "64x128",
        "vocab, embed",
        "float32",
        "model=4, fsdp=2",
        "8,192",
    ]
    assert any(line.startswith("encoder/layers/attention/scores/random/R (fixed)") for line in lines)
    leaves = jax.tree.leaves((made.declared_state().params, made.declared_state().fixed))
    rows = lines[1 : 1 + len(leaves)]
    counts = [int(row.split()[-1].replace(",", "")) for row in rows]
    trained, fixed = (int(line.split()[-1].replace(",", "")) for line in lines[-3:-1])
    assert sum(counts) == trained + fixed and lines[len(rows) + 1] == ""


def test_json_lines_are_json(tmp_path):
    write(tmp_path, 0, {1: 1.0}).close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 1.0}


def test_what_the_library_logs_is_said_once(capsys):
    logger = python_logging.getLogger("synthesizer_jax")
    before = logger.level, list(logger.handlers)
    try:
        say_what_is_logged()
        say_what_is_logged()
        python_logging.getLogger("synthesizer_jax.ops.fused").info("attention: path %r: %s", "xla", "a reason")
        assert capsys.readouterr().err == "attention: path 'xla': a reason\n"
    finally:
        logger.setLevel(before[0])
        logger.handlers = before[1]
