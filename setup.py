"""Builds the C extension. Everything else is in pyproject.toml. Without a compiler, phalanx is installed without it."""

from glob import glob

from setuptools import Extension, setup

NATIVE = "src/phalanx/collectives/native"

setup(
    ext_modules=[
        Extension(
            "phalanx.collectives._native",
            sorted(glob(f"{NATIVE}/*.c")),
            depends=sorted(glob(f"{NATIVE}/*.h")),
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            # No contraction: products and sums are rounded separately everywhere, with the same bits as torch. No
            # trapping math: otherwise the compiler vectorizes less.
            extra_compile_args=[
                *("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fwrapv"),
                *("-pthread", "-fvisibility=hidden"),
            ],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
