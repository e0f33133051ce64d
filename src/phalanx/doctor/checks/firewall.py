"""Checks the packet filters of this machine, as far as they are readable. The test between nodes is conclusive."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from phalanx.doctor.finding import Finding

CHECK = "firewall"
_PATIENCE = 5.0


@dataclass(frozen=True)
class Firewall:
    """Firewall chains that reject connections by default."""

    readable: bool  # only root can read the rules
    refusing: tuple[str, ...] = ()  # chains that reject packets that no rule accepts


def read() -> Firewall:
    """Read the firewall rules, if this process is allowed to."""
    if os.geteuid() != 0:
        return Firewall(readable=False)
    refusing = [*nft_chains(_output("nft", "list", "ruleset"))]
    for tool, table in (("iptables", "/proc/net/ip_tables_names"), ("ip6tables", "/proc/net/ip6_tables_names")):
        # Listing an empty table would load it into the kernel.
        if _holds(table, "filter"):
            refusing += iptables_chains(_output(tool, "-S", "INPUT"), tool)
    return Firewall(readable=True, refusing=tuple(refusing))


def nft_chains(text: str) -> list[str]:
    """Return the chains that see incoming packets and reject them by default or in their last rule."""
    found = []
    # Parse whole chains: the policy is on the line of the hook, a final rule that rejects everything is at the end.
    for match in re.finditer(r"(?ms)^table (?P<table>[^{]+) \{\n(?P<body>.*?)^\}", text):
        for chain in re.finditer(r"(?ms)^\tchain (?P<name>\S+) \{\n(?P<body>.*?)^\t\}", match["body"]):
            rules = [line.strip() for line in chain["body"].splitlines() if line.strip()]
            if not any("hook input" in rule for rule in rules):
                continue
            last = rules[-1]
            if any(re.search(r"policy drop", rule) for rule in rules) or re.match(r"(counter\b.*)?(drop|reject)", last):
                found.append(f"nft {match['table']} {chain['name']}")
    return found


def iptables_chains(text: str, tool: str = "iptables") -> list[str]:
    """Return the rejecting chains in the output of `iptables -S INPUT`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    refuses = "-P INPUT DROP" in lines or (bool(lines) and re.fullmatch(r"-A INPUT -j (DROP|REJECT.*)", lines[-1]))
    return [f"{tool} INPUT"] if refuses else []


def _output(*words: str) -> str:
    tool = shutil.which(words[0]) or shutil.which(words[0], path="/usr/sbin:/sbin")
    if tool is None:
        return ""
    try:
        done = subprocess.run(
            [tool, *words[1:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def _holds(path: str, word: str) -> bool:
    try:
        with open(path) as file:
            return word in file.read().split()
    except OSError:
        return False


def judge(firewall: Firewall) -> list[Finding]:
    """Return findings about the firewall."""
    if not firewall.readable:
        return [Finding(CHECK, "green", "only root can read the rules; the test between nodes shows what passes")]
    if firewall.refusing:
        return [
            Finding(
                CHECK,
                "yellow",
                f"incoming connections are refused unless a rule lets them in ({', '.join(firewall.refusing)})",
                "a firewall on this machine; torch and NCCL use other ports in every run",
                "nft insert rule … ip saddr NETWORK accept   (`phalanx doctor --hosts …` proves what passes)",
            )
        ]
    return [Finding(CHECK, "green", "no rule refuses incoming connections in general")]
