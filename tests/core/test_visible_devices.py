from __future__ import annotations

import pytest

from lightning_memopt.core.machine_facts import Device
from lightning_memopt.core.visible_devices import OUTSHONE, VARIABLE, show_visible

A, B, C = (Device(f"card {x}", uuid=f"GPU-{x}-1") for x in "abc")
M0 = Device("slice 0", uuid="MIG-x-0", mig_card="GPU-m-1", is_mig_on=True)
M1 = Device("slice 1", uuid="MIG-x-1", mig_card="GPU-m-1", is_mig_on=True)
LOST = Device("GPU 1", hidden_by="GPU is lost")


def names(devices, variable):
    found = show_visible(devices, variable)
    assert [device.torch_name for device in found if device.torch_name] == [
        f"cuda:{at}" for at in range(len([each for each in found if each.torch_name]))
    ]
    assert len(found) == len(devices)
    return [device.name for device in found if device.torch_name]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["card a", "card b", "card c"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", ["card c", "card a"]),
        (" 1 , 2", ["card b", "card c"]),
        ("0,-1,2", ["card a"]),
        ("0,9,2", ["card a"]),
        ("1,1", []),
        ("GPU-b", ["card b"]),
        ("GPU-c-1,GPU-a", ["card c", "card a"]),
        ("GPU-", []),
        ("GPU-z,GPU-a", []),
    ],
)
def test_cards_are_chosen_as_cuda_chooses_them(variable, expected):
    assert names([A, B, C], variable) == expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["slice 0"]),
        ("0", ["card a"]),
        ("1", ["slice 0"]),
        ("0,1", ["slice 0"]),
        ("MIG-x-1", ["slice 1"]),
        ("MIG-x-1,MIG-x-0", ["slice 1"]),
        ("GPU-m", ["slice 0"]),
        ("2", []),
    ],
)
def test_a_process_sees_one_mig_instance_and_then_no_card(variable, expected):
    assert names([A, M0, M1], variable) == expected


def test_why_a_device_is_hidden_is_told():
    found = show_visible([M0, M1, A], "0,GPU-a")
    assert [(each.name, each.hidden_by) for each in found] == [
        ("slice 0", None),
        ("slice 1", VARIABLE),
        ("card a", OUTSHONE),
    ]


def test_a_card_that_is_lost_is_never_visible_but_keeps_its_number():
    found = show_visible([A, LOST, B], "1,2")
    assert [(each.name, each.hidden_by) for each in found] == [
        ("card b", None),
        ("card a", VARIABLE),
        ("GPU 1", "GPU is lost"),
    ]
