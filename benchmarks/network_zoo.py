"""The networks that `networks.py` trains, and the figures they have to reach.

Each has three sizes: `full`, at which the bars hold; `compile`, with images
that a compiler is done with in minutes; and `tiny`, for tests. None has
dropout, and all return logits: a softmax of untrained logits is nearly
uniform, and its gradient little more than rounding.

Ratios are activation memory with recomputation, relative to none; times are
those of a step, relative to a plain one.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import keras
import memory as chains

layers = keras.layers

# Names of plans: tfckpt's, and what others do. A budget may be any other too,
# "alike.8" are 8 segments of equal bytes, and "keep.Conv2D+Dense" keeps the
# products of these layers.
OURS = ("sqrt", "min_memory", "budget.55", "budget.40")
PEERS = ("chen", "recompute_grad")
BUDGET = re.compile(r"budget(\.\d+)")
ALIKE = re.compile(r"alike\.(\d+)")
KEEP = re.compile(r"keep\.(\w+(?:\+\w+)*)")

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, its sizes and its bars.

    Attributes:
        make: Makes the Keras model from sizes.
        full: `batch_size` and what `make` reads, as the bars have it.
        compile: The same for compilers.
        tiny: The same for tests.
        ratio: Highest ratio of process memory; None if there is no bar.
        time: Highest time at that ratio.
        budgets: Highest (ratio, time) by name of a budget's plan.
        compiled: Highest ratio by compiler.
        chain: Whether one tensor lives at each of its cuts, so that
            `tf.recompute_grad` can follow a plan.
    """

    make: Callable[[Sizes], keras.Model]
    full: Sizes
    compile: Sizes
    tiny: Sizes
    ratio: float | None = None
    time: float | None = None
    budgets: Mapping[str, tuple[float, float]] = dataclasses.field(
        default_factory=dict
    )
    compiled: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"cpu": 1.0, "v5e": 1.0, "a100-40gb": 1.0}
    )
    chain: bool = False


def _application(name):
    def make(sizes):
        return getattr(keras.applications, name)(
            weights=None,
            input_shape=(sizes["size"], sizes["size"], 3),
            classes=sizes["classes"],
            classifier_activation=None,
        )

    return make


def _convolution(x, filters, size, **options):
    x = layers.Conv2D(filters, size, padding="same", use_bias=False, **options)(
        x
    )
    return layers.ReLU()(layers.BatchNormalization()(x))


