"""Which results of a compiled graph become buffers, and how long they live."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from oomph.rehearsal.fusion import Program, _Scheduler, schedule

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


def test_a_result_that_nobody_reads_is_freed_at_once() -> None:
    one = program(lambda x, w: (x @ w, (x * 2) @ w)[1], (N, N), (N, N))
    freed = {name for step in one.steps for name in (*step.frees_first, *step.frees)}
    assert set(taken(one)) - freed == set(one.outputs)


def test_views_are_the_buffer_they_look_at() -> None:
    one = program(lambda x, w: (x @ w).view(N, 2, N // 2).transpose(0, 1), (N, N), (N, N))
    assert taken(one) == list(one.outputs)
    assert peak(one) == SIZE


def test_an_input_given_back_is_itself() -> None:
    one = program(lambda x, w: (x, x @ w), (N, N), (N, N))
    assert one.outputs[0] == one.inputs[0]
    assert len(taken(one)) == 1


def test_inputs_die_with_their_last_reader_unless_they_are_returned() -> None:
    one = program(lambda x, w: ((x @ w).relu() @ w, w), (N, N), (N, N))
    x, w = one.inputs
    assert x in one.steps[0].frees
    assert all(w not in step.frees for step in one.steps)


def test_what_dies_together_is_freed_in_the_graphs_order() -> None:
    def many(*tensors: Tensor) -> Tensor:
        return torch.cat([tensor @ tensor for tensor in tensors])

    one = program(many, *[(N, N)] * 12)
    assert list(one.steps[-1].frees) == [name for step in one.steps[:-1] for name, _ in step.takes]


def test_an_input_is_not_written_over() -> None:
    one = program(lambda x, w: (x + 1) @ w, (N, N), (N, N))
    assert one.steps[0].frees_first == ()


def test_several_results_of_one_kernel_are_taken_before_its_inputs_are_freed() -> None:
    def three(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        hidden = x @ w
        return (hidden + 1) @ w, (hidden * 2) @ w, hidden.exp() @ w

    one = program(three, (N, N), (N, N))
    (wide,) = [step for step in one.steps if len(step.takes) > 1]
    assert len(wide.takes) == 3 and wide.frees_first == ()
    assert peak(one) == 4 * SIZE


def test_results_that_depend_on_each_other_are_not_one_kernel() -> None:
    def through_a_product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = x + 1
        second = (first @ w) + x
        return first, second

    one = program(through_a_product, (N, N), (N, N))
    assert max(len(step.takes) for step in one.steps) == 1


def test_nor_are_those_that_do_by_way_of_what_other_kernels_took_in_since() -> None:
    """As in a layer of Gemma 3."""

    def tangled(u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a, b, d = u.relu(), v.relu(), w.relu()
        of_a, of_b, of_d = a @ a, b @ b, d @ d
        # Beside a, which then waits for b; beside b, which then waits for d; not beside d.
        return u.sin() + of_b, v.sin() + of_d, w.sin() + of_a

    one = program(tangled, (N, N), (N, N), (N, N))
    assert sorted(len(step.takes) for step in one.steps) == [1] * 5 + [2, 2]


def test_what_is_read_often_and_costly_is_written_down() -> None:
    def sums(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        return total.relu(), total.exp()

    few = program(lambda *t: sums(*t), *[(N, N)] * 3)
    many = program(lambda *t: sums(*t), *[(N, N)] * 6)
    assert len(taken(few)) == 2
    assert len(taken(many)) == 3


def test_the_work_of_a_fused_kernel_is_what_it_reads_and_writes() -> None:
    one = program(lambda x, y: (x + y).relu(), (N, N), (N, N))
    assert one.steps[0].work.bytes == 3 * SIZE
    assert one.steps[0].work.flops == 0


POINTWISE: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: (a * b).relu(),
    lambda a, b: a.exp(),
]
OTHERS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a @ b,
    lambda a, b: a / b.sum(-1, keepdim=True),
    lambda a, b: a.t(),
    lambda a, b: torch.cat([a[: N // 2], b[N // 2 :]]),
]


def test_rows_whose_largest_is_found_first_are_read_once_more() -> None:
    def largest_first(x: Tensor) -> Tensor:
        return x - x.amax(-1, keepdim=True)

    def plain(x: Tensor) -> Tensor:
        return x - x.sum(-1, keepdim=True)

    reached = [
        min(step.work.reach for step in program(one, (64, 64)).steps)
        for one in (largest_first, plain)
    ]
    assert reached[0] < reached[1]


def test_few_numbers_that_lie_far_apart_are_added_up_slowly() -> None:
    def reach(dim: int, *shape: int) -> float:
        return min(step.work.reach for step in program(lambda x: x.sum(dim), shape).steps)

    assert reach(0, 16, 512) < reach(0, 512, 16) == reach(1, 512, 16) == reach(0, 4096, 512)


@pytest.mark.parametrize("seed", range(20))
def test_any_program_takes_once_frees_at_most_once_and_reads_only_what_is_there(seed: int) -> None:
    draw = random.Random(seed)

    def tangled(*inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for _ in range(draw.randint(5, 40)):
            op = draw.choice(POINTWISE * 2 + OTHERS)
            values.append(op(draw.choice(values), draw.choice(values)))
        return tuple(draw.sample(values, 4))

    with FakeTensorMode():
        graph = make_fx(tangled)(*[torch.empty(N, N) for _ in range(3)]).graph
    graph.eliminate_dead_code()
    one = schedule(graph)
    alive, taken_ever, freed_ever = set(one.inputs), set(one.inputs), set()
    for step in one.steps:
        for name in step.frees_first:
            assert name in alive
            alive.remove(name)
            freed_ever.add(name)
        for name, size in step.takes:
            assert name not in taken_ever and size > 0
            taken_ever.add(name)
            alive.add(name)
        for name in step.frees:
            assert name in alive and name not in freed_ever
            alive.remove(name)
            freed_ever.add(name)
    assert set(one.outputs) <= alive
    # Nothing is left behind but what is returned, and inputs that nobody read.
    assert alive - set(one.outputs) <= set(one.inputs)


@pytest.mark.parametrize("seed", range(20))
def test_any_kernel_runs_while_all_it_reads_is_there(seed: int) -> None:
    draw = random.Random(seed)

    def tangled(*inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for _ in range(draw.randint(5, 40)):
            op = draw.choice(POINTWISE + OTHERS * 2)
            values.append(op(draw.choice(values), draw.choice(values)))
        return tuple(values[-3:])

    with FakeTensorMode():
        graph = make_fx(tangled)(*[torch.empty(N, N) for _ in range(3)]).graph
    graph.eliminate_dead_code()
    scheduler = _Scheduler(graph)
    one = scheduler.program()
    nodes = {node.name: node for node in graph.nodes}
    alive = set(one.inputs)
    for step in one.steps:
        for name, _ in step.takes:
            reads = {node.name for node in scheduler._reads(nodes[name], scheduler._written)}
            # What is written over is read in the same breath.
            assert reads <= alive
        alive -= set(step.frees_first)
        alive |= {name for name, _ in step.takes}
        alive -= set(step.frees)
