"""Applied choices give the untouched job's numbers, alone and in pairs, and can all be undone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

from switched_on import on

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.swin.modeling_swin import SwinDropPath

from oomph.engine.applying import apply_choices
from oomph.engine.step import train_step
from oomph.errors import BadInput
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.techniques.chunked_loss import chunked_calls

VOCABULARY = 4096  # the smallest whose loss is worth chunking
LENGTH = 8
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def compile_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace blocks, but run their ops eagerly: no C++ compiler is needed."""
    compile_ = torch.compile

    def stand_in(forward: Any, *, dynamic: bool, options: Any) -> Any:
        return compile_(forward, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", stand_in)


# -- jobs ------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unsqueeze(1).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        return x + self.dropout(self.out(attended).tanh())


class Plain(nn.Module):
    """A model of the user's own, which returns logits; its output layer is its embedding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(2)))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


class BiasedBlock(Block):
    """Its attention has a bias that is looked up by distance, as T5's is."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.bias = nn.Embedding(LENGTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        bias = self.bias((at[:, None] - at).abs()).permute(2, 0, 1).unsqueeze(0)
        query, key, value = self.project(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        attended = F.scaled_dot_product_attention(query, key, value, bias)
        return x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)).tanh())


class Biased(Plain):
    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.blocks = nn.Sequential(*(BiasedBlock(dropout) for _ in range(2)))


class Mixing(nn.Module):
    """A block of two convolutions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wide = nn.Conv2d(16, 24, 3, padding=1)
        self.norm = nn.GroupNorm(4, 24)
        self.narrow = nn.Conv2d(24, 16, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(self.norm(self.wide(x)).relu()))


class Images(nn.Module):
    """Tokens as the pixels of small images, which convolutions mix."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.Sequential(*(Mixing(dropout) for _ in range(2)))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        pixels = self.embed(ids).transpose(1, 2).unflatten(2, (2, -1)).contiguous()
        return self.head(self.blocks(pixels).flatten(2).transpose(1, 2))


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def causal_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """As in transformers, but without its cast to fp32, behind which fp64 would hide errors."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)


def gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        use_cache=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    )
    return GPT2LMHeadModel(config)


def llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    build: Callable[[float], nn.Module]
    blocks: tuple[str, str]
    head: str
    optimizer: Callable[..., torch.optim.Optimizer]
    loss: Any = None

    def model(self, dropout: float, dtype: torch.dtype) -> nn.Module:
        return copy.deepcopy(_built(self.build, dropout, dtype))


@functools.cache
def _built(build: Callable[[float], nn.Module], dropout: float, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = build(dropout).to(dtype).train()
    if hasattr(model, "loss_function"):
        model.loss_function = causal_loss
    return model


PLAIN = Case(
    build=Plain,
    blocks=("blocks.0", "blocks.1"),
    head="head",
    optimizer=functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    loss=plain_loss,
)
CASES = {
    "plain": PLAIN,
    "images": dataclasses.replace(PLAIN, build=Images),
    "biased": dataclasses.replace(PLAIN, build=Biased),
    "gpt2": Case(
        build=gpt2,
        blocks=("transformer.h.0", "transformer.h.1"),
        head="lm_head",
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
    ),
    "llama": Case(
        build=llama,
        blocks=("model.layers.0", "model.layers.1"),
        head="lm_head",
        optimizer=functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    ),
}


def ragged(samples: int) -> Batch:
    """The first sample has no valid label, the others have each another number of them."""
    ids = torch.randint(VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0] = -100
    for at in range(1, samples):
        labels[at, LENGTH - at :] = -100
    return {"input_ids": ids, "labels": labels}


BATCHES = [ragged(5), ragged(5), ragged(3)]  # the last one is short

#: What each technique chooses, for two blocks and a head.
TECHNIQUES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "recompute": lambda case: {"blocks": dict.fromkeys(case.blocks, "recompute")},
    "recompute in part": lambda case: {
        "blocks": dict.fromkeys(case.blocks, "recompute saving attention#0 product#1")
    },
    "micro-batches of 1": lambda case: {"micro_batch": 1},
    "micro-batches of 2": lambda case: {"micro_batch": 2},
    "micro-batches of 3": lambda case: {"micro_batch": 3},
    "chunked loss": lambda case: {"head": case.head, "loss_chunk": 7},
    "fused optimizer": lambda case: {"techniques": on("fused_optimizer")},
    "optimizer in backward": lambda case: {"optimizer_in_backward": True},
    "compile": lambda case: {"compiled": True},
    "biases in rows": lambda case: {"techniques": on("attention_rows")},
}
#: For models that convolve images.
TECHNIQUES_OF_IMAGES: dict[str, Callable[[Case], dict[str, Any]]] = {
    **TECHNIQUES,
    "channels last": lambda case: {"techniques": on("channels_last")},
}
#: Sums keep their order in all of these.
BITWISE = {"recompute", "recompute in part", "optimizer in backward", "compile"}
IN_ROWS = [(), *((name,) for name in TECHNIQUES if name != "biases in rows")]
DRAWS_THE_SAME = [name for name in TECHNIQUES if not name.startswith("micro-batches")]


def choose(case: Case, names: tuple[str, ...], **others: Any) -> Choices | None:
    """All of them together; None for two choices of one thing."""
    chosen: dict[str, Any] = dict(others)
    for name in names:
        more = TECHNIQUES_OF_IMAGES[name](case)
        if "techniques" in more:
            more["techniques"] |= chosen.pop("techniques", {})
        if more.keys() & chosen.keys():
            return None
        chosen |= more
    return Choices(**{"blocks": dict.fromkeys(case.blocks, "keep"), **chosen})


def combinations(case: str, techniques: list[str], most: int = 2) -> list[Any]:
    return [
        pytest.param(case, names, id=f"{case}: {' and '.join(names)}")
        for size in range(1, most + 1)
        for names in itertools.combinations(techniques, size)
        if choose(CASES[case], names) is not None
    ]


def train(
    case: Case, choices: Choices, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and weights of three steps."""
    model = case.model(dropout, dtype)
    optimizer = case.optimizer(model.parameters())
    job = Job(model, case.loss, optimizer, BATCHES[0])
    stage, undo = apply_choices(choices, job, model, optimizer, device_type="cpu")
    torch.manual_seed(2)
    losses = [train_step(stage, batch) for batch in BATCHES]
    if choices.head:
        head = model.get_submodule(choices.head)
        assert chunked_calls(head) >= len(BATCHES)  # type: ignore[arg-type]
    undo()
    return losses, model.state_dict()  # type: ignore[return-value]


