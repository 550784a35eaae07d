"""Gradients of a batch that a loop of the user's own runs in parts, hidden until they are complete.

Such a loop clips, reads or writes gradients after each backward. Between the parts of a batch it
finds none, as after `zero_grad`, but zeros for the smallest parameter: `clip_grad_value_` fails
where there are none at all. After the last part it finds those of the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.torch_compat.tensors import version_of

_ONCE = "put it under `if accelerator.sync_gradients:`, which is true for the last part only"


class PartGradients:
    """The gradients of the running batch; `backward` makes those of a part."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._hidden: dict[Tensor, Tensor] = {}
        #: The zeros that are shown meanwhile.
        self._zeros: Tensor | None = None
        #: The learning rates in this batch's first backward.
        self._rates: list[object] | None = None
        #: Whether the running part and the first one went backward.
        self._went_back = False
        self._first_went_back: bool | None = None

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """While active, a batch is run in parts."""
        self._rates = self._first_went_back = None
        try:
            yield
        finally:
            self.show()

    @contextlib.contextmanager
    def part(self, *, last: bool) -> Iterator[None]:
        """While active, the loop's code runs for a part; raises if it did what counts per batch."""
        self._went_back = False
        before = self._marks()
        yield
        if self._first_went_back is None:
            self._first_went_back = self._went_back
        if self._went_back != self._first_went_back:
            raise BadInput(
                "the loop went backward for some parts of a batch and not for others, whose"
                " gradients are missing: leave out whole batches only, before they are split"
            )
        if (last and self._went_back) or self._marks().items() <= before.items():
            if not last:
                self._check_rates()
            return
        raise BadInput(
            "the loop made or wrote gradients for a part of a batch in another way than with"
            " accelerator.backward, which weighs the parts: call accelerator.backward(loss), and"
            f" where gradients are written to, {_ONCE}"
        )

    @contextlib.contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """While active, gradients are there to be added to."""
        self._went_back = True
        if self._rates is None:
            self._rates = self._learning_rates()
        self._check_rates()
        if self._hidden and self._marks():
            raise BadInput(
                "the loop wrote gradients before those of all parts of the batch were there:"
                f" {_ONCE}"
            )
        self.show()
        try:
            yield
        finally:
            if not last:
                self._hide()

    def show(self) -> None:
        """Give the parameters their gradients so far."""
        hidden, self._hidden, self._zeros = self._hidden, {}, None
        for parameter, gradient in hidden.items():
            parameter.grad = gradient

    def _hide(self) -> None:
        for parameter in self._parameters():
            if parameter.grad is not None:
                self._hidden[parameter], parameter.grad = parameter.grad, None
        if self._hidden:
            smallest = min(self._hidden, key=torch.Tensor.numel)
            smallest.grad = self._zeros = torch.zeros_like(self._hidden[smallest])

    def _marks(self) -> dict[Tensor, tuple[int, int]]:
        """What tells whether a gradient is another one, or was written to."""
        return {
            parameter: (id(parameter.grad), version_of(parameter.grad))
            for parameter in self._parameters()
            if parameter.grad is not None and parameter.grad is not self._zeros
        }

    def _parameters(self) -> list[Tensor]:
        owned = (one for group in self._optimizer.param_groups for one in group["params"])
        return list(dict.fromkeys((*owned, *self._model.parameters())))

    def _check_rates(self) -> None:
        if self._rates is not None and self._learning_rates() != self._rates:
            raise BadInput(
                "the loop changed the learning rate between the parts of a batch: have"
                f" accelerator.prepare take the scheduler, too, or {_ONCE}"
            )

    def _learning_rates(self) -> list[object]:
        rates = (group.get("lr") for group in self._optimizer.param_groups)
        return [(id(r), version_of(r)) if isinstance(r, Tensor) else r for r in rates]
