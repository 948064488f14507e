"""The ``nixl`` backend of offload-core: any medium with a storage plugin of NIXL, behind a child process.

This module imports nothing, because the child imports the package too and must start fast.
"""