@functools.cache
def untouched(name: str, dropout: float = 0.0) -> tuple[list[Tensor], dict[str, Tensor]]:
    return train(CASES[name], Choices(), dropout=dropout)


def assert_same(one: Any, other: Any, names: tuple[str, ...]) -> None:
    bitwise = set(names) <= BITWISE
    torch.testing.assert_close(
        one, other, rtol=0 if bitwise else 1e-10, atol=0 if bitwise else 1e-12
    )


# -- the same numbers ------------------------------------------------------------------------------

EAGER = [name for name in TECHNIQUES if name != "compile"]


@pytest.mark.parametrize(
    ("name", "techniques"),
    [
        *combinations("plain", list(TECHNIQUES)),
        ("images", ("channels last",)),
        *(("images", ("channels last", name)) for name in TECHNIQUES),
        *combinations("gpt2", EAGER),
        *combinations("llama", EAGER, most=1),
        *(("biased", ("biases in rows", *names)) for names in IN_ROWS),
        ("gpt2", ("compile",)),
        ("llama", ("compile", "recompute in part")),
    ],
)
def test_exact_techniques_give_the_untouched_jobs_numbers(
    name: str, techniques: tuple[str, ...]
) -> None:
    choices = choose(CASES[name], techniques)
    assert choices is not None
    assert_same(train(CASES[name], choices), untouched(name), techniques)


@pytest.mark.parametrize(
    ("name", "techniques"),
    [*combinations("plain", DRAWS_THE_SAME), *combinations("gpt2", DRAWS_THE_SAME, most=1)],
)
def test_dropout_draws_the_same_numbers(name: str, techniques: tuple[str, ...]) -> None:
    choices = choose(CASES[name], techniques)
    assert choices is not None
    trained = train(CASES[name], choices, dropout=0.5)
    assert_same(trained, untouched(name, 0.5), techniques)
    assert trained[0] != untouched(name)[0]


