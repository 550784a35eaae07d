"""Loss over a large vocabulary without materialising its logits, with unchanged model code.

The head (the linear layer that makes the logits) returns *lazy logits*: a tensor that knows its
shape, its dtype and how to compute it. Model code reshapes, shifts and upcasts it on the way to
`cross_entropy`; these operations are applied to the head's small input instead. `cross_entropy`
then runs over chunks of rows (`softmax_grad`). Any other use computes the logits, once, and goes on
with an ordinary tensor: always correct, but without the memory savings.

Example:
    undo = chunk_loss(model.lm_head, tokens=1024)
    model(**batch).loss.backward()
    undo()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.techniques.lazy_logits import Chunking, lazy_logits
from oomph.techniques.technique import Undo

#: With a smaller vocabulary, logits are too small to matter for memory.
SMALLEST_VOCABULARY = 4096


def chunk_loss(head: nn.Linear, tokens: int) -> Undo:
    """From now on, losses over `head`'s logits are computed `tokens` rows at a time."""
    if tokens < 1:
        raise BadInput(f"a chunk of the loss needs at least one token, not {tokens}")
    present = vars(head).get("forward")
    if isinstance(present, ChunkedForward):
        raise BadInput("this head's loss is chunked already: undo that first")
    if present is not None or type(head).forward is not nn.Linear.forward:
        raise BadInput(
            f"a chunked loss needs a plain nn.Linear; this {type(head).__name__} has a forward of "
            "its own, which chunking would leave out"
        )
    head.forward = ChunkedForward(head, tokens)  # type: ignore[method-assign]

    def undo() -> None:
        vars(head).pop("forward", None)

    return undo


def find_heads(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Layers of `model` that may make logits over a vocabulary.

    They are wide, much wider than their input, and not part of a repeated block.
    """
    repeated = tuple(f"{path}." for path in _repeated_blocks(model))
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and module.out_features >= max(SMALLEST_VOCABULARY, 2 * module.in_features)
        and not path.startswith(repeated)
    ]


def _repeated_blocks(model: nn.Module) -> Iterator[str]:
    for path, parent in model.named_modules():
        children = dict(parent.named_children())
        looks = {name: _look(child) for name, child in children.items()}
        for name in children:
            alike = sum(looks[name] == look for look in looks.values())
            if isinstance(parent, nn.ModuleList) or alike > 1:
                yield f"{path}.{name}".lstrip(".")


def _look(module: nn.Module) -> Any:
    return type(module), [(name, tensor.shape) for name, tensor in module.named_parameters()]


def chunked_calls(head: nn.Linear) -> int:
    """How many losses over this head's logits were computed in chunks since `chunk_loss`."""
    forward = vars(head).get("forward")
    return forward.chunked if isinstance(forward, ChunkedForward) else 0


class ChunkedForward(Chunking):
    """A head's forward that returns lazy logits and counts the chunked losses made from them.

    An object, not a closure, so that a copy of the model calls its own copy of the head.
    """

    def __init__(self, head: nn.Linear, tokens: int) -> None:
        super().__init__(tokens)
        self.head = head

    def __call__(self, input: Tensor) -> Tensor:
        """The result of `nn.Linear.forward`, computed lazily."""
        head = self.head
        lazy = lazy_logits(self, input, head.weight, head.bias)
        return nn.Linear.forward(head, input) if lazy is None else lazy
