"""What is said about a step that hangs, and what is measured of those that don't: traces and utilisation."""

import dataclasses
import io
import re
import socket
import time

import jax
import pytest
from test_loop import arguments, compile_once  # noqa: F401 (compile_once is a fixture)

from synthesizer_jax import data
from synthesizer_jax.models import classifier_tiny, lm_tiny, t5_tiny
from synthesizer_jax.models.flops import training_flops
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training import throughput
from synthesizer_jax.training.logging import read_lines
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.profiling import Profile, check_steps
from synthesizer_jax.training.watchdog import COMPILATION, DATA, DEVICES, Watchdog

SIZES = {"features": 16, "mlp_features": 32, "heads": 2, "head_dim": 8, "vocab_size": 2048}
MODEL = t5_tiny("R", max_length=32, dropout_rate=0.0, **SIZES, encoder_layers=1, decoder_layers=1)


def until(condition):
    """A condition that another thread fulfils; well before the minute that this allows."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_says_which_step_waits_for_what_since_when_and_again_when_the_time_has_doubled():
    told = io.StringIO()
    with Watchdog(0.2, told) as watch:
        watch.waits(6, DATA)
        watch.waits(7, DEVICES)
        until(lambda: told.getvalue().count("\n") == 3)
        watch.waits(8, DATA)
        until(lambda: "goes on" in told.getvalue())
        watch.rests()
    *hung, on = told.getvalue().splitlines()[:4]
    who = rf"\(process 0 of 1, on {re.escape(socket.gethostname())}\)"
    for line in hung:
        assert re.fullmatch(
            rf"watchdog: step 7 has been waiting for the devices for \d+ s, since \d\d:\d\d:\d\d {who}", line
        )
    assert re.fullmatch(rf"watchdog: step 7 goes on, after \d+ s {who}", on)


def test_says_nothing_while_there_is_progress_or_nothing_to_wait_for():
    told = io.StringIO()
    with Watchdog(1.0, told) as watch:
        for _ in range(15):
            watch.waits(1, COMPILATION)  # the same words: progress all the same
            time.sleep(0.1)
        watch.rests()
        time.sleep(1.5)
    with Watchdog(None, told) as watch:
        watch.waits(1, DATA)
    assert told.getvalue() == ""


@pytest.mark.parametrize("seconds", [0, -1.0, "300", True, float("nan")])
def test_refuses_a_time_that_is_none(seconds):
    with pytest.raises(ValueError, match="watchdog_seconds: expected a number > 0, or None for no watchdog, got"):
        Watchdog(seconds)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run whose fifth batch does not come until the watchdog has said so, with a trace of steps 2 and 3."""
    folder, lines = tmp_path_factory.mktemp("watched"), io.StringIO()

    class Blocked(data.TrainBatches):
        read = 0

        def __next__(self):
            self.read += 1
            if self.read == 5:
                until(lambda: "step 5 has been waiting for data" in lines.getvalue())
            return super().__next__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "TrainBatches", Blocked)
        patch.setattr("sys.stderr", lines)
        options = {"watchdog_seconds": 0.5, "profile_steps": (2, 4), "peak_flops_per_device": 1e9}
        task = {"mixture_or_task_name": "quickstart_negation", "pack": False}
        train(**arguments(folder, model=MODEL, train_steps=6, eval_period=None, log_period=2, **task, **options))
    return folder, lines.getvalue()


def test_a_run_whose_data_does_not_come_says_so(watched):
    _, told = watched
    assert "watchdog: step 5 has been waiting for data for " in told
    assert "watchdog: step 5 goes on, after " in told


def test_the_trace_has_its_steps_and_the_models_scopes(watched):
    folder, told = watched
    (trace,) = (folder / "profile").rglob("*.xplane.pb")
    assert f"profile: in {folder}/profile" in told
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events if event.name == "train"]
    numbers = {value for event in events for name, value in event.stats if name == "step_num"}
    assert numbers == {2, 3}
    content = trace.read_bytes()
    assert all(scope in content for scope in (b"self_attention", b"cross_attention", b"mlp"))


