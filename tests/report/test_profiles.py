"""What was measured, as a table: every number with its unit and its part of the data sheet's."""

from __future__ import annotations

from oomph.hardware.profile import Profile
from oomph.report.profiles import describe_profile

H200 = Profile(
    gpu="h200",
    torch="2.11.0",
    date="2026-01-31T12:00:00+00:00",
    driver="580.1",
    product_rates={"bf16": ((2.7e8, 2e13), (1.1e12, 742.05e12))},
    attention_rates={"fp16": {"forward": 494.7e12, "backward": 400e12}},
    convolution_rates={"fp32": 33.5e12},
    memory_bandwidth=4.08e12,
    launch_seconds=4.312e-6,
    host_to_device=56.7e9,
    both_ways=100.8e9,
    disk_read=1.5e9,
    disk_method="direct I/O, 1.00 GiB in /scratch",
    host_adam=1.234e9,
    host_threads=16,
)


def rows(profile: Profile) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in describe_profile(profile).rows}


def test_each_number_has_its_unit_and_its_part_of_the_data_sheet() -> None:
    found = rows(H200)
    assert found["bf16 matrix products"][:2] == ("742 TFLOP/s", "75 %")
    assert found["bf16 matrix products"][2] == "large; 20.0 TFLOP/s at 270 MFLOP"
    assert found["fp16 attention forward"][:2] == ("495 TFLOP/s", "50 %")
    assert found["fp32 convolution"][:2] == ("33.5 TFLOP/s", "50 %")
    assert found["memory"][:2] == ("4.08 TB/s", "85 %")
    assert found["host to device"][:2] == ("56.7 GB/s", "90 %")
    assert found["both ways at once"][:2] == ("101 GB/s", "80 %")
    assert found["one launch"][:2] == ("4.31 µs", "–")
    assert found["disk read"] == ("1.50 GB/s", "–", H200.disk_method)
    assert found["AdamW on the host"] == ("1.23 Gparam/s", "–", "fused, fp32, 16 threads")


def test_what_was_not_measured_has_no_row() -> None:
    assert {"disk write", "pinning", "device to host", "smallest kernel"}.isdisjoint(rows(H200))
    assert rows(Profile(gpu="cpu", torch="2.13", date="2026-01-31")) == {}


def test_a_card_outside_the_catalogue_has_no_data_sheet() -> None:
    profile = Profile(gpu="NVIDIA Toy", torch="2.13", date="2026-01-31", memory_bandwidth=1e12)
    assert rows(profile)["memory"][:2] == ("1.00 TB/s", "–")


def test_the_title_says_of_what_when_and_with_what() -> None:
    title = describe_profile(H200).title
    assert title == "h200, measured 2026-01-31T12:00:00+00:00 with torch 2.11.0, driver 580.1"
    on_cpu = Profile(gpu="cpu", torch="2.13", date="2026-01-31")
    assert describe_profile(on_cpu).title == "cpu, measured 2026-01-31 with torch 2.13"
