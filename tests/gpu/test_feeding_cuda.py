"""Batches on a real card: whole under every delay, in counted memory, with the idle time told."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from test_packing import make_dataset, make_llama, packed_batches, sums_and_gradients
from torch import Tensor

from oomph.data.packed_rows import check_packing
from oomph.data.prefetch import Prefetcher
from oomph.data.prefetch_memory import prefetched_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20
#: Cycles of a GPU that does nothing: about 10 ms.
PAUSE = 20_000_000


def make_batches(count: int, elements: int = MIB) -> list[dict[str, Tensor]]:
    return [{"x": torch.full((elements,), float(n)), "n": torch.tensor([n])} for n in range(count)]


def spoil(device: torch.device) -> None:
    """Take and fill what the computing stream has free."""
    torch.full((MIB,), float("nan"), device=device)


@pytest.mark.parametrize("slow", ["nothing", "computing", "copying"])
@pytest.mark.parametrize("depth", [1, 3])
def test_batches_are_whole_whatever_is_slow(slow: str, depth: int) -> None:
    device = torch.device("cuda")
    totals = []
    with Prefetcher(make_batches(12), device, depth) as prefetcher:
        for batch in prefetcher:
            if slow == "computing":
                torch.cuda._sleep(PAUSE)
            if slow == "copying":
                with torch.cuda.stream(prefetcher._link._in):  # type: ignore[union-attr]
                    torch.cuda._sleep(PAUSE)
            totals.append((batch["x"].sum(), batch["n"].sum()))
            del batch
            spoil(device)
    assert [float(total) / MIB for total, _ in totals] == list(range(12))
    assert [int(n) for _, n in totals] == list(range(12))


def test_batches_that_are_kept_stay_as_they_were() -> None:
    with Prefetcher(make_batches(8), "cuda", 2) as prefetcher:
        kept = list(prefetcher)
        for n, batch in enumerate(kept):
            assert batch["x"].device.type == "cuda"
            assert bool((batch["x"] == n).all())


def test_what_is_ahead_takes_the_memory_that_was_counted_and_gives_it_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    prefetcher = Prefetcher(make_batches(20), "cuda", 3)
    for at, batch in enumerate(prefetcher):
        if at == 10:
            time.sleep(0.2)  # so that all that may be ahead is staged
        if at == 11:
            here = torch.cuda.memory_allocated() - before
            one = prefetched_bytes(batch, 1)
            assert here == one + prefetched_bytes(batch, 3)
            break
    del batch
    prefetcher.close()
    del prefetcher
    assert torch.cuda.memory_allocated() == before


def test_a_busy_gpu_did_not_wait_and_an_idle_one_did() -> None:
    def loader() -> Iterator[Tensor]:
        for _ in range(6):
            time.sleep(0.05)
            yield torch.zeros(1)

    waited = {}
    for busy in (False, True):
        torch.cuda.synchronize()
        with Prefetcher(loader(), "cuda", 1) as prefetcher:
            for _ in prefetcher:
                if busy:
                    torch.cuda._sleep(20 * PAUSE)
            waited[busy] = prefetcher.waited[1:]
    assert min(waited[False]) > 0.02
    assert max(waited[True]) < 0.02


def test_an_error_of_the_loader_leaves_the_card_usable() -> None:
    def loader() -> Iterator[Tensor]:
        yield torch.ones(8)
        raise KeyError("gone")

    batches = iter(Prefetcher(loader(), "cuda", 2))
    assert float(next(batches).sum()) == 8
    with pytest.raises(KeyError, match="gone"):
        next(batches)
    assert float(torch.ones(8, device="cuda").sum()) == 8


def test_packed_rows_have_the_numbers_of_the_samples_on_the_card_too() -> None:
    lengths = [9, 30, 4, 1, 17, 12, 8, 2, 21, 32]
    model = make_llama().cuda()
    alone = [
        {"input_ids": sample[None].cuda(), "labels": sample[None].cuda()}
        for sample in make_dataset(lengths)
    ]
    packed = [
        {name: value.cuda() for name, value in batch.items()} for batch in packed_batches(lengths)
    ]
    check_packing(model, packed[0])
    loss, gradients = sums_and_gradients(model, alone)
    loss_packed, gradients_packed = sums_and_gradients(model, packed)
    assert loss_packed == pytest.approx(loss, rel=1e-5)
    for one, other in zip(gradients, gradients_packed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
