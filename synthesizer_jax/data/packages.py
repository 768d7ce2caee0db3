"""The packages below: the right ones, and kept off the accelerators."""

import importlib.metadata

import seqio
import tensorflow as tf
import tensorflow_datasets as tfds


def check_packages() -> None:
    """Raises ImportError where a nightly package, which t5 asks for, lies on top of the stable one of the same name."""
    for module, stable, nightly in ((seqio, "seqio", "seqio-nightly"), (tfds, "tensorflow-datasets", "tfds-nightly")):
        try:
            expected = importlib.metadata.version(stable)
        except importlib.metadata.PackageNotFoundError:
            expected = None
        if module.__version__ != expected:
            raise ImportError(
                f"the {module.__name__} that was imported is {module.__version__}, but {stable} is "
                f"{expected or 'not installed'}: {nightly} lies on top of it. Repair: "
                "pip install --force-reinstall --no-deps seqio tensorflow-datasets"
            )


def keep_off_accelerators() -> None:
    """TensorFlow takes all memory of the accelerators that it sees, and JAX then gets none."""
    for kind in ("GPU", "TPU"):
        try:
            tf.config.set_visible_devices([], kind)
        except RuntimeError as error:  # TensorFlow has run already: too late to hide anything
            if tf.config.get_visible_devices(kind):
                raise RuntimeError(f"TensorFlow holds {kind}s; import synthesizer_jax.data before using it") from error
