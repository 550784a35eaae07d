"""Files as oomph, PyTorch and others write them, small: what is damaged afterwards."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import oomph
from oomph.hardware.profile import Profile
from oomph.jobs.description import describe_job
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.ledgers import Ledgers
from oomph.plans.plan import Change, Plan, Predicted
from oomph.plans.techniques import read_settings
from oomph.process.random_state import random_state_kept
from oomph.report.exports.plain import timeline_json
from oomph.report.history import history_of
from oomph.units import GIB, MIB


class Net(nn.Module):
    """A model with a shared weight, a buffer and a layer with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.image = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the tokens."""
        scores: Tensor = self.head(self.norm(self.embed(tokens))) + self.image.bias.sum()
        return scores


BATCH = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4])


@functools.cache
def plan() -> Plan:
    """A plan with a bit of everything."""
    return Plan(
        made_for=dataclasses.replace(
            describe_job("net", Net(), BATCH, torch.optim.Adam([torch.ones(1)]), None), gpu="h200"
        ),
        budget=GIB,
        choices=Choices(
            precision="bf16-mixed",
            micro_batch=2,
            blocks={"blocks.0": "keep", "blocks.1": "recompute saving product#1, offloaded #0 #3"},
            compiled_others=("norm",),
            head="head",
            loss_chunk=512,
            optimizer_on="host",
            host_share=0.25,
            gradient_room=1000,
            weights_away=("blocks.0",),
            techniques={
                "cuda_allocator": read_settings(
                    "cuda_allocator", {"conf": "expandable_segments:True"}
                )
            },
        ),
        predicted=Predicted(
            peak=Ledgers(allocated=900 * MIB, reserved=950 * MIB, device=980 * MIB),
            high=1000 * MIB,
            categories_at_peak={"parameter": 500 * MIB, "activation": 400 * MIB},
            seconds=0.5,
            unlimited_seconds=0.4,
            samples=4,
            tokens=32,
            host=MIB,
        ),
        fidelity=Fidelity.ROUNDING,
        gap=0.01,
        changes=(
            Change(
                technique="recompute",
                before="none",
                after="1 of 2 blocks",
                saves=1000,
                costs=0.1,
                fidelity=Fidelity.EXACT,
            ),
            Change(
                technique="optimizer",
                before="on the GPU",
                after="on the host",
                saves=-7,
                costs=-0.1,
                fidelity=Fidelity.ROUNDING,
            ),
        ),
        notes=("a note",),
        planning_seconds=1.5,
    )


@functools.cache
def estimate() -> oomph.Estimate:
    """A small job on a card."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    job = oomph.Job(model, nn.MSELoss(), "adamw", (torch.ones(4, 8), torch.ones(4, 8)), name="net")
    return oomph.estimate(job, gpu="t4", phases=("build", "step"))


@functools.cache
def timeline() -> bytes:
    """Its memory over time."""
    return timeline_json(history_of(estimate()))


WATCH: dict[str, Any] = {
    "kind": "oomph watch", "schema_version": 1, "verdict": "does_not_fit",
    "headline": "out of memory in forward (train.py:9): it does not fit", "device": "cuda:0",
    "gpu": "h200", "torch": "2.13.0", "program": "train.py --lr 1", "cause": "does_not_fit",
    "causes": [{"kind": kind, "size": 8, "sentence": f"{kind}!"} for kind in ("leak", "b", "c")],
    "remedies": [
        {"do": "a", "saves": 100, "enough": True, "why": "w"},
        {"do": "b", "saves": None, "enough": None, "why": "v"},
    ],
    "asked": 8 * MIB,
    "memory": {"allocated": 60 * MIB, "reserved": 64 * MIB, "limit": 64 * MIB, "total": 64 * MIB,
               "free": 0, "hidden": 0, "others": 0},
    "at": {"phase": "forward", "place": "train.py:9", "module": "Net",
           "first_optimizer_step": False, "steps": 7},
    "inputs": {"now": [4, 8], "largest_before": [4, 8]},
    "categories": {"activation": 36 * MIB, "parameter": 4}, "modules": {"Linear": 36 * MIB},
    "held": [{"name": "losses", "kind": "list", "place": "train.py:12", "count": 8,
              "what": "float32 one number", "size": 32 * MIB}],
    "history": [[step, step * MIB, step * MIB + 1] for step in range(20)], "eval_history": [],
}  # fmt: skip

NO_PLAN: dict[str, Any] = {
    "schema_version": 1, "job": "net", "gpu": "t4", "verdict": "does_not_fit", "budget": 10,
    "smallest_budget": 3 * MIB, "reason": "no plan fits", "seconds": 1.0, "host_missing": 0,
}  # fmt: skip


@functools.cache
def reports() -> tuple[dict[str, Any], ...]:
    """JSON of every command whose answer can be explained."""
    planned = json.loads(json.dumps(plan().as_dict()))
    training = {
        "schema_version": 1, "verdict": "fits", "job": "net", "gpu": "h200", "device": "cuda",
        "steps": 3, "losses": [1.0, None], "step_seconds": [0.5], "plan_changes": [],
        "predicted": {"peak": planned["predicted"]["peak"], "seconds": 0.5},
        "measured": {"peak": planned["predicted"]["peak"], "seconds": 0.6}, "plan": planned,
    }  # fmt: skip
    estimated = json.loads(json.dumps(estimate().as_dict()))
    return WATCH, NO_PLAN, planned, training, estimated


def _frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


