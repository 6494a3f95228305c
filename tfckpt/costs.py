"""What the calls of a model cost: plain data, which planners read.

`tfckpt.cost` finds these numbers for a Keras model. Nothing here needs
TensorFlow or Keras.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CallCost:
    """What one call costs.

    Tensors are named by keys, which index `Costs.sizes`. Tensors that share
    memory (the input and output of a reshape) are one tensor.

    Attributes:
        path: Path of the call.
        kind: Class of the layer or operation.
        reads: Keys of the tensors that it reads and doesn't make.
        makes: Keys of the tensors that it makes.
        needs: Keys among both that its gradient reads.
        saved: Bytes that its gradient needs besides.
        forward_flops: Floating-point operations of the forward pass.
        backward_flops: Floating-point operations of the gradient.
        forward_time: Time of the forward pass, in any unit.
        backward_time: Time of the gradient, in the same unit.
        forward_workspace: Bytes that exist only while it runs.
        backward_workspace: Bytes that exist only while its gradient runs,
            above its `needs`, `saved` and all gradients that it reads and
            makes; negative where some of these don't exist at once.
        product_bytes: Bytes of the products (matrix products, convolutions)
            that it makes inside and that a plan may keep; 0 if none.
        product_overlap: How many of these bytes are also counted in `saved`
            or in the sizes of `makes`.
        product_flops: Operations that are not run again when they are kept.
        product_time: Time that is not spent again when they are kept.
        product_needs: Keys among `reads` that running it again still needs
            when the products are kept (the other summand of a sum).
        weight_gradient_bytes: Bytes of the gradients of its weights, which
            are there from its gradient on; a shared weight counts in the first
            call.
        recomputable: Whether it may be run again at no risk of doing so for
            nothing: False for what only reads ids, such as an embedding.
    """

    path: str
    kind: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    needs: tuple[int, ...] = ()
    saved: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_time: float = 0.0
    backward_time: float = 0.0
    forward_workspace: int = 0
    backward_workspace: int = 0
    product_bytes: int = 0
    product_overlap: int = 0
    product_flops: float = 0.0
    product_time: float = 0.0
    product_needs: tuple[int, ...] = ()
    recomputable: bool = True
    weight_gradient_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a training step of a model costs, call by call.

    Attributes:
        calls: The calls in the order in which they run.
        sizes: Bytes of each tensor, by key.
        gradients: Bytes of each tensor's gradient, by key; 0 where none flows.
        names: Name of each tensor, by key.
        inputs: Keys of the model's inputs, which live anyway.
        outputs: Keys of the model's outputs.
        batch_size: Examples in a step.
        weight_bytes: Bytes of the model's variables.
        gradient_bytes: Bytes of the gradients of its trainable variables.
        optimizer_bytes: Bytes of the optimizer's variables.
        notes: What was assumed, a sentence each.
    """

    calls: tuple[CallCost, ...]
    sizes: tuple[int, ...]
    gradients: tuple[int, ...]
    names: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    batch_size: int
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the calls."""
        return tuple(call.path for call in self.calls)

    @property
    def step_time(self) -> float:
        """Time of a plain training step, in the unit of the calls."""
        return sum(c.forward_time + c.backward_time for c in self.calls)

    @property
    def input_bytes(self) -> int:
        """Bytes of the model's inputs."""
        return sum(self.sizes[key] for key in dict.fromkeys(self.inputs))
