"""One forward tells what planning has to know of a job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import (
    Residual,
    bert,
    chain,
    convnext,
    gpt2,
    hf_resnet,
    llama,
    resnet,
    swin,
    vit,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from oomph.engine.applying import apply_choices
from oomph.engine.step import train_step
from oomph.errors import CannotRehearse
from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.plans.choices import KEEP, RECOMPUTE, Choices, saved_ops
from oomph.search.survey import Block, SavableOp, Survey, survey

H200 = find_gpu("h200")


def look(job: Job, gpu: Any = None) -> Survey:
    return survey(job, gpu, Clock.of(gpu), lambda *_: None)


def three(**options: Any) -> nn.Module:
    return nn.Sequential(*(Residual(**options) for _ in range(3)))


# -- kinds and menus ------------------------------------------------------------------------------


def test_blocks_that_do_the_same_are_of_one_kind() -> None:
    assert len({block.kind for block in look(llama()).blocks}) == 1


def test_a_kind_is_weights_inputs_and_ops_together() -> None:
    kinds = [block.kind for block in look(resnet()).blocks]
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 4
    # Every second block of a Swin shifts its windows, with the same weights and inputs.
    kinds = [block.kind for block in look(swin()).blocks]
    assert kinds[0] != kinds[1]
    assert kinds[2] == kinds[4] and kinds[3] == kinds[5]
    assert kinds[2] != kinds[3]


def test_a_menu_goes_from_keeping_all_to_recomputing_all() -> None:
    found = look(gpt2(), H200)
    keep, recompute, *between = found.options(found.blocks[0])
    assert (keep, recompute) == (KEEP, RECOMPUTE)
    sizes = [len(saved_ops(option)) for option in between]
    assert sizes == sorted(set(sizes)) and sizes[0] == 1
    names = {op.name for op in found.blocks[0].ops}
    assert all(saved_ops(option) <= names for option in between)


def test_what_saves_most_time_for_its_bytes_is_saved_first() -> None:
    def op(name: str, nbytes: int, seconds: float) -> SavableOp:
        return SavableOp(name=name, nbytes=nbytes, seconds=seconds)

    block = Block(
        path="",
        kind=(),
        ops=(op("a#0", 10, 1.0), op("b#0", 1, 1.0), op("c#0", 10, 5.0), op("last#0", 1, 100.0)),
        parameters=0,
    )
    found = look(chain(three))
    menu = found.options(block)
    assert [saved_ops(how) for how in menu[2:]] == [{"b#0"}, {"b#0", "c#0"}, {"a#0", "b#0", "c#0"}]


def test_the_result_of_a_blocks_last_product_is_never_worth_saving() -> None:
    found = look(chain(three))
    assert [op.name for op in found.blocks[0].ops] == ["product#0", "product#1"]
    assert found.options(found.blocks[0]) == (KEEP, RECOMPUTE, "recompute saving product#0")


class Adds(nn.Module):
    """Writes to the results of its first product and, through a view, of its third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.layers
        hidden = second(first(x).add_(1).relu()).relu()
        x = third(hidden)
        x.view(-1, 4)[:, 1:].mul_(2)
        return last(x.relu())


def test_what_a_block_writes_to_later_is_not_saved() -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(Adds() for _ in range(3)))

    found = look(chain(model))
    assert found.options(found.blocks[0]) == (KEEP, RECOMPUTE, "recompute saving product#1")
    batch = (torch.randn(4, 16), torch.randn(4, 16))
    losses = []
    for blocks in ({}, dict.fromkeys("012", "recompute saving product#1")):
        torch.manual_seed(0)
        own = model()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        job = Job(own, nn.MSELoss(), optimizer, batch)
        stage, _ = apply_choices(Choices(blocks=blocks), job, own, optimizer, device_type="cpu")
        losses.append([train_step(stage, batch) for _ in range(3)])
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)


def test_a_block_without_products_can_be_kept_or_recomputed() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LayerNorm(16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    found = look(chain(lambda: nn.Sequential(Norms(), Norms())))
    assert found.options(found.blocks[0]) == (KEEP, RECOMPUTE)


def test_ops_are_those_of_training_not_of_evaluation() -> None:
    # In evaluation it would be a single op without a name for what is inside.
    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    batch = (torch.ones(2, 4, 16), torch.zeros(2, 4, 16))
    found = look(Job(encoder, nn.MSELoss(), "sgd", batch), H200)
    names = {op.name for op in found.blocks[0].ops}
    assert {"attention#0", "product#0", "product#3"} <= names


# -- what is no block after all -------------------------------------------------------------------


def test_frozen_blocks_before_all_that_is_trained_are_left_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained = three(), three()
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.trained(self.frozen(x))

    assert [block.path[:7] for block in look(chain(Model)).blocks] == ["trained"] * 3


def test_frozen_blocks_after_something_trained_stay() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.adapter, self.frozen = nn.Linear(16, 16), three()
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.adapter(x))

    assert len(look(chain(Model)).blocks) == 3


def test_a_loss_that_goes_around_forward_hides_no_blocks() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = three()

        def encode(self, x: Tensor) -> Tensor:
            return self.blocks(x)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model.encode(batch).pow(2).mean()

    assert len(look(Job(Model, loss, "sgd", torch.ones(4, 16))).blocks) == 3


