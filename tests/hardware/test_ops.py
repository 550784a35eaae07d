"""The work of an op follows from its shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.hardware.timing.ops import work_of
from oomph.hardware.timing.work import Work
from oomph.techniques.softmax_grad import cross_entropy_chunk

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


class Sum(TorchDispatchMode):
    """All work of whatever runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:  # a question, not an op
            self.works.append(work_of(func, args, out))
        return out


def works(function: Callable[[], Any]) -> list[Work]:
    with Sum() as log:
        function()
    return [work for work in log.works if work != Work()]


def test_products_of_every_kind_count_two_operations_for_each_triple() -> None:
    a, b = torch.empty(8, 16), torch.empty(16, 4)
    bias = torch.empty(4)
    for function in (lambda: a @ b, lambda: torch.addmm(bias, a, b)):
        (work,) = works(function)
        assert (work.flops, work.kind, work.dtype) == (2 * 8 * 16 * 4, "product", "fp32")
    (work,) = works(lambda: torch.bmm(torch.empty(3, 8, 16), torch.empty(3, 16, 4)))
    assert work.flops == 3 * 2 * 8 * 16 * 4


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float64, "fp64")],
)
def test_the_dtype_of_a_product_is_that_of_what_it_reads(dtype: torch.dtype, name: str) -> None:
    (work,) = works(lambda: torch.empty(8, 8, dtype=dtype) @ torch.empty(8, 8, dtype=dtype))
    assert work.dtype == name
    assert work.bytes == 3 * 64 * dtype.itemsize


def test_a_convolution_counts_all_positions_of_its_result() -> None:
    image, kernel = torch.empty(2, 3, 8, 8), torch.empty(5, 3, 3, 3)
    (work,) = works(lambda: torch.conv2d(image, kernel, padding=1))
    assert work.kind == "convolution"
    assert work.flops == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


def test_a_transposed_convolution_does_not_fail() -> None:
    image, kernel = torch.empty(2, 3, 8, 8), torch.empty(3, 5, 3, 3)
    (work,) = works(lambda: torch.conv_transpose2d(image, kernel))
    assert work.kind == "convolution" and work.bytes > 0


def attention(op: Any, queries: int, keys: int, heads: int, *rest: Any) -> Work:
    query, key = torch.empty(2, 8, queries, 16), torch.empty(2, heads, keys, 16)
    return work_of(op, (query, key, key, *rest), query)


def test_attention_is_two_products_over_all_pairs() -> None:
    flash = aten._scaled_dot_product_flash_attention.default
    assert attention(flash, 32, 64, 8, 0.0, False).flops == 2 * 2 * 2 * 8 * 32 * 64 * 16


def test_a_causal_mask_halves_the_pairs_wherever_the_op_is_told() -> None:
    for op, causal in (
        (aten._scaled_dot_product_flash_attention.default, (0.0, True)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (0.0, True)),
        (aten._scaled_dot_product_efficient_attention.default, (None, True, 0.0, True)),
        (aten._scaled_dot_product_cudnn_attention.default, (None, True, 0.0, True)),
    ):
        free = (*causal[:-1], False)
        assert attention(op, 32, 32, 8, *causal).flops * 2 == attention(op, 32, 32, 8, *free).flops


def test_groups_of_queries_share_keys_but_not_products() -> None:
    flash = aten._scaled_dot_product_flash_attention.default
    one, shared = (attention(flash, 32, 32, heads, 0.0, False) for heads in (8, 2))
    assert one.flops == shared.flops
    assert one.bytes > shared.bytes


