"""Small models whose graphs have every shape that matters."""

import keras
import numpy as np
from keras import layers


def chain():
    x = inputs = keras.Input((6,))
    for i in range(7):
        x = layers.Dense(8, activation="tanh", name=f"dense_{i}")(x)
        x = layers.Dropout(0.3, seed=i)(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(x))


def residual():
    """Pre-activation blocks; a cut inside one leaves two tensors alive."""
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    for i in range(3):
        y = layers.BatchNormalization()(x)
        y = layers.Activation("relu")(y)
        y = layers.Conv2D(4, 3, padding="same")(y)
        y = layers.SpatialDropout2D(0.3, seed=i)(y)
        x = x + y
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def u_net():
    x = inputs = keras.Input((8, 8, 2))
    skips = []
    for filters in (3, 4):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.BatchNormalization()(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(5, 3, padding="same", activation="relu")(x)
    for filters in (4, 3):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = layers.Concatenate()([x, skips.pop()])
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(1, 1)(x))


def dense_net():
    x = inputs = keras.Input((5,))
    features = [x]
    for i in range(6):
        x = keras.ops.concatenate(features, axis=-1) if i else x
        x = layers.BatchNormalization()(x)
        x = layers.Dense(4, activation="gelu")(x)
        features.append(x)
    return keras.Model(inputs, layers.Concatenate()(features))


def inception():
    """Parallel branches of different length, with a tensor read by four."""
    x = inputs = keras.Input((5,))
    for _ in range(2):
        a = layers.Dense(4, activation="tanh")(x)
        b = layers.Dense(4, activation="tanh")(x)
        b = layers.Dense(4, activation="tanh")(b)
        c = layers.Dense(4, activation="tanh")(x)
        c = layers.Dropout(0.2, seed=3)(c)
        c = layers.Dense(4, activation="tanh")(c)
        d = keras.ops.sin(x)
        x = layers.Concatenate()([a, b, c, d])
    return keras.Model(inputs, layers.Dense(2)(x))


def dictionaries():
    """Several inputs and outputs; one is used early, read late, returned."""
    a, b = keras.Input((4,), name="a"), keras.Input((6,), name="b")
    x = layers.Dense(5, activation="tanh", name="x")(a)
    y = layers.Dense(5, activation="tanh", name="y")(b)
    both = layers.Multiply(name="both")([x, y])
    z = layers.Dense(5, activation="tanh", name="z")(both)
    z = layers.Dropout(0.4, seed=1, name="drop")(z)
    late = layers.Add(name="late")([z, x, layers.Dense(5, name="of_b")(b)])
    return keras.Model(
        {"a": a, "b": b},
        {"first": both, "input": a, "last": layers.Dense(2, name="end")(late)},
    )


def shared():
    """A layer called three times, a dropout and its seeds twice."""
    inputs = keras.Input((6,))
    dense = layers.Dense(6, activation="tanh", name="dense")
    dropout = layers.Dropout(0.3, seed=5, name="dropout")
    norm = layers.BatchNormalization(name="norm")
    x = dropout(dense(inputs))
    x = norm(dense(norm(x)))
    x = layers.Dense(6, name="other")(dropout(x))
    return keras.Model(inputs, dense(x))


def nested():
    """Models in models: one called twice, one as if for inference."""
    inputs = keras.Input((6,), name="core_in")
    x = layers.Dense(6, activation="tanh", name="one")(inputs)
    x = layers.Dropout(0.3, seed=1, name="drop")(x)
    core = keras.Model(inputs, layers.Add()([x, inputs]), name="core")

    inputs = keras.Input((6,))
    x = layers.BatchNormalization(name="norm")(core(inputs))
    x = layers.Dense(6, name="two")(x)
    backbone = keras.Model(inputs, [x, core(x)], name="backbone")

    inputs = keras.Input((6,))
    frozen = keras.Sequential(
        [
            layers.Dense(6, activation="relu", name="inner"),
            layers.BatchNormalization(name="inner_norm"),
            layers.Dropout(0.5, seed=7, name="inner_drop"),
        ],
        name="frozen",
    )
    x = frozen(inputs, training=False)
    x = core(x)
    x, y = backbone(x)
    x = layers.Dropout(0.2, seed=9)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Add()([x, y])))


def masked():
    """A mask made in one segment, used in others, through a nested model."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(7, 4, mask_zero=True)(inputs)
    x = layers.LSTM(4, return_sequences=True, dropout=0.2, seed=2)(x)
    within = keras.Input((None, 4))
    core = keras.Model(
        within, layers.LSTM(4, return_sequences=True)(within), name="core"
    )
    x = core(x)
    x = layers.Dropout(0.2, seed=4)(x)
    y = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, [layers.LSTM(3)(x), y])


def attention():
    inputs = keras.Input((5, 8))
    x = inputs
    for i in range(2):
        y = layers.MultiHeadAttention(2, 4, dropout=0.2, seed=i)(x, x)
        x = layers.LayerNormalization()(x + y)
        y = layers.Dense(8, activation="gelu")(x)
        x = layers.Add()([x, layers.Dropout(0.1, seed=i)(y)])
    return keras.Model(inputs, x)


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x * 2.0


def losses():
    x = inputs = keras.Input((4,))
    for i in range(3):
        x = layers.Dense(
            4,
            activation="tanh",
            activity_regularizer="l2",
            kernel_regularizer="l1",
            name=f"dense_{i}",
        )(x)
        x = AddsLoss(name=f"adds_{i}")(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def unconnected():
    """An output that no weight leads to, weights behind an argmax."""
    inputs = keras.Input((4,))
    x = layers.Dense(5, name="used")(inputs)
    y = layers.Dense(5, name="cut_off")(x)
    place = keras.ops.argmax(y, axis=-1)
    z = layers.Embedding(5, 3)(place)
    w = layers.Dense(3, activation="tanh")(x)
    return keras.Model(inputs, [layers.Add()([z, w]), place])


# Name: how it is made, shapes of its inputs.
ZOO = {
    "chain": (chain, [(4, 6)]),
    "residual": (residual, [(3, 6, 6, 3)]),
    "u_net": (u_net, [(2, 8, 8, 2)]),
    "dense_net": (dense_net, [(4, 5)]),
    "inception": (inception, [(4, 5)]),
    "dictionaries": (dictionaries, {"a": (3, 4), "b": (3, 6)}),
    "shared": (shared, [(4, 6)]),
    "nested": (nested, [(4, 6)]),
    "masked": (masked, [(3, 5)]),
    "attention": (attention, [(2, 5, 8)]),
    "losses": (losses, [(4, 4)]),
    "unconnected": (unconnected, [(4, 4)]),
}


def make(name):
    """Returns a model of the zoo."""
    return ZOO[name][0]()


def inputs_of(name, dtype="float32"):
    """Returns inputs for a model of the zoo: one structure."""
    shapes = ZOO[name][1]
    random = np.random.default_rng(0)
    if name == "masked":
        ids = random.integers(1, 7, shapes[0]).astype("int32")
        ids[0, 3:], ids[1, 1:] = 0, 0
        return ids
    found = keras.tree.map_shape_structure(
        lambda shape: random.normal(size=shape).astype(dtype), shapes
    )
    return found[0] if isinstance(found, list) else found
