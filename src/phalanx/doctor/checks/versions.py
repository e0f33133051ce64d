"""Checks the versions of Python, phalanx, torch and NCCL. Does not import torch, which takes seconds."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster import nvidia, software
from phalanx.doctor import torch_build
from phalanx.doctor.finding import Finding
from phalanx.version import __version__

CHECK = "versions"


@dataclass(frozen=True)
class Versions:
    """The versions of Python, phalanx, torch and its libraries."""

    python: str
    phalanx: str
    torch: str = ""  # empty: not installed
    cuda: str = ""  # the version torch was built for; empty: CPU build
    hip: str = ""
    packages: tuple[tuple[str, str], ...] = ()  # installed versions of torch, phalanx and NCCL
    gpus: int = 0  # number on the PCI bus
    interpreter: str = ""

    def installed(self, name: str) -> list[str]:
        """Return the installed versions of a package."""
        return [version for package, version in self.packages if package == name]

    @property
    def nccl(self) -> list[tuple[str, str]]:
        """The installed NCCL packages with their versions."""
        return [(name, version) for name, version in self.packages if name.startswith("nvidia-nccl")]


def read(root: str = "/") -> Versions:
    """Read the installed versions, without importing torch."""
    torch = torch_build.read()
    return Versions(
        python=platform.python_version(),
        phalanx=__version__,
        torch=torch.get("__version__", ""),
        cuda=torch.get("cuda", ""),
        hip=torch.get("hip", ""),
        packages=tuple(sorted(software.packages())),
        gpus=len(nvidia.scan(Path(root, "sys"))[0]),
        interpreter=sys.executable,
    )


def judge(versions: Versions) -> list[Finding]:
    """Return findings about the versions."""
    if not versions.torch:
        return [
            Finding(
                CHECK,
                "red",
                f"torch is not installed for {versions.interpreter or 'this Python'}",
                "",
                f"{versions.interpreter or 'python'} -m pip install torch",
            )
        ]
    found: list[Finding] = []
    for name, seen in (("torch", versions.torch), ("phalanx", versions.phalanx)):
        installed = sorted(set(versions.installed(name)))
        if len(installed) > 1:
            found.append(_muddle(f"{name} is installed {len(installed)} times: {', '.join(installed)}", name))
        elif installed and not _same(installed[0], seen):
            found.append(_muddle(f"{name} {seen} would be imported, but pip knows {installed[0]}", name))
    if len(versions.nccl) > 1:
        packages = " and ".join(f"{name} {version}" for name, version in versions.nccl)
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"NCCL is installed {len(versions.nccl)} times: {packages}",
                "both write the same files, so that torch may load one it was not built with",
                f"pip uninstall {' '.join(name for name, _ in versions.nccl)}; pip install --force-reinstall torch",
            )
        )
    if versions.gpus and not versions.cuda and not versions.hip:
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"there are {versions.gpus} NVIDIA GPUs, but torch {versions.torch} was built for the CPU",
                "",
                "install a build of torch for CUDA: https://pytorch.org/get-started",
            )
        )
    if not found:
        found.append(Finding(CHECK, "green", describe(versions)))
    return found


def describe(versions: Versions) -> str:
    """Return the versions in one line."""
    words = [f"phalanx {versions.phalanx}", f"Python {versions.python}", f"torch {versions.torch}"]
    if versions.cuda:
        words.append(f"CUDA {versions.cuda}")
    if versions.hip:
        words.append(f"ROCm {versions.hip}")
    words += [f"NCCL {version}" for _, version in versions.nccl[:1]]
    return ", ".join(words)


def _same(installed: str, seen: str) -> bool:
    """Return whether versions are equal, ignoring a local label (+cpu)."""
    return installed.partition("+")[0].replace("_", "-") == seen.partition("+")[0].replace("_", "-")


def _muddle(fact: str, name: str) -> Finding:
    cause = "an installation that was interrupted, or copied over another"
    return Finding(CHECK, "yellow", fact, cause, f"pip uninstall {name}; pip install {name}")


def compare(by_node: Mapping[str, Versions]) -> list[Finding]:
    """Return findings about versions that differ between nodes."""
    found: list[Finding] = []
    parts: dict[str, Callable[[Versions], str]] = {
        "torch": lambda of: of.torch,
        "phalanx": lambda of: of.phalanx,
        "NCCL": lambda of: ", ".join(version for _, version in of.nccl),
        "Python": lambda of: ".".join(of.python.split(".")[:2]),
    }
    for name, part in parts.items():
        seen: dict[str, list[str]] = {}
        for node, versions in by_node.items():
            seen.setdefault(part(versions) or "none", []).append(node)
        if len(seen) > 1:
            listed = "; ".join(f"{version}: {', '.join(nodes)}" for version, nodes in sorted(seen.items()))
            found.append(
                Finding(
                    CHECK,
                    "yellow" if name == "Python" else "red",
                    f"the nodes have different versions of {name} ({listed})",
                    "ranks that talk to each other must be of one version",
                    "install the same on all nodes, or use one environment on a shared disk",
                )
            )
    if len(by_node) > 1 and not found:
        found.append(Finding(CHECK, "green", "the same on all nodes"))
    return found
