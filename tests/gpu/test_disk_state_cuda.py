"""State and masters on the disk behind a card: the plain bits, whatever is late. Needs a GPU."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from host_training import Training, plain, same_bits
from late_link import PLACES, LateLink
from test_host_optimizer_cuda import RECIPES, STEPS, plainly

from oomph.memory.cuda_link import CudaLink
from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.numbered_store import NumberedStore
from oomph.techniques import disk_state

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _every_parameter_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_state, "LEAST", 0)


def on_disk(name: str, link: CudaLink, folder: Path, share: float = 1.0) -> Training:
    def open_store(largest: int, buffers: int) -> NumberedStore:
        return NumberedDiskStore(link, folder, largest=largest, buffers=buffers)

    training = Training(recipe=RECIPES[name])
    training.go_to_host(link, disk=open_store, disk_share=share, keep_gradients=2000)
    return training


@pytest.mark.parametrize("late", [(), *((place,) for place in PLACES), PLACES], ids=str)
@pytest.mark.parametrize(
    "name", ["plain", "clipped", "in parts, clipped", "masters", "masters, clipped"]
)
def test_steps_have_the_plain_bits_whatever_is_late(
    name: str, late: Collection[str], links: list[CudaLink], tmp_path: Path
) -> None:
    links.append(LateLink(late))
    trained = on_disk(name, links[0], tmp_path).run(STEPS)
    assert trained.host is not None
    trained.host.undo()
    same_bits(trained, plainly(name))


def test_a_state_dict_has_the_numbers_and_training_goes_on(
    links: list[CudaLink], tmp_path: Path
) -> None:
    links.append(LateLink(PLACES))
    trained = on_disk("clipped", links[0], tmp_path, share=0.5).run(2)
    saved = copy.deepcopy(trained.optimizer.state_dict()["state"])
    expected = plain(RECIPES["clipped"], 2).optimizer.state_dict()["state"]
    for number, state in expected.items():
        for name, value in state.items():
            assert torch.equal(saved[number][name].cpu(), value.cpu()), (number, name)
    trained.run(STEPS - 2)
    assert trained.host is not None
    trained.host.undo()
    same_bits(trained, plainly("clipped"))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", ["masters", "masters, clipped"])
def test_masters_are_read_written_and_trained_on(
    name: str, share: float, links: list[CudaLink], tmp_path: Path
) -> None:
    links.append(LateLink(PLACES))
    trained, expected = on_disk(name, links[0], tmp_path, share).run(2), plain(RECIPES[name], 2)
    assert trained.host is not None and trained.masters is not None
    before = trained.weights()
    for ours, theirs in zip(trained.model.parameters(), expected.model.parameters(), strict=True):
        assert expected.masters is not None
        master = trained.masters.master_of(ours)
        numbers = trained.host.numbers(master).to("cuda")
        assert torch.equal(numbers, expected.masters.master_of(theirs))
        if master is not ours:
            trained.masters.write(ours, numbers)
    for key, value in trained.model.state_dict().items():
        assert torch.equal(value.cpu(), before[key]), key
    trained.optimizer.state_dict()  # shows them
    trained.run(STEPS - 2)
    trained.host.undo()
    same_bits(trained, plainly(name))
