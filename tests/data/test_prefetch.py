"""Prefetching: the loader's batches, in order and whole, its errors and its place."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from locked_link import LockedLink
from patience import eventually, waits_for_nobody
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from oomph.data.loader import Loader
from oomph.data.prefetch import STAGED, Prefetcher
from oomph.data.prefetch_memory import prefetched_bytes
from oomph.data.staging import Slot
from oomph.data.token_batches import TokenBatches
from oomph.errors import BadInput
from oomph.memory.link import Copy
from oomph.runs.batches import Batches
from oomph.runs.run import Run, fit

LENGTHS = [3, 9, 4, 7, 5, 2, 8, 6, 1, 9, 3, 4]


def make_batches(count: int = 7, sizes: tuple[int, ...] = (4, 40, 8)) -> list[dict[str, Tensor]]:
    return [
        {
            "ids": torch.full((sizes[n % len(sizes)],), n),
            "weights": torch.full((2, sizes[n % len(sizes)]), n / 2),
            "flags": torch.tensor([True, False, n % 2 == 0]),
        }
        for n in range(count)
    ]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "oomph-prefetch"]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@given(st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 99), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_batches_arrive_whole_and_in_order_however_late_they_are_copied(
    depth: int, eager: float, seed: int, count: int
) -> None:
    expected = make_batches(count)
    with Prefetcher(
        make_batches(count), "cpu", depth, link=LockedLink(eager=eager, seed=seed)
    ) as p:
        for _ in range(2):
            seen = list(p)  # all are kept: memory of one that is handed out is never used again
            assert len(seen) == count
            assert all(map(same, seen, expected))


def test_staging_memory_is_used_again() -> None:
    link = LockedLink()
    with Prefetcher(make_batches(50, sizes=(16,)), "cpu", 2, link=link) as prefetcher:
        for _ in prefetcher:
            pass
        assert link.pieces <= 2 + STAGED
        assert prefetcher.host_bytes == link.taken


def test_staging_memory_grows_with_the_batches() -> None:
    link = LockedLink()
    slot = Slot(link)
    for size in (10, 11, 12, 13):
        slot.stage({"x": torch.zeros(size * 1000)})
    assert link.pieces == 2
    assert slot.nbytes >= 13 * 4000


def test_no_more_than_the_depth_is_on_the_device_ahead() -> None:
    prefetcher = Prefetcher(make_batches(20), "cpu", 3, link=LockedLink())
    batches = iter(prefetcher)
    for _ in range(15):
        next(batches)
        assert len(batches._sent) <= 3  # type: ignore[attr-defined]
    prefetcher.close()


def test_a_batch_that_was_handed_out_is_not_held() -> None:
    with Prefetcher(make_batches(), "cpu", 2, link=LockedLink()) as prefetcher:
        batches = iter(prefetcher)
        first = weakref.ref(next(batches)["ids"].untyped_storage())
        next(batches)
        assert first() is None


def test_layouts_and_what_is_no_tensor_stay() -> None:
    image = torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    gaps = torch.arange(20.0).reshape(4, 5)[:, ::2]
    loader = [{"image": image, "gaps": gaps, "name": "a", "empty": torch.empty(0, 3)}]
    with Prefetcher(loader, "cpu", link=LockedLink()) as prefetcher:
        (batch,) = prefetcher
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch["image"], image)
    assert torch.equal(batch["gaps"], gaps)
    assert batch["name"] == "a"
    assert batch["empty"].shape == (0, 3)


def test_without_a_gpu_batches_are_the_loader_s_own() -> None:
    expected = make_batches()
    with Prefetcher(expected, "cpu") as prefetcher:
        assert [id(batch) for batch in prefetcher] == [id(batch) for batch in expected]
        assert len(prefetcher.waited) == len(expected)
        assert prefetcher.host_bytes == 0


class FullLink(LockedLink):
    """Has no room for some copies."""

    def __init__(self, refused: set[int]) -> None:
        super().__init__()
        self.refused, self.asked = refused, 0

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        self.asked += 1
        if self.asked in self.refused:
            raise torch.OutOfMemoryError("no room")
        return super().to_gpu(source, target, after)


@given(st.sets(st.integers(1, 40), max_size=12))
@settings(max_examples=30, deadline=None)
def test_a_batch_for_which_there_was_no_room_is_not_lost(refused: set[int]) -> None:
    expected = make_batches(6)
    with Prefetcher(make_batches(6), "cpu", 2, link=FullLink(refused)) as prefetcher:
        batches, seen = iter(prefetcher), []
        while len(seen) < 6:
            try:
                seen.append(next(batches))
            except torch.OutOfMemoryError:
                continue  # freed something, asks again
        assert next(batches, None) is None
    assert all(map(same, seen, expected))


class Broken(Exception):
    """A loader's own."""


