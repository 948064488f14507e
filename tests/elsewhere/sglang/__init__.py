"""Checks of our backend on SGLang's own machinery. They run in processes of their own; see test_sglang_hicache.py.

SGLang's prefix tree, controllers, host pools, storage factory and file backend are the real ones. These are not:

- torchvision, which SGLang imports for image models only, and which has no build for this torch;
- one base class of SGLang's test kit, whose module needs a package of data sets;
- pinned memory, and the copies between device and host pools: plain copies do the same on a CPU (``cpu.py``).
"""

from tests.elsewhere.sglang import stand_ins  # noqa: F401  # before SGLang
