"""NVIDIA GPUs through the real binding, over a libnvidia-ml that is compiled here and does as it is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvguard.domain import GIB

SOURCE = Path(__file__).parent / "fake_nvml.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = pytest.mark.skipif(
    COMPILER is None, reason="a fake libnvidia-ml needs a C compiler: install gcc"
)

SYSTEM = "driver 550.54.14\ncuda 12040\n"
GPU_A = f"gpu GPU-aaaa1111 NVIDIA_H100 {80 * GIB} {70 * GIB}\n"
GPU_B = f"gpu GPU-bbbb2222 NVIDIA_H100 {80 * GIB} {20 * GIB}\n"
SMALL = f"gpu GPU-cccc3333 NVIDIA_T4 {16 * GIB} {15 * GIB}\n"
MIG = (
    "gpu GPU-dddd4444 NVIDIA_A100 {0} {0}\nmig MIG-eeee-1 NVIDIA_A100_MIG_1g.10gb {1} {2}\n"
    "mig MIG-eeee-2 NVIDIA_A100_MIG_3g.40gb {3} {3}\nslots 7\n"
).format(80 * GIB, 10 * GIB, 9 * GIB, 40 * GIB)

PRELUDE = """
import json, os, pathlib, sys
from dataclasses import asdict
from kvguard.ports import CardLost
from kvguard_adapters.cards import binding_card, detect_cards
from kvguard_adapters.cards.nvml import NoGpu, nvml_card

def script(text):
    pathlib.Path(os.environ["FAKE_NVML_SCRIPT"]).write_text(text)

def card():
    return nvml_card(os.environ)

def show(value):
    print(json.dumps(value))
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile the fake with these flags; returns the directory that holds it."""
    built: dict[tuple[str, ...], Path] = {}

    def build(*flags: str) -> Path:
        if flags not in built:
            built[flags] = tmp_path_factory.mktemp("nvml")
            target = built[flags] / "libnvidia-ml.so.1"
            command = [COMPILER or "cc", "-Wall", "-Werror", "-shared", "-fPIC", *flags, "-o", str(target)]
            subprocess.run([*command, str(SOURCE)], check=True)
        return built[flags]

    return build


class Machine:
    """Runs code in a process that finds the fake library, and returns what it showed."""

    def __init__(self, build: Callable[..., Path], tmp_path: Path) -> None:
        self._build = build
        self._script = tmp_path / "script"

    def run(
        self, script: str, code: str, *, flags: tuple[str, ...] = (), prefix: tuple[str, ...] = (), **env: str
    ) -> Any:
        self._script.write_text(script)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        done = subprocess.run(
            [*prefix, sys.executable, "-c", PRELUDE + code],
            env={
                **kept,
                "LD_LIBRARY_PATH": str(self._build(*flags)),
                "FAKE_NVML_SCRIPT": str(self._script),
                **env,
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def machine(library: Callable[..., Path], tmp_path: Path) -> Machine:
    return Machine(library, tmp_path)


READ = "c = card(); show([asdict(c.info), asdict(c.read([10, 11]))])"

# ---------------------------------------------------------------- one GPU


def test_one_gpu_with_ours_and_others_processes(machine: Machine) -> None:
    processes = f"ecc 1\nprocess 10 {3 * GIB}\nprocess 99 {5 * GIB}\nprocess 11 {GIB}\n"
    info, reading = machine.run(SYSTEM + GPU_A + processes, READ)
    assert info == {
        "kind": "nvml",
        "name": "NVIDIA H100",
        "total_bytes": 80 * GIB,
        "driver": "550.54.14, CUDA 12.4",
        "detail": "GPU-aaaa1111; ECC on",
    }
    assert (reading["total_bytes"], reading["used_bytes"], reading["own_bytes"]) == (
        80 * GIB, 10 * GIB, 4 * GIB,
    )  # fmt: skip
    assert reading["source"] == "NVML device memory, ours by process"


def test_the_gpu_binds_before_the_hosts_memory(machine: Machine) -> None:
    code = "show([[c.info.kind for c in detect_cards([])], binding_card([], gpu=False).info.kind])"
    assert machine.run(SYSTEM + GPU_A, code) == [["nvml", "host"], "host"]


def test_an_older_driver_lists_processes_too(machine: Machine) -> None:
    _, reading = machine.run(SYSTEM + GPU_A + f"process 10 {GIB}\n", READ, flags=("-DSECOND_VERSION",))
    assert (reading["own_bytes"], reading["source"]) == (GIB, "NVML device memory, ours by process")


def test_an_unknown_cuda_version_is_left_out(machine: Machine) -> None:
    assert machine.run("driver 390.1\n" + GPU_A, READ)[0]["driver"] == "390.1"


# ---------------------------------------------------------------- hidden per-process numbers

LIFE = """
c = card()
first = c.read([10])
script(open(os.environ["FAKE_NVML_SCRIPT"]).read().replace(str(70 << 30), str(50 << 30)))
show([first.own_bytes, asdict(c.read([10, 12]))])
"""


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        ("processes 3\n", ()),  # not supported
        ("processes 4\n", ()),  # no permission
        (f"process 10 ?\nprocess 99 {GIB}\n", ()),
        ("", ("-DNO_PROCESSES",)),
    ],
)
def test_where_process_memory_is_hidden_the_delta_is_ours_and_the_source_says_so(
    machine: Machine, processes: str, flags: tuple[str, ...]
) -> None:
    first, reading = machine.run(SYSTEM + GPU_A + processes, LIFE, flags=flags)
    assert first == 0
    assert (reading["used_bytes"], reading["own_bytes"]) == (30 * GIB, 20 * GIB)
    assert "delta against the baseline" in reading["source"]


def test_a_new_backend_has_a_new_baseline(machine: Machine) -> None:
    code = LIFE.replace("[10, 12]", "[20]")
    _, reading = machine.run(SYSTEM + GPU_A + "processes 3\n", code)
    assert (reading["used_bytes"], reading["own_bytes"]) == (30 * GIB, 0)


@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode != 0
    if shutil.which("unshare")
    else True,
    reason="a pid namespace needs root",
)
def test_in_a_container_foreign_pids_are_not_taken_for_others(machine: Machine) -> None:
    """NVML tells the machine's pids there: ours, in another namespace, are not among them."""
    prefix = ("unshare", "--pid", "--fork", "--mount-proc")
    first, reading = machine.run(SYSTEM + GPU_A + f"process 4711 {GIB}\n", LIFE, prefix=prefix)
    assert (first, reading["own_bytes"]) == (0, 20 * GIB)
    assert "delta" in reading["source"]
    _, told = machine.run(SYSTEM + GPU_A + f"process 10 {GIB}\n", LIFE, prefix=prefix)
    assert told["own_bytes"] == GIB  # a driver that translates them