def test_a_block_with_a_hook_of_the_users_inside_is_left_alone_with_a_reason() -> None:
    def model() -> nn.Module:
        made = three()
        made[1].up.register_forward_hook(lambda *_: None)
        made[2].register_forward_hook(lambda *_: None)  # runs outside of what is recomputed
        return made

    found = look(chain(model))
    assert [block.path for block in found.blocks] == ["0", "2"]
    assert found.left_alone == ("1 has a hook inside, which recompute would call twice",)


def test_a_block_that_holds_the_head_is_none() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5000)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x))

    def batch() -> tuple[Tensor, Tensor]:
        return torch.ones(4, 16), torch.ones(4, dtype=torch.long)

    job = Job(lambda: nn.Sequential(three(), Classifier()), nn.CrossEntropyLoss(), "sgd", batch)
    found = look(job)
    assert found.heads == {"1.head": (5000, 16)}
    assert [block.path for block in found.blocks] == ["0.0", "0.1", "0.2"]


# -- the rest -------------------------------------------------------------------------------------


def test_small_modules_of_a_library_outside_the_blocks_are_worth_compiling() -> None:
    assert look(llama()).others == ("model.norm",)
    assert look(gpt2()).others == ()  # its norms are torch's own


def test_random_numbers_are_noticed_wherever_they_are_drawn() -> None:
    assert not look(llama()).draws_random_numbers
    assert not look(llama(), H200).draws_random_numbers  # attention could, and does not
    assert look(bert()).draws_random_numbers
    assert look(chain(lambda: three(dropout=0.1))).draws_random_numbers
    assert not look(chain(three)).draws_random_numbers

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.layer(x), 0.5, self.training)

    assert look(chain(Dropped)).draws_random_numbers


@pytest.mark.parametrize(
    ("optimizer", "fuses", "low_bit", "per_parameter"),
    [
        ("adamw", True, True, True),
        ("adamw-fused", False, True, True),
        ("rmsprop", False, False, True),
    ],
)
def test_what_the_optimizer_can_do_is_tried_out(
    optimizer: str, fuses: bool, low_bit: bool, per_parameter: bool
) -> None:
    found = look(chain(three, optimizer=optimizer), H200)
    assert ("fused_optimizer" not in found.unsuited) is fuses
    assert ("low_bit_state" not in found.unsuited) is low_bit
    assert found.steps_per_parameter is per_parameter


def test_trainable_parameters_are_counted() -> None:
    def model() -> nn.Module:
        made = three()
        made[0].requires_grad_(False)
        return made

    each = sum(p.numel() for p in Residual().parameters())
    assert look(chain(model)).trainable == 2 * each


def test_batch_norm_is_a_reason_to_keep_the_batch_whole() -> None:
    assert "bn1 (BatchNorm2d)" in look(resnet()).whole_because
    assert look(llama()).whole_because == ""


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("not today")

    before = _get_current_dispatch_mode_stack()
    with pytest.raises(CannotRehearse, match="not today"):
        look(chain(lambda: nn.Sequential(Residual(), Fails())))
    assert _get_current_dispatch_mode_stack() == before


def test_whoever_handles_an_error_sees_the_same() -> None:
    # As somebody does who ran out of memory, or whose budget was too small, and plans anew.
    plain = look(llama())
    try:
        raise torch.OutOfMemoryError
    except torch.OutOfMemoryError:
        found = look(llama())
    assert found.blocks == plain.blocks
    assert "generation_cache" not in {*found.unsuited, *plain.unsuited}


def test_a_model_that_handles_an_error_of_its_own_is_seen_as_a_whole() -> None:
    class Careful(Residual):
        def forward(self, x: Tensor) -> Tensor:
            try:
                raise NotImplementedError
            except NotImplementedError:
                return super().forward(x)

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            try:
                raise NotImplementedError
            except NotImplementedError:
                return super().forward(x)  # type: ignore[no-any-return]

    assert len(look(chain(lambda: Model(*(Careful() for _ in range(3))))).blocks) == 3


def test_the_users_own_model_is_not_touched() -> None:
    model = three()
    look(Job(model, nn.MSELoss(), "sgd", (torch.ones(2, 16), torch.ones(2, 16))))
    assert "forward" not in vars(model)
    assert not any(module._forward_hooks for module in model.modules())


# -- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [resnet, hf_resnet, convnext])
def test_nets_of_convolutions_convolve_images(make: Any) -> None:
    assert "channels_last" not in look(make()).unsuited


@pytest.mark.parametrize("make", [vit, swin, llama])
def test_cutting_images_into_patches_is_no_net_of_convolutions(make: Any) -> None:
    assert "channels_last" in look(make()).unsuited


class Scaled(nn.Conv2d):
    """A convolution that computes in its own way."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, 2 * self.weight, self.bias)


@pytest.mark.parametrize(("make", "dims"), [(nn.Conv1d, 1), (Scaled, 2)], ids=["sounds", "own"])
def test_convolutions_that_cannot_be_given_images_are_not_counted(make: Any, dims: int) -> None:
    def layers() -> nn.Module:
        return nn.Sequential(*(make(16, 16, 3, padding=1) for _ in range(3)))

    def batch() -> tuple[Tensor, Tensor]:
        return torch.ones(2, 16, *dims * [8]), torch.zeros(2, 16, *dims * [8])

    assert "channels_last" in look(chain(layers, batch)).unsuited
