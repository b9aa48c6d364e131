"""The model: loading, forward step, sampler, page pools as tensors, and the shared worker."""

import os

# Threads of a step that wait for each other must sleep, not spin: on a host whose cores are
# shared by several services, spinning costs a step ten times its own length. Read by the
# OpenMP runtime when torch loads it, so it has to be set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
