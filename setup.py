"""The part in C. All else is in pyproject.toml; without a compiler phalanx is installed without it, and works."""

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
            # Products and sums are rounded one by one on every machine: the same bits as torch's. Nobody traps on what
            # is computed and then not chosen: else less could be vectorised.
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
