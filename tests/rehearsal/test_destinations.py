"""Every way to write where a tensor or a module is to be: its bytes are counted there.

A number is the truth, worked out by hand: the bytes that the line leaves on the GPU.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from oomph import CannotRehearse, find_gpu
from oomph.rehearsal.checkpoints import hollow_checkpoints
from oomph.rehearsal.script import rehearse_script
from oomph.rehearsal.stand_ins import stand_ins
from oomph.rehearsal.storages import tensors_in
from oomph.rehearsal.world import pretend

#: The ways are tried in this many rehearsals.
GROUPS = 4
GPU = find_gpu("rtx-4090")

#: `t` are 1,000 numbers of four bytes on the host, `lin` is a layer of 4,080 bytes there, `g` and
#: `g64` are small and on the GPU already.
WAYS = r"""
 4000 x = t.to('cuda')
 4000 x = t.to(device='cuda')
 4000 x = t.to('cuda:0')
 4000 x = t.to(0)
 4000 x = t.to(torch.device('cuda'))
 4000 x = t.to(torch.device('cuda:0'))
 4000 x = t.to(torch.device(0))
 4000 x = t.to(device=0)
 2000 x = t.to(torch.device('cuda', 0), torch.float16)
 8000 x = t.to('cuda', torch.float64)
 2000 x = t.to(device='cuda', dtype=torch.float16)
 2000 x = t.to(dtype=torch.float16, device='cuda')
 4000 x = t.to('cuda', non_blocking=True)
 2000 x = t.to('cuda', torch.float16, True, True)
 4000 x = t.to('cuda', None, True)
 4000 x = t.to(device='cuda', copy=True)
 4000 x = t.to(g)
 8000 x = t.to(g64)
 8000 x = t.to(g64, True, True)
 4000 x = t.cuda()
 4000 x = t.cuda(0)
 4000 x = t.type_as(g)
 8000 x = t.type_as(g64)
    0 x = t.cuda().type_as(t)
 4000 x = t.cuda(device=0)
 4000 x = t.cuda('cuda')
 4000 x = t.cuda(torch.device('cuda'))
 4000 x = t.cuda(non_blocking=True)
 4000 x = t.cuda(0, True)
 4000 x = t.cuda(memory_format=torch.preserve_format)
 4000 x = t.type(torch.cuda.FloatTensor)
 4000 x = t.type('torch.cuda.FloatTensor')
 2000 x = t.type(torch.cuda.HalfTensor)
 8000 x = t.type(dtype=torch.cuda.DoubleTensor)
    0 x = t.cuda().type(torch.FloatTensor)
 2000 x = t.cuda().type(torch.float16)
 4000 x = t.cuda().type('torch.cuda.FloatTensor')
 4000 x = torch.cuda.FloatTensor(N)
 4000 x = torch.cuda.FloatTensor([1.0] * N)
 8000 x = torch.cuda.LongTensor(N)
 4000 x = torch.cuda.FloatTensor(10, 100)
 4000 x = torch.cuda.FloatTensor(N).fill_(0)
 2000 x = torch.cuda.HalfTensor(N)
 1000 x = torch.cuda.ByteTensor(N)
 1000 x = torch.cuda.BoolTensor(N)
 4000 x = torch.FloatTensor(N).cuda()
 4000 x = torch.Tensor(N).cuda()
 4000 x = g.new(N)
 4000 x = g.new_empty(N)
 4000 x = g.new_zeros((N,))
 4000 x = g.new_ones(N)
 4000 x = g.new_full((N,), 2.0)
 4000 x = g.new_tensor([1.0] * N)
 4000 x = t.new_zeros(N, device='cuda')
 4000 x = t.new_tensor([1.0] * N, device='cuda')
 4000 x = t.new_empty(N, device=0)
 4000 x = t.new_empty_strided((N,), (1,), device='cuda')
 4000 x = t.new_ones(N, device='cuda:0')
 4000 x = t.new_full((N,), 1.0, device='cuda:0')
 4000 x = torch.zeros_like(t, device='cuda')
 4000 x = torch.empty_like(t, device='cuda')
 4000 x = torch.ones_like(t, device=0)
 4000 x = torch.full_like(t, 2, device='cuda')
 4000 x = torch.randn_like(t, device='cuda')
 4000 x = torch.rand_like(t, device='cuda')
 4000 x = torch.randint_like(t, 5, device='cuda')
 4000 x = torch.tensor([1.0] * N, device='cuda')
 4000 x = torch.tensor([1.0] * N, device=0)
 4000 x = torch.as_tensor(t, device='cuda')
 4000 x = torch.as_tensor([1.0] * N, device='cuda')
 4000 x = torch.as_tensor(numpy.ones(N, dtype='float32'), device='cuda')
 4000 x = torch.asarray(numpy.ones(N, dtype='float32'), device='cuda')
 4000 x = torch.asarray(t, device='cuda')
 4000 x = torch.from_numpy(numpy.ones(N, dtype='float32')).to('cuda')
 4000 x = torch.from_numpy(numpy.ones(N, dtype='float32')).to(device='cuda')
 4000 x = torch.zeros(N, device='cuda')
 4000 x = torch.empty(N, device=0)
 4000 x = torch.full((N,), 1.0, device='cuda')
 8000 x = torch.arange(N, device='cuda')
 4000 x = torch.randn(N, device='cuda')
 4000 x = torch.rand(N, device='cuda')
 4000 x = torch.linspace(0, 1, N, device='cuda')
 4000 x = torch.logspace(0, 1, N, device='cuda')
 4000 x = torch.eye(50, 20, device='cuda')
 8000 x = torch.randint(0, 5, (N,), device='cuda')
 8000 x = torch.randperm(N, device='cuda')
 4000 x = torch.normal(0.0, 1.0, (N,), device='cuda')
 4000 x = torch.normal(torch.zeros(N, device='cuda'))
 3360 x = torch.tril_indices(20, 20, device='cuda')
 3360 x = torch.triu_indices(20, 20, device='cuda')
 4004 x = torch.hann_window(N, device='cuda')
 4000 x = torch.kaiser_window(N, device='cuda')
 4000 x = torch.empty_strided((N,), (1,), device='cuda')
 4000 x = torch.empty_permuted((50, 20), (1, 0), device='cuda')
    4 x = torch.scalar_tensor(2.0, device='cuda')
 8000 x = torch.complex(torch.zeros(N, device='cuda'), torch.zeros(N, device='cuda'))
 4000 x = torch.fft.fftfreq(N, device='cuda')
 4000 x = torch.fft.rfftfreq(2 * N - 1, device='cuda')
 4000 x = torch.vander(torch.ones(50, device='cuda'), 20)
 4000 x = torch.bernoulli(torch.zeros(N, device='cuda'))
 4000 x = torch.signal.windows.hann(N, device='cuda')
 4000 x = torch.cartesian_prod(torch.ones(50, device='cuda'), torch.ones(10, device='cuda'))
 4000 torch.set_default_device('cuda')\nx = torch.zeros(N)
 4000 torch.set_default_device('cuda')\nx = torch.tensor([1.0] * N)
 4080 torch.set_default_device(0)\nx = nn.Linear(50, 20)
 8000 torch.set_default_device('cuda:0')\nx = torch.arange(N)
    0 torch.set_default_device('cuda')\nx = torch.from_numpy(numpy.ones(N, dtype='float32'))
 4000 torch.set_default_device('cuda')\nx = torch.as_tensor([1.0] * N)
 4000 torch.set_default_device('cuda')\nx = torch.asarray([1.0] * N)
    0 torch.set_default_device('cuda')\nx = torch.zeros(N, device='cpu')
 4000 torch.set_default_device('cuda')\nx = torch.randn(N)
 4000 with torch.device('cuda'):\n    x = torch.zeros(N)
 4080 with torch.device('cuda', 0):\n    x = nn.Linear(50, 20)
 4080 with torch.device(0):\n    x = nn.Linear(50, 20)
 8000 with torch.device('cuda'):\n    x = torch.randperm(N)
 8000 with torch.device('cuda'):\n    x = torch.randint(0, 5, (N,))
 4080 with torch.device('meta'): l=nn.Linear(50,20)\nx=l.to_empty(device='cuda')
 4080 with torch.device('meta'): l=nn.Linear(50,20)\nx=l.to_empty(device=0)
 4080 x = nn.Linear(50, 20, device='meta').to_empty(device='cuda')
 4000 with torch.device('meta'):\n  with torch.device('cuda'): x=torch.zeros(N)
 4000 with torch.cuda.device(0):\n    x = t.cuda()
 4000 with torch.cuda.device('cuda'):\n    x = torch.zeros(N, device='cuda')
 4000 with torch.cuda.device(torch.device('cuda:0')):\n    x = torch.cuda.FloatTensor(N)
 4000 with torch.cuda.device_of(g):\n    x = t.cuda()
 4000 with torch.cuda.stream(torch.cuda.Stream()):\n    x = t.cuda(non_blocking=True)
 4080 x = lin.to('cuda')
 4080 x = lin.to(device='cuda')
 4080 x = lin.to(0)
 4080 x = lin.to(device=0)
 4080 x = lin.to(device=torch.device('cuda'))
 4080 x = lin.to(torch.device('cuda:0'))
 2040 x = lin.to('cuda', torch.float16)
 2040 x = lin.to(device='cuda', dtype=torch.float16)
 2040 x = lin.to(dtype=torch.float16, device='cuda')
 4080 x = lin.to('cuda', non_blocking=True)
 4080 x = lin.to(device='cuda', non_blocking=True)
 4080 x = lin.to(g)
 4080 x = lin.to(tensor=g)
 8160 x = lin.to(g64)
 4080 x = lin.cuda()
 4080 x = lin.cuda(0)
 4080 x = lin.cuda(device=0)
 4080 x = lin.cuda(device='cuda')
 3640 x = nn.Conv2d(10, 10, 3).to(device='cuda', memory_format=torch.channels_last)
 4080 x = lin.type(torch.cuda.FloatTensor)
 4080 x = lin.type('torch.cuda.FloatTensor')
 4080 x = lin._apply(lambda p: p.cuda())
 4080 x = lin._apply(lambda p: p.to(device='cuda'))
 2040 x = lin.to('cuda').half()
 2040 x = lin.half().to(device='cuda')
    0 x = lin.to(device='cuda').cpu()
    0 x = lin.cuda().to('cpu')
    0 x = lin.cuda().to(device='cpu')
    0 x = lin.cuda().to(device='meta')
    0 x = lin.to('cuda').to_empty(device='cpu')
 4080 x = nn.Linear(50, 20, device='cuda')
 4080 x = nn.Linear(50, 20, device=0)
 2040 x = nn.Linear(50, 20, device='cuda:0', dtype=torch.float16)
 4000 x = nn.Embedding(50, 20, device='cuda')
 6720 x = nn.MultiheadAttention(20, 2, device='cuda')
