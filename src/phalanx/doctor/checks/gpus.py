"""Checks that all GPUs are present, healthy, unused and not throttled. Unknown values produce no finding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.cluster.affinity import spell
from phalanx.doctor.checks import xids
from phalanx.doctor.finding import Finding
from phalanx.doctor.gpu_facts import GpuFacts, Gpus
from phalanx.doctor.quantity import listed, several, size

CHECK = "gpus"
_UNEXPLAINED = 2 << 30  # bytes in use that no visible process owns; the driver itself uses up to 1 GiB


def judge(facts: Gpus) -> list[Finding]:
    """Return findings about the GPUs."""
    found = [*_judge_count(facts), *_judge_driver(facts), *_judge_memory(facts), *xids.judge(facts.xids)]
    found += [*_judge_use(facts), *_judge_power(facts), *_judge_links(facts)]
    if found:
        return found
    if not facts.gpus:
        return [Finding(CHECK, "green", "none")]
    return [Finding(CHECK, "green", describe(facts))]


def describe(facts: Gpus) -> str:
    """Return the GPUs in one line."""
    kinds: dict[str, int] = {}
    for gpu in facts.gpus:
        kinds[gpu.name] = kinds.get(gpu.name, 0) + 1
    words = [", ".join(f"{count} {name}" for name, count in kinds.items())]
    if facts.hidden:
        words.append(f"{facts.hidden} hidden by CUDA_VISIBLE_DEVICES")
    if facts.gone:
        words.append(f"{len(facts.gone)} more on the PCI bus are not available to this process")
    if facts.driver:
        words.append(f"driver {facts.driver}" + (f" (CUDA {facts.driver_cuda})" if facts.driver_cuda else ""))
    if facts.topology:
        words.append(facts.topology)
    return "; ".join(words)


def _judge_count(facts: Gpus) -> Iterator[Finding]:
    reset = "nvidia-smi --gpu-reset as root; else a reboot"
    lost = [address for address in facts.silent if address in facts.gone or not facts.gpus]
    if lost:
        yield _red(
            f"no answer from {several(len(lost), 'GPU')} on the PCI bus: {listed(lost)}",
            "it fell off the bus: a fault of power, heat, slot or card",
            reset,
        )
    unlisted = [address for address in facts.gone if address not in facts.silent]
    if unlisted and not facts.confined:
        yield _yellow(
            f"the PCI bus has {len(facts.bus)} GPUs, the driver lists {len(facts.gpus)}: without {listed(unlisted)}",
            "a container or a scheduler keeps it from this process, or it is broken",
            "nvidia-smi -L; dmesg | grep NVRM",
        )
    if facts.trouble:
        yield _red(facts.trouble, "", "nvidia-smi; dmesg | grep NVRM")
    elif facts.bus and not facts.gpus and not facts.confined and not lost:
        yield _yellow(
            f"there are {several(len(facts.bus), 'GPU')} on the PCI bus, and no NVIDIA driver",
            "it is not installed, or this container was started without GPUs",
            "install the driver   (docker run --gpus all …)",
        )


def _judge_driver(facts: Gpus) -> Iterator[Finding]:
    if not facts.driver_cuda or not facts.torch_cuda:
        return
    if int(facts.driver_cuda.split(".")[0]) < int(facts.torch_cuda.split(".")[0]):
        yield _red(
            f"torch was built for CUDA {facts.torch_cuda}, the driver {facts.driver} knows {facts.driver_cuda} at most",
            "the driver is too old for this torch",
            f"a newer driver, or a build of torch for CUDA {facts.driver_cuda.split('.')[0]}",
        )


def _judge_memory(facts: Gpus) -> Iterator[Finding]:
    for gpu in facts.gpus:
        who = f"GPU {gpu.index}"
        if gpu.memory.remap_failed:
            yield _red(
                f"{who} could not replace a broken row of its memory",
                "no spare rows are left",
                "have the card replaced",
            )
        if gpu.memory.pending:
            yield _yellow(
                f"{who} waits for a reset to replace broken memory",
                "it had memory errors that could not be corrected",
                f"nvidia-smi --gpu-reset -i {gpu.index}   (when it is not in use)",
            )
        if gpu.memory.errors_now:
            yield _red(
                f"{who} had {several(gpu.memory.errors_now, 'memory error')} that could not be corrected since the "
                "driver was loaded",
                "results may be wrong, and processes that meet one are killed",
                f"nvidia-smi --gpu-reset -i {gpu.index}; if they come back, have the card replaced",
            )
        elif gpu.memory.errors_ever and not gpu.memory.pending:
            yield _yellow(
                f"{who} had {several(gpu.memory.errors_ever, 'memory error')} that could not be corrected in its life",
                "none since the driver was loaded",
                f"keep an eye on it: nvidia-smi -q -d ECC -i {gpu.index}",
            )


def _judge_use(facts: Gpus) -> Iterator[Finding]:
    for gpu in facts.gpus:
        if gpu.processes:
            who = [
                f"process {process.pid} ({process.user or 'not of this container'}"
                f"{', ' + process.command if process.command else ''}"
                f"{', ' + size(process.memory) if process.memory else ''})"
                for process in gpu.processes
            ]
            yield _yellow(
                f"GPU {gpu.index} is in use by {listed(who)}",
                "another run, or processes left by an earlier run",
                "phalanx ps, nvidia-smi; or choose others: phalanx run --devices …",
            )
        elif gpu.memory.used > _UNEXPLAINED and not gpu.sliced:
            yield _yellow(
                f"{size(gpu.memory.used)} of GPU {gpu.index} are in use by processes that cannot be seen from here",
                "another container's, or of a process that did not end",
                "nvidia-smi on the machine itself",
            )


def _judge_power(facts: Gpus) -> Iterator[Finding]:
    capped = [
        gpu for gpu in facts.gpus if gpu.power.limit and gpu.power.default and gpu.power.limit < gpu.power.default
    ]
    if capped:
        first = capped[0]
        yield _yellow(
            f"{_which(capped)} may draw {first.power.limit} W, less than {first.power.default} W, which is usual",
            "a power limit is set; the slowest GPU determines the speed",
            f"nvidia-smi -pl {first.power.default}",
        )
    off = [gpu for gpu in facts.gpus if gpu.persistence is False]
    if off:
        yield _yellow(
            f"persistence mode is off for {_which(off)}",
            "the driver is initialized for every first process, which takes seconds",
            "nvidia-smi -pm 1   (or the service nvidia-persistenced)",
        )
    for gpu in facts.gpus:
        if gpu.power.slowed:
            heat = f", at {gpu.power.temperature} °C" if gpu.power.temperature is not None else ""
            yield _yellow(
                f"GPU {gpu.index} is slowed down{heat}",
                "; ".join(dict.fromkeys(gpu.power.slowed)),
                f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.index}",
            )


def _judge_links(facts: Gpus) -> Iterator[Finding]:
    most = max((gpu.links for gpu in facts.gpus), default=0)
    fewer = [gpu for gpu in facts.gpus if gpu.links < most and gpu.links_down]
    if fewer:
        yield _yellow(
            f"{_which(fewer)} has {fewer[0].links} NVLinks up, others have {most}",
            "a link that failed, or a bridge that is loose",
            "nvidia-smi nvlink -s",
        )


def _which(gpus: Sequence[GpuFacts]) -> str:
    return f"GPU{'' if len(gpus) == 1 else 's'} {spell(gpu.index for gpu in gpus)}"


def _yellow(fact: str, cause: str, fix: str) -> Finding:
    return Finding(CHECK, "yellow", fact, cause, fix)


def _red(fact: str, cause: str, fix: str) -> Finding:
    return Finding(CHECK, "red", fact, cause, fix)