def test_the_backward_of_attention_is_five_products_for_forwards_two() -> None:
    query = torch.empty(2, 8, 32, 16)
    rows = torch.empty(2, 8, 32)
    forward = attention(aten._scaled_dot_product_flash_attention.default, 32, 32, 8, 0.0, True)
    backward = work_of(
        aten._scaled_dot_product_flash_attention_backward.default,
        (query, query, query, query, query, rows, None, None, 32, 32, 0.0, True, rows, rows),
        (query, query, query),
    )
    assert backward.kind == "attention backward"
    assert backward.flops == 2.5 * forward.flops


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(-1),
        lambda x: x.t(),
        lambda x: x[:4],
        lambda x: x.expand(3, 8, 8),
        lambda x: x.detach(),
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(8),
    ],
    ids=["view", "t", "slice", "expand", "detach", "empty_like", "new_empty"],
)
def test_views_and_empty_tensors_launch_nothing(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.empty(8, 8)
    assert works(lambda: view(x)) == []


def test_pointwise_ops_read_and_write_all_bytes() -> None:
    x = torch.empty(8, 8)
    (work,) = works(lambda: x + x)
    assert work == Work(bytes=3 * 256)
    (work,) = works(lambda: x.add_(1))
    assert work == Work(bytes=2 * 256)


@pytest.mark.parametrize(
    "fill",
    [Tensor.zero_, lambda x: x.fill_(2), torch.zeros_like, lambda x: x.new_full((8, 8), 2)],
    ids=["zero_", "fill_", "zeros_like", "new_full"],
)
def test_fills_read_nothing(fill: Callable[[Tensor], Tensor]) -> None:
    x = torch.empty(8, 8)
    (work,) = works(lambda: fill(x))
    assert work.bytes == 256


def test_a_loss_of_classes_reads_one_number_of_a_row_and_its_backward_writes_all() -> None:
    rows, at = torch.empty(8, 1000), torch.zeros(8, dtype=torch.int64)
    (forward,) = works(lambda: torch.nn.functional.nll_loss(rows, at))
    assert forward.bytes < 200
    args = (torch.ones(()), rows, at, None, 1, -100, torch.ones(()))
    assert work_of(aten.nll_loss_backward.default, args, rows).bytes == rows.nbytes


def test_logits_of_a_chunk_are_read_twice_and_written() -> None:
    logits = torch.empty(8, 1000, dtype=torch.bfloat16)
    target = torch.zeros(8, dtype=torch.int64)
    (work,) = works(lambda: cross_entropy_chunk(logits, target, 1000, -100, 1.0, 1.0, True))
    assert work.bytes == pytest.approx(3 * logits.nbytes, rel=0.05)


def test_pointwise_kernels_take_numbers_one_by_one_where_shapes_or_types_differ() -> None:
    x, row, half = torch.empty(64, 64), torch.empty(64), torch.empty(64, 64, dtype=torch.bfloat16)
    alike, number, spread, mixed, widened, rounded = works(
        lambda: (x * x, x * torch.ones(()), x * row, x + half, half.float(), x.bfloat16())
    )[-6:]
    assert alike.reach == number.reach == rounded.reach == 1
    assert spread.reach == mixed.reach == widened.reach < 1
    (reduced,) = works(lambda: x.sum(0))
    assert reduced.reach == 1, "what is no pointwise kernel has other shapes as a matter of course"


def test_halves_with_steps_between_them_are_no_faster_than_whole_numbers() -> None:
    x, half = torch.empty(64, 64), torch.empty(64, 64, dtype=torch.bfloat16)
    whole, halves = works(lambda: (x + x.t(), half + half.t()))
    assert halves.reach < whole.reach < 1
    whole, halves = works(lambda: (torch.cat([x.t(), x]), torch.cat([half.t(), half])))
    assert halves.reach == whole.reach / 2
    (in_order,) = works(lambda: torch.cat([half, half]))
    assert in_order.reach == 1


def test_a_broadcast_dimension_is_read_once() -> None:
    row = torch.empty(1, 8).expand(8, 8)
    (work,) = works(lambda: torch.empty(8, 8) * row)
    assert work.bytes == 256 + 32 + 256


@pytest.mark.parametrize(
    "lookup",
    [
        lambda table, at: torch.nn.functional.embedding(at, table),
        lambda table, at: table[at],
        lambda table, at: table.index_select(0, at),
    ],
    ids=["embedding", "index", "index_select"],
)
def test_a_lookup_reads_the_rows_it_returns(lookup: Callable[[Tensor, Tensor], Tensor]) -> None:
    table, at = torch.empty(1000, 8), torch.zeros(3, dtype=torch.int64)
    (work,) = works(lambda: lookup(table, at))
    assert work.bytes == 2 * 3 * 8 * 4


@pytest.mark.parametrize(
    ("one", "other", "out", "flops"),
    [
        ((96, 32), (4, 32, 16), (96, 16), 2 * 96 * 32 * 16),  # rows of experts
        ((32, 96), (96, 16), (4, 32, 16), 2 * 96 * 32 * 16),  # gradients of their weights
        ((4, 8, 32), (4, 32, 16), (4, 8, 16), 4 * 2 * 8 * 32 * 16),
    ],
    ids=["rows", "gradients", "batches"],
)
def test_products_of_experts_count_the_rows_that_each_has(
    one: tuple[int, ...], other: tuple[int, ...], out: tuple[int, ...], flops: int
) -> None:
    given = [torch.empty(shape, dtype=torch.bfloat16) for shape in (one, other)]
    made = torch.empty(out, dtype=torch.bfloat16)
    work = work_of(torch.ops.aten._grouped_mm.default, given, made)
    assert (work.flops, work.kind, work.dtype) == (flops, "product", "bf16")


@pytest.mark.parametrize(("classes", "slower"), [(50264, 1), (50260, 1.5), (50258, 3), (50257, 6)])
def test_rows_that_begin_anywhere_are_multiplied_by_an_old_kernel(
    classes: int, slower: float
) -> None:
    rows, weight = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((64, 32), (classes, 32)))
    (logits,) = works(lambda: rows @ weight.t())
    assert 1 / logits.reach >= slower
    assert (logits.reach == 1) is (classes % 8 == 0)
    gradient = torch.empty(64, classes, dtype=torch.bfloat16)
    for product in (lambda: gradient @ weight, lambda: gradient.t() @ rows):
        (work,) = works(product)
        assert work.reach == logits.reach


