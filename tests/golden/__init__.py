"""Golden files: behaviour that no change of the code's structure may change.

``data/`` holds the files. Each is produced by today's code and compared with the file; the tests never write. Read a
difference as a change that operators, plugin authors or stored objects notice. Where such a change is meant, write the
files anew and read the difference in git before you commit it::

    python -m tests.golden.regenerate            # all files of the present code
    python -m tests.golden.regenerate plan-      # only files whose names begin so

All that is tested is imported in ``subject.py``: when a module moves, only its import line changes. Prose (messages,
descriptions, help) is left out of the files; what stays is what a program could depend on. Objects of an older format
version (``object-v1-none.bin``) are never written anew: no code makes them any more.
"""
