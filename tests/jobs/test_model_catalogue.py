"""The model catalogue: published sizes, names as people write them, a step on fake tensors."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.errors import BadInput, MissingExtra, UnknownName
from oomph.jobs.models import find_model, known_models, sample_batch, task_kind
from oomph.jobs.models.building import build_config, build_model, model_from_config_path
from oomph.jobs.models.catalogue import parse_models

pytest.importorskip("transformers")

MODELS = known_models()

# These draw a random number per layer and compare it with layerdrop, even where that is zero.
READS_LAYERDROP = {
    "opt-1.3b",
    "bart-base",
    "bart-large",
    "whisper-small",
    "whisper-large-v3",
    "wav2vec2-base",
}
# PyTorch's shape rule for grouped_mm, unlike its kernel, knows bf16 only.
MIXTURES_OF_EXPERTS = {"olmoe-1b-7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "mixtral-8x7b"}

TINY_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}

ONE_MODEL = """
schema = 1
[models.toy]
model_class = "GPT2LMHeadModel"
config_class = "GPT2Config"
kind = "causal-lm"
parameters = 1
batch = 1
seq = 1
config = {}
"""


class AnswerNo(TorchDispatchMode):
    """Answers a fake tensor that is asked for its truth with no, and counts the questions."""

    questions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            assert args[0].dtype is torch.bool
            self.questions += 1
            return False
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def keep_six_of_each_stack(model: nn.Module) -> None:
    """Blocks repeat (at most every sixth differs, in Gemma 3), so six show what forty would."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) > 8:
                setattr(module, name, child[:6])


def tiny_seq(entry) -> int:
    return {"image-classification": 224, "audio-classification": 3200}.get(entry.kind, 16)


def write_config(folder, values) -> str:
    text = values if isinstance(values, str) else json.dumps(values)
    (folder / "config.json").write_text(text)
    return str(folder / "config.json")


# --- The catalogue itself -------------------------------------------------------------------------


def test_every_kind_of_model_is_there() -> None:
    assert len(MODELS) >= 30
    kinds = {entry.kind for entry in MODELS.values()}
    assert {"causal-lm", "masked-lm", "seq2seq-lm", "image-classification"} <= kinds
    assert {"speech-seq2seq", "audio-classification", "image-to-text"} <= kinds
    assert max(entry.parameters for entry in MODELS.values()) > 70e9


@pytest.mark.parametrize("entry", MODELS.values(), ids=MODELS)
def test_parameter_count_is_the_published_one(entry) -> None:
    with torch.device("meta"):
        model = build_model(entry)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(entry.parameters, rel=0.015)
    assert task_kind(type(model), model.config) == entry.kind


@pytest.mark.parametrize("entry", MODELS.values(), ids=MODELS)
def test_a_training_step_runs_on_fake_tensors(entry) -> None:
    dtype = torch.bfloat16 if entry.name in MIXTURES_OF_EXPERTS else torch.float32
    answers = AnswerNo() if entry.name in READS_LAYERDROP else contextlib.nullcontext()
    with FakeTensorMode():
        with default_dtype(dtype):
            model = build_model(entry)
        keep_six_of_each_stack(model)
        batch = sample_batch(entry, model.config, 1, tiny_seq(entry))
        with answers:
            model(**batch).loss.backward()
    assert model.training
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    # A few have parameters their loss does not reach: mask tokens, unused norms.
    assert len(trained) >= len(list(model.parameters())) - 2
    if entry.name in READS_LAYERDROP:
        assert answers.questions > 0


def test_the_largest_runs_at_full_depth() -> None:
    entry = find_model("llama-3.1-70b")
    with FakeTensorMode():
        model = build_model(entry)
        model(**sample_batch(entry, model.config, 1, 8)).loss.backward()
    assert sum(p.grad.numel() for p in model.parameters()) == entry.parameters


