"""Tests run on 8 CPU devices, with strict dtype promotion and checked array annotations.

Most of their time goes into compiling tiny programs that run once, of which LLVM's optimization is half.
"""

import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import pytest
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")

with install_import_hook(
    [f"synthesizer_jax.{room}" for room in ("scores", "ops", "mixers", "nn", "models")],
    "beartype.beartype",
):
    import synthesizer_jax  # noqa: F401


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """Reference data beside the checkout; tests that need it skip where it is absent."""
    default = pathlib.Path(__file__).parents[2] / "shared"
    folder = pathlib.Path(os.environ.get("SYNTHESIZER_JAX_SHARED", default))
    if not folder.is_dir():
        pytest.skip(f"no reference data in {folder}; name its folder in SYNTHESIZER_JAX_SHARED")
    return folder


@pytest.fixture
def real_data(shared, monkeypatch):
    """shared/ as the place of vocabulary and data."""
    import seqio  # takes seconds, and few tests need it

    monkeypatch.setenv("SYNTHESIZER_JAX_VOCAB", str(shared / "data/vocab/t5/spiece.model"))
    monkeypatch.setenv("SYNTHESIZER_JAX_DATA", str(shared / "data"))
    seqio.set_tfds_data_dir_override(str(shared / "tfds"))
    yield shared
    seqio.set_tfds_data_dir_override(None)


@pytest.fixture
def unchecked_annotations():
    """Array annotations go unchecked, as for users: what a wrong argument says is our own error's text."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Thousands of compiled programs would take gigabytes by the end of a run."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def forget_where_data_is():
    """The command line tells seqio and the environment, for the rest of the process."""
    names = ("SYNTHESIZER_JAX_VOCAB", "SYNTHESIZER_JAX_DATA")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    if "seqio" in sys.modules:
        sys.modules["seqio"].set_tfds_data_dir_override(None)
