"""Ways to write a training, by what is special about them; importing this enters them all."""

from . import (
    batches,
    gradient_hooks,
    loops,
    losses,
    models,
    optimizers,
    single_numbers,
    states,
    views_of_weights,
)

__all__ = [
    "batches",
    "gradient_hooks",
    "loops",
    "losses",
    "models",
    "optimizers",
    "single_numbers",
    "states",
    "views_of_weights",
]