# ---------------------------------------------------------------- several GPUs, MIG


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, "GPU-aaaa1111; GPU-bbbb2222"),
        ("1", "GPU-bbbb2222"),
        ("1,0", "GPU-bbbb2222; GPU-aaaa1111"),
        (" 0 ,7,1", "GPU-aaaa1111"),  # CUDA's list ends at the first that is not there
        ("0,-1,1", "GPU-aaaa1111"),
        ("GPU-bbbb", "GPU-bbbb2222"),
        ("GPU-bbbb2222,0", "GPU-bbbb2222; GPU-aaaa1111"),
    ],
)
def test_the_gpus_are_those_that_cuda_shows(machine: Machine, visible: str | None, uuids: str) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    info, _ = machine.run(SYSTEM + GPU_A + GPU_B, READ, **env)
    assert info["detail"] == uuids


def test_of_several_gpus_the_one_with_the_least_free_memory_binds(machine: Machine) -> None:
    info, reading = machine.run(
        SYSTEM + GPU_A + f"process 10 {GIB}\n" + GPU_B + f"process 11 {9 * GIB}\n", READ
    )
    assert (info["name"], info["total_bytes"]) == ("2 x NVIDIA H100", 80 * GIB)
    assert (reading["used_bytes"], reading["own_bytes"]) == (60 * GIB, 9 * GIB)
    info, reading = machine.run(SYSTEM + GPU_A + SMALL, READ)
    assert (info["name"], info["total_bytes"]) == ("2 x NVIDIA H100, NVIDIA T4", 16 * GIB)
    assert reading["used_bytes"] == GIB


def test_the_order_of_different_gpus_is_warned_of(machine: Machine) -> None:
    info, _ = machine.run(SYSTEM + SMALL + GPU_A, READ, CUDA_VISIBLE_DEVICES="0")
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in info["detail"]
    info, _ = machine.run(
        SYSTEM + SMALL + GPU_A, READ, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID"
    )
    assert info["detail"] == "GPU-cccc3333"


@pytest.mark.parametrize(
    ("visible", "uuid", "total_gib"),
    [
        (None, "MIG-eeee-1", 10),
        ("0", "MIG-eeee-1", 10),
        ("MIG-eeee-2", "MIG-eeee-2", 40),
        ("GPU-dddd4444", "MIG-eeee-1", 10),
    ],
)
def test_a_mig_instance_is_a_card_of_its_own(
    machine: Machine, visible: str | None, uuid: str, total_gib: int
) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    info, reading = machine.run(SYSTEM + MIG, READ, **env)
    assert (info["detail"], info["total_bytes"]) == (uuid, total_gib * GIB)
    assert "MIG" in info["name"]
    assert reading["used_bytes"] == (GIB if uuid == "MIG-eeee-1" else 0)


