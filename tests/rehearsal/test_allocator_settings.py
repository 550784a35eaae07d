"""What the options of PYTORCH_CUDA_ALLOC_CONF mean."""

import pytest

from oomph.errors import BadInput
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.units import MIB


def divisions(text: str) -> tuple[int, ...]:
    return AllocatorSettings.parse(f"roundup_power2_divisions:{text}").roundup_power2_divisions


def test_empty_text_means_the_defaults() -> None:
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings().as_text() == ""


def test_options_are_read_by_name_and_spaces_do_not_matter() -> None:
    text = "expandable_segments:True, max_split_size_mb : 128,garbage_collection_threshold:0.8"
    assert AllocatorSettings.parse(text) == AllocatorSettings(
        expandable_segments=True, max_split_size=128 * MIB, garbage_collection_threshold=0.8
    )


def test_options_that_cannot_change_device_memory_are_passed_over() -> None:
    text = "backend:native,pinned_use_background_threads:True,pinned_num_register_threads:8"
    assert AllocatorSettings.parse(text) == AllocatorSettings()


# The expected values were read from libc10 of torch 2.13.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", (4,) * 16),
        ("[64:8,256:4,1024:4,>:1]", (8,) * 7 + (0, 4, 0, 4) + (1,) * 5),
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[8:4]", (4,) * 4 + (0,) * 12),
        ("[>:4]", (0,) + (4,) * 15),
        ("[4:2,1:8]", (8, 2, 2) + (0,) * 13),
        ("[131072:4]", (4,) * 16),
    ],
)
def test_divisions_are_given_for_all_sizes_or_by_interval(
    text: str, expected: tuple[int, ...]
) -> None:
    assert divisions(text) == expected


@pytest.mark.parametrize(
    "settings",
    [
        AllocatorSettings(),
        AllocatorSettings(expandable_segments=True, max_split_size=20 * MIB),
        AllocatorSettings(roundup_power2_divisions=(8,) * 16, garbage_collection_threshold=0.25),
        AllocatorSettings(roundup_power2_divisions=(0, 2, 4, 1) * 4),
    ],
)
def test_text_written_is_text_read(settings: AllocatorSettings) -> None:
    assert AllocatorSettings.parse(settings.as_text()) == settings


@pytest.mark.parametrize(
    "text",
    [
        "speed:11",
        "max_split_size_mb",
        "max_split_size_mb=40",
        "max_split_size_mb:",
        "max_split_size_mb:19",
        "max_split_size_mb:40.5",
        "max_split_size_mb:-40",
        "max_split_size_mb:40,",
        "expandable_segments:true",
        "expandable_segments:True,,max_split_size_mb:40",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:1.0",
        "garbage_collection_threshold:half",
        "garbage_collection_threshold:nan",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[64:3]",
        "roundup_power2_divisions:[48:4]",
        "roundup_power2_divisions:[64]",
        "roundup_power2_divisions:[]",
        "roundup_power2_divisions:[64:4",
        "backend:cudaMallocAsync",
        "large_segment_size_mb:40",
    ],
)
def test_what_cannot_be_read_or_replayed_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        AllocatorSettings.parse(text)


def test_settings_made_by_hand_are_checked_too() -> None:
    with pytest.raises(BadInput, match="max_split_size"):
        AllocatorSettings(max_split_size=19 * MIB)
    with pytest.raises(BadInput, match="16 entries"):
        AllocatorSettings(roundup_power2_divisions=(4,))
    with pytest.raises(BadInput, match="between 0 and 1"):
        AllocatorSettings(garbage_collection_threshold=1.5)
