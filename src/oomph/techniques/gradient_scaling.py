"""Gradients that are handled one by one: unscaled as a GradScaler does, clipped where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from oomph.memory.link import Copy, Link
from oomph.techniques.host_tensors import host_tensor
from oomph.torch_compat.grad_scaler import scale_of, states_of
from oomph.torch_compat.optimizers import foreach_unscale_


class GradientScaling:
    """A GradScaler's part in the steps of `optimizer`, whose gradients arrive one by one."""

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        self._scaler = scaler
        self._optimizer = optimizer
        self._found_inf: Tensor | None = None
        self._inverse_scale: Tensor | None = None

    def begin_batch(self) -> None:
        """Begin a batch: none of its gradients has overflowed yet."""
        self._found_inf = self._inverse_scale = None

    def unscale(self, gradient: Tensor) -> None:
        """Unscale one gradient, as the scaler does."""
        scale = scale_of(self._scaler)
        assert scale is not None
        if self._found_inf is None:
            self._found_inf = torch.zeros((), dtype=torch.float32, device=gradient.device)
            self._inverse_scale = scale.double().reciprocal().float()
        assert self._inverse_scale is not None
        foreach_unscale_([gradient], self._found_inf, self._inverse_scale)

    def skips(self) -> bool:
        """Whether a gradient overflowed; updates the scaler accordingly."""
        assert self._found_inf is not None
        record = states_of(self._scaler)[id(self._optimizer)]
        record["found_inf_per_device"] = {self._found_inf.device: self._found_inf}
        overflowed = bool(self._found_inf.item())
        self._scaler.update()
        return overflowed


class CoefficientOnHost:
    """The factor that clips the gradients of a step, where the host's cores can read it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._room: Tensor | None = None
        self._sent: tuple[Tensor, Copy] | None = None

    def of(self, coefficient: Tensor | None) -> tuple[Tensor, Copy] | None:
        """Send it once a step; None if nothing is clipped."""
        if coefficient is not None and self._sent is None:
            if self._room is None:
                self._room = host_tensor(self._link, coefficient)
            self._sent = self._room, self._link.to_host(coefficient, self._room)
        return self._sent

    def wait(self) -> None:
        """Wait until it has arrived; the step is over."""
        if self._sent is not None:
            self._sent[1].wait()
        self.forget()

    def forget(self) -> None:
        """The next step has another."""
        self._sent = None

    def close(self) -> None:
        """Give its memory back."""
        self._sent = self._room = None