@pytest.mark.parametrize(
    "techniques", [(), *((name,) for name in EAGER if name != "fused optimizer")]
)
def test_dropping_autocasts_copies_changes_no_bit(techniques: tuple[str, ...]) -> None:
    kept, dropped = (
        choose(
            CASES["gpt2"],
            techniques,
            precision="bf16-mixed",
            techniques=on(cast_cache={"dropped": not cache}),
        )
        for cache in (True, False)
    )
    assert kept is not None
    assert dropped is not None
    expected = train(CASES["gpt2"], kept, dtype=torch.float32)
    torch.testing.assert_close(
        train(CASES["gpt2"], dropped, dtype=torch.float32), expected, rtol=0, atol=0
    )


# -- undo ------------------------------------------------------------------------------------------


def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything about a model and its optimizer that applying may touch, but for values."""
    return {
        "attributes": {path: set(vars(module)) for path, module in model.named_modules()},
        "forwards": {path: vars(m).get("forward") for path, m in model.named_modules()},
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "parameters": [
            (path, id(p), p.dtype, p.requires_grad, len(p._post_accumulate_grad_hooks or ()))
            for path, p in model.named_parameters()
        ],
        "groups": [
            {**group, "params": [id(p) for p in group["params"]]}
            for group in optimizer.param_groups
        ],
        "defaults": dict(optimizer.defaults),
        "optimizer": set(vars(optimizer)) - {"_opt_called"},  # for schedulers: it has stepped
        "step": optimizer.step.__func__,  # type: ignore[attr-defined]
        "step hooks": (
            len(optimizer._optimizer_step_pre_hooks),
            len(optimizer._optimizer_step_post_hooks),
            len(optimizer._optimizer_load_state_dict_post_hooks),
        ),
        "precision": torch.get_float32_matmul_precision(),
    }


EVERYTHING = Choices(
    precision="bf16-mixed",
    micro_batch=2,
    blocks={"blocks.0": "recompute", "blocks.1": "recompute saving product#0"},
    compiled=True,
    head="head",
    loss_chunk=5,
    optimizer_in_backward=True,
    weights="bf16 with fp32 masters",
    techniques=on("fused_optimizer", cast_cache={"dropped": True}),
)
UNDOABLE = {
    **{name: choose(CASES["plain"], (name,)) for name in TECHNIQUES_OF_IMAGES},
    "master weights": Choices(precision="bf16-mixed", weights="bf16 with fp32 masters"),
    "8-bit state": Choices(techniques=on("low_bit_state")),
    "tf32": Choices(precision="tf32"),
    "everything": EVERYTHING,
    "everything lossy": dataclasses.replace(
        EVERYTHING,
        optimizer_in_backward=False,
        techniques=on("low_bit_state", cast_cache={"dropped": True}),
    ),
}


def plain_job(**options: Any) -> tuple[Job, nn.Module, torch.optim.Optimizer]:
    model = CASES["plain"].model(0.0, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Job(model, plain_loss, optimizer, BATCHES[0], **options), model, optimizer


@pytest.mark.parametrize("choices", UNDOABLE.values(), ids=UNDOABLE)
def test_undo_leaves_model_and_optimizer_as_they_were(choices: Choices) -> None:
    job, model, optimizer = plain_job()
    plain_loss(model, BATCHES[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = look(model, optimizer)
    stage, undo = apply_choices(choices, job, model, optimizer, device_type="cpu")
    train_step(stage, BATCHES[0])
    undo()
    undo()
    assert look(model, optimizer) == before
    state = optimizer.state_dict()
    fresh = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-2)
    fresh.load_state_dict(state)
    averages = {name: t.dtype for name, t in state["state"][0].items()}
    assert averages == dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), torch.float32)
    assert {float(one["step"]) for one in state["state"].values()} == {2.0}


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_compiled_blocks_have_the_rate_of_their_drop_path_in_a_tensor_until_undone(
    how: str,
) -> None:
    def start(choices: Choices) -> tuple[nn.Module, list[Any], Callable[[], None]]:
        job, model, optimizer = plain_job()
        for rate, block in enumerate(model.blocks, start=1):  # type: ignore[arg-type, union-attr]
            block.dropout = SwinDropPath(rate / 4)
        stage, undo = apply_choices(choices, job, model, optimizer, device_type="cpu")
        torch.manual_seed(2)
        return model, [train_step(stage, batch) for batch in BATCHES], undo

    _, expected, _ = start(Choices())
    blocks = {"blocks.0": how, "blocks.1": how}
    model, losses, undo = start(Choices(compiled=True, blocks=blocks))
    torch.testing.assert_close(losses, expected)
    assert [keep.item() for keep in model.buffers()] == [0.75, 0.5]
    undo()
    assert not list(model.buffers())


def test_undone_and_applied_again_it_trains_on_as_if_nothing_had_been() -> None:
    choices = choose(CASES["plain"], ("recompute", "optimizer in backward"))
    assert choices is not None
    job, model, optimizer = plain_job()
    other_job, other, other_optimizer = plain_job()
    stage, _ = apply_choices(Choices(), other_job, other, other_optimizer, device_type="cpu")
    expected = [train_step(stage, batch) for batch in BATCHES]
    losses = []
    for batch in BATCHES:
        stage, undo = apply_choices(choices, job, model, optimizer, device_type="cpu")
        losses.append(train_step(stage, batch))
        undo()
    assert losses == expected


# -- what is refused leaves no trace ---------------------------------------------------------------


class OwnStep(torch.optim.AdamW):
    """An optimizer of which nobody can tell what its step looks at."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def assert_refused(
    choices: Choices,
    words: str,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> None:
    model = CASES["plain"].model(0.0, torch.float32)
    optimizer = make(model.parameters(), lr=1e-2)
    job = Job(model, plain_loss, optimizer, BATCHES[0], **options)
    before = look(model, optimizer)
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(BadInput, match=words):
        apply_choices(choices, job, model, optimizer, device_type="cpu")
    assert look(model, optimizer) == before
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)


