"""Which results of a compiled graph become buffers, and how long they live."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from oomph.rehearsal.fusion import Program, schedule

N = 64
SIZE = N * N * 4


def program(function: Callable[..., object], *shapes: tuple[int, ...]) -> Program:
    with FakeTensorMode():
        tensors = [torch.empty(shape) for shape in shapes]
        graph = make_fx(function)(*tensors).graph
    output = next(node for node in graph.nodes if node.op == "output")
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
    return schedule(graph)


def peak(one: Program) -> int:
    alive: dict[str, int] = {}
    highest = 0
    for step in one.steps:
        for name in step.frees_first:
            alive.pop(name, None)
        alive.update(step.takes)
        highest = max(highest, sum(alive.values()))
        for name in step.frees:
            alive.pop(name, None)
    return highest


def taken(one: Program) -> list[str]:
    return [name for step in one.steps for name, _ in step.takes]


def test_a_chain_of_pointwise_ops_writes_only_its_result() -> None:
    one = program(lambda x: (x + 1).relu().exp() * 2, (N, N))
    assert len(one.steps) == 1
    assert peak(one) == SIZE


def test_what_a_product_reads_and_writes_are_buffers() -> None:
    one = program(lambda x, w: (x + 1) @ w, (N, N), (N, N))
    assert len(taken(one)) == 2
    assert one.steps[1].work.flops == 2 * N**3


def test_a_reduction_writes_a_buffer() -> None:
    one = program(lambda x: x / x.exp().sum(-1, keepdim=True), (N, N))
    assert [size for step in one.steps for _, size in step.takes] == [N * 4, SIZE]


def test_results_that_share_an_input_are_written_by_one_kernel_beside_it() -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x @ w
        return (hidden + 1) @ w, (hidden * 2) @ w

    one = program(both, (N, N), (N, N))
    (wide,) = [step for step in one.steps if len(step.takes) == 2]
    assert peak(one) == 3 * SIZE
    assert len(wide.frees) == 1


def test_a_single_result_is_written_over_an_input_that_dies() -> None:
    one = program(lambda x, w: ((x @ w) + 1) @ w, (N, N), (N, N))
    assert [len(step.frees_first) for step in one.steps] == [0, 1, 0]
    assert peak(one) == 2 * SIZE


def test_what_is_returned_is_never_freed_and_inputs_are_never_taken() -> None:
    one = program(lambda x, w: (x @ w, (x @ w).relu() @ w), (N, N), (N, N))
    freed = [name for step in one.steps for name in (*step.frees_first, *step.frees)]
    assert set(one.outputs) <= set(taken(one)) - set(freed)
    assert not set(one.inputs) & set(taken(one))
    assert len(freed) == len(set(freed))


def test_kernels_come_after_what_they_read() -> None:
    def tangled(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = x @ w
        b = (a + x).relu()
        c = b @ w
        d = (a * 2) @ w
        return c + d, (c * d).sum(), b

    one = program(tangled, (N, N), (N, N))
    there = set(one.inputs)
    for step in one.steps:
        assert set(step.frees) <= there | {name for name, _ in step.takes}
        there |= {name for name, _ in step.takes}
    assert set(one.outputs) <= there