@pytest.mark.parametrize("link", [None, LockedLink()])
def test_an_error_of_the_loader_comes_as_itself_and_at_its_batch(link: LockedLink | None) -> None:
    def loader() -> Iterator[Tensor]:
        yield torch.zeros(2)
        yield torch.ones(2)
        raise Broken("the file is gone")

    prefetcher = Prefetcher(loader(), "cpu", 4, link=link)
    batches = iter(prefetcher)
    assert next(batches).tolist() == [0, 0]
    assert next(batches).tolist() == [1, 1]
    with pytest.raises(Broken, match="the file is gone"):
        next(batches)
    assert next(batches, "the end") == "the end"
    assert not threads()


def test_a_loader_without_batches_gives_none() -> None:
    with Prefetcher([], "cpu") as prefetcher:
        assert list(prefetcher) == []


def test_a_pass_that_is_broken_off_ends_its_thread_and_its_generator() -> None:
    ended = threading.Event()

    def loader() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            ended.set()

    for batch in Prefetcher(loader(), "cpu", 2):
        if batch == 3:
            break
    assert ended.wait(10)
    assert eventually(lambda: not threads())


def test_a_pass_is_forgotten_without_waiting_for_its_thread() -> None:
    # Garbage is collected anywhere, also while `threading` has locks that an ending thread needs.
    goes_on, fetching = threading.Event(), threading.Event()

    def loader() -> Iterator[int]:
        yield 0
        fetching.set()
        goes_on.wait()
        yield 1

    prefetcher = Prefetcher(loader(), "cpu", 1)
    passes = [iter(prefetcher)]
    assert next(passes[0]) == 0
    fetching.wait()
    assert waits_for_nobody(passes.clear)
    assert threads()
    goes_on.set()
    prefetcher.close()
    assert not threads(), "who closes it waits"


def test_a_closed_prefetcher_ends_its_thread_and_gives_no_more() -> None:
    link = LockedLink()
    prefetcher = Prefetcher(make_batches(), "cpu", 2, link=link)
    next(iter(prefetcher))
    prefetcher.close()
    assert not threads()
    assert link.closed
    with pytest.raises(BadInput, match="is closed"):
        iter(prefetcher)


def test_a_second_pass_ends_the_first() -> None:
    with Prefetcher(make_batches(), "cpu", 1) as prefetcher:
        first = iter(prefetcher)
        next(first)
        second = iter(prefetcher)
        assert len(threads()) <= 1
        assert same(next(second), make_batches()[0])
        assert next(first, None) is None


def test_what_the_loader_has_is_there() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    prefetcher = Prefetcher(loader, "cpu")
    assert len(prefetcher) == 4
    assert prefetcher.batch_sampler is loader.batch_sampler
    assert not hasattr(prefetcher, "state_dict")


@pytest.mark.parametrize("depth", [0, -1, 1.5])
def test_a_depth_is_a_count(depth: Any) -> None:
    with pytest.raises(BadInput, match="depth of prefetching"):
        Prefetcher([], "cpu", depth)


