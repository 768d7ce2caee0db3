"""A profile of a few steps, for XProf or TensorBoard's profile plugin: model_dir/profile/.

Each process writes what its own host and devices did: plugins/profile/<time>/<host>.xplane.pb, below a folder of its own where
processes are several, since those of one host would take the same name. The trace has the model's named scopes, and each step
of training as "train" with its number.
"""

import jax

from synthesizer_jax.training.logging import say

PROFILE = "profile"  # in model_dir
STEP = "train"  # the name of a step in the trace


def check_steps(steps: tuple[int, int] | None, train_steps: int) -> None:
    """ValueError unless `steps` is (a, b) with 1 <= a < b, and a no later than the last step."""
    if steps is None:
        return
    whole = isinstance(steps, (tuple, list)) and len(steps) == 2 and all(type(step) is int for step in steps)
    if not whole or not 1 <= steps[0] < steps[1]:
        raise ValueError(
            f"profile_steps: expected (a, b) with 1 <= a < b, for the steps from a to before b, or None, got {steps!r}"
        )
    if steps[0] > train_steps:
        raise ValueError(f"profile_steps: step {steps[0]} is past train_steps={train_steps}: nothing would be traced")


class Profile:
    """Traces the steps [a, b) of a run that goes on from `after_step`: what of them was done before is left out."""

    def __init__(self, steps: tuple[int, int] | None, model_dir: str, after_step: int):
        self._begin, self._end = steps or (0, 0)
        several = jax.process_count() > 1
        self._folder = f"{model_dir}/{PROFILE}" + (f"/process_{jax.process_index()}" if several else "")
        self._running = False
        if self._begin <= after_step < self._end - 1:
            say(f"profile_steps: steps {self._begin} to {after_step} were made before: the others are traced")
        elif steps and after_step >= self._end - 1:
            say(f"profile_steps: steps {self._begin} to {self._end - 1} were made before: nothing is traced")

    def step(self, number: int) -> jax.profiler.StepTraceAnnotation:
        """Marks the dispatch of a step; begins the trace with the first one that is due."""
        if not self._running and self._begin <= number < self._end:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # each Python call would be recorded: slow, and in the way
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True
        return jax.profiler.StepTraceAnnotation(STEP, step_num=number)

    def after(self, number: int, results) -> None:
        """Ends the trace after its last step, once the devices have computed its `results`."""
        if self._running and number >= self._end - 1:
            jax.block_until_ready(results)
            self._stop()

    def _stop(self):
        self._running = False
        jax.profiler.stop_trace()
        say(f"profile: in {self._folder}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._running:
            self._stop()
