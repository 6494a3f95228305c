"""Costs of made-up models, for tests of simulator and planners."""

import dataclasses

from hypothesis import strategies as st

from tfckpt import costs
from tfckpt.simulator import index as index_lib
from tfckpt.simulator import walk as walk_lib


class Builder:
    """Collects the calls of a model, one tensor each unless said otherwise."""

    def __init__(self, input_bytes=0):
        self.calls = []
        self.sizes = []
        self.gradients = []
        self.inputs = [self.tensor(input_bytes, 0)]

    def tensor(self, size, gradient=None):
        self.sizes.append(size)
        self.gradients.append(size if gradient is None else gradient)
        return len(self.sizes) - 1

    def call(self, kind, reads, size, needs="reads", path=None, **more):
        """Adds a call and returns the tensor that it makes.

        `needs` is "reads", "makes", "both", "none", or a tuple of keys.
        """
        key = self.tensor(size)
        reads = tuple(reads)
        if isinstance(needs, str):
            needs = {
                "reads": reads,
                "makes": (key,),
                "both": (*reads, key),
                "none": (),
            }[needs]
        time = more.pop("time", 1.0)
        more.setdefault("forward_time", time)
        more.setdefault("backward_time", 2 * time)
        more.setdefault("forward_flops", 10 * time)
        more.setdefault("backward_flops", 20 * time)
        self.calls.append(
            costs.CallCost(
                path or f"{kind.lower()}_{len(self.calls)}",
                kind,
                reads,
                (key,),
                needs,
                **more,
            )
        )
        return key

    def product(self, kind, reads, size, time=10.0, **more):
        """Adds a call that is one matrix product or convolution."""
        more.setdefault("product_bytes", size)
        more.setdefault("product_overlap", size)
        more.setdefault("product_time", 0.95 * time)
        more.setdefault("product_flops", 9.5 * time)
        return self.call(kind, reads, size, time=time, **more)

    def done(self, *outputs, **more):
        return costs.Costs(
            tuple(self.calls),
            tuple(self.sizes),
            tuple(self.gradients),
            tuple(f"tensor_{key}" for key in range(len(self.sizes))),
            tuple(self.inputs),
            outputs or (len(self.sizes) - 1,),
            batch_size=4,
            **{
                "weight_bytes": 1000,
                "gradient_bytes": 900,
                "optimizer_bytes": 1800,
                **more,
            },
        )


def chain(length, size=1, saved=0, gradient=0, needs="reads", **more):
    """Equal calls, one after the other."""
    builder = Builder()
    key = builder.inputs[0]
    for _ in range(length):
        key = builder.call(
            "Dense", [key], size, needs=needs, saved=saved, **more
        )
    builder.gradients = [gradient] * len(builder.sizes)
    return builder.done()


def _conv_norm_act(builder, key, size, time=10.0, act=True):
    key = builder.product("Conv2D", [key], size, time)
    key = builder.call(
        "BatchNormalization", [key], size, saved=size // 64, time=1.0
    )
    if act:
        key = builder.call("Activation", [key], size, needs="makes", time=0.5)
    return key


def conv_chain(blocks, size=1024):
    """Convolution, normalization, activation, again and again."""
    builder = Builder(size)
    key = builder.inputs[0]
    for _ in range(blocks):
        key = _conv_norm_act(builder, key, size)
    return builder.done()


def residual_block(size=1024):
    """A block of two convolutions and what passes it by."""
    builder = Builder(size)
    first = builder.product("Conv2D", builder.inputs, size)
    key = _conv_norm_act(builder, first, size)
    key = builder.product("Conv2D", [key], size)
    key = builder.call("Add", [key, first], size, needs="none", time=0.5)
    builder.call("Activation", [key], size, needs="makes", time=0.5)
    return builder.done()