def u_net(sizes: Sizes) -> keras.Model:
    """Returns a U-Net (Ronneberger et al. 2015), batch-normalized."""

    def block(x, filters):
        return _convolution(_convolution(x, filters, 3), filters, 3)

    widths = [sizes["width"] * 2**level for level in range(4)]
    inputs = x = keras.Input((sizes["size"], sizes["size"], 3))
    skips = []
    for width in widths:
        x = block(x, width)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = block(x, 2 * widths[-1])
    for width, skip in zip(reversed(widths), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(width, 2, 2, padding="same")(x)
        x = block(layers.Concatenate()([skip, x]), width)
    return keras.Model(inputs, layers.Conv2D(2, 1)(x), name="u_net")


def _bottleneck(x, filters, stride=1, dilation=1):
    shortcut = x
    y = _convolution(x, filters, 1, strides=stride)
    y = _convolution(y, filters, 3, dilation_rate=dilation)
    y = layers.Conv2D(4 * filters, 1, use_bias=False)(y)
    y = layers.BatchNormalization()(y)
    if x.shape[-1] != 4 * filters or stride > 1:
        shortcut = layers.Conv2D(4 * filters, 1, stride, use_bias=False)(x)
        shortcut = layers.BatchNormalization()(shortcut)
    return layers.ReLU()(layers.Add()([shortcut, y]))


def psp_net(sizes: Sizes) -> keras.Model:
    """Returns a pyramid scene parser (Zhao et al. 2017) on a dilated ResNet.

    The image's size is a multiple of 48, so that the bins fit.
    """
    width = sizes["width"]
    inputs = keras.Input((sizes["size"], sizes["size"], 3))
    x = _convolution(inputs, width, 3, strides=2)
    x = layers.MaxPooling2D(3, 2, padding="same")(_convolution(x, width, 3))
    for stage, blocks in enumerate(sizes["blocks"]):
        for block in range(blocks):
            x = _bottleneck(
                x,
                width * 2**stage,
                stride=2 if stage == 1 and not block else 1,
                dilation=max(1, 2 ** (stage - 1)),
            )
    side, branches = x.shape[1], [x]
    for bins in (1, 2, 3, 6):
        y = layers.AveragePooling2D(side // bins)(x)
        y = _convolution(y, x.shape[-1] // 4, 1)
        branches.append(
            layers.UpSampling2D(side // bins, interpolation="bilinear")(y)
        )
    x = _convolution(layers.Concatenate()(branches), 4 * width, 3)
    x = layers.Conv2D(21, 1)(x)
    x = layers.UpSampling2D(8, interpolation="bilinear")(x)
    return keras.Model(inputs, x, name="psp_net")


def deep_residual(sizes: Sizes) -> keras.Model:
    """Returns a residual network for small images (He et al. 2016).

    Three stages of pre-activation bottlenecks; of 111 each it is ResNet-1001.
    """

    def convolution(x, filters, size, stride=1):
        x = layers.ReLU()(layers.BatchNormalization()(x))
        return layers.Conv2D(
            filters, size, stride, padding="same", use_bias=False
        )(x)

    inputs = keras.Input((sizes["size"], sizes["size"], 3))
    x = layers.Conv2D(sizes["width"], 3, padding="same", use_bias=False)(inputs)
    for stage in range(3):
        width = sizes["width"] * 2**stage
        for block in range(sizes["blocks"]):
            stride = 2 if stage and not block else 1
            shortcut = x
            if not block:
                shortcut = layers.Conv2D(4 * width, 1, stride, use_bias=False)(
                    x
                )
            y = convolution(x, width, 1, stride)
            y = convolution(convolution(y, width, 3), 4 * width, 1)
            x = layers.Add()([shortcut, y])
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x), name="deep_residual")


def _of_chains(name):
    return lambda sizes: chains.make_model(name, sizes)


def _images(batch_size, size, **others):
    return {"batch_size": batch_size, "size": size, **others}


_WIDE = {"batch_size": 4096, "depth": 36, "width": 1024}
_TOKENS = {"batch_size": 8, "depth": 12, "width": 256, "size": 512}
_BACKBONE = [3, 4, 6, 3]

NETWORKS = {
    "chain": Network(
        _of_chains("chain"),
        full=_WIDE,
        compile=_WIDE,
        tiny={"batch_size": 256, "depth": 9, "width": 16},
        ratio=0.30,
        time=1.35,
        compiled={"cpu": 0.35, "v5e": 0.13, "a100-40gb": 0.33},
        chain=True,
    ),
    "transformer": Network(
        _of_chains("transformer"),
        full=_TOKENS,
        compile=_TOKENS,
        tiny={"batch_size": 2, "depth": 4, "width": 16, "size": 8},
        ratio=0.20,
        time=1.33,
        compiled={"cpu": 0.45, "v5e": 0.30, "a100-40gb": 0.30},
        chain=True,
    ),
    "resnet50": Network(
        _application("ResNet50"),
        full=_images(16, 160, classes=1000),
        compile=_images(16, 96, classes=1000),
        tiny=_images(2, 32, classes=4),
        ratio=0.35,
        time=1.33,
        budgets={"budget.55": (0.55, 1.05), "budget.40": (0.40, 1.09)},
        compiled={"cpu": 0.60, "v5e": 0.22, "a100-40gb": 0.38},
    ),
    "resnet152": Network(
        _application("ResNet152"),
        full=_images(8, 160, classes=1000),
        compile=_images(8, 96, classes=1000),
        tiny=_images(2, 32, classes=4),
        ratio=0.17,
        time=1.33,
    ),
    "vgg19": Network(
        _application("VGG19"),
        full=_images(8, 160, classes=1000),
        compile=_images(8, 96, classes=1000),
        tiny=_images(2, 32, classes=4),
        ratio=0.62,
        time=1.33,
    ),
    "densenet121": Network(
        _application("DenseNet121"),
        full=_images(16, 128, classes=1000),
        compile=_images(16, 64, classes=1000),
        tiny=_images(2, 32, classes=4),
        ratio=0.20,
        time=1.35,
    ),
    "inceptionv3": Network(
        _application("InceptionV3"),
        full=_images(16, 160, classes=1000),
        compile=_images(16, 96, classes=1000),
        tiny=_images(2, 75, classes=4),
        ratio=0.28,
        time=1.33,
    ),
    "u_net": Network(
        u_net,
        full=_images(4, 192, width=32),
        compile=_images(4, 96, width=32),
        tiny=_images(2, 32, width=4),
        ratio=0.50,
        time=1.25,
    ),
    "psp_net": Network(
        psp_net,
        full=_images(4, 192, width=64, blocks=_BACKBONE),
        compile=_images(4, 96, width=64, blocks=_BACKBONE),
        tiny=_images(2, 48, width=4, blocks=[1, 1, 2, 1]),
    ),
    "deep_residual": Network(
        deep_residual,
        full=_images(16, 32, width=16, blocks=111),
        compile=_images(16, 32, width=16, blocks=36),
        tiny=_images(2, 8, width=2, blocks=3),
        ratio=0.12,
        time=1.33,
    ),
}


def make_model(name: str, sizes: Sizes) -> keras.Model:
    """Returns a fresh model; its layers' names are the same every time."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    return NETWORKS[name].make(sizes)


def describe(name: str, sizes: Sizes) -> str:
    """Returns batch and input of a network in a few characters."""
    own: dict[str, Any] = {"size": sizes.get("size", sizes.get("width"))}
    text = f"{sizes['batch_size']} x {own['size']}"
    blocks = sizes.get("blocks")
    if name == "deep_residual":
        text += f", {9 * blocks + 2} layers"
    return text


def is_plan(name: str) -> bool:
    """Returns whether a plan has this name."""
    return name in ("none", *OURS, *PEERS) or any(
        pattern.fullmatch(name) for pattern in (ALIKE, BUDGET, KEEP)
    )