def test_what_fails_halfway_leaves_everything_as_it_was() -> None:
    change = functools.partial(dataclasses.replace, EVERYTHING)
    blocks = {**EVERYTHING.blocks, "blocks.7": "recompute"}
    assert_refused(change(blocks=blocks), "names blocks.7, which Plain has not")
    assert_refused(change(compiled_others=("norm",)), "names norm, which Plain has not")
    assert_refused(change(head="embed"), "head embed is no linear layer")
    assert_refused(change(head="missing"), "names missing, which Plain has not")
    assert_refused(EVERYTHING, "clipping by the norm of all gradients", clip_norm=1.0)
    assert_refused(change(precision="fp16-mixed"), "GradScaler")
    assert_refused(EVERYTHING, "keeping master weights needs an optimizer", OwnStep)
    own = change(weights="own", techniques={})
    assert_refused(own, "stepping inside backward needs an optimizer", OwnStep)
    assert_refused(change(weights="own"), "no fused step", torch.optim.NAdam)
    assert_refused(change(techniques=on("low_bit_state"), weights="own"), "8-bit", torch.optim.SGD)


def test_a_plan_is_applied_once() -> None:
    job, model, optimizer = plain_job()
    _, undo = apply_choices(Choices(), job, model, optimizer, device_type="cpu")
    with pytest.raises(BadInput, match="applied to this model already; undo it first"):
        apply_choices(Choices(), job, model, optimizer, device_type="cpu")
    around = nn.Sequential(model)
    with pytest.raises(BadInput, match="applied to this model already; undo it first"):
        apply_choices(Choices(), job, around, optimizer, device_type="cpu")
    undo()
    apply_choices(Choices(), job, around, optimizer, device_type="cpu")


def test_a_batch_norm_is_not_split_unless_the_job_splits_it_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job(model, nn.MSELoss(), optimizer, (torch.ones(6, 4), torch.ones(6, 4)))
    with pytest.raises(BadInput, match=r"must not be split: 1 \(BatchNorm1d\) averages over"):
        apply_choices(Choices(micro_batch=2), job, model, optimizer, device_type="cpu")
    own = dataclasses.replace(job, micro_batch=2)
    apply_choices(Choices(micro_batch=2), own, model, optimizer, device_type="cpu")


def test_defaults_leave_a_job_as_it_is() -> None:
    job, model, optimizer = plain_job()
    before = look(model, optimizer)
    apply_choices(Choices(), job, model, optimizer, device_type="cpu")
    after = look(model, optimizer)
    added = after["attributes"].pop("") - before["attributes"].pop("")
    assert added == {"_oomph_applied", "__reduce_ex__"}  # the mark, and what refuses pickles
    assert after == before
