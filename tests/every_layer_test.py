"""Every layer class of Keras, recomputed, against itself without it."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import equality

L = keras.layers
_RANDOM = np.random.RandomState(0)
VECTOR = _RANDOM.rand(2, 6).astype("float32")
SEQUENCE = _RANDOM.rand(2, 6, 4).astype("float32")
IMAGE = _RANDOM.rand(2, 6, 6, 3).astype("float32")
VOLUME = _RANDOM.rand(2, 4, 4, 4, 2).astype("float32")
FRAMES = _RANDOM.rand(2, 3, 6, 6, 2).astype("float32")
FRAMES_1D = _RANDOM.rand(2, 3, 6, 2).astype("float32")
FRAMES_3D = _RANDOM.rand(1, 2, 4, 4, 4, 2).astype("float32")
WAVE = _RANDOM.rand(2, 512).astype("float32")
IDS = np.array([[1, 2, 0], [3, 3, 1]])

# Name: how to make the layer, and its input (or inputs, as one list).
LAYERS = {
    "Activation": (lambda: L.Activation("gelu"), VECTOR),
    "ActivityRegularization": (lambda: L.ActivityRegularization(0.1), VECTOR),
    "Add": (L.Add, [VECTOR, 2 * VECTOR]),
    "AdditiveAttention": (
        lambda: L.AdditiveAttention(dropout=0.2, seed=1),
        [SEQUENCE, 2 * SEQUENCE],
    ),
    "AlphaDropout": (lambda: L.AlphaDropout(0.3, seed=1), VECTOR),
    "Attention": (
        lambda: L.Attention(use_scale=True, dropout=0.2, seed=1),
        [SEQUENCE, 2 * SEQUENCE],
    ),
    "Average": (L.Average, [VECTOR, 2 * VECTOR]),
    "BatchNormalization": (L.BatchNormalization, SEQUENCE),
    "Bidirectional": (
        lambda: L.Bidirectional(L.GRU(3, dropout=0.2, seed=1)),
        SEQUENCE,
    ),
    "CenterCrop": (lambda: L.CenterCrop(4, 4), IMAGE),
    "Concatenate": (L.Concatenate, [VECTOR, 2 * VECTOR]),
    "Conv1D": (lambda: L.Conv1D(3, 2, activation="tanh"), SEQUENCE),
    "Conv1DTranspose": (lambda: L.Conv1DTranspose(3, 2), SEQUENCE),
    "Conv2D": (lambda: L.Conv2D(3, 2, activation="relu"), IMAGE),
    "Conv2DTranspose": (lambda: L.Conv2DTranspose(3, 2), IMAGE),
    "Conv3D": (lambda: L.Conv3D(3, 2, activation="relu"), VOLUME),
    "Conv3DTranspose": (lambda: L.Conv3DTranspose(3, 2), VOLUME),
    "ConvLSTM1D": (
        lambda: L.ConvLSTM1D(2, 2, dropout=0.2, seed=1),
        FRAMES_1D,
    ),
    "ConvLSTM2D": (
        lambda: L.ConvLSTM2D(2, 2, recurrent_dropout=0.2, seed=1),
        FRAMES,
    ),
    "ConvLSTM3D": (lambda: L.ConvLSTM3D(1, 2), FRAMES_3D),
    "Cropping1D": (lambda: L.Cropping1D(1), SEQUENCE),
    "Cropping2D": (lambda: L.Cropping2D(1), IMAGE),
    "Cropping3D": (lambda: L.Cropping3D(1), VOLUME),
    "Dense": (lambda: L.Dense(4, activation="tanh"), VECTOR),
    "DepthwiseConv1D": (lambda: L.DepthwiseConv1D(2), SEQUENCE),
    "DepthwiseConv2D": (lambda: L.DepthwiseConv2D(2), IMAGE),
    "Dot": (lambda: L.Dot(-1), [VECTOR, 2 * VECTOR]),
    "Dropout": (lambda: L.Dropout(0.5, seed=1), VECTOR),
    "ELU": (L.ELU, VECTOR),
    "EinsumDense": (lambda: L.EinsumDense("abc,cd->abd", [6, 3]), SEQUENCE),
    "Embedding": (lambda: L.Embedding(5, 4, mask_zero=True), IDS),
    "Flatten": (L.Flatten, IMAGE),
    "GRU": (
        lambda: L.GRU(3, dropout=0.2, recurrent_dropout=0.3, seed=1),
        SEQUENCE,
    ),
    "GaussianDropout": (lambda: L.GaussianDropout(0.3, seed=1), VECTOR),
    "GaussianNoise": (lambda: L.GaussianNoise(0.3, seed=1), VECTOR),
    "GroupNormalization": (lambda: L.GroupNormalization(3), VECTOR),
    "GroupQueryAttention": (
        lambda: L.GroupQueryAttention(3, 4, 2, dropout=0.2, seed=1),
        [SEQUENCE, 2 * SEQUENCE],
    ),
    "Identity": (L.Identity, VECTOR),
    "LSTM": (
        lambda: L.LSTM(3, dropout=0.2, recurrent_dropout=0.3, seed=1),
        SEQUENCE,
    ),
    "Lambda": (lambda: L.Lambda(lambda x: keras.ops.tanh(x)), VECTOR),
    "LayerNormalization": (L.LayerNormalization, VECTOR),
    "LeakyReLU": (L.LeakyReLU, VECTOR - 0.5),
    "Masking": (L.Masking, SEQUENCE),
    "Maximum": (L.Maximum, [VECTOR, 1 - VECTOR]),
    "MelSpectrogram": (
        lambda: L.MelSpectrogram(
            fft_length=64,
            sequence_stride=32,
            sequence_length=64,
            num_mel_bins=8,
            sampling_rate=1000,
            max_freq=400,
        ),
        WAVE,
    ),
    "Minimum": (L.Minimum, [VECTOR, 1 - VECTOR]),
    "MultiHeadAttention": (
        lambda: L.MultiHeadAttention(2, 3, dropout=0.2, seed=1),
        [SEQUENCE, 2 * SEQUENCE],
    ),
    "Multiply": (L.Multiply, [VECTOR, 2 * VECTOR]),
    "Normalization": (lambda: L.Normalization(mean=0.5, variance=2.0), VECTOR),
    "PReLU": (L.PReLU, VECTOR - 0.5),
    "Permute": (lambda: L.Permute((2, 1)), SEQUENCE),
    "RMSNormalization": (L.RMSNormalization, VECTOR),
    "RNN": (
        lambda: L.RNN([L.LSTMCell(3), L.GRUCell(2)]),
        SEQUENCE,
    ),
    "ReLU": (lambda: L.ReLU(6.0, 0.1), VECTOR - 0.5),
    "RepeatVector": (lambda: L.RepeatVector(3), VECTOR),
    "Rescaling": (lambda: L.Rescaling(0.5, 1.0), VECTOR),
    "Reshape": (lambda: L.Reshape((3, 2)), VECTOR),
    "Resizing": (lambda: L.Resizing(4, 4), IMAGE),
    "ReversibleEmbedding": (lambda: L.ReversibleEmbedding(5, 4), IDS),
    "STFTSpectrogram": (
        lambda: L.STFTSpectrogram(
            frame_length=64, frame_step=32, fft_length=64
        ),
        WAVE[..., None],
    ),
    "SeparableConv1D": (lambda: L.SeparableConv1D(3, 2), SEQUENCE),
    "SeparableConv2D": (lambda: L.SeparableConv2D(3, 2), IMAGE),
    "SimpleRNN": (lambda: L.SimpleRNN(3, dropout=0.2, seed=1), SEQUENCE),
    "Softmax": (L.Softmax, VECTOR),
    "SpatialDropout1D": (lambda: L.SpatialDropout1D(0.3, seed=1), SEQUENCE),
    "SpatialDropout2D": (lambda: L.SpatialDropout2D(0.3, seed=1), IMAGE),
    "SpatialDropout3D": (lambda: L.SpatialDropout3D(0.3, seed=1), VOLUME),
    "SpectralNormalization": (
        lambda: L.SpectralNormalization(L.Dense(4, activation="tanh")),
        VECTOR,
    ),
    "Subtract": (L.Subtract, [VECTOR, 3 * VECTOR]),
    "TimeDistributed": (
        lambda: L.TimeDistributed(L.Dense(3, activation="tanh")),
        SEQUENCE,
    ),
    "UnitNormalization": (L.UnitNormalization, VECTOR),
    "Wrapper": (lambda: Wrapped(L.Dense(3)), VECTOR),
}
for _rank, _input in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME)):
    LAYERS |= {
        f"{name}{_rank}D": (
            lambda name=name, args=args, rank=_rank: getattr(
                L, f"{name}{rank}D"
            )(*args),
            _input,
        )
        for name, args in {
            "AdaptiveAveragePooling": (2,),
            "AdaptiveMaxPooling": (2,),
            "AveragePooling": (2,),
            "GlobalAveragePooling": (),
            "GlobalMaxPooling": (),
            "MaxPooling": (2,),
            "UpSampling": (2,),
            "ZeroPadding": (1,),
        }.items()
    }
# Aliases that Keras lists under the other name first.
for _rank in (1, 2, 3):
    LAYERS[f"MaxPool{_rank}D"] = LAYERS.pop(f"MaxPooling{_rank}D")
    LAYERS[f"GlobalMaxPool{_rank}D"] = LAYERS.pop(f"GlobalMaxPooling{_rank}D")

_NO_GRADIENT = "its output is made of integers or text: nothing to train"
_AUGMENTATION = "augments data before training and has no gradient to keep"
EXEMPT = {
    "CategoryEncoding": _NO_GRADIENT,
    "Discretization": _NO_GRADIENT,
    "HashedCrossing": _NO_GRADIENT,
    "Hashing": _NO_GRADIENT,
    "IntegerLookup": _NO_GRADIENT,
    "StringLookup": _NO_GRADIENT,
    "TextVectorization": _NO_GRADIENT,
    "MaxNumBoundingBoxes": _NO_GRADIENT,
    "FlaxLayer": "runs on JAX",
    "JaxLayer": "runs on JAX",
    "TorchModuleWrapper": "runs on PyTorch",
    "TFSMLayer": "calls a SavedModel, for inference",
    "GRUCell": "a cell, tested within RNN",
    "LSTMCell": "a cell, tested within RNN",
    "SimpleRNNCell": "a cell, tested within SimpleRNN",
    "StackedRNNCells": "a cell, tested within RNN",
    "InputLayer": "computes nothing",
    "Layer": "abstract",
    "Pipeline": "a list of augmentations",
    **dict.fromkeys(
        [
            "AugMix",
            "AutoContrast",
            "Equalization",
            "MixUp",
            "CutMix",
            "ContrastLimitedAdaptiveHistogramEqualization",
            "RandAugment",
            "RandomBrightness",
            "RandomColorDegeneration",
            "RandomColorJitter",
            "RandomContrast",
            "RandomCrop",
            "RandomElasticTransform",
            "RandomErasing",
            "RandomFlip",
            "RandomGaussianBlur",
            "RandomGrayscale",
            "RandomHue",
            "RandomInvert",
            "RandomPerspective",
            "RandomPosterization",
            "RandomRotation",
            "RandomSaturation",
            "RandomSharpness",
            "RandomShear",
            "RandomTranslation",
            "RandomZoom",
            "Solarization",
        ],
        _AUGMENTATION,
    ),
}

_NO_KERNEL = "TensorFlow has no kernel for it on the CPU"
# What Keras itself can't compute.
IMPOSSIBLE = {
    ("AdaptiveAveragePooling3D", "mixed_float16"): _NO_KERNEL,
    ("AdaptiveMaxPooling3D", "mixed_float16"): _NO_KERNEL,
    ("AveragePooling3D", "mixed_float16"): _NO_KERNEL,
    ("MaxPool3D", "mixed_float16"): _NO_KERNEL,
    ("STFTSpectrogram", "mixed_bfloat16"): "there is no bfloat16 transform",
    ("STFTSpectrogram", "mixed_float16"): "its gradient is infinite",
}

EPS = {
    "float32": 2.0**-23,
    "mixed_bfloat16": 2.0**-7,
    "mixed_float16": 2.0**-10,
}


class Wrapped(L.Wrapper):
    def call(self, x):
        return keras.ops.tanh(self.layer(x))


def _available(name):
    """Older versions of Keras lack some layers."""
    return hasattr(L, name)


def test_the_list_is_complete():
    found = {}
    for name in dir(L):
        cls = getattr(L, name)
        if inspect.isclass(cls) and issubclass(cls, L.Layer):
            found.setdefault(cls, name)
    missing = set(found.values()) - set(LAYERS) - set(EXEMPT)
    assert not missing, "add them to LAYERS, or to EXEMPT with the reason"
    assert not set(LAYERS) & set(EXEMPT)


def _compare(name, mode, policy):
    keras.config.set_dtype_policy(policy)
    factory, given = LAYERS[name]
    given = given if isinstance(given, list) else [given]
    merges = issubclass(type(factory()), (L.Attention, L.AdditiveAttention))

    def make(wrap):
        layer = wrap(factory())
        kwargs = {}
        if "training" in inspect.signature(layer.call).parameters:
            kwargs["training"] = True

        def call(*inputs):
            if len(inputs) == 1:
                return layer(inputs[0], **kwargs)
            if (
                merges
                or "value" not in inspect.signature(layer.call).parameters
            ):
                return layer(list(inputs), **kwargs)
            return layer(*inputs, **kwargs)

        # Eager tensors, outside of tapes: only to build it.
        call(*map(tf.convert_to_tensor, given))
        return equality.Subject(call, layer.variables, lambda: layer.losses)

    equality.check(make, given, tfckpt.Recompute, mode, eps=EPS[policy])


@pytest.mark.parametrize("name", sorted(filter(_available, LAYERS)))
def test_equals_plain(name):
    """The cheapest cell of the sweep below, in every run."""
    _compare(name, "graph", "float32")


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("policy", EPS)
@pytest.mark.parametrize("mode", equality.MODES)
@pytest.mark.parametrize("name", sorted(filter(_available, LAYERS)))
def test_equals_plain_everywhere(name, mode, policy):
    if (mode, policy) == ("graph", "float32"):
        return  # above
    if (name, policy) in IMPOSSIBLE:
        pytest.skip(IMPOSSIBLE[name, policy])
    _compare(name, mode, policy)
