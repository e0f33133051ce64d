"""GPUs on the bus, from a fake /sys tree, and from a fake NVML, because these tests run without a GPU.

The fake raises the errors of the real library. gpu_probe.py uses a real driver.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from phalanx.cluster import nvidia
from phalanx.cluster.inventory import Slice

LIVE = bytes.fromhex("de103523")
DEAD = b"\xff" * 4


def pci(
    root: Path,
    address: str,
    *,
    vendor: str = "0x10de",
    kind: str = "0x030200",
    config: bytes = LIVE,
    driver: str = "nvidia",
    virtual: bool = False,
) -> None:
    device = root / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")
    (device / "config").write_bytes(config)
    if driver:
        (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
    if virtual:
        (device / "physfn").mkdir()


@dataclass
class Card:
    """What the fake driver knows about one GPU. An error as a value is raised when it is queried."""

    uuid: str = "GPU-a"
    name: str = "NVIDIA H200"
    bus: str = "00000000:3B:00.0"
    slices: list[Any] | None = None  # None: cannot be sliced
    error: int = 0


@dataclass
class Nvml:
    """The part of the module pynvml that phalanx uses."""

    cards: list[Card] = field(default_factory=list)
    error: int = 0  # raised by nvmlInit
    open: int = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML", "__")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        if self.error:
            raise pynvml.NVMLError(self.error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        assert self.open
        if self.cards[index].error:
            raise pynvml.NVMLError(self.cards[index].error)
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Any) -> str:
        return str(card.uuid)

    def nvmlDeviceGetName(self, card: Any) -> str:
        return str(card.name)

    def nvmlDeviceGetPciInfo(self, card: Card) -> Any:
        return SimpleNamespace(busId=card.bus)

    def nvmlDeviceGetMemoryInfo(self, card: Any) -> Any:
        if "GB10" in card.name:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=1 << 30)

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        if card.slices is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1] if card.slices else [0, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, number: int) -> Any:
        assert card.slices is not None
        if number >= len(card.slices) or card.slices[number] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card.slices[number]

    def nvmlDeviceGetGpuInstanceId(self, part: Any) -> int:
        return int(part.gi)

    def nvmlDeviceGetComputeInstanceId(self, part: Any) -> int:
        return int(part.ci)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_the_bus_is_scanned_for_nvidia_gpus_only(tmp_path: Path) -> None:
    pci(tmp_path, "0000:5e:00.0")
    pci(tmp_path, "0000:3b:00.0", kind="0x030000")
    pci(tmp_path, "0000:3b:00.1", kind="0x040300")  # the audio device of the GPU
    pci(tmp_path, "0000:03:00.0", vendor="0x1002")
    pci(tmp_path, "0000:60:00.0", kind="0x068000")  # an NVSwitch
    pci(tmp_path, "0000:61:00.0", driver="vfio-pci")  # passed through to a guest
    pci(tmp_path, "0000:62:00.4", virtual=True, driver="")
    pci(tmp_path, "0000:63:00.0", driver="")
    assert nvidia.scan(tmp_path / "sys") == (("0000:3b:00.0", "0000:5e:00.0", "0000:63:00.0"), ())


def test_a_gpu_that_reads_as_all_ones_is_silent(tmp_path: Path) -> None:
    pci(tmp_path, "0000:3b:00.0")
    pci(tmp_path, "0000:5e:00.0", config=DEAD)
    assert nvidia.scan(tmp_path / "sys") == (("0000:3b:00.0", "0000:5e:00.0"), ("0000:5e:00.0",))


def test_a_machine_without_a_bus_has_nothing(tmp_path: Path) -> None:
    assert nvidia.scan(tmp_path / "sys") == ((), ())


@pytest.mark.parametrize("trace", ["proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg"])
def test_each_trace_of_a_driver_makes_us_ask_it(tmp_path: Path, nvml: Nvml, trace: str) -> None:
    nvml.cards = [Card()]
    assert nvidia.survey({}, root=str(tmp_path)).driver == ()
    (tmp_path / trace).parent.mkdir(parents=True)
    (tmp_path / trace).touch()
    assert [device.uuid for device in nvidia.survey({}, root=str(tmp_path)).driver] == ["GPU-a"]


def test_without_a_driver_nothing_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from phalanx.cluster.nvidia import survey; "
        "print(survey({'CUDA_VISIBLE_DEVICES': '0'}, root=sys.argv[1])); "
        "print({'pynvml', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    expected = "Inventory(driver=(), visible=(), mask='0', bus=(), silent=(), trouble='', "
    expected += "confined=False, other_vendor=False)\nset()"
    assert done.stdout.strip() == expected


@pytest.mark.skipif(nvidia.driver_present(Path("/")), reason="a driver is here; gpu_probe.py asks it")
def test_the_real_library_without_a_driver_is_no_trouble() -> None:
    assert nvidia.ask(by_bus=False, expected=False) == ((), "")


def test_gpus_are_listed_as_the_kernel_spells_them(tmp_path: Path, nvml: Nvml) -> None:
    pci(tmp_path, "0000:3b:00.0")
    pci(tmp_path, "0000:5e:00.0")
    nvml.cards = [Card(), Card("GPU-b", bus="00000000:5E:00.0")]
    found = nvidia.survey({"CUDA_VISIBLE_DEVICES": "1"}, root=str(tmp_path))
    assert [(d.kind, d.index, d.handle, d.bus, d.memory) for d in found.driver] == [
        ("gpu", 0, "0", "0000:3b:00.0", 1 << 30),
        ("gpu", 1, "1", "0000:5e:00.0", 1 << 30),
    ]
    assert found.visible == found.driver[1:]
    assert (found.mask, found.gone, found.trouble) == ("1", (), "")
    assert nvml.open == 0


def test_a_gpu_off_the_bus_is_gone_and_silent(tmp_path: Path, nvml: Nvml) -> None:
    pci(tmp_path, "0000:3b:00.0")
    pci(tmp_path, "0000:5e:00.0", config=DEAD)
    nvml.cards = [Card()]
    found = nvidia.survey({}, root=str(tmp_path))
    assert found.gone == found.silent == ("0000:5e:00.0",)


@pytest.mark.parametrize(
    ("names", "order", "handles"),
    [
        (["H200", "H200"], None, ["0", "1"]),
        (["T400", "H200"], None, ["GPU-0", "GPU-1"]),
        (["T400", "H200"], "FASTEST_FIRST", ["GPU-0", "GPU-1"]),
        (["T400", "H200"], "PCI_BUS_ID", ["0", "1"]),
    ],
)
def test_numbers_are_handles_only_where_cuda_counts_as_we_do(
    tmp_path: Path, nvml: Nvml, names: list[str], order: str | None, handles: list[str]
) -> None:
    pci(tmp_path, "0000:3b:00.0")
    nvml.cards = [Card(f"GPU-{number}", name) for number, name in enumerate(names)]
    environ = {"CUDA_DEVICE_ORDER": order} if order else {}
    assert [device.handle for device in nvidia.survey(environ, root=str(tmp_path)).driver] == handles


def test_slices_follow_their_gpu_which_has_no_handle(nvml: Nvml) -> None:
    first = SimpleNamespace(uuid="MIG-1", name="NVIDIA H200 MIG 1g.18gb", gi=9, ci=0)
    second = SimpleNamespace(uuid="MIG-2", name="NVIDIA H200 MIG 2g.35gb", gi=5, ci=1)
    nvml.cards = [Card(slices=[first, None, second]), Card("GPU-b", bus="00000000:5E:00.0", slices=[])]
    devices, trouble = nvidia.ask(by_bus=True, expected=True)
    assert trouble == ""
    assert [(d.kind, d.index, d.handle, d.bus) for d in devices] == [
        ("gpu", 0, "", "0000:3b:00.0"),
        ("mig", 0, "MIG-1", "0000:3b:00.0"),
        ("mig", 0, "MIG-2", "0000:3b:00.0"),
        ("gpu", 1, "GPU-b", "0000:5e:00.0"),
    ]
    assert [device.alias for device in devices if isinstance(device, Slice)] == [
        "MIG-GPU-a/9/0",
        "MIG-GPU-a/5/1",
    ]


def test_a_lost_gpu_is_reported_and_the_others_go_by_uuid(nvml: Nvml) -> None:
    nvml.cards = [Card(error=pynvml.NVML_ERROR_GPU_IS_LOST), Card("GPU-b")]
    devices, trouble = nvidia.ask(by_bus=True, expected=True)
    assert [(device.index, device.handle) for device in devices] == [(1, "GPU-b")]
    assert trouble == "GPU 0 does not answer the driver: GPU is lost"
    assert nvml.open == 0


def test_another_jobs_gpu_is_no_trouble(nvml: Nvml) -> None:
    nvml.cards = [Card(error=pynvml.NVML_ERROR_NO_PERMISSION), Card("GPU-b")]
    devices, trouble = nvidia.ask(by_bus=True, expected=True)
    assert ([device.handle for device in devices], trouble) == (["GPU-b"], "")


def test_memory_that_is_not_reported_is_zero(nvml: Nvml) -> None:
    nvml.cards = [Card(name="NVIDIA GB10")]
    devices, _ = nvidia.ask(by_bus=True, expected=True)
    assert devices[0].memory == 0


@pytest.mark.parametrize(
    ("error", "expected", "trouble"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, True, ""),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, False, ""),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, True, "the NVIDIA driver does not run: Driver Not Loaded"),
        (
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            False,
            "the NVIDIA driver does not answer: RM has detected an NVML/RM version mismatch.",
        ),
    ],
)
def test_why_the_driver_could_not_be_asked(nvml: Nvml, error: int, expected: bool, trouble: str) -> None:
    nvml.error = error
    assert nvidia.ask(by_bus=False, expected=expected) == ((), trouble)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in nvidia.ask(by_bus=False, expected=True)[1]