16008 x = nn.BatchNorm1d(N, device='cuda')
15320 x = nn.TransformerEncoderLayer(20, 2, 50, device='cuda')
16008 x = nn.BatchNorm1d(N).to(device='cuda')
 4080 x = nn.utils.skip_init(nn.Linear, 50, 20, device='cuda')
 4000 x = nn.Parameter(torch.zeros(N, device='cuda'))
 4000 x = nn.Parameter(torch.zeros(N)).to('cuda')
 4000 x = nn.Parameter(torch.zeros(N)).to(device='cuda')
 4000 x = nn.Parameter(t.cuda())
 4000 x = nn.Buffer(t.cuda())
 4000 t.data = t.data.to('cuda')\nx = t
 4000 t.data = t.data.cuda()\nx = t
 4000 t.data = t.to(device='cuda')\nx = t
 4080 for p in lin.parameters(): p.data=p.data.to('cuda')\nx=lin
 4080 for p in lin.parameters(): p.data=p.data.to(device='cuda')\nx=lin
 4080 for p in lin.parameters(): p.data=p.data.cuda()\nx=lin
 4000 x = torch.zeros(N, device='cuda')\nx.copy_(t)
 4000 x = torch.zeros(N, device='cuda')\nx.copy_(t, non_blocking=True)
   12 x = g.clone()
 4000 x = torch.clone(t.cuda())
    0 x = t.pin_memory()
 4000 x = t.pin_memory().cuda()
 4000 x = t.pin_memory().to(device='cuda', non_blocking=True)
    0 x = torch.zeros(N, pin_memory=True)
 4000 x = torch.zeros(N, pin_memory=True).to('cuda', non_blocking=True)
    0 x = t.pin_memory(device='cuda')
 4000 x = torch.empty(N, device='cpu', pin_memory=True).cuda()
 4000 x = t.to(torch.accelerator.current_accelerator())
 4000 x = torch.zeros(N, device=torch.accelerator.current_accelerator())
 4000 with torch.accelerator.device_index(0):\n    x = t.cuda()
    0 x = t.to(torch.get_default_device())
 4000 torch.set_default_device('cuda')\nx = t.to(torch.get_default_device())
 4000 torch.set_default_tensor_type(torch.cuda.FloatTensor)\nx = torch.zeros(N)
 4000 torch.set_default_tensor_type('torch.cuda.FloatTensor')\nx = torch.zeros(N)
 4080 torch.set_default_tensor_type('torch.cuda.FloatTensor')\nx = nn.Linear(50, 20)
 4000 x = t.cpu().to('cuda')
    0 x = t.cuda().cpu()
    0 x = t.cuda().to('cpu')
    0 x = t.cuda().to(device='cpu')
    0 x = t.cuda().to(device=torch.device('cpu'))
    0 x = t.cuda().to(t)
 4000 x = t.cuda().cpu().cuda()
 4000 x = t.cuda().float()
 2000 x = t.cuda().half()
 8000 x = t.cuda().double()
 2000 x = t.cuda().to(torch.float16)
 2000 x = t.cuda().to(dtype=torch.float16)
 2000 x = t.cuda().bfloat16()
 8000 x = torch.cat([t.cuda(), t.cuda()])
 8000 x = torch.stack([t.cuda()] * 2)
 8000 x = [y.to(device='cuda') for y in (t, t)]
 4000 x = torch.Tensor.cuda(t)
 4000 x = torch.Tensor.to(t, 'cuda')
 4000 x = torch.Tensor.to(t, device='cuda')
 4000 x = torch.ops.aten._to_copy(t, device=torch.device('cuda'))
 4000 x = torch.ops.aten.zeros([N], device=torch.device('cuda'))
 4000 x = torch.empty(0, device='cuda').resize_(N)
 4000 x = torch.empty(0, device='cuda').set_(t.cuda())
 4000 x = torch.empty(N, device='cuda').new(50, 20)
 4000 x = torch.zeros(N, out=torch.empty(N, device='cuda'))
 4000 x = torch.add(t.cuda(), 1, out=torch.empty(N, device='cuda'))
 4000 x = torch.frombuffer(bytearray(4000), dtype=torch.float32).cuda()
 4000 x = torch.from_dlpack(t).to(device='cuda')
 4000 x = torch.utils.dlpack.from_dlpack(t.cuda())
 4000 gen = torch.Generator(device='cuda')\nx = torch.randn(N, device='cuda', generator=gen)
 4000 d = 'cuda' if torch.cuda.is_available() else 'cpu'\nx = t.to(d)
 4080 x = lin.to(device='cuda', dtype=None)
 4080 x = lin.requires_grad_(False).to(device='cuda')
 4080 x = copy.deepcopy(lin.to(device='cuda'))\ndel lin
 4080 x = copy.deepcopy(lin).to(device='cuda')
 4080 l2 = nn.Linear(50, 20, device='cuda')\nl2.load_state_dict(lin.state_dict())\nx = l2
 8160 x = torch.nn.utils.parameters_to_vector(lin.to(device='cuda').parameters())
 4080 x = nn.DataParallel(lin).cuda()
 4080 x = nn.DataParallel(lin.to(device='cuda'))
 4160 x = torch.nn.utils.parametrizations.weight_norm(lin).to(device='cuda')
 8000 x = torch.distributions.Normal(torch.zeros(N, device='cuda'), torch.ones(N, device='cuda'))
 4000 x = torch.einsum('i,j->ij', torch.ones(50, device='cuda'), torch.ones(20, device='cuda'))
 4000 x = torch.tensor(numpy.ones(N), device='cuda', dtype=torch.float32)
 4000 x = torch.tensor(t, device='cuda')
 4000 x = torch.tensor([1.0] * N).to(device='cuda')
 4000 x = t[None].to(device='cuda')
 4000 x = t.to(device='cuda')[:10]
 8000 x = torch.LongTensor([1] * N).to(device='cuda')
 4000 x = t.T.to(device='cuda')
 4000 x = t.requires_grad_().to(device='cuda')
 4000 x = t.to('cuda').requires_grad_()
 4000 x = torch.zeros(N, device='cuda', requires_grad=True)
 8080 t.grad = torch.ones(N)\nlin.weight.grad = torch.ones(20, 50)\nx = lin.to(device='cuda')
   20 x = torch.zeros(N).index_select(0, torch.zeros(5, dtype=torch.long)).to(device='cuda')
 4000 x = torch.where(t.cuda() > 0, 1.0, 0.0)
 4000 x = t.cuda() + torch.ones(N).to(device='cuda')
    0 x = t.cuda().tolist()
 4000 i = torch.accelerator.current_device_index()\nx = t.to(torch.device('cuda', i))
 4000 gen = torch.Generator('cuda').manual_seed(1)\nx = torch.rand(N, generator=gen, device='cuda')