def test_speed_and_utilisation_are_in_the_log(watched):
    folder, _ = watched
    timed = [line for line in read_lines(folder / "train" / "metrics.jsonl") if "timing/seconds_per_step" in line]
    assert timed
    work = 8 * training_flops(MODEL, {"inputs": 32, "targets": 16})
    for line in timed:
        seconds = line["timing/seconds_per_step"]
        assert line["timing/steps_per_second"] == pytest.approx(1 / seconds)
        assert line["timing/model_flops_utilization"] == pytest.approx(work / seconds / 1e9)
        assert 0 < line["timing/target_tokens_per_second"] * seconds <= 8 * 16


def test_a_trace_begins_where_the_run_goes_on(monkeypatch, capfd):
    done = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, profiler_options: done.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: done.append("stop"))
    for after_step in (0, 4, 7):
        with Profile((3, 8), "run", after_step) as profile:
            for step in range(after_step + 1, 11):
                with profile.step(step):
                    done.append(step)
                profile.after(step, ())
        done.append("end")
    traced = ["run/profile", *range(3, 8), "stop"]
    assert done == [1, 2, *traced, 8, 9, 10, "end", "run/profile", 5, 6, 7, "stop", 8, 9, 10, "end", 8, 9, 10, "end"]
    said = capfd.readouterr().err
    assert said.count("profile: in run/profile") == 2
    assert "profile_steps: steps 3 to 4 were made before: the others are traced" in said
    assert "profile_steps: steps 3 to 7 were made before: nothing is traced" in said
    with Profile((3, 8), "run", 0) as profile, profile.step(3):
        pass  # a run that is stopped
    assert done[-2:] == ["run/profile", "stop"]


@pytest.mark.parametrize("steps", [(0, 5), (5, 5), (5,), 5, (1.0, 2), (True, 3)])
def test_refuses_steps_that_are_none(steps):
    with pytest.raises(ValueError, match=r"profile_steps: expected \(a, b\) with 1 <= a < b"):
        check_steps(steps, 10)


def test_refuses_steps_that_do_not_come():
    with pytest.raises(ValueError, match="profile_steps: step 11 is past train_steps=10: nothing would be traced"):
        check_steps((11, 12), 10)


# Utilisation


@pytest.mark.parametrize(
    "config, lengths",
    [
        (MODEL, {"inputs": 32, "targets": 16}),
        (lm_tiny("R", max_length=32, **SIZES), {"targets": 16}),
        (classifier_tiny(2, "R", max_length=32, **SIZES), {"inputs": 32}),
    ],
    ids=["encoder_decoder", "decoder_only", "encoder_only"],
)
def test_recomputation_is_no_model_flop(config, lengths):
    again = dataclasses.replace(config, remat="full")
    assert training_flops(again, lengths) == training_flops(config, lengths) > 0


def test_full_use_of_known_and_unknown_devices(monkeypatch):
    mesh, lengths = MeshShape().build(), {"inputs": 32, "targets": 16}
    assert throughput.full_use(MODEL, lengths, 8, mesh) is None, "a CPU's peak is not in the table"
    work = 8 * training_flops(MODEL, lengths)
    assert throughput.full_use(MODEL, lengths, 8, mesh, 1e9) == work / (8 * 1e9)
    monkeypatch.setitem(throughput.PEAK_FLOPS, mesh.devices.flat[0].device_kind, 2e9)
    assert throughput.full_use(MODEL, lengths, 8, mesh) == work / (8 * 2e9)


@pytest.mark.parametrize("peak", [0, -1.0, "197e12", float("nan")])
def test_refuses_a_peak_that_is_none(peak):
    with pytest.raises(ValueError, match="peak_flops_per_device: expected a number of FLOP/s > 0"):
        throughput.check_peak(peak)