def make_loader(workers: int = 0) -> Loader:
    return Loader(
        [torch.full((length,), n) for n, length in enumerate(LENGTHS)],
        TokenBatches(LENGTHS, tokens=18, seed=5),
        collate=lambda samples: [int(sample[0]) for sample in samples],
        workers=workers,
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetched", [False, True])
def test_the_place_of_a_loader_is_where_the_step_is(workers: int, prefetched: bool) -> None:
    def open_loader() -> Any:
        return Prefetcher(make_loader(workers), "cpu") if prefetched else make_loader(workers)

    one = TokenBatches(LENGTHS, tokens=18, seed=5)
    flat = [*one, *one]
    first = open_loader()
    assert first.state_dict()["taken"] == 0
    batches = iter(first)
    taken = [next(batches) for _ in range(2)]
    state = first.state_dict()
    assert (state["epoch"], state["taken"]) == (0, 2)
    second = open_loader()
    second.load_state_dict(state)
    assert taken + list(second) + list(second) == flat
    assert second.state_dict()["epoch"] == 2


def test_a_loader_that_was_broken_off_begins_its_epoch_again() -> None:
    loader = make_loader()
    whole = list(loader)
    second = list(loader)
    again = make_loader()
    for _ in again:
        break
    assert list(again) == whole
    assert list(again) == second
    again.set_epoch(0)
    assert list(again) == whole


def test_a_run_s_batches_resume_through_the_prefetcher() -> None:
    device = torch.device("cpu")
    expected = list(make_loader())
    first = Batches(Prefetcher(make_loader(), device), device)
    batches = iter(first)
    taken = [next(batches) for _ in range(3)]
    second = Batches(Prefetcher(make_loader(), device), device)
    second.load_state_dict(first.state_dict())
    assert taken + list(second) == expected


def test_a_run_s_batches_of_a_shuffling_loader_resume_through_the_prefetcher() -> None:
    device = torch.device("cpu")

    def shuffling() -> Prefetcher:
        return Prefetcher(DataLoader(TensorDataset(torch.arange(20)), 2, shuffle=True), device)

    torch.manual_seed(0)
    first = Batches(shuffling(), device)
    seen = []
    for at, (batch,) in enumerate(first):
        seen.append(batch)
        if at == 3:
            state = first.state_dict()
    torch.manual_seed(1)
    second = Batches(shuffling(), device)
    second.load_state_dict(state)
    rest = [batch for (batch,) in second]
    assert torch.equal(torch.cat(seen[4:]), torch.cat(rest))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def fit_net(prefetch: int, budget: int = 1 << 20) -> Run:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return fit(net, optimizer, None, torch.ones(4, 8), budget=budget, prefetch=prefetch)


def test_a_run_that_prefetches_learns_the_same_and_tells_how_long_it_waited() -> None:
    loader = [torch.full((4, 8), float(n)) for n in range(5)]
    losses = {}
    for prefetch in (0, 2):
        with fit_net(prefetch) as run:
            losses[prefetch] = [float(run.step(batch)) for batch in run.batches(loader)]
            assert len(run.waited) == (5 if prefetch else 0)
    assert losses[0] == losses[2]
    assert not threads()


def test_a_plan_leaves_room_for_what_is_prefetched() -> None:
    with fit_net(0) as plain, fit_net(3) as ahead:
        assert plain.plan.budget - ahead.plan.budget == prefetched_bytes(torch.ones(4, 8), 3)


def test_a_run_that_prefetches_resumes_where_its_steps_were(tmp_path: Path) -> None:
    def batches_of(run: Run) -> Batches:
        dataset = [torch.full((8,), float(n)) for n in range(12)]
        return run.batches(Loader(dataset, TokenBatches([8] * 12, tokens=32)))

    with fit_net(2) as run:
        losses = [float(run.step(batch)) for _ in range(2) for batch in batches_of(run)]
    with fit_net(2) as run:
        batches = iter(batches_of(run))
        before = [float(run.step(next(batches))) for _ in range(2)]
        run.save(tmp_path)
    with fit_net(2) as run:
        run.load(tmp_path)
        after = [float(run.step(batch)) for batch in batches_of(run)]
    assert before + after == losses[:3]
