"""Streamed weights on the disk: the numbers of an untouched model to the bit, or an error."""

from __future__ import annotations

import copy
import errno
import gc
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_link import poison
from shared_link import SharedLink
from torch import Tensor, nn

from oomph.errors import BadInput, DiskDamaged, DiskFull, HostMemoryFull
from oomph.memory import limits
from oomph.memory.disk import DiskStore
from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.limits import HostLimits
from oomph.memory.link import InstantLink, Link
from oomph.memory.scratch_file import ScratchFile
from oomph.techniques.disk_weights import BUFFERS, OnDisk
from oomph.techniques.streamed_weights import StreamedWeights

WIDTH, LAYERS = 8, 8
BLOCKS = [f"blocks.{at}" for at in range(LAYERS)]
COLD = BLOCKS[:6]
"""More than there are buffers, so that the disk is read in every forward."""
TINY = HostLimits(memory=100, memory_limit="a small machine", lockable=None)


#: Of the test that runs.
APPLIED: list[StreamedWeights] = []


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """No test leaves files or threads behind."""
    yield
    while APPLIED:
        APPLIED.pop().undo()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu()) * self.scale


class Net(nn.Module):
    """Blocks run in the order of `runs`; two of them share a weight if it is `tied`."""

    def __init__(self, *, tied: bool = False, runs: Sequence[int] = range(LAYERS)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.runs = runs
        if tied:
            self.blocks[3].up.weight = self.blocks[1].up.weight  # both on the disk
            self.blocks[7].down.weight = self.blocks[2].down.weight  # one of them
            self.blocks[4].scale = self.first.bias  # not streamed at all

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for at in self.runs:
            x = self.blocks[at](x)
        return x


class Disk:
    """Opens slots in a folder, and remembers them."""

    def __init__(self, link: Link, folder: Path) -> None:
        self.link, self.folder = link, folder
        self.opened: list[NumberedDiskStore] = []

    def __call__(self, largest: int, buffers: int) -> NumberedDiskStore:
        opened = NumberedDiskStore(self.link, self.folder, largest=largest, buffers=buffers)
        self.opened.append(opened)
        return opened


def on_disk(
    net: nn.Module,
    folder: Path,
    link: Link | None = None,
    *,
    blocks: Sequence[str] = BLOCKS,
    cold: Sequence[str] = COLD,
    ahead: int = 1,
) -> tuple[StreamedWeights, Disk]:
    link = link or InstantLink()
    disk = Disk(link, folder)
    where = OnDisk(blocks=cold, open_store=disk)
    streamed = StreamedWeights(net, blocks, link, ahead=ahead, on_disk=where)
    APPLIED.append(streamed)
    return streamed, disk


def batch() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def outputs(net: nn.Module) -> Tensor:
    out: Tensor = net(batch())
    return out


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name, value in theirs.items() if not torch.equal(mine[name], value)] == []


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps a block's memory for longer than he should finds nonsense in it."""
    drop = StreamedWeights._drop

    def drop_poisoned(streamed: StreamedWeights, unit: Any) -> None:
        memory, here = unit.memory, unit.is_here
        drop(streamed, unit)
        if memory is not None and here:
            poison(memory)

    monkeypatch.setattr(StreamedWeights, "_drop", drop_poisoned)


# --- Same numbers ---------------------------------------------------------------------------------