_STACK = [_frame("??", 0, "c10::alloc"), _frame("/me/train.py", 41, "step")]
SNAPSHOT: dict[str, Any] = {
    "segments": [
        {"device": 0, "address": 1, "total_size": 9 * MIB, "blocks": [
            {"size": 4 * MIB, "state": "active_allocated", "frames": _STACK, "address": 1},
            {"size": 5 * MIB, "state": "inactive", "frames": [], "address": 2,
             "history": [{"frames": _STACK, "real_size": 3}]},
        ]},
    ],
    "device_traces": [[
        {"action": "alloc", "addr": 1, "size": 4 * MIB, "stream": 0, "frames": _STACK},
        {"action": "alloc", "addr": 2, "size": 5 * MIB, "stream": 0, "frames": _STACK},
        {"action": "free_requested", "addr": 2, "size": 5 * MIB, "stream": 0, "frames": _STACK},
        {"action": "free_completed", "addr": 2, "size": 5 * MIB, "stream": 0, "frames": _STACK},
        {"action": "oom", "size": 50 * MIB, "device_free": 7, "frames": _STACK},
    ], []],
    "cuda_allocator": {"expandable_segments": False, "ratio": 0.5},
}  # fmt: skip


def _memory(time: float, allocated: int, device: int = 1) -> dict[str, Any]:
    return {
        "ph": "i", "name": "[memory]", "tid": 7, "ts": time,
        "args": {"Device Type": device, "Device Id": 0, "Bytes": 8 * MIB,
                 "Total Allocated": allocated, "Total Reserved": 2 * allocated},
    }  # fmt: skip


TRACE: dict[str, Any] = {
    "schemaVersion": 1,
    "traceEvents": [
        {"ph": "X", "name": "aten::addmm", "tid": 7, "ts": 190, "dur": 20},
        _memory(100, 10 * MIB),
        _memory(200, 90 * MIB),
        _memory(150.5, 900 * MIB, device=0),
        {"ph": "X", "name": "Block", "tid": "7", "ts": "120", "dur": 150},
    ],
    "traceName": "trace.json",
}

PROFILE = Profile(
    gpu="h200", torch="2.13", date="2026-01-01T00:00:00Z", driver="570",
    product_rates={"bf16": ((1e9, 1e14), (1e12, 7e14)), "fp32": ((1e12, 5e13),)},
    attention_rates={"bf16": {"forward": 4e14, "backward": 3e14}},
    convolution_rates={"bf16": 3e14}, memory_bandwidth=4e12, launch_seconds=4e-6,
    host_to_device=5e10, disk_method="direct I/O", host_adam=1e9, host_threads=8,
)  # fmt: skip

PRICES = 'schema = 1\n[dollars_per_hour]\nh200 = 3.5\n"RTX 4090" = 0.4\n'
GPUS = """schema = 1
[gpus.toy]
vendor = "nvidia"
architecture = "toy"
compute_capability = [8, 9]
sm_count = 10
memory = "8 GiB"
memory_bandwidth = 1e11
host_link = 1e10
rates = { fp32 = 1e12, bf16 = 2e12 }
aliases = ["plaything"]
"""
MODELS = """schema = 1
[models.toy]
model_class = "GPT2LMHeadModel"
config_class = "GPT2Config"
config = { n_layer = 2, n_embd = 8 }
kind = "causal-lm"
parameters = 1000
batch = 1
seq = 16
aliases = ["plaything"]
"""

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32,
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": True, "bos_token_id": 1,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


class Counted:
    """Something attached to a run."""

    def __init__(self, count: int) -> None:
        self.state: Any = count

    def state_dict(self) -> dict[str, Any]:
        """Values of every kind that a checkpoint can have."""
        return {
            "count": self.state, "by number": {5: (1, 2)}, "rate": float("inf"), "bytes": b"abc",
            "words": ["a", None],
            "tensor": torch.arange(3), "array": torch.arange(2).numpy(),
        }  # fmt: skip

    def load_state_dict(self, state: Any, /) -> None:
        """Take it."""
        self.state = state["count"]


def new_run(count: int = 3) -> tuple[oomph.Run, Counted]:
    """A run with all that a checkpoint may be given to."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    run = oomph.fit(model, optimizer, nn.CrossEntropyLoss(), BATCH, budget="1GiB")
    counted = Counted(count)
    run.attach("counted", counted)
    run.step(BATCH)
    return run, counted


@functools.cache
def checkpoint() -> dict[str, bytes]:
    """The files of a checkpoint, by name."""
    with random_state_kept(torch.device("cpu")):
        np.random.seed(0)
        random.seed(0)
        run, _ = new_run(count=7)
    with tempfile.TemporaryDirectory(prefix="oomph-") as folder:
        path = run.save(Path(folder), extra={"note": "n", "nested": [[1.5, {"a": (None,)}]]})
        run.undo()
        return {one.name: one.read_bytes() for one in path.iterdir()}


@functools.cache
def weights() -> dict[str, bytes]:
    """A model's weights in two files and an index, by name."""
    from safetensors.torch import save

    state = {name: one.contiguous() for name, one in Net().state_dict().items()}
    del state["head.weight"]
    names = sorted(state)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    index = {
        "metadata": {"total_size": 100},
        "weight_map": {name: file for file, inside in parts.items() for name in inside},
    }
    found = {file: save({name: state[name] for name in inside}) for file, inside in parts.items()}
    return {**found, "model.safetensors.index.json": json.dumps(index).encode()}