def test_fp32_and_vectors_have_no_rows_that_could_begin_badly() -> None:
    (work,) = works(lambda: torch.empty(64, 31) @ torch.empty(31, 7))
    assert work.reach == 1
    column = torch.empty(64, 1, dtype=torch.bfloat16)
    (work,) = works(lambda: column.t() @ torch.empty(64, 32, dtype=torch.bfloat16))
    assert work.reach == 1


def test_many_small_products_in_fp32_reach_less() -> None:
    def batched(dtype: torch.dtype) -> Work:
        one = torch.empty(3, 64, 64, dtype=dtype)
        (work,) = works(lambda: torch.bmm(one, one))
        return work

    assert batched(torch.float32).reach < batched(torch.bfloat16).reach == 1


def narrow_attention(length: int, width: int, dropout: float) -> Work:
    query = torch.empty(2, 8, length, width)
    op = aten._scaled_dot_product_flash_attention.default
    return work_of(op, (query, query, query, dropout, False), query)


def test_attention_reaches_less_with_narrow_heads_odd_lengths_and_dropout() -> None:
    assert narrow_attention(1024, 128, 0.0).reach == 1
    assert narrow_attention(1024, 64, 0.0).reach == pytest.approx(0.64)
    assert narrow_attention(257, 128, 0.0).reach == pytest.approx((257 / 384) ** 2)
    assert narrow_attention(1024, 128, 0.1).reach == 0.5


