"""What holds for every test: devices, seeds, logs."""

import contextlib
import os

import hypothesis
import pytest

# Read when TensorFlow is imported: errors only.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@contextlib.contextmanager
def _no_stderr():
    """Drops what is written to stderr, from C++ too."""
    with open(os.devnull, "w") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


# Before it has read that level, TensorFlow says which devices it misses;
# pytest-xdist would show it behind the summary.
with _no_stderr():
    import keras
    import tensorflow as tf

    tf.config.list_physical_devices()

# Distribution is tested wherever the tests run. The number of logical devices
# can only be set before TensorFlow starts, hence once for all tests.
_CPUS = 2
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * _CPUS,
)

# The same examples in every run: a failure is repeated by running the test
# again. The time of an example says little, the first one traces.
hypothesis.settings.register_profile(
    "tfckpt",
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)
hypothesis.settings.load_profile("tfckpt")


def pytest_collection_modifyitems(config, items):
    # Only one process at a time may hold the compiler of a TPU.
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("compile"):
                item.add_marker(pytest.mark.xdist_group("compile"))


@pytest.fixture(scope="session", autouse=True)
def _logical_devices():
    found = tf.config.list_logical_devices("CPU")
    assert len(found) == _CPUS, (
        f"The tests need {_CPUS} logical CPU devices, set before TensorFlow "
        f"starts, but something started it earlier; found {found}."
    )


@pytest.fixture(autouse=True)
def _fresh_state():
    """Seeds, names, dtypes and switches as in a new process."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    tf.config.run_functions_eagerly(False)
    # An option stays as it is until it is set again.
    tf.config.optimizer.set_experimental_options(
        {"arithmetic_optimization": True, "disable_meta_optimizer": False}
    )


@pytest.fixture(scope="session")
def strategy(_logical_devices):
    """Two replicas."""
    # One for all: collectives of two strategies get the same keys.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
