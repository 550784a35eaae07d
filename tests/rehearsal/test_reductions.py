"""The scratch memory of CUDA reductions, against what an H200 was seen to allocate."""

from __future__ import annotations

import pytest
import torch

from oomph.rehearsal.cuda.reductions import reduction_scratch

#: dtype, shape, reduced dimensions, and the blocks (buffer, semaphores) in the allocation history.
SEEN = [
    (torch.float32, (8192, 1024), (0,), [67_108_864, 32]),
    (torch.bfloat16, (8192, 4096), (0,), [138_412_032, 128]),
    (torch.bfloat16, (8192, 3072), (0,), [138_412_032, 96]),
    (torch.float32, (2048, 1024), (0,), [16_777_216, 32]),
    (torch.float32, (2048, 4096), (0,), [67_108_864, 128]),
    (torch.float32, (4, 2048, 1024), (0, 1), [67_108_864, 32]),
]


def scratch(tensor: torch.Tensor, dims: tuple[int, ...]) -> list[int]:
    return reduction_scratch(tensor, dims, accumulator_bytes=4, sm_count=132, threads_per_sm=2048)


@pytest.mark.parametrize(("dtype", "shape", "dims", "blocks"), SEEN)
def test_scratch_is_what_an_h200_allocates(
    dtype: torch.dtype, shape: tuple[int, ...], dims: tuple[int, ...], blocks: list[int]
) -> None:
    assert scratch(torch.empty(shape, dtype=dtype, device="meta"), dims) == blocks


def test_negative_dimensions_count_from_the_end() -> None:
    tensor = torch.empty(4, 2048, 1024, device="meta")
    assert scratch(tensor, (-3, -2)) == scratch(tensor, (0, 1))


def test_no_dimensions_mean_all_of_them() -> None:
    tensor = torch.empty(8192, 1024, device="meta")
    assert scratch(tensor, ()) == scratch(tensor, (0, 1)) != []


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((8192, 1024), (1,)), ((64, 1024), (0,)), ((0, 1024), (0,)), ((1, 1024), (0,)), ((), ())],
)
def test_reductions_that_need_no_second_pass_take_no_scratch(
    shape: tuple[int, ...], dims: tuple[int, ...]
) -> None:
    assert scratch(torch.empty(shape, device="meta"), dims) == []


def test_smaller_gpus_split_the_work_less() -> None:
    tensor = torch.empty(8192, 4096, device="meta", dtype=torch.bfloat16)
    sizes = [
        sum(reduction_scratch(tensor, (0,), accumulator_bytes=4, sm_count=n, threads_per_sm=2048))
        for n in (132, 108, 40)
    ]
    assert sizes == sorted(sizes, reverse=True)