def test_an_optimizer_reads_four_numbers_of_a_parameter_and_writes_three() -> None:
    weights, gradients, first, second = ([torch.empty(1000)] for _ in range(4))
    with Sum() as log:
        torch._fused_adamw_(
            weights,
            gradients,
            first,
            second,
            [],
            [torch.ones(())],
            lr=1e-3,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
    (work,) = (one for one in log.works if one.bytes > 1000)
    assert work.bytes == pytest.approx(7 * 4 * 1000, abs=8)
    assert work.launches > 5, "the Python of a step is around it"


def test_an_optimizers_python_takes_longer_with_more_parameters() -> None:
    def launches(count: int) -> float:
        tensors = [torch.empty(10) for _ in range(count)]
        args = (tensors, tensors, tensors, tensors, [], [torch.ones(())] * count)
        return work_of(aten._fused_adamw_.default, args, None).launches

    assert launches(300) - launches(100) == 2 * (launches(200) - launches(100)) > 100


def test_a_fused_norm_is_no_optimizer() -> None:
    x, rows = torch.empty(1000, 8), torch.empty(1000, 1)
    work = work_of(aten._fused_rms_norm.default, (x, [8], torch.empty(8), None), (x, rows))
    assert work.launches == 1
    assert work.bytes == 2 * x.nbytes + 8 * 4 + rows.nbytes


def test_a_launch_with_nothing_around_it_takes_the_host_less() -> None:
    x = torch.empty(8, 8)
    zeroed, copied, added = works(lambda: (x.zero_(), x.copy_(torch.empty(8, 8)), x.add_(1)))
    assert zeroed.launches == copied.launches < added.launches == 1


def test_few_results_of_a_convolution_in_groups_take_as_long_as_more() -> None:
    def seconds(images: int) -> float:
        image, kernel = torch.empty(images, 8, 149), torch.empty(8, 4, 3)
        sizes = [1], [1], [1], False, [0], 2
        work = work_of(aten.convolution.default, (image, kernel, None, *sizes), image)
        return work.flops / work.reach

    assert seconds(4) == pytest.approx(seconds(16)) == pytest.approx(seconds(32) / 2)


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_the_backward_of_a_convolution_is_two_of_its_products_whatever_its_groups(
    groups: int,
) -> None:
    image, kernel = torch.empty(2, 8, 8, 8), torch.empty(16, 8 // groups, 3, 3)
    made = torch.empty(2, 16, 8, 8)
    sizes = [1, 1], [1, 1], [1, 1], False, [0, 0], groups
    forward = work_of(aten.convolution.default, (image, kernel, None, *sizes), made)
    backward = work_of(
        aten.convolution_backward.default,
        (made, image, kernel, None, *sizes, [True, True, False]),
        (image, kernel),
    )
    assert backward.flops == 2 * forward.flops
    assert (forward.kind == "convolution") is (groups < 8), "by itself a channel is only moved"
    assert (forward.reach == 1) is (groups == 1)


def test_what_is_read_with_steps_between_takes_longer() -> None:
    x = torch.empty(64, 64)
    plain, strided = works(lambda: (x + x, x + x.t()))
    assert plain.bytes == strided.bytes and plain.reach > strided.reach


# -- the layout of images --------------------------------------------------------------------------


def images(*shape: int, last: bool = False) -> Tensor:
    made = torch.empty(shape, dtype=torch.bfloat16)
    return made.contiguous(memory_format=torch.channels_last) if last else made


@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels last"])
def test_images_that_have_channels_last_are_not_converted(last: bool) -> None:
    image, kernel = images(8, 64, 16, 16, last=last), images(32, 64, 3, 3)
    made = images(8, 32, 16, 16, last=last)
    sizes = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    forward = work_of(aten.convolution.default, (image, kernel, None, *sizes), made)
    args = (made, image, kernel, None, *sizes, [True, True, False])
    backward = work_of(aten.convolution_backward.default, args, (image, kernel))
    moved, weight = image.nbytes + made.nbytes, kernel.nbytes
    assert forward.converted == 2 * (weight if last else moved + weight)
    assert backward.converted == 2 * (weight if last else 2 * moved + weight)


def test_a_gradient_in_another_layout_is_brought_into_that_of_the_images() -> None:
    image, kernel = images(8, 64, 16, 16, last=True), images(32, 64, 1, 1)
    gradient = images(8, 32, 16, 16)
    args = (gradient, image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3)
    work = work_of(aten.convolution_backward.default, args, (image, kernel))
    assert work.converted == 2 * gradient.nbytes


def test_in_full_precision_nothing_is_said_of_conversions() -> None:
    (work,) = works(lambda: torch.conv2d(torch.empty(2, 8, 8, 8), torch.empty(8, 8, 3, 3)))
    assert work.converted == 0


def test_batch_norm_is_faster_with_channels_last() -> None:
    def reach(last: bool) -> list[float]:
        x = images(8, 64, 16, 16, last=last).requires_grad_()
        norm, gradient = torch.nn.BatchNorm2d(64), torch.empty_like(x)
        found = works(lambda: torch.autograd.grad(norm(x), x, gradient))
        return [work.reach for work in found if work.bytes > x.nbytes]

    plain, last = reach(last=False), reach(last=True)
    assert len(plain) == len(last) == 2
    assert all(one < other for one, other in zip(plain, last, strict=True))


def test_what_is_in_one_layout_is_read_as_fast_in_any() -> None:
    plain, last = images(8, 64, 16, 16), images(8, 64, 16, 16, last=True)
    found = works(lambda: (plain + plain, last + last, plain + last))
    assert [work.reach for work in found] == [1.0, 1.0, found[2].reach]
    assert found[2].reach < 1
    (copy,) = works(lambda: plain.contiguous(memory_format=torch.channels_last))
    assert copy.reach < 1