LINKS: dict[str, Callable[[], Link]] = {
    "at once": InstantLink,
    "as late as may be": SharedLink,
    "sometimes late": lambda: SharedLink(eager=0.5),
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize(
    "cold", [COLD, BLOCKS, BLOCKS[::2], BLOCKS[3:4]], ids=["six", "all", "every other", "one"]
)
def test_outputs_are_those_of_the_plain_model(
    cold: Sequence[str], ahead: int, tied: bool, link: str, tmp_path: Path
) -> None:
    plain, net = Net(tied=tied), Net(tied=tied)
    expected = outputs(plain)
    streamed, _ = on_disk(net, tmp_path, LINKS[link](), cold=cold, ahead=ahead)
    for _ in range(3):
        assert torch.equal(outputs(net), expected)
    assert_same_state(net, plain)
    assert torch.equal(outputs(net), expected)
    streamed.undo()
    assert torch.equal(outputs(net), expected)
    assert_same_state(net, plain)


@pytest.mark.parametrize(
    "runs", [[7, 0, 6, 1, 5, 2, 4, 3], [0, 1, 0, 2, 0, 3, 3, 4, 5, 6, 7], [5, 5, 1]], ids=str
)
def test_blocks_may_run_in_any_order_and_more_than_once(runs: list[int], tmp_path: Path) -> None:
    expected = outputs(Net(runs=runs))
    net = Net(runs=runs)
    on_disk(net, tmp_path, SharedLink())
    for _ in range(3):
        assert torch.equal(outputs(net), expected)
    net.runs = range(LAYERS)
    assert torch.equal(outputs(net), outputs(Net()))


def test_gradients_are_those_of_the_plain_model(tmp_path: Path) -> None:
    plain, net = Net(tied=True), Net(tied=True)
    on_disk(net, tmp_path, SharedLink(eager=0.5))
    for _ in range(2):
        for model in (plain, net):
            model(batch()).square().sum().backward()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_generating_with_a_cache_gives_the_same_tokens(
    no_grad: Callable[[], Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    net = copy.deepcopy(plain)
    layers = [f"model.layers.{at}" for at in range(6)]
    streamed, _ = on_disk(net, tmp_path, SharedLink(eager=0.5), blocks=layers, cold=layers[1:])
    prompt = torch.randint(32, (2, 5))

    def generate(model: Any) -> Any:
        with no_grad():
            return model.generate(
                prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip

    expected = generate(plain)
    for _ in range(2):
        result = generate(net)
        assert torch.equal(result.sequences, expected.sequences)
        assert all(map(torch.equal, result.logits, expected.logits))
    streamed.undo()
    assert torch.equal(generate(net).sequences, expected.sequences)


# --- Read ahead -----------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [list(range(LAYERS)), [7, 0, 6, 1, 5, 2, 4, 3]], ids=str)
def test_each_block_is_read_once_a_forward_and_before_it_is_asked_for(
    runs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(runs=runs)
    _, disk = on_disk(net, tmp_path)
    (store,) = disk.opened
    reads: list[int] = []
    ahead: list[bool] = []
    read, get = DiskStore.read, store.get

    def count_read(disk: DiskStore, slot: int, *args: Any, **options: Any) -> Any:
        reads.append(slot)
        return read(disk, slot, *args, **options)

    def watch_get(slot: int, target: Tensor) -> Any:
        ahead.append(store._buffer_of(slot) is not None)
        return get(slot, target)

    monkeypatch.setattr(DiskStore, "read", count_read)
    monkeypatch.setattr(store, "get", watch_get)
    outputs(net)
    outputs(net)  # by now the order is known
    reads.clear()
    ahead.clear()
    forwards = 10
    for _ in range(forwards):
        outputs(net)
    assert ahead == [True] * forwards * len(COLD)
    # Each comes from the disk: the ring holds none from one forward to the next but the last ones.
    assert abs(len(reads) - forwards * len(COLD)) <= BUFFERS


# --- Looking at what is on the disk ---------------------------------------------------------------


def test_a_weight_on_the_disk_is_read_like_any_other_and_not_written_to(tmp_path: Path) -> None:
    plain, net = Net(), Net()
    weight = net.blocks[0].up.weight
    on_disk(net, tmp_path)
    assert net.blocks[0].up.weight is weight
    assert weight.shape == (2 * WIDTH, WIDTH)
    assert torch.equal(weight, plain.blocks[0].up.weight)
    with torch.no_grad(), pytest.raises(BadInput, match="on the disk, which is only read"):
        weight.add_(1)
    assert torch.equal(outputs(net), outputs(plain))


def test_a_part_of_a_block_is_saved_with_its_numbers(tmp_path: Path) -> None:
    plain, net = Net(), Net()
    on_disk(net, tmp_path)
    assert_same_state(net.blocks[2].up, plain.blocks[2].up)
    assert_same_state(net.blocks[2], plain.blocks[2])


def test_a_saved_state_is_read_once_for_each_block_and_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, net = Net(), Net()
    _, disk = on_disk(net, tmp_path)
    gets: list[int] = []
    get = disk.opened[0].get
    monkeypatch.setattr(
        disk.opened[0], "get", lambda slot, target: (gets.append(slot), get(slot, target))[1]
    )
    state = net.state_dict()
    assert sorted(gets) == list(range(len(COLD)))
    for path in COLD:
        state[f"{path}.scale"].zero_()
    assert_same_state(net, plain)


def test_a_copied_model_is_whole_and_on_its_own(tmp_path: Path) -> None:
    plain, net = Net(tied=True), Net(tied=True)
    streamed, _ = on_disk(net, tmp_path)
    copied = copy.deepcopy(net)
    streamed.undo()
    assert_same_state(copied, plain)
    assert torch.equal(outputs(copied), outputs(plain))
    copied.load_state_dict(plain.state_dict())
    assert copied.blocks[3].up.weight is copied.blocks[1].up.weight


@pytest.mark.parametrize("where", ["", "blocks", "blocks.0", "blocks.0.up"])
def test_nothing_is_loaded_into_a_model_with_weights_on_the_disk(
    where: str, tmp_path: Path
) -> None:
    plain, net = Net(), Net()
    streamed, _ = on_disk(net, tmp_path)
    part = net.get_submodule(where)
    zeros = {name: torch.zeros_like(value) for name, value in part.state_dict().items()}
    with pytest.raises(BadInput, match="undo, load and apply again"):
        part.load_state_dict(zeros)
    assert_same_state(net, plain)
    streamed.undo()
    part.load_state_dict(zeros)
    assert not any(parameter.any() for parameter in part.parameters())


def test_host_memory_too_small_to_show_all_says_so_and_forwards_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, net = Net(), Net()
    streamed, _ = on_disk(net, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "host_limits", lambda *_: TINY)
        with pytest.raises(HostMemoryFull, match=r"weights of blocks\.0 from the disk"):
            net.state_dict()
        with pytest.raises(HostMemoryFull, match="back from the disk"):
            streamed.undo()
        assert torch.equal(outputs(net), outputs(plain))
    assert_same_state(net, plain)
    streamed.undo()
    assert torch.equal(outputs(net), outputs(plain))


# --- Memory ---------------------------------------------------------------------------------------


class Host(InstantLink):
    """Knows the most host memory there ever was: what was taken, and what a model had before."""

    def __init__(self) -> None:
        self.most = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    @property
    def now(self) -> int:
        return sum(size for there, size in self._alive.values() if there() is not None)

    def follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = weakref.ref(storage), storage.nbytes()
        self.most = max(self.most, self.now)

    def host_memory(self, nbytes: int) -> Tensor:
        memory = super().host_memory(nbytes)
        self.follow(memory)
        return memory


def test_host_memory_of_a_block_is_given_back_before_the_next_one_goes(tmp_path: Path) -> None:
    net, host = Net(), Host()
    for parameter in net.parameters():
        host.follow(parameter.data)
    block = sum(parameter.nbytes for parameter in net.blocks[0].parameters())
    room = 2048  # a block's memory as it lies on the disk, and in a buffer
    assert block <= room
    whole = host.now
    streamed, disk = on_disk(net, tmp_path, host)
    hot = (LAYERS - len(COLD)) * room
    assert host.most <= whole + (BUFFERS + 1) * room
    first = sum(parameter.nbytes for parameter in net.first.parameters())
    assert host.now <= first + hot + BUFFERS * room
    outputs(net)
    streamed.undo()
    del disk
    gc.collect()
    assert host.now == first


def test_no_file_is_left_open(tmp_path: Path) -> None:
    def open_files() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = open_files()
    net = Net()
    streamed, _ = on_disk(net, tmp_path)
    outputs(net)
    assert open_files() > before
    streamed.undo()
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


# --- When things go wrong -------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_refused_before_anything_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = ScratchFile.take

    def take_few(file: ScratchFile, nbytes: int) -> int:
        taken.append(nbytes)
        if len(taken) == len(COLD):
            raise DiskFull("full", 1)
        return take(file, nbytes)

    monkeypatch.setattr(ScratchFile, "take", take_few)
    plain, net = Net(), Net()
    memory = [parameter.data_ptr() for parameter in net.parameters()]
    with pytest.raises(DiskFull):
        on_disk(net, tmp_path)
    assert [parameter.data_ptr() for parameter in net.parameters()] == memory
    assert torch.equal(outputs(net), outputs(plain))
    net.load_state_dict(plain.state_dict())


def test_a_write_that_fails_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    put = NumberedDiskStore.put

    def put_few(slots: NumberedDiskStore, slot: int, source: Tensor) -> Any:
        written.append(slot)
        if len(written) == 4:
            raise DiskDamaged("broken", slot)
        return put(slots, slot, source)

    monkeypatch.setattr(NumberedDiskStore, "put", put_few)
    plain, net = Net(tied=True), Net(tied=True)
    with pytest.raises(DiskDamaged):
        on_disk(net, tmp_path)
    assert_same_state(net, plain)
    assert torch.equal(outputs(net), outputs(plain))


def test_the_folder_may_vanish(tmp_path: Path) -> None:
    plain, net = Net(), Net()
    folder = tmp_path / "scratch"
    folder.mkdir()
    streamed, _ = on_disk(net, folder)
    shutil.rmtree(folder)
    for _ in range(2):
        assert torch.equal(outputs(net), outputs(plain))
    streamed.undo()
    assert_same_state(net, plain)


@pytest.mark.parametrize("link", LINKS)
def test_a_failed_forward_leaves_everything_usable(link: str, tmp_path: Path) -> None:
    plain, net = Net(tied=True), Net(tied=True)
    streamed, _ = on_disk(net, tmp_path, LINKS[link]())

    def fail(*_: Any) -> None:
        raise ArithmeticError

    for at in range(LAYERS):
        handle = net.blocks[at].up.register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            outputs(net)
        handle.remove()
        assert torch.equal(outputs(net), outputs(plain))
    streamed.undo()
    assert_same_state(net, plain)


def flip(disk: Disk, slot: int) -> None:
    """Flip a bit of a slot in the file itself."""
    store = disk.opened[0]._disk
    file = os.open(f"/proc/self/fd/{store._file._file}", os.O_RDWR)
    offset = store._slots[slot].offset + 40
    (byte,) = os.pread(file, 1, offset)
    os.pwrite(file, bytes([byte ^ 4]), offset)
    os.fsync(file)
    os.close(file)


@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_a_read_that_fails_once_is_tried_again(
    ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, net = Net(), Net()
    on_disk(net, tmp_path, ahead=ahead)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "not now")

    with monkeypatch.context() as patch:
        patch.setattr(ScratchFile, "read", fail)
        with pytest.raises(DiskDamaged, match="not now"):
            outputs(net)
    assert torch.equal(outputs(net), outputs(plain))


@pytest.mark.parametrize("link", LINKS)
def test_a_flipped_bit_is_an_error_and_never_a_number(link: str, tmp_path: Path) -> None:
    plain, net = Net(), Net()
    streamed, disk = on_disk(net, tmp_path, LINKS[link]())
    assert torch.equal(outputs(net), outputs(plain))
    flip(disk, 3)
    seen: list[Tensor] = []
    handle = net.blocks[3].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for _ in range(3):
        with pytest.raises(DiskDamaged, match="other bytes came back") as damaged:
            outputs(net)
        assert damaged.value.slot == 3
    assert len(seen) == 3  # the blocks before it ran
    for look in (net.state_dict, streamed.undo, lambda: copy.deepcopy(net)):
        with pytest.raises(DiskDamaged):
            look()
    assert_same_state(net.blocks[2], plain.blocks[2])
    handle.remove()
    flip(disk, 3)
    for _ in range(2):
        assert torch.equal(outputs(net), outputs(plain))
    streamed.undo()
    assert_same_state(net, plain)
