"""What every test starts from: no network, few threads, known seeds. Knows nothing of the package."""

import os

# Before anything imports Triton, which reads it once: kernels run in its interpreter, on tensors of the CPU.
# A test that compiles kernels does so in a subprocess without the variable.
os.environ["TRITON_INTERPRET"] = "1"

import random
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.triton_interpreter import Lazily

sys.meta_path.insert(0, Lazily())

# Before anything imports torch or Hugging Face's libraries, which read these once; subprocesses inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["USE_HUB_KERNELS"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # a thread that waits for a busy core sleeps, and does not spin

# Derandomized: the same examples everywhere, so that a red run stays red. No deadline: machines are shared.
settings.register_profile("constate", derandomize=True, deadline=None, database=None)
settings.load_profile("constate")


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    """One thread in each of several xdist workers, two in a lone process: what a small machine has."""
    import torch

    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(autouse=True)
def seeded(few_threads: None) -> Iterator[None]:
    """The same draws whichever tests ran before, and torch's defaults put back if the test moved them."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