def resnet(blocks, size=4096):
    """Bottlenecks with a residual connection, in four stages."""
    builder = Builder(size)
    key = _conv_norm_act(builder, builder.inputs[0], size)
    for block in range(blocks):
        wide = size >> (block * 4 // blocks)
        branch = _conv_norm_act(builder, key, wide // 4)
        branch = _conv_norm_act(builder, branch, wide // 4)
        branch = _conv_norm_act(builder, branch, wide, act=False)
        if block and block * 4 // blocks != (block - 1) * 4 // blocks:
            key = _conv_norm_act(builder, key, wide, act=False)
        key = builder.call("Add", [branch, key], wide, needs="none", time=0.5)
        key = builder.call("Activation", [key], wide, needs="makes", time=0.5)
    builder.product("Dense", [key], 16)
    return builder.done()


def unet(levels=4, size=8192):
    """Down, and up again with a connection across at every level."""
    builder = Builder(size)
    key, across = builder.inputs[0], []
    for level in range(levels):
        wide = size >> level
        key = _conv_norm_act(builder, key, wide)
        key = _conv_norm_act(builder, key, wide)
        across.append(key)
        key = builder.call("MaxPooling2D", [key], wide // 4, needs="both")
    key = _conv_norm_act(builder, key, size >> levels)
    for level in reversed(range(levels)):
        wide = size >> level
        key = builder.product("Conv2DTranspose", [key], wide)
        key = builder.call(
            "Concatenate", [key, across[level]], 2 * wide, needs="none"
        )
        key = _conv_norm_act(builder, key, wide)
        key = _conv_norm_act(builder, key, wide)
    builder.product("Conv2D", [key], size // 8)
    return builder.done()


def densenet(blocks=3, layers=6, size=1024):
    """Each layer reads what all before it in its block made."""
    builder = Builder(size)
    key = _conv_norm_act(builder, builder.inputs[0], size)
    for block in range(blocks):
        wide = size >> block
        for layer in range(layers):
            total = wide + layer * (wide // 4)
            new = builder.call(
                "BatchNormalization", [key], total, saved=total // 64
            )
            new = builder.call("Activation", [new], total, needs="makes")
            new = builder.product("Conv2D", [new], wide // 4)
            key = builder.call(
                "Concatenate", [key, new], total + wide // 4, needs="none"
            )
        key = builder.product("Conv2D", [key], wide)
        key = builder.call("AveragePooling2D", [key], wide // 2, needs="none")
    builder.product("Dense", [key], 16)
    return builder.done()


def transformer(blocks=4, width=64, tokens=64, heads=4):
    """Embedding, then attention and a network of two layers, each summed."""
    builder = Builder()
    size = 4 * width * tokens
    scores = 4 * heads * tokens * tokens
    key = builder.call(
        "Embedding",
        builder.inputs,
        size,
        needs="none",
        path="embedding",
        recomputable=False,
    )
    for block in range(blocks):
        name = f"block_{block}"
        more = {"needs": "reads"}
        new = builder.call(
            "LayerNormalization",
            [key],
            size,
            saved=size // 32,
            path=f"{name}/norm_1",
        )
        new = builder.call(
            "MultiHeadAttention",
            [new],
            size,
            saved=4 * size + 2 * scores,
            time=20.0,
            product_bytes=4 * size + scores,
            product_overlap=4 * size + scores,
            product_time=17.0,
            product_flops=170.0,
            forward_workspace=scores,
            backward_workspace=scores,
            path=f"{name}/attention",
            **more,
        )
        key = builder.call(
            "Add", [new, key], size, needs="none", path=f"{name}/add_1"
        )
        new = builder.call(
            "LayerNormalization",
            [key],
            size,
            saved=size // 32,
            path=f"{name}/norm_2",
        )
        new = builder.product(
            "Dense",
            [new],
            4 * size,
            16.0,
            saved=4 * size,
            path=f"{name}/dense_1",
        )
        new = builder.product(
            "Dense", [new], size, 16.0, path=f"{name}/dense_2"
        )
        key = builder.call(
            "Add", [new, key], size, needs="none", path=f"{name}/add_2"
        )
    key = builder.call("LayerNormalization", [key], size, saved=size // 32)
    builder.product("Dense", [key], size)
    return builder.done()


@st.composite
def graphs(draw, least=2, most=8, chain=False):
    """Costs of any graph: skips, several inputs and outputs, products.

    With `chain`, every call reads what the last one made, no gradient reads
    what its own call made, every call may be recomputed, and products share
    no memory with outputs.
    """
    sizes = st.integers(0, 50)
    builder = Builder(7)
    for _ in range(draw(st.integers(0, 2))):
        builder.inputs.append(builder.tensor(draw(sizes), 0))
    length = draw(st.integers(least, most))
    for position in range(length):
        known = list(range(len(builder.sizes)))
        # Mostly what was made just before, so that there is some depth.
        reads = {draw(st.sampled_from(known[-2:]))}
        reads |= draw(st.sets(st.sampled_from(known), max_size=2))
        if chain:
            reads = {known[-1]}
        kept = draw(st.booleans())
        size = draw(sizes)
        extra = [
            builder.tensor(draw(sizes))
            for _ in range(draw(st.integers(0, int(not chain))))
        ]
        key = builder.call("Any", sorted(reads), size, path=f"call_{position}")
        makes = (key, *extra)
        time = draw(st.integers(0, 5))
        builder.calls[-1] = dataclasses.replace(
            builder.calls[-1],
            kind=draw(st.sampled_from(["Dense", "Conv2D", "Add"])),
            makes=makes,
            needs=tuple(
                sorted(
                    draw(
                        st.sets(
                            st.sampled_from([*reads, *(() if chain else makes)])
                        )
                    )
                )
            ),
            saved=draw(st.sampled_from([0, 0, 1, 5])),
            forward_time=float(time),
            backward_time=2.0 * time,
            forward_workspace=draw(st.sampled_from([0, 0, 4])),
            backward_workspace=draw(st.sampled_from([0, 0, 6])),
            recomputable=chain or draw(st.integers(0, 9)) > 0,
            **(
                {
                    "product_bytes": (bytes_ := draw(st.integers(1, 20))),
                    "product_overlap": 0
                    if chain
                    else draw(st.integers(0, bytes_)),
                    "product_flops": 9.0 * time,
                    "product_time": 0.75 * time,
                    "product_needs": tuple(
                        sorted(draw(st.sets(st.sampled_from(sorted(reads)))))
                    ),
                }
                if kept
                else {}
            ),
        )
    builder.gradients = [draw(sizes) for _ in builder.sizes]
    made = [key for call in builder.calls for key in call.makes]
    outputs = {made[-1]}
    if not chain:
        outputs |= draw(st.sets(st.sampled_from(made), max_size=1))
    return builder.done(*sorted(outputs))


@st.composite
def parts(draw, model, products=None, alone=True):
    """Segments of a model by positions, with kept products.

    With `products`, those are kept wherever they would be made again. Without
    `alone`, only what must be is left alone.
    """
    index = index_lib.Index(model)
    cuts = st.sets(st.integers(1, max(index.length - 1, 1)), max_size=4)
    ends = sorted({c for c in draw(cuts) if c < index.length} | {index.length})
    result = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        inside = range(start, end)
        recomputed = end < index.length and (not alone or draw(st.booleans()))
        recomputed &= all(model.calls[i].recomputable for i in inside)
        having = {i for i in inside if model.calls[i].product_bytes}
        if products is not None:
            having &= products
        elif having:
            having = draw(st.sets(st.sampled_from(sorted(having))))
        whole = index_lib.Part(start, end, False)
        run = walk_lib.needed_again(index, [whole], having)
        kept = frozenset(having & run) if recomputed else frozenset()
        result.append(index_lib.Part(start, end, recomputed, kept))
    return result
