"""Each private name of PyTorch is there, and does what oomph uses it for."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from listed_names import NAMES
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from oomph.torch_compat import (
    autograd,
    backend_flags,
    compiler,
    cuda,
    dispatch,
    fake_tensors,
    function_modes,
    functorch,
    grad_scaler,
    modules,
    operators,
    optimizers,
    pytree,
    storages,
    tensors,
    threads,
    tracing,
)
from oomph.torch_compat.private_name import TESTED_WITH, PrivateName

aten = torch.ops.aten
ROOT = Path(__file__).parent.parent.parent
HAS_CUDA = torch.backends.cuda.is_built()


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*(shape or (2,))))


def scheduled() -> torch.optim.Optimizer:
    """An optimizer that a scheduler follows, after a step."""
    optimizer = torch.optim.SGD([weight()])
    scheduler = StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    return optimizer


#: Objects of classes whose attributes only their objects have.
OBJECTS: dict[str, Callable[[], Any]] = {
    "torch.nn.Module": lambda: nn.Linear(1, 1),
    "torch.Tensor": weight,
    "torch.UntypedStorage": lambda: weight().untyped_storage(),
    "torch.Generator": torch.Generator,
    "torch.optim.Optimizer": scheduled,
    "torch.optim.Optimizer.step": lambda: scheduled().step,
    "torch.optim.SGD": lambda: torch.optim.SGD([weight()], fused=True),
    "torch.amp.GradScaler": lambda: torch.amp.GradScaler("cpu"),
    "torch._ops.OpOverload": lambda: aten.add.Tensor,
    "torch.autograd.graph.Node": lambda: weight().exp().grad_fn,
    "torch._subclasses.fake_tensor.FakeTensorMode": fake_tensors.FakeTensorMode,
    "torch._dynamo.eval_frame.OptimizedModule": lambda: torch.compile(nn.Linear(1, 1)),
    "torch.jit.ScriptFunction": lambda: torch.jit.script(_scripted),
    "torch.optim.optimizer": lambda: importlib.import_module("torch.optim.optimizer"),
}


def _scripted(x: Tensor) -> Tensor:
    return x + 1


def has(path: str) -> bool:
    """Whether this version of PyTorch has a name."""
    owner, _, last = path.rpartition(".")
    if owner in OBJECTS:
        names = [*dir(OBJECTS[owner]())]
        return last in names or (last == "_raw_saved" and any(n.startswith(last) for n in names))
    if owner == "torch":
        return hasattr(torch, last)
    try:
        importlib.import_module(path)
    except ImportError:
        pass
    else:
        return True
    found: Any = torch
    for at, part in enumerate(path.split(".")[1:], start=2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(path.split(".")[:at]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_this_version_of_pytorch_has(name: PrivateName) -> None:
    if name.is_optional or (name.has_cuda and not HAS_CUDA):
        return
    assert has(name.path), (
        f"PyTorch {torch.__version__} has no {name.path}, which oomph uses for this:"
        f" {name.used_for}. Without it: {name.without_it}"
    )


def test_a_name_that_is_gone_is_missed() -> None:
    assert not has("torch._C._no_such_name")
    assert not has("torch._no_such_module.name")
    assert not has("torch.nn.Module._no_such_attribute")


def test_each_name_says_what_breaks_without_it() -> None:
    paths = [name.path for name in NAMES]
    assert len(paths) == len(set(paths)) > 100
    assert all(name.path.startswith("torch.") for name in NAMES)
    assert all(name.used_for and name.without_it for name in NAMES)


def test_the_versions_they_are_tested_with_are_those_of_the_project() -> None:
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    (least,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert {pinned, least} <= set(TESTED_WITH)


@pytest.mark.parametrize("op", operators.OPS)
def test_this_version_of_pytorch_has_the_op(op: str) -> None:
    assert hasattr(aten, op), f"PyTorch {torch.__version__} has no op aten::{op}"


# -- what they do ---------------------------------------------------------------------------------

_CHECKS: dict[str, Callable[[], None]] = {}


def does(*paths: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """The function checks that these names do what oomph uses them for."""

    def mark(check: Callable[[], None]) -> Callable[[], None]:
        once = functools.cache(check)
        _CHECKS.update(dict.fromkeys((f"torch.{path}" for path in paths), once))
        return check

    return mark


@does(*(f"utils._pytree.{name}" for name in (
    "keystr", "tree_flatten", "tree_flatten_with_path", "tree_is_leaf", "tree_leaves", "tree_map",
    "tree_map_with_path", "tree_unflatten",
)))  # fmt: skip
def _trees() -> None:
    tree = {"a": [1, (2, 3)], "b": None}
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == pytree.tree_leaves(tree) == [1, 2, 3, None]
    assert pytree.tree_unflatten(leaves, spec) == tree
    assert pytree.tree_map(str, {"a": [1]}) == {"a": ["1"]}
    places, _ = pytree.tree_flatten_with_path(tree)
    assert [pytree.keystr(place) for place, _ in places][:2] == ["['a'][0]", "['a'][1][0]"]
    named = pytree.tree_map_with_path(lambda place, _: pytree.keystr(place), {"a": 1})
    assert named == {"a": "['a']"}
    assert pytree.tree_is_leaf(1) and not pytree.tree_is_leaf([1])


@does("utils._pytree.GetAttrKey", "utils._pytree.register_pytree_node")
def _attributes() -> None:
    class Held:
        def __init__(self, held: dict[str, Any]) -> None:
            vars(self).update(held)

    pytree.register_attributes(Held, vars, Held)
    (place, leaf), = pytree.tree_flatten_with_path(Held({"x": 1}))[0]  # fmt: skip
    assert (pytree.keystr(place), leaf) == (".x", 1)
    assert pytree.tree_map(str, Held({"x": 1})).x == "1"


class _Seen(dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@does("utils._python_dispatch.TorchDispatchMode", "utils._python_dispatch._disable_current_modes",
      "_ops.OpOverload", "_ops.OpOverload._schema", "_ops.OpOverload._overloadpacket")  # fmt: skip
def _modes() -> None:
    with _Seen() as seen:
        torch.ones(2).add_(1)
        with dispatch.disable_current_modes():
            torch.zeros(2)
    assert seen.ops == [aten.ones.default, aten.add_.Tensor]
    op = seen.ops[1]
    assert isinstance(op, operators.OpOverload)
    assert operators.schema_of(op).is_mutable
    assert [argument.name for argument in operators.schema_of(op).arguments][:2] == [
        "self",
        "other",
    ]
    assert getattr(op, operators.OVERLOADS) is aten.add_


@does("utils._python_dispatch.is_traceable_wrapper_subclass")
def _wrappers() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    assert dispatch.is_traceable_wrapper_subclass(nested)
    assert not dispatch.is_traceable_wrapper_subclass(torch.ones(1))


@does("_C.DispatchKey", "_C.DispatchKeySet", "_C._dispatch_keyset_full_after",
      "_C._dispatch_has_kernel_for_dispatch_key", "_C._dispatch_get_all_op_names",
      "_ops.resolve_key", "_ops.OpOverload._dispatch_cache", "library._scoped_library")  # fmt: skip
def _kernels() -> None:
    keys = dispatch.DispatchKeySet(dispatch.DispatchKey.AutocastCPU)
    assert keys.has(dispatch.DispatchKey.AutocastCPU) and not keys.has(dispatch.DispatchKey.CPU)
    below = dispatch.keys_below(dispatch.DispatchKey.AutocastCPU)
    assert below.has(dispatch.DispatchKey.CPU)
    assert not below.has(dispatch.DispatchKey.AutocastCPU)
    assert "aten::linear" in dispatch.all_op_names()
    assert dispatch.has_kernel("aten::linear", "AutocastCPU")
    assert not dispatch.has_kernel("aten::relu", "AutocastCPU")
    resolved = dispatch.resolve_key(aten.linear.default, dispatch.DispatchKey.CPU)
    assert isinstance(resolved, dispatch.DispatchKey)
    with dispatch.scoped_library("aten", "IMPL") as library:
        library.impl("relu", lambda keys, x: x + 5, "AutocastCPU", with_keyset=True)
        operators.forget_kernels(aten.relu.default)
        with torch.autocast("cpu"):
            assert torch.relu(torch.zeros(1)) == 5
    operators.forget_kernels(aten.relu.default)
    with torch.autocast("cpu"):
        assert torch.relu(torch.zeros(1)) == 0


@does("_C._ExcludeDispatchKeyGuard", "_C._ForceDispatchKeyGuard",
      "_C._dispatch_tls_local_exclude_set", "_C._dispatch_tls_local_include_set",
      "_C._dispatch_tls_is_dispatch_key_excluded")  # fmt: skip
def _guards() -> None:
    key = dispatch.DispatchKey.AutocastCPU
    cast = torch.autocast("cpu", dtype=torch.bfloat16)
    with cast, dispatch.ExcludeDispatchKeyGuard(dispatch.DispatchKeySet(key)):
        assert dispatch.is_key_excluded(key)
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32
        included = dispatch.included_keys()
        with dispatch.ForceDispatchKeyGuard(included, dispatch.excluded_keys().remove(key)):
            assert not dispatch.is_key_excluded(key)
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16


@does("_C._SetExcludeDispatchKeyGuard")
def _one_guard() -> None:
    key = dispatch.DispatchKey.ADInplaceOrView
    with torch.inference_mode():
        was = dispatch.is_key_excluded(key)
        with dispatch.SetExcludeDispatchKeyGuard(key, not was):
            assert dispatch.is_key_excluded(key) is not was
        assert dispatch.is_key_excluded(key) is was


@does("_subclasses.fake_tensor.FakeTensor", "_subclasses.fake_tensor.FakeTensorMode",
      "_subclasses.FakeTensor", "_C._get_dispatch_mode", "_C._TorchDispatchModeKey",
      "_guards.detect_fake_mode")  # fmt: skip
def _fakes() -> None:
    assert fake_tensors.HOME.FakeTensor is fake_tensors.FakeTensor
    assert fake_tensors.current_fake_mode() is None is fake_tensors.detect_fake_mode()
    with fake_tensors.FakeTensorMode() as mode:
        made = torch.ones(2) @ torch.ones(2, 3)
        assert fake_tensors.current_fake_mode() is mode is fake_tensors.detect_fake_mode()
    assert type(made) is fake_tensors.FakeTensor
    assert made.shape == (3,) and made.fake_mode is mode and made.constant is None


@does("_subclasses.fake_tensor.DynamicOutputShapeException")
def _sizes_that_hang_on_data() -> None:
    with (
        fake_tensors.FakeTensorMode(shape_env=None),
        pytest.raises(fake_tensors.DynamicOutputShapeException),
    ):
        torch.ones(3).nonzero()


@does(
    "_dynamo.eval_frame._callback_from_stance",
    "_dynamo.eval_frame.set_fullgraph_compiled_frame_count",
)
def _compiled_functions_that_run_as_written() -> None:
    traced = []

    def backend(graph: Any, _: Any) -> Any:
        traced.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def double(x: Tensor) -> Tensor:
        return 2 * x

    loaded = compiler.loaded_compiler()
    assert loaded is not None
    with pytest.MonkeyPatch.context() as patches:
        for name, stand_in in compiler.UNCOMPILED.items():
            patches.setattr(loaded, name, stand_in, raising=False)
        assert torch.equal(double(torch.ones(1)), torch.full((1,), 2.0)) and not traced
    assert torch.equal(double(torch.ones(1)), torch.full((1,), 2.0)) and traced


@does("backends.__allow_nonbracketed_mutation")
def _backend_flags() -> None:
    before = torch.backends.cudnn.benchmark
    backend_flags.set_backend_flag(torch.backends.cudnn, "benchmark", before)
    assert torch.backends.cudnn.benchmark is before


@does("_subclasses.fake_tensor.FakeCopyMode")
def _fake_copies() -> None:
    with fake_tensors.FakeTensorMode() as mode, fake_tensors.FakeCopyMode(mode):
        copied = copy.deepcopy(nn.Linear(2, 2))
    assert isinstance(copied.weight, fake_tensors.FakeTensor)


@does("_subclasses.fake_tensor.in_kernel_invocation_manager", "Tensor._make_subclass",
      "_subclasses.fake_tensor.FakeTensorMode._allow_unsafe_data_ptr_access",
      "_C._set_throw_on_mutable_data_ptr",
      "_C._set_warn_deprecated_on_mutable_data_ptr")  # fmt: skip
def _quick_fakes() -> None:
    with fake_tensors.FakeTensorMode() as mode:
        fake = torch.ones(2)
        with fake_tensors.in_kernel_invocation(mode):
            made = aten.mul.Tensor(fake, fake)
    assert made.device.type == "meta" and fake.device.type == "cpu"
    assert isinstance(fake_tensors.allows_data_ptr(mode), bool)
    device = torch.device("cpu")
    like = fake_tensors.make_subclass(
        fake_tensors.FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device
    )
    assert type(like) is fake_tensors.FakeTensor
    fake_tensors.warn_on_mutable_data_ptr(like)
    fake_tensors.throw_on_mutable_data_ptr(like)
    vars(like).update({k: v for k, v in vars(fake).items() if k != "fake_mode"}, fake_mode=mode)
    assert like.device == device and like.shape == (2,)


@does("_subclasses.fake_tensor.log")
def _fake_log() -> None:
    fake_tensors.log.removeFilter(None)
    assert fake_tensors.log.name == "torch._subclasses.fake_tensor"


@does("_C.TensorBase")
def _base() -> None:
    assert issubclass(Tensor, tensors.TensorBase)
    assert tensors.TensorBase.numpy(torch.ones(1), force=True) == 1
    assert tensors.TensorBase.device.__get__(torch.ones(1)).type == "cpu"
    assert tensors.TensorBase.clone(torch.ones(1)) == 1


@does("Tensor._version", "_C._autograd._unsafe_set_version_counter")
def _versions() -> None:
    tensor = torch.ones(2)
    before = tensors.version_of(tensor)
    tensor.add_(1)
    assert tensors.version_of(tensor) == before + 1
    tensors.set_versions((tensor,), (7,))
    assert tensors.version_of(tensor) == getattr(tensor, tensors.VERSION) == 7


@does("Tensor._is_view", "Tensor._base", "Tensor._use_count")
def _views() -> None:
    whole = torch.ones(4)
    part = whole[1:]
    assert tensors.is_view(part) and not tensors.is_view(whole)
    assert getattr(part, tensors.BASE) is whole
    alone = tensors.use_count(whole)
    node = (whole.requires_grad_() * whole).grad_fn  # saves it
    assert node is not None and tensors.use_count(whole) > alone


@does("Tensor._indices", "Tensor._values")
def _sparse() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,))
    assert tensors.indices_of(sparse).tolist() == [[0, 0]]
    assert tensors.values_of(sparse).tolist() == [1.0, 2.0]


class _Shell(Tensor):
    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> None:
        raise AssertionError("nothing is computed")


@does("Tensor._make_wrapper_subclass")
def _shells() -> None:
    shell = tensors.make_wrapper_subclass(
        _Shell, (1 << 20, 1 << 20), dtype=torch.float32, device="cpu"
    )
    assert type(shell) is _Shell and shell.shape == (1 << 20, 1 << 20)


@does("_C._swap_tensor_impl")
def _swaps() -> None:
    one, other = torch.zeros(1), torch.ones(2)
    tensors.swap_contents(one, other)
    assert one.shape == (2,) and other.shape == (1,)


@does("_debug_has_internal_overlap")
def _overlaps() -> None:
    assert tensors.internal_overlap(torch.ones(2)) == 0
    assert tensors.internal_overlap(torch.ones(1).expand(3)) == 1


@does("_prims_common.suggest_memory_format")
def _layouts() -> None:
    images = torch.ones(2, 3, 4, 4)
    assert tensors.suggest_memory_format(images) is torch.contiguous_format
    last = images.to(memory_format=torch.channels_last)
    assert tensors.suggest_memory_format(last) is torch.channels_last


@does("Tensor._grad", "Tensor._cdata", "Tensor._backward_hooks",
      "Tensor._post_accumulate_grad_hooks")  # fmt: skip
def _attributes_of_tensors() -> None:
    leaf = weight()
    assert not getattr(leaf, tensors.BACKWARD_HOOKS)
    assert not getattr(leaf, tensors.AFTER_ACCUMULATION)
    leaf.register_hook(lambda _: None)
    leaf.register_post_accumulate_grad_hook(lambda _: None)
    assert len(getattr(leaf, tensors.BACKWARD_HOOKS)) == 1
    assert len(getattr(leaf, tensors.AFTER_ACCUMULATION)) == 1
    for name in (tensors.GRADIENT, tensors.CDATA, tensors.BACKWARD_HOOKS):
        assert callable(getattr(Tensor, name).__get__)


@does("UntypedStorage._cdata", "Generator._cdata", "_C._storage_Use_Count")
def _shared_memory() -> None:
    tensor, other = torch.ones(4), torch.ones(4)
    key = storages.cdata_of(tensor.untyped_storage())
    view = tensor[1:]
    assert storages.cdata_of(view.untyped_storage()) == key
    assert storages.cdata_of(other.untyped_storage()) != key
    with_view = storages.storage_use_count(key)
    del view
    assert storages.storage_use_count(key) == with_view - 1
    one, another = torch.Generator(), torch.Generator()
    assert storages.cdata_of(one) != storages.cdata_of(another)


@does("_C._construct_storage_from_data_pointer")
def _foreign_memory() -> None:
    tensor = torch.arange(4.0)
    storage = storages.storage_at(tensor.data_ptr(), torch.device("cpu"), tensor.nbytes)
    same = torch.empty(0).set_(storage, 0, (4,), (1,))
    same[0] = 5
    assert tensor[0] == 5


@does("_C._current_autograd_node", "_C._current_graph_task_id",
      "_C._autograd._get_current_graph_task_keep_graph", "autograd.Variable._execution_engine",
      "autograd.graph.Node._sequence_nr", "_C._autograd._get_sequence_nr")  # fmt: skip
def _backwards() -> None:
    leaf, seen = weight(), []

    def look(_: Tensor) -> None:
        node = autograd.current_node()
        seen.append((node, autograd.current_graph_task_id(), autograd.keeps_graph()))
        if len(seen) == 1:
            autograd.queue_callback(lambda: seen.append("over"))

    first = autograd.next_sequence_number()
    middle = leaf.exp()
    assert first <= autograd.sequence_number(middle.grad_fn) < autograd.next_sequence_number()
    middle.register_hook(look)
    assert autograd.current_node() is None and autograd.current_graph_task_id() == -1
    loss = middle.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (_, one, kept), over, (_, another, freed) = seen
    assert over == "over" and one != another and -1 not in (one, another)
    assert kept and not freed


@does("_C._autograd._top_saved_tensors_default_hooks",
      "_C._autograd._saved_tensors_hooks_is_enabled")  # fmt: skip
def _saving() -> None:
    assert autograd.top_saved_tensors_hooks(False) is None
    pack, unpack = (lambda tensor: tensor), (lambda tensor: tensor)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert tuple(autograd.top_saved_tensors_hooks(False)) == (pack, unpack)
    assert autograd.hooks_are_allowed()
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        assert not autograd.hooks_are_allowed()


@does("autograd.graph.Node._raw_saved", "autograd.graph._engine_run_backward")
def _saved() -> None:
    node = weight().exp().grad_fn
    names = [name for name in dir(node) if name.startswith(autograd.SAVED)]
    assert [getattr(node, name).data.shape for name in names] == [(2,)]
    assert callable(getattr(torch.autograd.graph, autograd.RUN_BACKWARD))


@does("_C._functorch.peek_interpreter_stack", "_C._functorch.is_functorch_wrapped_tensor",
      "_C._functorch.get_unwrapped")  # fmt: skip
def _transforms() -> None:
    def inside(x: Tensor) -> Tensor:
        assert functorch.interpreter_stack() is not None
        assert functorch.is_wrapped(x) and not functorch.is_wrapped(functorch.unwrapped(x))
        return x.sum()

    assert functorch.interpreter_stack() is None
    torch.func.grad(inside)(torch.ones(2))


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@does("_C.DisableTorchFunction", "_C.DisableTorchFunctionSubclass",
      "_C._disabled_torch_function_impl", "overrides._get_current_function_mode",
      "overrides._get_current_function_mode_stack", "overrides._pop_mode_temporarily",
      "_C._nn._parse_to", "_C._set_grad_enabled")  # fmt: skip
def _function_modes() -> None:
    assert function_modes.current_function_mode() is None
    with _Functions() as mode:
        assert function_modes.current_function_mode() is mode
        assert list(function_modes.function_mode_stack()) == [mode]
        with function_modes.DisableTorchFunction():
            torch.add(1, 2)
        with function_modes.pop_function_mode() as popped:
            assert popped is mode
            torch.sub(torch.ones(1), 1)
        with function_modes.DisableTorchFunctionSubclass():
            torch.mul(torch.ones(1), 1)
        nn.Linear(1, 1).to(torch.float64)
        torch.set_grad_enabled(True)
    assert torch.mul in mode.seen and torch.add not in mode.seen and torch.sub not in mode.seen
    assert function_modes.parse_to in mode.seen and function_modes.set_grad_enabled in mode.seen
    device, dtype, non_blocking, layout = function_modes.parse_to("cpu", torch.float64)
    assert (device, dtype, non_blocking, layout) == (
        torch.device("cpu"),
        torch.float64,
        False,
        None,
    )

    class Plain(Tensor):
        __torch_function__ = function_modes.disabled_torch_function

    assert type(Plain(torch.ones(1)) + 1) is Tensor


@does("utils._device.DeviceContext", "utils._device._device_constructors")
def _default_devices() -> None:
    assert {torch.empty, torch.ones, torch.tensor} <= function_modes.device_constructors()
    assert function_modes.default_device() is None
    torch.set_default_device("meta")
    try:
        assert function_modes.default_device() == torch.device("meta")
        (mode,) = function_modes.function_mode_stack()
        assert isinstance(mode, function_modes.DeviceContext)
    finally:
        torch.set_default_device(None)


@does("nn.modules.batchnorm._BatchNorm", "nn.modules.batchnorm._NormBase",
      "nn.modules.instancenorm._InstanceNorm", "nn.modules.conv._ConvNd")  # fmt: skip
def _layers() -> None:
    assert issubclass(nn.BatchNorm2d, modules.BatchNorm)
    assert issubclass(nn.InstanceNorm2d, modules.InstanceNorm)
    assert issubclass(modules.BatchNorm, modules.NormBase)
    assert issubclass(modules.InstanceNorm, modules.NormBase)
    assert not issubclass(nn.LayerNorm, modules.NormBase)
    assert issubclass(nn.Conv2d, modules.ConvNd) and issubclass(nn.ConvTranspose1d, modules.ConvNd)
    assert modules.BatchNorm.forward is nn.BatchNorm2d.forward


@does("nn.Module._parameters", "nn.Module._buffers", "nn.Module._modules",
      "nn.Module._non_persistent_buffers_set")  # fmt: skip
def _contents() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(2))
    (inside,) = modules.children_of(norm).values()
    assert list(modules.parameters_of(inside)) == ["weight", "bias"]
    modules.buffers_of(inside)["running_mean"] = torch.full((2,), 7.0)
    assert inside.running_mean[0] == 7
    inside.register_buffer("more", torch.ones(1), persistent=False)
    assert modules.unsaved_buffers_of(inside) == {"more"}
    assert {modules.PARAMETERS, modules.BUFFERS, modules.CHILDREN} <= vars(norm).keys()


@does(*(f"nn.Module.{name}" for name in (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks",
    "_backward_hooks", "_backward_pre_hooks")),
    "nn.modules.module._global_backward_hooks",
    "nn.modules.module._global_backward_pre_hooks")  # fmt: skip
def _hooks() -> None:
    module = nn.Linear(1, 1)
    assert all(
        not getattr(module, name) for name in modules.HOOK_REGISTERS if hasattr(module, name)
    )
    assert {"_forward_hooks", "_forward_hooks_with_kwargs"} <= modules.HOOK_REGISTERS
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    assert len(modules.forward_hooks_of(module)) == 1 == len(modules.forward_pre_hooks_of(module))
    assert all(len(getattr(module, name)) == 1 for name in modules.BACKWARD_HOOKS)
    every = nn.modules.module
    handle = every.register_module_full_backward_hook(lambda *_: None)
    try:
        assert any(getattr(every, name) for name in modules.BACKWARD_HOOKS_OF_ALL)
    finally:
        handle.remove()
    assert not any(getattr(every, name) for name in modules.BACKWARD_HOOKS_OF_ALL)


@does("nn.Module._call_impl")
def _calls() -> None:
    class Looks(nn.Module):
        def forward(self) -> list[str]:
            return [frame.function for frame in inspect.stack(0)]

    assert modules.CALL in Looks()()


@does("nn.utils.stateless._reparametrize_module")
def _other_weights() -> None:
    module = nn.Linear(1, 1)
    own = module.weight
    with modules.reparametrized(module, {"weight": torch.full((1, 1), 3.0)}):
        assert module.weight == 3
    assert module.weight is own


@does("optim.optimizer._global_optimizer_pre_hooks", "optim.optimizer._global_optimizer_post_hooks",
      "optim.Optimizer._optimizer_step_pre_hooks", "optim.Optimizer._optimizer_step_post_hooks",
      "optim.Optimizer._optimizer_load_state_dict_post_hooks")  # fmt: skip
def _hooks_of_optimizers() -> None:
    optimizer = torch.optim.SGD([weight()])
    of_all = importlib.import_module("torch.optim.optimizer")
    for register, hooks in (
        (of_all.register_optimizer_step_pre_hook, optimizers.pre_hooks_of_all),
        (of_all.register_optimizer_step_post_hook, optimizers.post_hooks_of_all),
        (optimizer.register_step_pre_hook, optimizers.pre_hooks_of(optimizer)),
        (optimizer.register_step_post_hook, optimizers.post_hooks_of(optimizer)),
        (optimizer.register_load_state_dict_post_hook, optimizers.load_hooks_of(optimizer)),
    ):
        handle = register(_noted)
        assert hooks[handle.id] is _noted
        handle.remove()
        assert handle.id not in hooks


def _noted(*_: Any) -> None:
    return None


@does("optim.optimizer._get_scalar_dtype", "optim.SGD._init_group",
      "optim.SGD._step_supports_amp_scaling", "optim.SGD._need_device_dtype_check_for_fused",
      "utils._contextlib.context_decorator")  # fmt: skip
def _steps() -> None:
    assert optimizers.scalar_dtype(is_fused=True) is torch.float32
    assert callable(getattr(torch.optim.AdamW, optimizers.INIT_GROUP))
    fused = torch.optim.AdamW([weight()], fused=True)
    assert vars(fused)[optimizers.UNSCALES] is True
    assert vars(torch.optim.SGD([weight()], fused=True))[optimizers.CHECKS_FUSED] is True
    step = torch.optim.AdamW.step
    files = []
    while hasattr(step, "__wrapped__"):
        files.append(inspect.unwrap(step, stop=lambda f: True).__code__.co_filename)
        step = step.__wrapped__
    assert files and set(files) <= optimizers.WRAPPERS


@does("optim.Optimizer._opt_called", "optim.Optimizer.step._wrapped_by_lr_sched")
def _schedulers() -> None:
    optimizer = torch.optim.SGD([weight()])
    scheduler = StepLR(optimizer, 1)
    assert hasattr(optimizer.step, optimizers.WRAPPED_BY_SCHEDULER)
    optimizers.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@does("_foreach_copy_", "_foreach_mul_", "_foreach_norm",
      "_amp_foreach_non_finite_check_and_unscale_",
      "utils._foreach_utils._group_tensors_by_device_and_dtype",
      "utils._foreach_utils._has_foreach_support",
      "utils._foreach_utils._foreach_supported_types",
      "optim.optimizer._foreach_supported_types")  # fmt: skip
def _many() -> None:
    some = [torch.zeros(2), torch.zeros(3)]
    optimizers.foreach_copy_(some, [torch.ones(2), torch.ones(3)])
    optimizers.foreach_mul_(some, 3.0)
    assert [float(norm) for norm in optimizers.foreach_norm(some, 1)] == [6.0, 9.0]
    overflow = torch.zeros(())
    optimizers.foreach_unscale_(some[:1], overflow, torch.tensor(0.5))
    assert some[0].tolist() == [1.5, 1.5] and overflow == 0
    optimizers.foreach_unscale_([torch.tensor([float("inf")])], overflow, torch.tensor(1.0))
    assert overflow == 1
    groups = optimizers.group_tensors([[torch.ones(1), torch.ones(1, dtype=torch.float64)]])
    assert {dtype for _, dtype in groups} == {torch.float32, torch.float64}
    assert isinstance(optimizers.has_foreach(some, torch.device("cpu")), bool)
    assert all(Tensor in types for types in optimizers.foreach_types)


@does("amp.GradScaler._scale", "amp.GradScaler._growth_tracker",
      "amp.GradScaler._per_optimizer_states",
      "amp.grad_scaler._refresh_per_optimizer_state")  # fmt: skip
def _scalers() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert grad_scaler.scale_of(scaler) is None
    scaler.scale(torch.ones(1))
    assert grad_scaler.scale_of(scaler) == 8 and grad_scaler.growth_of(scaler) == 0
    assert {grad_scaler.SCALE, grad_scaler.GROWTH} <= vars(scaler).keys()
    assert grad_scaler.GROWTH in scaler.state_dict()
    optimizer = torch.optim.SGD([weight()])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    scaler.unscale_(optimizer)
    assert grad_scaler.states_of(scaler)[id(optimizer)]["found_inf_per_device"]
    grad_scaler.forget_steps(scaler)
    assert not grad_scaler.states_of(scaler)
    scaler.unscale_(optimizer)  # once more


@does("nn.Module._compiled_call_impl", "_dynamo.eval_frame.OptimizedModule._orig_mod",
      "_dynamo.eval_frame.innermost_fn", "_dynamo.config")  # fmt: skip
def _compiled() -> None:
    module = nn.Linear(1, 1)
    assert compiler.compiled_call_of(module) is None
    assert getattr(torch.compile(module), compiler.ORIGINAL) is module
    module.compile()
    assert getattr(module, compiler.COMPILED_CALL) is not None
    assert getattr(torch.compile(_scripted), compiler.ORIGINAL_FUNCTION) is _scripted
    assert compiler.settings().recompile_limit > 0


@does("_dynamo.decorators.assume_constant_result")
def _constants() -> None:
    def one() -> int:
        return 1

    def other() -> int:
        return 1

    compiler.mark_constant(one)
    assert vars(one) == vars(torch.compiler.assume_constant_result(other))


@does("jit.ScriptFunction._torchdynamo_inline")
def _scripts() -> None:
    assert getattr(torch.jit.script(_scripted), compiler.SCRIPTED) is _scripted


@does("utils._triton")
def _triton() -> None:
    answers = vars(importlib.import_module(compiler.TRITON)).values()
    assert any(callable(getattr(answer, "cache_clear", None)) for answer in answers)


@does("_functorch.aot_autograd.aot_function", "_functorch.compile_utils.fx_graph_cse",
      "_functorch.partitioners", "_functorch.config", "fx._lazy_graph_module._make_graph_module",
      "fx._lazy_graph_module._use_lazy_graph_module", "_inductor.config",
      "_inductor.pattern_matcher", "_inductor.decomposition.select_decomp_table")  # fmt: skip
def _traced() -> None:
    found: dict[str, Any] = {}

    def cut(joint: Any, inputs: Any, **options: Any) -> Any:
        found.update(joint=joint, inputs=inputs, options=options)
        return tracing.partitioners.min_cut_rematerialization_partition(joint, inputs, **options)

    with tracing.compiler_settings().patch({"fallback_random": True}):
        decompositions = tracing.decompositions()
    assert aten.silu.default in decompositions
    traced = tracing.aot_function(
        lambda x: (x.sin() * x.sin()).sum(),
        fw_compiler=lambda graph, _: graph,
        partition_fn=cut,
        decompositions=decompositions,
    )
    with tracing.config.patch(cse=False), tracing.use_lazy_graph_module(True):
        traced(torch.ones(2, requires_grad=True)).backward()
        graph = tracing.fx_graph_cse(found["joint"].graph)
        made = tracing.make_graph_module(found["joint"], graph)
    targets = [node.target for node in made.graph.nodes]
    assert targets.count(aten.sin.default) == 1 and "num_fwd_outputs" in found["options"]
    assert callable(tracing.partitioners.functionalize_rng_ops)


@does("_dynamo.trace_rules.get_torch_obj_rule_map")
def _filed() -> None:
    tracing.file_functions()


@does("cuda._sleep", "_C._accelerator_setAllocatorSettings",
      "cuda.memory._set_allocator_settings")  # fmt: skip
def _allocators() -> None:
    assert callable(cuda.sleep)
    newer = has("torch._C._accelerator_setAllocatorSettings")
    assert newer or has("torch.cuda.memory._set_allocator_settings")


@does("cuda._is_compiled", "cuda._exchange_device", "cuda._maybe_exchange_device",
      "cuda.memory._record_memory_history", "cuda._lazy_init", "_C._accelerator_exchangeDevice",
      "_C._accelerator_maybeExchangeDevice", "_use_cudnn_rnn_flatten_weight")  # fmt: skip
def _answered() -> None:
    names = [cuda.IS_COMPILED, *cuda.EXCHANGE_DEVICE, cuda.LAZY_INIT]
    assert all(callable(getattr(torch.cuda, name)) for name in names)
    assert callable(getattr(torch.cuda.memory, cuda.RECORD_HISTORY))
    assert all(callable(getattr(cuda.bindings, name)) for name in cuda.EXCHANGE_ACCELERATOR)
    assert callable(getattr(torch, cuda.FLATTENS_WEIGHTS))


@does("_C._is_key_in_tls", "_C._get_obj_in_tls", "_C._stash_obj_in_tls")
def _threads() -> None:
    assert not threads.is_kept("oomph test")
    threads.keep("oomph test", "this")
    assert threads.is_kept("oomph test") and threads.kept("oomph test") == "this"
    elsewhere: list[bool] = []
    thread = threading.Thread(target=lambda: elsewhere.append(threads.is_kept("oomph test")))
    thread.start()
    thread.join()
    assert elsewhere == [False]


@does("utils.data.DataLoader._get_iterator")
def _loaders() -> None:
    from oomph.torch_compat import data_loading

    loader = DataLoader([1, 2])
    assert data_loading.get_iterator is getattr(DataLoader, data_loading.GET_ITERATOR)
    assert len(list(data_loading.get_iterator(loader))) == 2


@does("_scaled_mm")
def _low_precision() -> None:
    with fake_tensors.FakeTensorMode():
        left = torch.empty(16, 32, dtype=torch.float8_e4m3fn, device="meta")
        right = torch.empty(48, 32, dtype=torch.float8_e4m3fn, device="meta").t()
        one = torch.ones((), device="meta")
        made = operators.scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    assert made.shape == (16, 48) and made.dtype is torch.bfloat16


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_it_does_what_oomph_uses_it_for(name: PrivateName) -> None:
    if name.has_cuda:
        return  # tests/gpu
    try:
        _CHECKS[name.path]()
    except Exception as error:
        raise AssertionError(
            f"{name.path} of PyTorch {torch.__version__} does not do what oomph uses it for:"
            f" {name.used_for}. So: {name.without_it}"
        ) from error


def test_each_name_but_those_of_a_card_is_tried() -> None:
    tried = {name.path for name in NAMES if not name.has_cuda}
    assert tried == _CHECKS.keys()