# ---------------------------------------------------------------- no card, lost card

WHY_NOT = "cards = detect_cards([]); show([[c.info.kind for c in cards], cards[0].info.detail])"


@pytest.mark.parametrize(
    ("script", "flags", "env", "reason"),
    [
        ("init 9\n", (), {}, "the NVIDIA driver does not answer: Driver Not Loaded"),
        (
            "init 18\n",
            (),
            {},
            "the NVIDIA driver does not answer: RM has detected an NVML/RM version mismatch.",
        ),
        (SYSTEM, (), {}, "the NVIDIA driver finds no GPU"),
        (
            SYSTEM + GPU_A,
            ("-DTOO_OLD",),
            {},
            "the NVIDIA driver is too old for its memory to be read: update it",
        ),
        (SYSTEM + GPU_A, (), {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES hides every NVIDIA GPU"),
        (SYSTEM + GPU_A + "memory 15\n", (), {}, "the NVIDIA driver does not answer: GPU is lost"),
    ],
)
def test_without_a_gpu_to_measure_the_host_card_says_why(
    machine: Machine, script: str, flags: tuple[str, ...], env: dict[str, str], reason: str
) -> None:
    kinds, detail = machine.run(script, WHY_NOT, flags=flags, **env)
    assert kinds == ["host"]
    assert detail == reason


def test_without_a_driver_the_host_card_says_so(machine: Machine, tmp_path: Path) -> None:
    kinds, detail = machine.run("", WHY_NOT, LD_LIBRARY_PATH=str(tmp_path))
    assert kinds == ["host"]
    assert detail == "no NVIDIA driver (libnvidia-ml.so.1 is not installed)"


LOSE = """
c = card()
whole = open(os.environ["FAKE_NVML_SCRIPT"]).read()
script(whole.replace("ecc 0", "ecc 0\\nmemory 15"))
try:
    c.read([10])
except CardLost as exc:
    lost = str(exc)
script(whole)
show([lost, c.read([10]).used_bytes])
"""


def test_a_gpu_that_falls_off_the_bus_is_lost_until_it_is_back(machine: Machine) -> None:
    lost, used = machine.run(SYSTEM + GPU_A + "ecc 0\n", LOSE)
    assert lost == "NVIDIA H100 does not answer: GPU is lost"
    assert used == 10 * GIB


def test_a_gpu_that_was_reset_is_found_again_by_its_uuid(machine: Machine) -> None:
    """Old handles are void, and the index has moved."""
    code = (
        f"c = card(); script({SYSTEM + 'epoch 2' + chr(10) + GPU_B + GPU_A!r}); show(c.read([10]).used_bytes)"
    )
    assert machine.run(SYSTEM + GPU_A, code) == 10 * GIB


def test_a_failing_list_of_processes_is_not_taken_for_hidden_numbers(machine: Machine) -> None:
    code = "c = card()\ntry:\n    c.read([10])\nexcept CardLost as exc:\n    show(str(exc))"
    assert "does not answer: GPU is lost" in machine.run(SYSTEM + GPU_A + "processes 15\n", code)


def test_a_meter_keeps_its_peaks_when_the_gpu_is_lost(machine: Machine) -> None:
    code = """
import asyncio
from kvguard.meter import Meter
async def main():
    c = card()
    meter = Meter(c, interval_s=0.005, own_pids=lambda: [10])
    await meter.start()
    script(open(os.environ["FAKE_NVML_SCRIPT"]).read().replace("ecc 0", "ecc 0\\nmemory 15"))
    stable = await meter.stable(3600.0, timeout_s=60.0)
    await meter.stop()
    [peak] = meter.peaks()
    show([stable, str(meter.lost), peak.peak_bytes, peak.source])
asyncio.run(main())
"""
    stable, lost, peak, source = machine.run(SYSTEM + GPU_A + "ecc 0\n", code)
    assert (stable, peak) == (False, 10 * GIB)
    assert "GPU is lost" in lost
    assert source == "NVML device memory, ours by process"


def test_the_script_reaches_the_library(machine: Machine) -> None:
    """The harness itself: another script, another machine."""
    assert machine.run(SYSTEM + SMALL, READ)[0]["name"] == "NVIDIA T4"


def test_no_gpu_is_an_error_of_its_own_kind(machine: Machine) -> None:
    code = "try:\n    card()\nexcept NoGpu as exc:\n    show(type(exc.__cause__).__name__)"
    assert machine.run("init 9\n", code) == "NVMLError_DriverNotLoaded"