"""

#: What a program may ask of tensors, and what it is told where there is a GPU.
TRUE_THERE = (
    "t.cuda().type() == 'torch.cuda.FloatTensor'",
    "isinstance(t.cuda(), torch.cuda.FloatTensor)",
    "not isinstance(t, torch.cuda.FloatTensor)",
    "not isinstance(t.cuda().half(), torch.cuda.FloatTensor)",
    "isinstance(t, torch.FloatTensor)",
    "t.type() == 'torch.FloatTensor'",
    "t.cuda().long().type() == 'torch.cuda.LongTensor'",
    "next(lin.to(device='cuda').parameters()).is_cuda",
    "t.to(device='cuda').device == torch.device('cuda:0')",
    "torch.device(0) == torch.device('cuda:0')",
    "t.to(device='cuda') is not t",
    "g.to('cuda') is g",
    "g.to(device='cuda:0', dtype=torch.float32) is g",
    "torch.as_tensor(g, device='cuda') is g",
    "torch.tensor(t.cuda()).is_cuda",
    "torch.as_tensor(t.cuda()).is_cuda",
    "torch.as_tensor(t.cuda(), device='cpu').is_cpu",
    "lin.to(g64).weight.dtype == torch.float64",
    "torch.cuda.FloatTensor([1, 2]).dtype == torch.float32",
    "torch.cuda.FloatTensor.dtype == torch.float32",
    "torch.cuda.FloatTensor.is_cuda and not torch.cuda.FloatTensor.is_sparse",
    "torch.cuda.FloatTensor.layout == torch.strided",
)


@contextlib.contextmanager
def new_tensors_as_before() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


def names() -> dict[str, Any]:
    return {
        "torch": torch,
        "nn": nn,
        "numpy": numpy,
        "copy": copy,
        "N": 1000,
        "t": torch.ones(1000),
        "lin": nn.Linear(50, 20),
        "g": torch.ones(3, device="cuda"),
        "g64": torch.ones(3, dtype=torch.float64, device="cuda"),
    }


@pytest.mark.parametrize("group", range(GROUPS))
def test_bytes_are_counted_where_they_are(group: int) -> None:
    with pretend(GPU) as recorder, hollow_checkpoints(len), stand_ins(len):
        for way in WAYS.strip().splitlines()[group::GROUPS]:
            size, statements = way.strip().split(" ", 1)
            with new_tensors_as_before():
                known = names()
                gc.collect()
                before = recorder.allocated
                exec(statements.replace("\\n", "\n"), known)
                gc.collect()
                assert recorder.allocated - before == int(size), way
                # What the program sees of the result agrees.
                made = known["x"]
                is_module = isinstance(made, nn.Module)
                shown = [*made.parameters(), *made.buffers()] if is_module else [made]
                devices = {tensor.device.type for tensor in tensors_in(shown)} - {"meta"}
                assert devices <= ({"cuda"} if int(size) else {"cpu"}), way


def test_programs_are_told_what_is_so_with_a_gpu() -> None:
    with pretend(GPU):
        for question in TRUE_THERE:
            assert eval(question, names()), question


def test_a_data_parallel_model_has_the_tensors_it_is_given_moved_to_the_card() -> None:
    class Takes(nn.Linear):
        def forward(self, x: torch.Tensor, scale: float, **more: torch.Tensor) -> torch.Tensor:
            assert x.is_cuda and more["shift"].is_cuda
            return super().forward(x) * scale + more["shift"]

    with pretend(GPU), stand_ins(len):
        out = nn.DataParallel(Takes(3, 2).cuda())(torch.ones(4, 3), 2.0, shift=torch.ones(2))
        assert out.is_cuda and out.shape == (4, 2)


def test_an_old_type_as_default_is_that_of_tensors_made_the_old_way() -> None:
    with new_tensors_as_before(), pretend(GPU) as recorder:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        there = torch.Tensor(1000)
        assert recorder.allocated == there.nbytes == 4000
        torch.set_default_tensor_type(torch.FloatTensor)
        here = torch.Tensor(1000)
        assert recorder.allocated == there.nbytes
        assert here.is_cpu


def script(folder: Path, *lines: str) -> Path:
    path = folder / "train.py"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_what_a_gpu_refuses_is_refused(tmp_path: Path) -> None:
    mixed = (
        "nn.Linear(8, 8)(torch.ones(2, 8).cuda())",
        "torch.ones(8) + torch.ones(8).cuda()",
        "torch.ones(8).cuda().mul_(torch.ones(8))",
        "nn.Embedding(8, 8).cuda()(torch.tensor([1]))",
        "nn.Conv2d(3, 8, 3)(torch.ones(1, 3, 8, 8).cuda())",
        "nn.LayerNorm(8)(torch.ones(2, 8).cuda())",
        "nn.functional.cross_entropy(torch.ones(2, 8).cuda(), torch.tensor([1, 2]))",
        "torch.cat([torch.ones(8), torch.ones(8).cuda()])",
    )
    for statement in mixed:
        path = script(tmp_path, "import torch", "from torch import nn", statement)
        with pytest.raises(CannotRehearse, match=r"train\.py:3 raised RuntimeError: Expected all"):
            rehearse_script(path, gpu=GPU)


def test_numbers_and_indices_on_the_host_meet_tensors_of_the_gpu(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import torch",
        "x = torch.ones(8, 8).cuda()",
        "x * torch.tensor(2.0) + torch.tensor(1)",
        "x[torch.tensor([1, 2])]",
        "x[torch.tensor([1, 2])] = 0.0",
        "x.copy_(torch.ones(8, 8))",
        "torch.where(x > 0, torch.tensor(1.0), x)",
        "x.masked_fill(x > 0, torch.tensor(1.0))",
        "torch.nn.functional.ctc_loss(",
        "    torch.ones(4, 1, 3).cuda().log_softmax(2), torch.ones(1, 2, dtype=torch.long).cuda(),",
        "    torch.tensor([4]), torch.tensor([2]))",
    )
    assert rehearse_script(path, gpu=GPU).notes == [
        "the script ended by itself after 0 optimizer steps"
    ]


def test_gradients_come_back_to_where_their_parameters_are(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import torch",
        "w, x = torch.ones(1000, requires_grad=True), torch.ones(1000).cuda().requires_grad_()",
        "(w.to(device='cuda') * x).cpu().sum().backward()",
        "assert w.grad.is_cpu and x.grad.is_cuda",
    )
    rehearse_script(path, gpu=GPU)