@pytest.mark.parametrize("entry", MODELS.values(), ids=MODELS)
def test_default_shapes_are_ones_the_model_takes(entry) -> None:
    batch = sample_batch(entry, build_config(entry), entry.batch, entry.seq, device="meta")
    assert {tensor.shape[0] for tensor in batch.values()} == {entry.batch}


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama_3.1_70B", "llama-3.1-70b"),
        ("openai-community/gpt2", "gpt2"),
        ("google-bert/bert-base-uncased", "bert-base"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("google/vit-base-patch16-224", "vit-base"),
        ("QWEN3 8B", "qwen3-8b"),
    ],
)
def test_common_spellings_are_understood(spelling: str, name: str) -> None:
    assert find_model(spelling).name == name


def test_every_name_finds_itself() -> None:
    assert all(find_model(name) is entry for name, entry in MODELS.items())


@pytest.mark.parametrize("name", ["lama-3.2-1b", "someone/Lama-3.2-1B"])
def test_an_unknown_name_offers_near_ones(name: str) -> None:
    with pytest.raises(UnknownName, match=r"config\.json") as caught:
        find_model(name)
    assert "llama-3.2-1b" in caught.value.near


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("schema = 1", "schema = 2", "schema"),
        ("batch = 1", "", "batch"),
        ("batch = 1", "batch = 0", "positive"),
        ("batch = 1", "batch = 1\nbatches = 1", "batches"),
        ("causal-lm", "causal-ml", "kind"),
        ("[models.toy]", "[models.toy", "not TOML"),
    ],
)
def test_a_malformed_catalogue_is_refused(old: str, new: str, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        parse_models(ONE_MODEL.replace(old, new, 1))


def test_looking_up_a_model_imports_no_torch() -> None:
    code = (
        "import sys, oomph.jobs.models as m; m.find_model('gpt2'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_transformers_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"oomph\[hf\]"):
        build_model(MODELS["gpt2"])


# --- Building -------------------------------------------------------------------------------------


def test_weights_stay_tied_without_initialising(tmp_path) -> None:
    _, config = model_from_config_path(write_config(tmp_path, TINY_LLAMA))
    for fake in (contextlib.nullcontext(), FakeTensorMode()):
        with fake:
            model = build_model(config)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_everything_a_fake_model_holds_is_fake() -> None:
    mode = FakeTensorMode()
    with mode:
        model = build_model(MODELS["convnext-base"])
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.fake_mode is mode
        assert tensor.device.type == "cpu"


def test_an_initialised_model_trains_for_real(tmp_path) -> None:
    cls, config = model_from_config_path(write_config(tmp_path, TINY_LLAMA))
    model = build_model(config, initialise=True)
    loss = model(**sample_batch(task_kind(cls, config), config, 2, 8)).loss
    loss.backward()
    assert loss.isfinite()
    assert 0 < model.lm_head.weight.std() < 0.1


def test_a_step_fills_no_cache(tmp_path) -> None:
    assert not build_config(MODELS["gpt2"]).use_cache
    _, config = model_from_config_path(write_config(tmp_path, {**TINY_LLAMA, "use_cache": True}))
    assert not config.use_cache


# --- config.json ----------------------------------------------------------------------------------


def test_a_config_is_read_from_a_file_or_its_folder_without_network(tmp_path, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("reached for the network")

    monkeypatch.setattr(socket, "socket", refuse)
    path = write_config(tmp_path, TINY_LLAMA)
    for where in (path, tmp_path, str(tmp_path)):
        cls, config = model_from_config_path(where)
        assert (cls.__name__, config.hidden_size) == ("LlamaForCausalLM", 16)


def test_code_that_came_with_a_model_is_not_run(tmp_path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
    values = {**TINY_LLAMA, "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    cls, _ = model_from_config_path(write_config(tmp_path, values))
    assert cls.__module__.startswith("transformers.models.llama")


@pytest.mark.parametrize(
    ("model_type", "cls"),
    [
        ("llama", "LlamaForCausalLM"),
        ("bert", "BertForMaskedLM"),
        ("deberta-v2", "DebertaV2ForMaskedLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("bart", "BartForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("wav2vec2", "Wav2Vec2ForCTC"),
    ],
)
def test_without_architectures_the_type_decides(tmp_path, model_type: str, cls: str) -> None:
    found, config = model_from_config_path(write_config(tmp_path, {"model_type": model_type}))
    assert found.__name__ == cls
    assert task_kind(found, config)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "list, not an object"),
        ({}, "no model_type"),
        ({"model_type": 7}, "no model_type"),
        ({"model_type": "lama"}, r"did you mean .*llama"),
        ({**TINY_LLAMA, "architectures": ["LlamaForCausalML"]}, "did you mean LlamaForCausalLM"),
        ({**TINY_LLAMA, "architectures": ["GPT2LMHeadModel"]}, "no llama model"),
        ({**TINY_LLAMA, "architectures": ["pipeline"]}, "no llama model"),
        ({**TINY_LLAMA, "hidden_size": "big"}, "not a llama config"),
        ({**TINY_LLAMA, "quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(tmp_path, values, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        model_from_config_path(write_config(tmp_path, values))


def test_a_missing_or_binary_file_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="there is no"):
        model_from_config_path(tmp_path / "nowhere.json")
    with pytest.raises(BadInput, match="there is no"):
        model_from_config_path(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not JSON"):
        model_from_config_path(tmp_path)


def test_a_config_of_impossible_sizes_is_refused(tmp_path) -> None:
    _, config = model_from_config_path(write_config(tmp_path, {**TINY_LLAMA, "vocab_size": -1}))
    with pytest.raises(BadInput, match="cannot build LlamaForCausalLM"):
        build_model(config)


# --- Batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "longest"),
    [("gpt2", 1024), ("bert-base", 512), ("roberta-large", 512), ("whisper-small", 448)],
)
def test_more_tokens_than_positions_are_refused(name: str, longest: int) -> None:
    entry, config = MODELS[name], build_config(MODELS[name])
    sample_batch(entry, config, 1, longest, device="meta")
    with pytest.raises(BadInput, match=f"takes {longest} tokens"):
        sample_batch(entry, config, 1, longest + 1, device="meta")


@pytest.mark.parametrize("name", ["llama-3.2-1b", "t5-base", "deberta-v3-base"])
def test_relative_positions_have_no_such_limit(name: str) -> None:
    sample_batch(MODELS[name], build_config(MODELS[name]), 1, 200_000, device="meta")


@pytest.mark.parametrize(
    ("name", "seq", "complaint"),
    [
        ("vit-base", 225, "224 pixels"),
        ("resnet-50", 8, "too small"),
        ("wav2vec2-base", 399, "too few"),
    ],
)
def test_images_and_audio_of_the_wrong_size_are_refused(name, seq, complaint) -> None:
    with pytest.raises(BadInput, match=complaint):
        sample_batch(MODELS[name], build_config(MODELS[name]), 1, seq)


@pytest.mark.parametrize(("batch", "seq"), [(0, 8), (-1, 8), (1, 0), (1.5, 8), (1, "8")])
def test_a_batch_is_made_of_whole_positive_numbers(batch, seq) -> None:
    with pytest.raises(BadInput, match="at least 1"):
        sample_batch("causal-lm", build_config(MODELS["gpt2"]), batch, seq)


def test_ctc_has_labels_it_can_align() -> None:
    batch = sample_batch("ctc", build_config(MODELS["wav2vec2-base"]), 2, 16_000)
    assert batch["labels"].shape == (2, 13)
    assert (batch["labels"] > 0).all()


def test_models_without_a_known_loss_ask_for_a_batch(tmp_path) -> None:
    cls, config = model_from_config_path(
        write_config(tmp_path, {**TINY_LLAMA, "architectures": ["LlamaModel"]})
    )
    with pytest.raises(BadInput, match="sample batch for LlamaModel"):
        task_kind(cls, config)
