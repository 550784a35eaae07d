"""Building a model fetches nothing: no network, no hub or its cache, no foreign code."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

from oomph.errors import BadInput
from oomph.process.rehearsal_threads import rehearsing, replaced_here

#: Libraries that fetch, and the names of their fetching functions in any module.
_LIBRARIES = ("diffusers", "huggingface_hub", "kernels", "peft", "timm", "transformers")
_FETCHERS = {
    "_hf_hub_download_to_cache_dir",
    "_hf_hub_download_to_local_dir",
    "cached_file",
    "cached_files",
    "download_cached_file",
    "download_url_to_file",
    "get_cached_module_file",
    "get_class_from_dynamic_module",
    "get_class_in_module",
    "get_kernel",
    "hf_hub_download",
    "load_and_register_attn_kernel",
    "load_model_config_from_hf",
    "load_state_dict_from_hf",
    "load_state_dict_from_url",
    "snapshot_download",
    "try_to_load_from_cache",
}


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """While active, this thread fetches nothing; attempts raise an error."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(rehearsing())

        def put(owner: Any, name: str, stand_in: Any) -> None:
            if owner is not None and hasattr(owner, name):
                stack.enter_context(replaced_here(owner, name, stand_in))

        for name in ("connect", "connect_ex"):
            put(socket.socket, name, _refuse)
        for name in ("create_connection", "getaddrinfo", "gethostbyname"):
            put(socket, name, _refuse)
        for module in _loaded():
            # Reading attributes through the module itself would load lazy ones.
            names = vars(module).keys()
            for name in _FETCHERS & names:
                put(module, name, _refuse)
            if "is_kernels_available" in names:  # otherwise kernels would be fetched
                put(module, "is_kernels_available", lambda *_, **__: False)
        for name in ("download_url_to_file", "load", "load_state_dict_from_url"):
            put(sys.modules.get("torch.hub"), name, _refuse)
        # A backbone that is not on the hub is taken to be one of timm's.
        hub = sys.modules.get("huggingface_hub.hf_api")
        put(getattr(hub, "HfApi", None), "repo_exists", lambda *_, **__: False)
        yield


def _loaded() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _LIBRARIES and isinstance(module, ModuleType)
    ]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise BadInput(
        "the config asks for something that lies elsewhere, and nothing is fetched: write what it"
        " names into the config itself"
    )
